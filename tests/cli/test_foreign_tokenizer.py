"""A tokenizer with ids that the model does not have, through the commands, without fakes."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapt_llm.cli.app import app
from adapt_llm.convert.writer import hash_file

WHAT = "the tokenizer knows token 1000000, the model only 264."
RIVER = ("--method", "river", "--quantizer", "rtn", "--group-size", "32", "--threads", "1", "-q")


def adapt(*args: object, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def foreign(folder: Path, letter: str) -> Path:
    """Give a letter an id far beyond the model."""
    path, manifest = folder / "tokenizer.json", folder / "adapt.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["model"]["vocab"][letter] = 1_000_000
    path.write_text(json.dumps(data), encoding="utf-8")
    if manifest.exists():
        sealed = json.loads(manifest.read_text(encoding="utf-8"))
        sealed["files"][path.name] = hash_file(path).model_dump()
        manifest.write_text(json.dumps(sealed), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def bundle(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle in whose own texts the letter is rare."""
    out = tmp_path_factory.mktemp("foreign") / "toy-river"
    code, _, err = adapt("convert", toy_model, *RIVER, "-o", out)
    assert (code, err) == (0, "")
    return foreign(out, "q")


def test_only_texts_with_such_an_id_are_refused(bundle: Path, tmp_path: Path) -> None:
    rows, text = tmp_path / "rows.txt", tmp_path / "text.txt"
    rows.write_text("quick\nslow\n", encoding="utf-8")
    text.write_text("the quick one", encoding="utf-8")
    assert adapt("run", bundle, "slow", "--raw", "-n", "2")[0] == 0
    code, out, _ = adapt("run", bundle, "-i", rows, "--raw", "-n", "2", "-q")
    found = [json.loads(line) for line in out.splitlines()]
    assert (code, ["error" in row for row in found]) == (3, [True, False])
    assert found[0]["error"].startswith(WHAT)
    asked = (["run", bundle, "quick", "--raw"], None), (["chat", bundle, "--raw"], "quick\n")
    for args, stdin in (*asked, (["eval", bundle, "--text", text, "-q"], None)):
        code, _, err = adapt(*args, stdin=stdin)
        assert (code, err.startswith(f"adapt: error: {WHAT}"), err.count("\n")) == (1, True, 1)
    assert adapt("verify", bundle, "-q")[0] == 0


def test_verify_bench_and_convert(bundle: Path, toy_model: Path, tmp_path: Path) -> None:
    """Their own texts have the letter."""
    copy = foreign(shutil.copytree(bundle, tmp_path / "copy"), "e")
    code, out, _ = adapt("verify", copy, "--json")
    assert (code, [problem["file"] for problem in json.loads(out)["problems"]]) == (1, ["self-check"])
    source = foreign(shutil.copytree(toy_model, tmp_path / "source"), "e")
    for args in (["bench", copy, "-q"], ["convert", source, *RIVER, "-o", tmp_path / "out"]):
        code, out, err = adapt(*args)
        assert (code, out, err.startswith(f"adapt: error: {WHAT}"), err.count("\n")) == (1, "", True, 1)
