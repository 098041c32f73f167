"""From `adapt convert --method nvium` to texts, on a tiny model, all through the command line and without fakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapt_llm.cli.app import app

SAMPLED = ("--dtype", "fp32", "--temperature", "1", "--seed", "5", "--ignore-eos", "--max-tokens", "24")


def adapt(*args: object, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "river.txt"
    lines = [f"The river leaves the mountains, line {number % 7}.\n" for number in range(90)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bundle(toy_model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "toy-nvium"
    args = ["--exits", "2", "--target-depth", "0.7", "--data", text, "--steps", "12", "--sequence-length", "48"]
    args += ["--batch-size", "4", "--lr", "0.01", "--dtype", "fp32", "--threads", "1", "-q", "-o", folder]
    code, out, err = adapt("convert", toy_model, "--method", "nvium", *args)
    assert (code, err) == (0, "")
    return Path(out.strip())


def test_a_text_does_not_depend_on_when_what_waits_is_run(bundle: Path) -> None:
    code, out, err = adapt("run", bundle, "The river", *SAMPLED, "--stats")
    assert code == 0
    assert "mean depth" in err
    for option in (("--no-piggyback",), ("--max-deferred", "1")):
        assert adapt("run", bundle, "The river", *SAMPLED, *option)[1] == out
    facts = json.loads(adapt("run", bundle, "The river", *SAMPLED, "--json")[1])
    counts = facts["exit_histogram"]
    assert sum(counts.values()) == facts["tokens"] - 1 == 23  # the first token came from the prompt
    assert set(counts) <= {"2", "4"}
    assert facts["mean_depth"] == pytest.approx(sum(int(at) * count for at, count in counts.items()) / 23, abs=0.01)


def test_chat_goes_on_over_waiting_tokens(bundle: Path) -> None:
    code, out, err = adapt("chat", bundle, "--raw", *SAMPLED, "--stats", stdin="hello\nand you?\n/regen\nand me?\n")
    assert code == 0
    assert out
    assert err.count("mean depth") == 4
    assert "kept from before" in err


def test_inspect_shows_exits_and_other_depths(bundle: Path) -> None:
    code, out, _ = adapt("inspect", bundle)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["exits", "after", "2", "and", "all", "4", "blocks"] in rows
    assert "the junctions alone; 12 steps of 4 x 48 tokens from river.txt" in out
    assert "steered to 70% of the blocks" in out
    assert [row[0] for row in rows if len(row) == 3 and row[1].endswith("%")][:2] == ["2", "4"]
    assert sum(row[:2] == ["+0", "*"] for row in rows) == 1
    assert "dense + junction" in out
    assert max(map(len, out.splitlines()[1:])) <= 80


def test_verify_and_the_likelihood_of_a_text(bundle: Path, text: Path) -> None:
    assert adapt("verify", bundle)[0] == 0
    code, out, _ = adapt("eval", bundle, "--text", text, "--limit-tokens", "200", "--json", "-q")
    assert code == 0
    assert json.loads(out)["tokens"] > 0
    file = bundle / "junctions.safetensors"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert adapt("verify", bundle)[0] != 0
    finally:
        file.write_bytes(whole)


def test_options_that_mean_nothing_are_refused(bundle: Path, text: Path) -> None:
    for args in (("run", bundle, "x", "--tau", "0.5"), ("run", bundle, "x", "--lossless")):
        code, _, err = adapt(*args)
        assert code == 2
        assert f"{args[3]} is for generating with River bundles" in " ".join(err.split())
    for flag in (("--no-piggyback",), ("--max-deferred", "3"), ("--per-exit-truncation",)):
        code, _, err = adapt("eval", bundle, "--text", text, *flag)
        assert (code, "--prompts" in err) == (2, True)
