"""`adapt tune`: what is asked of it, what it prints and draws; and once from the command line to the bundle."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adapt_llm.cli import services
from adapt_llm.cli.charts import scatter

Invoke = Callable[..., tuple[int, str, str]]


def figures(kl: float) -> dict[str, Any]:
    return {"perplexity": 20.0, "loss": kl / 2, "kl": kl, "agreement": 0.9, "mean_depth": 2.0, "exit_histogram": [1, 9]}


def point(name: str, speedup: float, kl: float) -> dict[str, Any]:
    both = {"chosen_on": figures(kl), "held_out": figures(kl * 1.1)}
    return {"name": name, "settings": {"tau": 0.5}, "dense_blocks": 2.0, "speedup": speedup, **both}


FOUND = {
    "method": "river",
    "goal": "max_loss",
    "limit": 0.05,
    "chosen": "2 dense",
    "frontier": [point("dense", 1.0, 0.0), point("2 dense", 1.4, 0.03), point("all 4-bit", 1.6, 0.1)],
    "held_out": {},
    "measured": True,
    "stored": True,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def tune(path: Path, values: dict[str, Any], settings: dict[str, Any], _reporter: object) -> dict[str, Any]:
        calls.append({"path": path, **values, **settings})
        return FOUND

    monkeypatch.setattr(services, "tune", tune)
    return calls


def test_a_table_a_picture_and_what_was_chosen(adapt: Invoke, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    picture = tmp_path / "frontier.png"
    arguments = [
        "--text",
        "t.txt",
        "--max-loss",
        "0.05",
        "--seed",
        "7",
        "--dry-run",
        "--threads",
        "1",
        "--resident",
        "3",
    ]
    code, out, err = adapt("tune", "b", *arguments, "--plot", picture)
    assert (code, err) == (0, "")
    call = asked[0]
    assert (call["path"], call["text"], call["max_loss"], call["seed"]) == (Path("b"), Path("t.txt"), 0.05, 7)
    assert (call["store"], call["again"], call["threads"], call["resident"]) == (False, False, 1, 3)
    lines = out.splitlines()
    assert lines[0].split("   ")[0].strip() == "setting"
    assert sum(line.startswith("● ") for line in lines) == 1
    assert any(line.startswith("● 2 dense") and "1.40" in line and "0.0330" in line for line in lines)
    assert any("chosen" in line and "2 dense" in line for line in lines)
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, err = adapt("tune", "b", "--text", "t.txt", "--plot", picture)
    assert code == 2
    assert "--force" in err


def test_json_is_what_was_found(adapt: Invoke, asked: list[dict[str, Any]]) -> None:
    code, out, err = adapt("tune", "b", "--labels", "rows.csv", "--max-drop", "0.04", "--limit", "100", "--json")
    assert (code, json.loads(out), err) == (0, FOUND, "")
    assert (asked[0]["labels"], asked[0]["max_drop"], asked[0]["limit"]) == (Path("rows.csv"), 0.04, 100)


def test_labelled_rows_have_a_table_of_their_own(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"accuracy": 0.9, "macro_f1": 0.89, "work": 0.4, "mean_layers": 3.0, "mean_sentences": 2.0}
    found = {**FOUND, "goal": "max_drop", "chosen": "2d", "frontier": [], "held_out": {"full": row, "2d": row}}
    monkeypatch.setattr(services, "tune", lambda *_: found)
    code, out, _ = adapt("tune", "b", "--labels", "rows.csv")
    assert code == 0
    assert any(line.startswith("2d") and "0.9000" in line for line in out.splitlines())


def test_what_was_not_measured_has_no_column_and_the_loss_its_name(
    adapt: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """N-vium: growth of perplexity alone."""
    frontier = [point("router bias +0", 1.5, 0.02), point("router bias +4", 2.5, 0.08)]
    for one in frontier:
        for half in ("chosen_on", "held_out"):
            one[half] |= {"kl": None, "agreement": None}
    found = {**FOUND, "method": "nvium", "chosen": "router bias +4", "frontier": frontier}
    monkeypatch.setattr(services, "tune", lambda *_: found)
    picture = tmp_path / "f.svg"
    out = adapt("tune", "b", "--text", "t.txt", "--plot", picture)[1].splitlines()
    assert out[0].split("  ")[0] == "setting"
    assert "KL" not in out[0]
    assert "same token" not in out[0]
    assert out[1].split() == ["router", "bias", "+0", "2.0", "1.50", "1.00%", "1.10%"]
    assert any("growth of perplexity, on the other half" in line for line in out)
    assert "<!-- growth of perplexity -->" in picture.read_text("utf-8")


@pytest.mark.parametrize(("limit", "said"), [(0.05, False), (0.016, True)])
def test_a_loss_above_the_limit_on_the_other_half_is_said(
    limit: float, said: bool, adapt: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "tune", lambda *_: {**FOUND, "limit": limit})
    assert ("on the other half it loses 0.0165" in adapt("tune", "b", "--text", "t.txt")[1]) is said
    row = {"accuracy": 0.9, "macro_f1": 0.89, "work": 0.4, "mean_layers": 3.0, "mean_sentences": 2.0}
    ways = {"full": row, "2d": {**row, "accuracy": 0.86}}
    found = {**FOUND, "goal": "max_drop", "limit": limit, "chosen": "2d", "frontier": [], "held_out": ways}
    monkeypatch.setattr(services, "tune", lambda *_: found)
    assert ("on the other half it loses 0.04" in adapt("tune", "b", "--labels", "rows.csv")[1]) is said


def test_max_drop_is_one_option(adapt: Invoke) -> None:
    helps = {tuple(_help_of("--max-drop", adapt(command, "--help")[1])) for command in ("run", "eval", "bench", "tune")}
    assert len(helps) == 1


def _help_of(option: str, page: str) -> list[str]:
    lines = page.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:1] == [option])
    others = (number for number, line in enumerate(lines[at + 1 :], at + 1) if not line.strip() or "--" in line)
    return " ".join(lines[at : next(others)]).split()


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(adapt: Invoke, asked: list[dict[str, Any]]) -> None:
    code, _, err = adapt("tune", "b", "--text", "t.txt", "--plot", "frontier.bmp")
    assert code == 2
    assert ".png" in err
    assert not asked


@pytest.mark.parametrize(
    ("data", "option"),
    [("--text", option) for option in ("--field", "--label-field", "--limit")]
    + [("--labels", option) for option in ("--limit-tokens", "--resident")],
)
def test_what_would_change_nothing_is_refused(
    data: str, option: str, adapt: Invoke, asked: list[dict[str, Any]]
) -> None:
    code, _, err = adapt("tune", "b", data, "rows.csv", option, "200")
    assert (code, asked) == (2, [])
    assert f"{option} is for --" in err


def test_something_must_be_given(adapt: Invoke) -> None:
    code, _, err = adapt("tune", "b")
    assert code == 2
    assert "--text" in err


def test_points_are_drawn_where_they_are() -> None:
    lines = list(scatter([(1.0, 0.0, "a"), (2.0, 0.5, "b")], x_label="x", y_label="y", width=10, height=5))
    assert lines[0].strip() == "y"
    assert lines[1].endswith("b")
    assert lines[1].split("│")[1].index("b") == 9
    assert lines[5].split("│")[1] == "a"
    assert lines[-1].split() == ["1", "x", "2"]
    assert list(scatter([], x_label="x", y_label="y")) == []
    assert any("a" in line for line in scatter([(1.0, 1.0, "a")], x_label="x", y_label="y"))


def test_from_the_command_line_to_the_bundle(
    adapt: Invoke, toy_model: Path, bundle_factory: ModuleType, tmp_path: Path
) -> None:
    """No fakes: a tiny bundle, timed for real."""
    bundle = bundle_factory.bundle(toy_model, tmp_path / "toy-river")
    text = tmp_path / "t.txt"
    text.write_text("The river leaves the mountains in the north. " * 30, encoding="utf-8")
    arguments = ["--text", text, "--limit-tokens", 512, "--max-loss", 1e6, "--device", "cpu", "--threads", 1, "-q"]
    code, out, _ = adapt("tune", bundle, *arguments, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["stored"]
    assert found["speed"]["dense_block_ms"] > 0
    assert found["chosen"] in [point["name"] for point in found["frontier"]]
    before = (bundle / "adapt.json").read_bytes()
    code, out, _ = adapt("tune", bundle, *arguments, "--json")
    assert (code, json.loads(out)["measured"], json.loads(out)["stored"]) == (0, False, False)
    assert (bundle / "adapt.json").read_bytes() == before
    assert adapt("tune", bundle, *arguments)[0] == 0
