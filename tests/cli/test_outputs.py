"""Files that commands write: a place where none can be made is refused before the work; figures survive a failure."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapt_llm.cli import services, writing
from adapt_llm.cli.outputs import Outputs
from adapt_llm.errors import UsageError

Invoke = Callable[..., tuple[int, str, str]]

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "b", "hello", "-o"),
    "run rows": ("run", "b", "-i", "IN", "-o"),
    "eval report": ("eval", "b", "--text", "IN", "--report"),
    "eval plot": ("eval", "b", "--text", "IN", "--plot"),
    "eval tasks": ("eval", "b", "--tasks", "t", "--report"),
    "eval prompts": ("eval", "b", "--prompts", "IN", "-o"),
    "bench report": ("bench", "b", "--report"),
    "bench plot": ("bench", "b", "--plot"),
    "tune plot": ("tune", "b", "--text", "IN", "--plot"),
}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what was begun: work that a command should not have reached."""
    calls: list[str] = []

    def work(*_: object, **__: object) -> None:
        calls.append("work")
        raise UsageError("the work was begun")

    for name in ("open_session", "text_quality", "task_quality", "bench", "tune"):
        monkeypatch.setattr(services, name, work)
    return calls


def place(kind: str, folder: Path) -> Path:
    """Return a name ending in .png, or what rows need, where no file can be made."""
    if kind == "folder":
        (folder / "x.png").mkdir()
        return folder / "x.png"
    if kind == "missing":
        return folder / "mistyped" / "x.png"
    (folder / "file").write_text("no folder", encoding="utf-8")
    return folder / "file" / "x.png"


@pytest.mark.parametrize("kind", ["folder", "missing", "below a file", "read only"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_without_files_is_refused_before_the_work(
    command: str, kind: str, adapt: Invoke, begun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "in.txt"
    rows.write_text("a row\n", encoding="utf-8")
    where = tmp_path / "x.png" if kind == "read only" else place(kind, tmp_path)
    if kind == "read only":  # root may write everywhere
        monkeypatch.setattr(writing.os, "access", lambda _, mode: not mode & os.W_OK)
    args = [str(rows) if word == "IN" else word for word in COMMANDS[command]]
    extra = ["--format", "jsonl"] if command == "run rows" else []
    before = sorted(tmp_path.rglob("*"))
    code, out, err = adapt(*args, where, *extra, *(["--force"] if kind == "folder" else []))
    assert (code, out, begun) == (2, "", [])
    assert err.startswith("adapt: error: ")
    assert err.count("\n") == 1
    said = {"folder": "is a folder", "below a file": "is not a folder", "read only": "cannot be written"}
    assert said.get(kind, f"There is no folder {where.parent}. ") in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_good_place_is_reached(adapt: Invoke, begun: list[str], tmp_path: Path) -> None:
    """The commands above fail for their place alone."""
    rows = tmp_path / "in.txt"
    rows.write_text("a row\n", encoding="utf-8")
    for number, words in enumerate(COMMANDS.values()):
        args = [str(rows) if word == "IN" else word for word in words]
        extra = ["--format", "jsonl"] if "-i" in words else []
        assert "the work was begun" in adapt(*args, tmp_path / f"{number}.png", *extra)[2], args


@pytest.mark.parametrize("broken", ["report", "plot"])
def test_figures_are_printed_although_a_file_cannot_be_written(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "r.md"))

    monkeypatch.setattr("adapt_llm.cli.outputs.write_whole", full)
    outputs = Outputs(**{broken: tmp_path / "r.md"})
    with pytest.raises(OSError, match="No space left"):
        outputs.publish({"a": 1}, ["the page"], ["the report"], full)
    assert capsys.readouterr().out == "the page\n"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.md"
    path.write_text("old", encoding="utf-8")

    def stopped(_path: Path, _other: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        writing.write_whole(path, "new")
    assert [item.name for item in tmp_path.iterdir()] == ["r.md"]
    assert path.read_text("utf-8") == "old"


def test_what_is_no_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writing.write_whole(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    writing.write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text("utf-8") == "new"


def test_peak_memory_is_this_programs_own() -> None:
    """A child of a large process starts with its parent's `ru_maxrss`."""
    child = "from adapt_llm.runtime.process import peak_memory; print(peak_memory())"
    parent = f"""
import json, subprocess, sys
large = b"x" * (300 << 20)
print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True, check=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    found: Any = json.loads(done.stdout)
    assert 1 << 20 < found < 200 << 20
