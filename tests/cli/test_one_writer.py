"""One process at a time writes an output; one that was killed, or that failed, leaves it free."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapt_llm.cli.writing import alone
from adapt_llm.errors import UsageError
from adapt_llm.runtime.file_lock import lock_file

Invoke = Callable[..., tuple[int, str, str]]


@contextmanager
def busy(path: Path) -> Iterator[None]:
    handle = lock_file(path)
    try:
        yield
    finally:
        os.close(handle)


def rows_of(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("good\nbad\n", encoding="utf-8")
    return path


def line(out: Path) -> str:
    return f"adapt: error: another process is writing {out}. Wait for it, or choose another name with -o\n"


@pytest.mark.parametrize("how", [[], ["--force"], ["--resume"]])
@pytest.mark.parametrize("invoke", ["adapt", "classify"])
@pytest.mark.parametrize("begun", [b"", b'{"row": 1'])
def test_rows_of_another_process(
    invoke: str, how: list[str], begun: bytes, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run: Invoke = request.getfixturevalue(invoke)
    out = tmp_path / "out.jsonl"
    out.write_bytes(begun)
    (tmp_path / "link.jsonl").symlink_to(out)
    for name in (out, tmp_path / "link.jsonl"):
        with busy(out):
            assert run("run", "b", "-i", rows_of(tmp_path), "-o", name, *how) == (2, "", line(name))
    assert out.read_bytes() == begun
    assert (
        run("run", "b", "-i", rows_of(tmp_path), "-o", out, *(how if begun else []), *([] if how else ["--force"]))[0]
        == 0
    )
    assert out.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("args", [["run", "b", "x", "--force"], ["eval", "b", "--prompts", "in.txt"]])
def test_other_outputs_written_bit_by_bit(
    adapt: Invoke, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows_of(tmp_path).parent)
    with busy(Path("out.jsonl")):
        assert adapt(*args, "-o", "out.jsonl") == (2, "", line(Path("out.jsonl")))
    assert adapt(*args, "-o", "out.jsonl")[0] == 0


def test_what_fails_lets_go_and_leaves_no_empty_file(adapt: Invoke, tmp_path: Path) -> None:
    out, rows = tmp_path / "out.jsonl", tmp_path / "in.txt"
    rows.write_text("FAIL\n", encoding="utf-8")
    assert adapt("run", "b", "-i", rows, "-o", out, "--on-error", "fail")[0] == 1
    assert not out.exists()
    rows.write_text("good\nFAIL\n", encoding="utf-8")
    assert adapt("run", "b", "-i", rows, "-o", out, "--on-error", "fail")[0] == 1
    assert adapt("run", "b", "-i", rows, "-o", out, "--resume")[0] == 3


def test_a_file_that_was_finished_meanwhile_is_not_cut(
    adapt: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking at it and holding it, another process may have written it whole."""
    out = tmp_path / "out.jsonl"

    def late(path: Path) -> int:
        path.write_text("whole\n", encoding="utf-8")
        return lock_file(path)

    monkeypatch.setattr("adapt_llm.cli.writing.lock_file", late)
    assert "is there already" in adapt("run", "b", "-i", rows_of(tmp_path), "-o", out)[2]
    assert out.read_text("utf-8") == "whole\n"


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(95, os.strerror(95))

    out = tmp_path / "out"
    with busy(out), monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", none)
        with alone(out):
            pass
    with busy(out), pytest.raises(UsageError, match="another process"), alone(out):
        pass


def test_two_processes(program: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    args = [*program, "run", "b", "-q", "-i", "-", "-o", str(out)]
    with subprocess.Popen(args, stdin=subprocess.PIPE) as first:
        assert first.stdin is not None
        first.stdin.write(b"one\n")
        first.stdin.flush()
        deadline = time.monotonic() + 20
        while (not out.exists() or not out.read_bytes().endswith(b"\n")) and time.monotonic() < deadline:
            time.sleep(0.02)
        for how in ([], ["--resume"]):
            second = subprocess.run([*args, *how], input=b"one\ntwo\n", capture_output=True, check=False)
            assert (second.returncode, second.stderr.decode()) == (2, line(out))
        first.send_signal(signal.SIGKILL)
    subprocess.run([*args, "--resume"], input=b"one\ntwo\n", check=True)
    assert [json.loads(row)["row"] for row in out.read_text("utf-8").splitlines()] == [1, 2]
