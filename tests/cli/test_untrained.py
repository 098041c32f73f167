"""A bundle converted with `--untrained` says so whenever it runs: once, on stderr, and not with -q."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapt_llm.cli.app import app
from adapt_llm.runtime.loading import UNTRAINED

WARNING = f"adapt: warning: {UNTRAINED}"
SHORT = ("--max-tokens", "3", "--threads", "1")


def adapt(*args: object, stdin: str | None = None) -> tuple[str, list[str]]:
    """Return stdout, and the lines of stderr."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr.splitlines()


@pytest.fixture(scope="module")
def bundle(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untrained") / "toy"
    line = ("--method", "rcla", "--untrained", "--share-every", "2", "-o", path, "--threads", "1", "-q")
    assert adapt("convert", toy_model, *line) == (f"{path}\n", [])
    return path


@pytest.mark.parametrize("form", [(), ("--json",), ("--json", "--stats")])
def test_one_answer(bundle: Path, form: tuple[str, ...]) -> None:
    line = ("run", bundle, "Hello", "--raw", *SHORT, *form)
    out, err = adapt(*line)
    assert err.count(WARNING) == 1
    assert "training" not in out
    if form:
        assert json.loads(out)["tokens"] <= 3
    quiet, silence = adapt(*line, "-q")
    assert WARNING not in silence
    assert form or quiet == out


def test_many_rows(bundle: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.txt", tmp_path / "out.jsonl"
    rows.write_text("one\ntwo\nthree\n", encoding="utf-8")
    line = ("run", bundle, "-i", rows, "--raw", *SHORT)
    assert adapt(*line, "-o", out)[1].count(WARNING) == 1
    whole = out.read_text(encoding="utf-8")
    assert [set(json.loads(row)) >= {"text", "tokens"} for row in whole.splitlines()] == [True] * 3
    assert adapt(*line, "-o", "-", "-q") == (whole, [])


def test_a_conversation(bundle: Path) -> None:
    line = ("chat", bundle, "--chat-template", "chatml", *SHORT)
    out, err = adapt(*line, stdin="one\ntwo\n")
    assert err.count(WARNING) == 1
    assert adapt(*line, "-q", stdin="one\ntwo\n") == (out, [])
