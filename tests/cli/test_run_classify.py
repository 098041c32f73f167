"""`adapt run` on a bundle that classifies: one text, lines, rows, options."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adapt_llm.cli.classification import Asked, choose, choose_two_d

Invoke = Callable[..., tuple[int, str, str]]


def source(tmp_path: Path, text: str, name: str = "in.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


SCORES = {"neg": 0.123457, "pos": 0.876543}
LINES = "A good film. I liked it.\n\nbad bad bad\nFAIL\ngood good\n"
LABELS = "pos\t0.876543\n\t\nneg\t0.876543\n\t\npos\t0.876543\n"


# --- one text


def test_one_text(classify: Invoke, tmp_path: Path) -> None:
    line = "pos\t0.876543\n"
    assert classify("run", "b", "a good one") == (0, line, "")
    assert classify("run", "b", "-p", "a good one")[1] == line
    assert classify("run", "b", "-f", source(tmp_path, "good\nbad\ngood\n"))[1] == line  # one text of three lines
    assert classify("run", "b", "-", stdin="bad\ngood\ngood\n")[1] == line
    out = tmp_path / "out.txt"
    assert classify("run", "b", "good", "-o", out) == (0, "", "")
    assert out.read_text("utf-8") == line
    assert (
        classify("run", "b", "good", "-o", out)[2] == f"adapt: error: {out} is there already. Replace it with --force\n"
    )


def test_one_text_as_json(classify: Invoke) -> None:
    code, out, err = classify("run", "b", "bad. Bad? So bad.", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "label": "neg",
        "confidence": 0.876543,
        "scores": {"neg": 0.876543, "pos": 0.123457},
        "layers": 3,
        "sentences": 2,
        "work": 0.5,
        "truncated": False,
    }
    assert classify("run", "b", "bad. Bad? So bad.", "--format", "jsonl")[1] == out


def test_a_text_given_leaves_stdin_alone(classify: Invoke) -> None:
    """In `while read -r line; do adapt run B "$line"; done < FILE` the rest of the file is the loop's."""
    assert classify("run", "b", "good", stdin="bad bad bad\n")[1] == "pos\t0.876543\n"


def test_one_text_that_is_cut_says_so(classify: Invoke) -> None:
    code, out, err = classify("run", "b", "good " * 51, "--stats")
    assert (code, out) == (0, "pos\t0.876543\n")
    assert err.splitlines() == [
        "adapt: warning: the text is longer than the bundle reads; its end was left out",
        "2D, thresholds 0.4,2: the rule decided; sentences 1 of 1, layers 2 of 6, work 0.333",
    ]
    assert json.loads(classify("run", "b", "good " * 51, "--json")[1])["truncated"] is True


# --- lines piped in


def test_a_label_for_each_line(classify: Invoke) -> None:
    code, out, err = classify("run", "b", stdin=LINES)
    assert (code, out) == (3, LABELS)
    assert out.count("\n") == LINES.count("\n")
    assert err.splitlines()[:2] == [
        "adapt: warning: row 2: the line is empty",
        "adapt: warning: row 4: the text has no token",
    ]
    assert err.splitlines()[2].startswith("5 rows, 2 failed, ")
    assert err.splitlines()[2].endswith(" rows/s, mean layers 2.3, sentences 1.3, work 0.389")


def test_lines_as_json_and_to_a_file(classify: Invoke, tmp_path: Path) -> None:
    out = classify("run", "b", "--json", stdin="good\nbad\n")[1]
    assert [json.loads(line)["label"] for line in out.splitlines()] == ["pos", "neg"]
    path = tmp_path / "labels.csv"
    assert classify("run", "b", "-o", path, stdin="good\n")[:2] == (0, "")
    assert path.read_text("utf-8").splitlines() == [
        "row,row_hash,label,confidence,scores,layers,sentences,work,truncated,error",
        '1,770e607624d6,pos,0.876543,"{""neg"": 0.123457, ""pos"": 0.876543}",2,1,0.333333,false,',
    ]
    assert classify("run", "b", "--on-error", "skip", stdin=LINES)[1] == LABELS.replace("\t\n", "")
    assert classify("run", "b", "--shard", "3/3", stdin=LINES)[1] == "neg\t0.876543\n"


