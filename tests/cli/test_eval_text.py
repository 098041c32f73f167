"""`adapt eval --text`: what is printed, and which texts are refused."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapt_llm.cli import services

Invoke = Callable[..., tuple[int, str, str]]
FOUND = {
    "tokens": 1000,
    "perplexity": 18.25,
    "dense_perplexity": 17.5,
    "kl": 0.0123,
    "agreement": 0.951,
    "mean_depth": 2.5,
    "exit_histogram": [0, 500, 500, 0],
    "by_position": [],
}
CURVE = (
    {"first": 1, "last": 1, "tokens": 10, "perplexity": 99.5},
    {"first": 2, "last": 3, "tokens": 990, "perplexity": 17.0},
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    FOUND["by_position"] = [dict(part) for part in CURVE]

    def measure(path: Path, text: str, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
        calls.append({"path": path, "text": text, **settings, **options})
        return FOUND

    monkeypatch.setattr(services, "text_quality", measure)
    return calls


def test_a_table(adapt: Invoke, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("안녕 river", encoding="utf-8-sig")
    code, out, err = adapt("eval", "b", "--text", text, "--tau", "0.9", "--ctx-size", "64", "--limit-tokens", "50")
    assert (code, err) == (0, "")
    call = asked[0]
    assert (call["path"], call["text"]) == (Path("b"), "안녕 river")
    assert (call["tau"], call["ctx_size"], call["limit"]) == (0.9, 64, 50)
    lines = [line.split() for line in out.splitlines()]
    assert ["perplexity", "18.25"] in lines
    assert ["dense", "perplexity", "17.5"] in lines
    assert ["same", "next", "token", "95.1%"] in lines
    assert ["mean", "depth", "2.5", "of", "4"] in lines
    assert any(line[0] == "2-3" and line[1] == "17" for line in lines)


def test_json_has_the_stable_keys(adapt: Invoke, asked: list[dict[str, Any]]) -> None:
    code, out, err = adapt("eval", "b", "--text", "-", "--json", stdin="from stdin")
    assert (code, json.loads(out), err) == (0, FOUND, "")
    assert asked[0]["text"] == "from stdin"


def test_nothing_to_compare_with_is_left_out(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {**FOUND, "dense_perplexity": None, "kl": None, "agreement": None, "exit_histogram": [0, 0, 0, 1000]}
    monkeypatch.setattr(services, "text_quality", lambda *_a, **_k: none)
    out = adapt("eval", "b", "--text", "-", stdin="text")[1]
    assert "dense" not in out
    assert "left" not in out


@pytest.mark.parametrize(
    ("name", "data", "message"), [("no.txt", None, "cannot read"), ("b.txt", b"\xff\xfe\x00", "UTF-8")]
)
def test_texts_that_cannot_be_read(
    name: str, data: bytes | None, message: str, adapt: Invoke, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    code, out, err = adapt("eval", "b", "--text", tmp_path / name)
    assert code in (1, 2)
    assert out == ""
    assert message in err
    assert not asked


@pytest.mark.parametrize("option", [("--prefill", "dense"), ("--chat-template", "chatml"), ("--field", "a")])
def test_what_would_change_nothing_is_refused(
    option: tuple[str, str], adapt: Invoke, asked: list[dict[str, Any]]
) -> None:
    code, _, err = adapt("eval", "b", "--text", "-", *option, stdin="text")
    assert code == 2
    assert option[0] in err
    assert not asked


def test_report_and_picture(adapt: Invoke, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    text, report, plot = tmp_path / "t.txt", tmp_path / "r.md", tmp_path / "p.png"
    text.write_text("river", encoding="utf-8")
    found = FOUND["by_position"]
    for part in found:
        part["dense_perplexity"] = part["perplexity"] - 1
    code, out, err = adapt("eval", "b", "--text", text, "--report", report, "--plot", plot)
    assert (code, err) == (0, "")
    assert ["2-3", "17", "16", "990"] in [line.split() for line in out.splitlines()]
    page = report.read_text("utf-8")
    assert page.startswith(f"# b on t.txt\n\n`adapt eval b --text {text} --report {report} --plot {plot}`\n")
    assert hashlib.sha256(b"river").hexdigest()[:16] in page
    assert "torch " in page
    assert "| perplexity | 18.25 |" in page
    assert "| 2-3 | 17 | 16 | 990 |" in page
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Replace it with --force" in adapt("eval", "b", "--text", text, "--report", report)[2]
    assert len(asked) == 1


def test_exits_of_a_mixture(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    exits = [{"depth": 2, "mass": 0.25, "perplexity": 30.0}, {"depth": 4, "mass": 0.75, "perplexity": 17.5}]
    monkeypatch.setattr(services, "text_quality", lambda *_a, **_k: {**FOUND, "exits": exits})
    lines = [line.split() for line in adapt("eval", "b", "--text", "-", stdin="text")[1].splitlines()]
    assert ["last", "exit", "alone", "17.5"] in lines
    assert ["expected", "depth", "2.5", "of", "4"] in lines
    assert lines[lines.index(["exits"]) + 2 :][:2] == [["2", "25.0%", "30"], ["4", "75.0%", "17.5"]]


def test_something_must_be_given(adapt: Invoke, asked: list[dict[str, Any]]) -> None:
    code, _, err = adapt("eval", "b")
    assert code == 2
    assert "--text" in err
    assert not asked
