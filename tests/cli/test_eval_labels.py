"""`adapt eval --labels`: figures, their page, report and picture; the map of stops; the scores."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapt_llm.cli import plots, services
from adapt_llm.cli.heat import ASCII_SHADES, SHADES, heat_map, shades
from adapt_llm.convert.frontier import macro_f1
from adapt_llm.errors import UsageError
from adapt_llm.runtime import label_quality
from adapt_llm.runtime.label_quality import Rows, compare, spread
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.schedule import Full, OneD, Rule, TwoD
from adapt_llm.runtime.scores import Confusion

Invoke = Callable[..., tuple[int, str, str]]


def labelled(tmp_path: Path, pairs: list[tuple[str, str]], name: str = "test.jsonl") -> Path:
    path = tmp_path / name
    lines = (json.dumps({"text": text, "label": label}) for text, label in pairs)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


PAIRS = [("good. Good", "pos"), ("bad", "neg"), ("bad. So bad. Bad", "pos"), ("good", "pos"), ("good", "neg")]


def test_json(classify: Invoke, tmp_path: Path) -> None:
    code, out, err = classify("eval", "b", "--labels", labelled(tmp_path, PAIRS), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["rows"] == 5
    assert found["accuracy"] == 0.6
    assert found["macro_f1"] == round((2 * 1 / 4 + 2 * 2 / 6) / 2, 6)
    assert found["mean_layers"] == (3 + 2 + 4 + 2 + 2) / 5
    assert found["mean_sentences"] == (2 + 1 + 2 + 1 + 1) / 5
    operations = 3 * 2 + 2 * 1 + 4 * 2 + 2 * 1 + 2 * 1
    assert found["work"] == round(operations / (6 * (2 + 1 + 3 + 1 + 1)), 6)  # a ratio of sums
    assert found["confusion"] == [[1, 1], [1, 2]]
    assert found["labels"] == ["neg", "pos"]
    assert found["per_class"]["pos"] == {"precision": 0.666667, "recall": 0.666667, "f1": 0.666667, "rows": 3}
    assert found["stops"] == [[1, 2, 3], [2, 3, 1], [2, 4, 1]]
    assert found["point"] == {"name": "2d", "thresholds": [0.4, 2.0], "layer": None}
    assert found["same_as_dense"] == 1
    assert (found["dense"]["work"], found["dense"]["mean_layers"], found["dense"]["mean_sentences"]) == (1, 6, 1.6)
    assert (found["one_d"]["point"]["layer"], found["one_d"]["work"]) == (4, round(4 / 6, 6))
    for speed in ("over_dense", "over_one_d"):
        assert set(found["speedup"][speed]) == {"median", "min", "max"}
    assert all(found[key]["rows_per_s"] > 0 for key in ("dense", "one_d"))
    assert found["data"]["name"] == "test.jsonl"
    assert len(found["data"]["sha256"]) == 64


def test_page_and_report(classify: Invoke, tmp_path: Path) -> None:
    rows, report = labelled(tmp_path, [*PAIRS, ("good " * 60, "pos")]), tmp_path / "r.md"
    code, out, err = classify("eval", "b", "--labels", rows, "--report", report, "--threshold", "0.1,9")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "b on 6 rows of test.jsonl, 4 at once"
    assert lines[2].split() == ["full", "1D", "2D"]
    assert lines[3].split() == ["layer", "6", "layer", "4", "0.1,9"]
    assert lines[4].split() == ["accuracy", "0.6667", "0.6667", "0.6667"]
    assert "1 texts are longer than the bundle reads; their ends were left out" in lines
    assert "where documents stopped" in lines
    assert max(map(len, lines)) <= 80
    page = report.read_text("utf-8")
    assert page.startswith(f"# b on test.jsonl\n\n`adapt eval b --labels {rows} --report {report} --threshold 0.1,9`\n")
    assert "| accuracy | 0.6667 | 0.6667 | 0.6667 |" in page
    assert "| pos | 1 | 3 |" in page
    assert "adapt 0, device none." in page
    assert classify("eval", "b", "--labels", rows, "--report", report)[2].endswith("Replace it with --force\n")
    assert classify("eval", "b", "--labels", rows, "--report", report, "--force", "-q")[0] == 0


def test_an_unknown_label_is_one_line(classify: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "open_classifier", None)  # before a model is loaded
    code, out, err = classify("eval", "b", "--labels", labelled(tmp_path, [("good", "pos"), ("so so", "neutral")]))
    assert (code, out) == (1, "")
    assert err.startswith("adapt: error: row 2 of test.jsonl has the label 'neutral', not one of neg, pos. ")
    assert err.count("\n") == 1


def test_the_rows_of_training_are_told(
    classify: Invoke, fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = labelled(tmp_path, PAIRS)
    digest = hashlib.sha256(rows.read_bytes()).hexdigest()
    seen = fake.settings().data.model_copy(update={"sha256": digest})
    monkeypatch.setattr(services, "twodee", lambda _: fake.settings(data=seen))
    code, _, err = classify("eval", "b", "--labels", rows)
    line = "test.jsonl is the file that the classifiers were trained on: these figures are too good"
    assert (code, err) == (0, f"adapt: warning: {line}\n")
    monkeypatch.setattr(services, "twodee", lambda _: fake.settings(validation_data=seen))
    line = "test.jsonl is the file that thresholds were chosen on: these figures are too good"
    assert classify("eval", "b", "--labels", rows)[2] == f"adapt: warning: {line}\n"


def test_fields_limit_and_tables(classify: Invoke, opened: Any, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("review,stars\n" + "bad one,neg\n" * 50 + "good one,pos\n" * 50, encoding="utf-8")
    args = ["--labels", table, "--field", "review", "--label-field", "stars", "--limit", "10", "--json", "-b", "3"]
    code, out, _ = classify("eval", "b", *args)
    found = json.loads(out)
    assert (code, found["rows"], found["accuracy"], found["batch_size"]) == (0, 10, 1.0, 3)
    assert found["confusion"] == [[5, 0], [0, 5]]  # a sorted file gives both labels
    assert opened.classifier.batch_sizes == {3}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "There is nothing to measure with. Give --text, --labels, --tasks or --prompts"),
        (
            ["--labels", "a", "--text", "b"],
            "--text and --labels exclude each other. Give --text, --labels, --tasks or --prompts",
        ),
        (["--labels", "no.jsonl"], "no.jsonl: no such file. Give a file of rows, or - for stdin"),
        (["--labels", "-"], "labelled rows come from a file, not from stdin. Save them first: they are read twice"),
        (["--labels", "a", "--limit-tokens", "5"], "--limit-tokens is for --text. Leave it out"),
        (["--labels", "a", "--tau", "0.5"], "--tau is for --text, --tasks and --prompts. Leave it out"),
        (["--text", "a", "--max-drop", "0.5"], "--max-drop is for --labels. Leave it out"),
        (["--text", "a", "--limit", "5"], "--limit is for --labels, --tasks and --prompts. Leave it out"),
        (["--labels", "a", "--plot", "p.jpeg"], "p.jpeg: pictures are .png, .pdf, .svg. Give a name that ends so"),
        (
            ["--labels", "a", "--max-drop", "0.1", "--threshold", "0,1"],
            "--threshold and --max-drop exclude each other. Give one of them",
        ),
    ],
)
def test_usage(classify: Invoke, args: list[str], line: str) -> None:
    assert classify("eval", "b", *args) == (2, "", f"adapt: error: {line}\n")


def test_a_bundle_that_generates(adapt: Invoke) -> None:
    code, _, err = adapt("eval", "b", "--labels", "x.jsonl")
    assert (code, err) == (2, "adapt: error: b generates; it has no labels. Measure it with --text FILE\n")


def test_without_matplotlib(classify: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    code, out, err = classify("eval", "b", "--labels", labelled(tmp_path, PAIRS), "--plot", tmp_path / "p.png")
    assert (code, out) == (1, "")
    assert err == "adapt: error: --plot needs matplotlib. Install it: pip install 'adapt-llm[plot]'\n"


@pytest.mark.parametrize(("name", "magic"), [("p.png", b"\x89PNG"), ("p.PDF", b"%PDF"), ("p.svg", b"<?xml")])
def test_picture(classify: Invoke, tmp_path: Path, name: str, magic: bytes) -> None:
    path = tmp_path / name
    assert classify("eval", "b", "--labels", labelled(tmp_path, PAIRS), "--plot", path)[0] == 0
    assert path.read_bytes().startswith(magic)
    assert [item.name for item in tmp_path.iterdir() if item.suffix == ".tmp"] == []


def test_a_bundle_without_thresholds(
    classify: Invoke, fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "twodee", lambda _: fake.settings(use="1d", chosen=None, frontier=()))
    code, out, _ = classify("eval", "b", "--labels", labelled(tmp_path, PAIRS), "--json")
    found = json.loads(out)
    assert (code, found["point"]["name"], found["accuracy"]) == (0, "1d", found["one_d"]["accuracy"])
    out = classify("eval", "b", "--labels", labelled(tmp_path, PAIRS))[1]
    assert out.splitlines()[2].split() == ["full", "1D"]


# --- measuring


def test_all_see_the_same_rows_in_turn(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk, each first in its turn; one clock for all."""
    clock = iter(range(1, 10_000))
    monkeypatch.setattr(label_quality, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    modes = {"dense": Full(), "one_d": OneD(2), "two_d": TwoD(Rule(0.1, 1.0))}
    rows = Rows([f"good {n}" for n in range(40)], [1] * 40)
    found = compare(opened, rows, modes, batch_size=2, reporter=SilentReporter())
    kinds = [type(mode).__name__ for mode in opened.classifier.modes]
    warm_up, *turns = ("".join(kinds[place : place + 3]) for place in range(0, 12, 3))
    assert (warm_up, turns) == ("FullOneDTwoD", ["FullOneDTwoD", "OneDTwoDFull", "TwoDFullOneD"])
    for tally in found.tallies.values():
        assert tally.seconds == [2.0] * 3  # one tick to read, one to classify
        assert tally.confusion.rows == 40
    assert found.tallies["two_d"].speedup(found.tallies["dense"]) == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_rows_without_a_token_are_left_out(opened: Any) -> None:
    modes = {"dense": Full(), "one_d": OneD(2)}
    rows = Rows(["good", "FAIL", "bad", "FAIL"], [1, 1, 0, 0], numbers=[1, 5, 6, 7])
    found = compare(opened, rows, modes, batch_size=2, reporter=SilentReporter())
    assert (found.unreadable, found.first_unreadable) == (2, "row 5: the text has no token")
    assert found.tallies["dense"].confusion.counts == [[1, 0], [0, 1]]
    with pytest.raises(UsageError, match="no row has a text"):
        compare(opened, Rows(["FAIL"], [1]), modes, batch_size=2, reporter=SilentReporter())


@given(st.integers(1, 500), st.none() | st.integers(1, 600))
def test_rows_are_spread_evenly(rows: int, limit: int | None) -> None:
    places = spread(rows, limit)
    assert len(places) == min(rows, limit or rows)
    assert places == sorted(set(places))
    assert places[0] == 0
    assert places[-1] < rows
    assert rows - places[-1] <= -(-rows // len(places))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_scores_are_those_of_conversion(pairs: list[tuple[int, int]]) -> None:
    matrix = Confusion(["a", "b", "c", "d"])
    for label, answer in pairs:
        matrix.add(label, answer)
    labels, answers = (np.array(column) for column in zip(*pairs, strict=True))
    assert matrix.accuracy == pytest.approx((labels == answers).mean())
    assert matrix.macro_f1 == pytest.approx(macro_f1(labels, answers, 4))
    for place, figures in enumerate(matrix.per_class().values()):
        hits = int(((labels == place) & (answers == place)).sum())
        there, said = int((labels == place).sum()), int((answers == place).sum())
        assert figures["rows"] == there
        assert figures["recall"] == (hits / there if there else None)
        assert figures["precision"] == (hits / said if said else None)


@pytest.mark.parametrize(
    ("right", "rows", "ends"),
    # By the formula in Newcombe (1998), table I, and the first by hand.
    [(50, 100, (0.4038, 0.5962)), (81, 263, (0.2553, 0.3662)), (20, 20, (0.8389, 1.0)), (0, 20, (0.0, 0.1611))],
)
def test_interval(right: int, rows: int, ends: tuple[float, float]) -> None:
    assert Confusion(["a", "b"], [[right, rows - right], [0, 0]]).interval == pytest.approx(ends, abs=1e-4)


# --- the map


def test_map() -> None:
    stops = Counter({(1, 1): 60, (2, 3): 30, (3, 4): 10})
    assert list(heat_map(stops, 4)) == [
        "  layers",
        "       1  ██      60.0%",
        "       2           0.0%",
        "       3    ▓▓    30.0%",
        "       4      ▒▒  10.0%",
        "          1   3",
        "  sentences looked at; █ = 60.0% of the documents",
    ]
    assert list(heat_map({}, 4)) == []


def test_map_in_bands() -> None:
    stops = {(sentence, 1 + sentence % 64): 1 for sentence in range(1, 201)}
    lines = list(heat_map(stops, 64, marks=ASCII_SHADES))
    assert [line.split()[0] for line in lines[1:4]] == ["1-4", "5-8", "9-12"]
    assert len(lines) == 1 + 16 + 1 + 1
    assert "".join(lines).isascii()
    assert "198 or more in the last column" in lines[-1]


@given(
    st.dictionaries(st.tuples(st.integers(1, 900), st.integers(1, 90)), st.integers(1, 9), min_size=1, max_size=30),
    st.integers(30, 200),
)
def test_map_keeps_to_its_width_and_counts_everything(stops: dict[tuple[int, int], int], width: int) -> None:
    lines = list(heat_map(stops, 90, width=width))
    assert max(map(len, lines)) <= width
    shares = [float(line.rsplit(maxsplit=1)[1].removesuffix("%")) for line in lines[1:16]]
    assert sum(shares) == pytest.approx(100, abs=1)
    marks = "".join(line[8:-7] for line in lines[1:16])
    assert set(marks) <= set(SHADES)
    assert SHADES[-1] in marks


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("UTF-8", SHADES), ("cp437", SHADES), ("ANSI_X3.4-1968", SHADES), ("ISO-8859-1", ASCII_SHADES)],
)
def test_shades_that_a_terminal_can_show(encoding: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getencoding", lambda: encoding)
    assert shades() == expected