def test_no_lines_are_no_error(classify: Invoke) -> None:
    assert classify("run", "b", stdin="") == (0, "", "0 rows\n")


def test_lines_without_a_last_ending_and_with_odd_ones(classify: Invoke) -> None:
    text = "\ufeffgood\r\nbad\u2028good bad\nbad 나쁘다 👎"
    assert classify("run", "b", stdin=text)[1] == "pos\t0.876543\nneg\t0.876543\nneg\t0.876543\n"
    assert classify("run", "b", stdin=b"good\n\xb3\xaa\n")[:2] == (3, "pos\t0.876543\n\t\n")


# --- rows


ROWS = """{"id": "a", "text": "good. Very good. The best. Good"}
{"id": "b", "sentences": ["bad ", "worse"], "label": "pos"}
not json
{"text": "FAIL", "label": "pos", "layers": 3}
{"messages": [{"role": "user", "content": "x"}]}
{"text": "good"}
"""


def test_rows(classify: Invoke, opened: Any, tmp_path: Path) -> None:
    code, out, err = classify("run", "b", "-i", source(tmp_path, ROWS, "in.jsonl"))
    lines = [json.loads(line) for line in out.splitlines()]
    for line in lines:
        assert len(line.pop("row_hash")) == 12
    assert code == 3
    assert [line["row"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[0] == {
        "id": "a",
        "text": "good. Very good. The best. Good",
        "row": 1,
        "label": "pos",
        "confidence": 0.876543,
        "scores": SCORES,
        "layers": 5,
        "sentences": 2,
        "work": round(5 * 2 / (6 * 4), 6),
        "truncated": False,
    }
    assert (lines[1]["label"], lines[1]["sentences"], lines[1]["id"]) == ("neg", 2, "b")
    assert ("bad ", "worse") in opened.reader.seen  # the sentences as they were given
    assert lines[2] == {"row": 3, "error": "not JSON: Expecting value: line 1 column 1 (char 0)"}
    assert lines[3] == {"text": "FAIL", "label": None, "layers": None, "row": 4, "error": "the text has no token"}
    assert "messages" in lines[4]
    assert lines[4]["error"].startswith("no key ")
    assert lines[5]["label"] == "pos"
    assert "`adapt eval` compares them" in err


def test_truncated_rows_are_told_once(classify: Invoke, tmp_path: Path) -> None:
    rows = source(tmp_path, f"good\n{'bad ' * 60}\n{'good ' * 70}\n")
    code, out, err = classify("run", "b", "-i", rows)
    assert (code, [json.loads(line)["truncated"] for line in out.splitlines()]) == (0, [False, True, True])
    assert err.count("warning") == 1
    assert "adapt: warning: 2 texts are longer than the bundle reads; their ends were left out\n" in err


def test_classified_rows_can_be_classified_again(classify: Invoke, tmp_path: Path) -> None:
    first = classify("run", "b", "-i", source(tmp_path, '{"text": "bad"}\n', "a.jsonl"))[1]
    code, out, _ = classify("run", "b", "-i", source(tmp_path, first, "b.jsonl"))
    assert (code, json.loads(out)["label"]) == (0, "neg")


def test_field_and_tables(classify: Invoke, tmp_path: Path) -> None:
    table = source(tmp_path, "id\treview\n1\tgood\n2\tbad\n", "in.tsv")
    out = tmp_path / "out.tsv"
    assert classify("run", "b", "-i", table, "--field", "review", "-o", out)[0] == 0
    header, *lines = [line.split("\t") for line in out.read_text("utf-8").splitlines()]
    assert header[:5] == ["id", "review", "row", "row_hash", "label"]
    assert [line[4] for line in lines] == ["pos", "neg"]


def test_on_error_fail_writes_what_comes_before(classify: Invoke, tmp_path: Path) -> None:
    rows = source(tmp_path, "good " * 40 + "\nbad\nFAIL\ngood\n")
    code, out, err = classify("run", "b", "-i", rows, "--on-error", "fail", "--format", "text")
    assert (code, out) == (1, "pos\t0.876543\nneg\t0.876543\n")  # the row is wrong, not the command line
    assert err == "adapt: error: row 3: the text has no token. Mend it, or use --on-error record or skip\n"


def test_lack_of_memory_is_not_a_rows_fault(classify: Invoke, tmp_path: Path) -> None:
    assert classify("run", "b", "-i", source(tmp_path, "good\nFULL\n"))[0] == 5


def test_stats(classify: Invoke, tmp_path: Path) -> None:
    rows = source(tmp_path, "good. Good.\n" * 3 + "bad\n")
    code, _, err = classify("run", "b", "-i", rows, "--stats", "-b", "3")
    lines = err.splitlines()
    assert code == 0
    assert lines[0].startswith("4 rows, ")
    assert lines[1:4] == ["2D, thresholds 0.4,2; 3 documents at once", "  layers", "       1         0.0%"]
    assert lines[4:6] == ["       2  ▒▒    25.0%", "       3    ██  75.0%"]
    assert lines[-1] == "memory 3.00 GiB"


# --- the whole is the same however it is cut


def test_pipe_file_shards_and_resume_agree(classify: Invoke, tmp_path: Path) -> None:
    text = "".join(f"{'good ' * (n * 7 % 11)}{'bad ' * (n * 5 % 13)}x{n}\n" for n in range(60)) + "\nFAIL\n"
    rows, out = source(tmp_path, text), tmp_path / "out.jsonl"
    piped = [line.split("\t")[0] for line in classify("run", "b", stdin=text)[1].splitlines()]
    assert classify("run", "b", "-i", rows, "-o", out)[0] == 3
    whole = out.read_bytes()
    labels = [json.loads(line).get("label", "") for line in whole.splitlines()]
    assert labels == piped
    assert {"pos", "neg", ""} == set(labels)
    assert classify("run", "b", "-i", "-", stdin=text)[1].encode() == whole
    parts = [classify("run", "b", "-i", rows, "--shard", f"{n}/3")[1].encode().splitlines() for n in (1, 2, 3)]
    assert [part for some in zip(*[iter(x) for x in parts], strict=False) for part in some] == whole.splitlines()[:60]
    for cut in (0, 1, 300, len(whole) // 2, len(whole) - 1):
        out.write_bytes(whole[:cut])
        assert classify("run", "b", "-i", rows, "-o", out, "--resume")[0] == 3
        assert out.read_bytes() == whole


@pytest.mark.parametrize("name", ["out.txt", "out.csv", "out.tsv"])
def test_resume_of_every_form(classify: Invoke, tmp_path: Path, name: str) -> None:
    rows, out = source(tmp_path, LINES * 4), tmp_path / name
    classify("run", "b", "-i", rows, "-o", out)
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) * 2 // 3])
    code, _, err = classify("run", "b", "-i", rows, "-o", out, "--resume")
    assert (code, out.read_bytes()) == (3, whole)
    assert "20 rows, " in err
    assert "8 failed" in err  # those of the first run too


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_batches_change_nothing(classify: Invoke, opened: Any, tmp_path: Path, size: int) -> None:
    rows = source(tmp_path, "".join(f"{'good ' * (n % 9)}{'bad ' * (n % 4)}\n" for n in range(40)))
    code, out, _ = classify("run", "b", "-i", rows, "--format", "text", "--batch-size", size)
    assert code == 3
    expected = ["" if n % 9 == n % 4 == 0 else "pos" if n % 9 >= n % 4 else "neg" for n in range(40)]
    assert [line.split("\t")[0] for line in out.splitlines()] == expected
    assert opened.classifier.most_at_once == min(size, 38)


# --- options


@pytest.mark.parametrize(
    ("args", "mode"),
    [
        ([], "TwoD(rule=Rule(tau_ignore=0.4, tau_acc=2.0), limit=None)"),
        (["--full"], "Full()"),
        (["--one-d"], "OneD(layer=4)"),
        (["--one-d", "--max-drop", "0.03"], "OneD(layer=3)"),
        (["--one_d", "--max_drop", "0"], "OneD(layer=5)"),
        (["--max-drop", "0.04"], "TwoD(rule=Rule(tau_ignore=0.3, tau_acc=1.0), limit=None)"),
        (["--max-drop", "0"], "TwoD(rule=Rule(tau_ignore=0.5, tau_acc=3.0), limit=None)"),
        (["--threshold", "0.25,7"], "TwoD(rule=Rule(tau_ignore=0.25, tau_acc=7.0), limit=None)"),
    ],
)
def test_how_to_decide(classify: Invoke, opened: Any, args: list[str], mode: str) -> None:
    assert classify("run", "b", "good", *args)[0] == 0
    assert str(opened.classifier.modes) == f"[{mode}]"


def test_a_bundle_that_is_faster_in_one_dimension(fake: ModuleType) -> None:
    settings = fake.settings(use="1d", chosen=None, frontier=())
    assert str(choose(settings, Asked())) == "1D, layer 4"
    assert str(choose(settings, Asked(max_drop=0.03))) == "1D, layer 3"
    assert choose_two_d(settings, Asked()) is None
    assert str(choose_two_d(fake.settings(use="1d", chosen=None), Asked())) == "2D, thresholds 0.5,3"
    assert str(choose_two_d(fake.settings(), Asked(max_drop=0.04))) == "2D, thresholds 0.3,1"
    slow = [point.model_copy(update={"work": 0.9}) for point in fake.settings().frontier]
    assert str(choose(fake.settings(frontier=slow), Asked(max_drop=0.01))) == "1D, layer 4"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--full", "--one-d"], "--full and --one-d exclude each other. Give one of them"),
        (["--threshold", "0,1", "--max-drop", "0"], "--threshold and --max-drop exclude each other. Give one of them"),
        (["--batch-size", "0"], "--batch-size 0 is neither auto nor a number from 1 to 4096"),
        (["--temperature", "0"], "--temperature is for bundles that generate; b classifies (2dee). Leave it out"),
        (["-n", "5"], "--max-tokens is for bundles that generate; b classifies (2dee). Leave it out"),
        (["--tau", "0.5"], "--tau is for bundles that generate; b classifies (2dee). Leave it out"),
        (["--system", "x"], "--system is for bundles that generate; b classifies (2dee). Leave it out"),
        (["--resume"], "--resume is for many rows. Give them with -i FILE, or -i - for stdin"),
        (["-b", "4"], "--batch-size is for many rows. Give them with -i FILE, or -i - for stdin"),
    ],
)
def test_usage(classify: Invoke, args: list[str], line: str) -> None:
    assert classify("run", "b", "good", *args) == (2, "", f"adapt: error: {line}\n")


@pytest.mark.parametrize("text", ["", "1", "1,2,3", "a,b", "-0.1,1", "1.1,2", "0.1,inf", "nan,1"])
def test_thresholds_that_are_none(classify: Invoke, text: str) -> None:
    code, _, err = classify("run", "b", "good", "--threshold", text)
    assert code == 2
    assert err.startswith("adapt: error: --threshold")
    assert " is not IGNORE,ACC. Two numbers, for example 0.4,3.5" in err


@pytest.mark.parametrize("args", [["--full"], ["--one-d"], ["--threshold", "0,1"], ["--max-drop", "0"]])
def test_a_bundle_that_generates_refuses_them(adapt: Invoke, args: list[str]) -> None:
    code, _, err = adapt("run", "b", "hi", *args)
    assert code == 2
    assert err == f"adapt: error: {args[0]} is for bundles that classify (2dee); b generates. Leave it out\n"


def test_chat_with_a_classifier(classify: Invoke) -> None:
    code, out, err = classify("chat", "b")
    assert (code, out) == (2, "")
    assert err.startswith("adapt: error: b classifies (2dee); it does not talk. ")
