"""Labelled rows: what is a label, what is refused, and that no text is both trained on and judged on."""

import gzip
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.convert.labelled import LabelledData, Split, class_weights, read_labelled, split, split_given
from adapt_llm.errors import FormatError, UsageError


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def data(texts: Sequence[str], labels: Sequence[int], names: Sequence[str] = ("a", "b")) -> LabelledData:
    return LabelledData("rows.jsonl", "0" * 64, tuple(texts), tuple(labels), tuple(names))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.tsv", "a.csv.gz"])
def test_every_form_gives_the_same(tmp_path: Path, name: str) -> None:
    rows = [("좋아요", "good"), ("bad, really", "bad"), ("fine", "good")]
    separator = "\t" if ".tsv" in name else ","
    table = f"label{separator}text\n" + "".join(
        f"{label}{separator}{json.dumps(text) if separator == ',' and ',' in text else text}\n" for text, label in rows
    )
    lines = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    content = (lines if ".jsonl" in name else table).encode()
    content = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(content)
    read = read_labelled(tmp_path / name)
    assert read.texts == ("좋아요", "bad, really", "fine")
    assert (read.labels, read.names, read.counts) == ((1, 0, 1), ("bad", "good"), (1, 2))
    assert (read.name, read.sha256) == (name, hashlib.sha256(content).hexdigest())
    assert (read.skipped, read.first_skipped) == (0, "")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["b", "a", "b"], ("a", "b")),
        ([10, 2, -1], ("-1", "2", "10")),
        (["10", 2, 10], ("2", "10")),
        ([1.0, 0, 1], ("0", "1")),
        ([True, False], ("false", "true")),
        (["star10", "star2", "Star1"], ("Star1", "star2", "star10")),
        ([" 긍정 ", "부정"], ("긍정", "부정")),
        (["²", "2"], ("2", "²")),
    ],
)
def test_labels_keep_their_names_in_natural_order(tmp_path: Path, values: list[object], names: tuple[str, ...]) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": f"t{at}", "label": value} for at, value in enumerate(values)])
    read = read_labelled(path)
    assert read.names == names
    shown = [str(int(value)) if isinstance(value, float) else str(value) for value in values]
    expected = [text.lower() if isinstance(values[0], bool) else text.strip() for text in shown]
    assert [read.names[label] for label in read.labels] == expected


def test_given_labels_set_the_order_and_refuse_others(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "t", "label": "a"}, {"text": "u", "label": "b"}])
    assert read_labelled(path, labels=["b", "c", "a"]).labels == (2, 0)
    with pytest.raises(FormatError, match=r"row 2 of a\.jsonl has the label 'b', not one of a, c"):
        read_labelled(path, labels=["a", "c"])


def test_other_keys_and_several_files(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [{"review": "t", "stars": 1, "text": "x"}])
    two = tmp_path / "b.csv"
    two.write_text("review,stars\nu,5\n", encoding="utf-8")
    read = read_labelled([one, two], text_field="review", label_field="stars")
    assert (read.texts, read.names, read.name) == (("t", "u"), ("1", "5"), "a.jsonl, b.csv")
    assert read.sha256 == hashlib.sha256(one.read_bytes() + two.read_bytes()).hexdigest()


def test_sentences_are_taken_as_given(tmp_path: Path) -> None:
    rows = [{"sentences": ["a.", "b."], "text": "x", "label": 0}, {"text": "y", "label": 1}]
    assert read_labelled(write(tmp_path / "a.jsonl", rows)).texts == (("a.", "b."), "y")


BAD_ROWS = [
    ({"text": "t"}, "no key 'label' among text"),
    ({"text": " ", "label": "a"}, "'text' is empty"),
    ({"label": "a"}, "no key 'text', 'prompt' or 'sentences'"),
    ({"text": "t", "label": ""}, "'label' is empty"),
    ({"text": "t", "label": None}, "'label' is empty"),
    ({"text": "t", "label": ["a", "b"]}, "'label' is neither a string nor a whole number"),
    ({"text": "t", "label": 0.5}, "'label' is neither a string nor a whole number"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_ROWS)
def test_few_bad_rows_are_left_out_and_counted(tmp_path: Path, bad: object, why: str) -> None:
    good = [{"text": f"t{at}", "label": at % 2} for at in range(99)]
    read = read_labelled(write(tmp_path / "a.jsonl", [*good[:50], bad, *good[50:]]))
    assert (len(read), read.skipped, read.first_skipped) == (99, 1, f"row 51: {why}")
    with pytest.raises(FormatError) as caught:
        read_labelled(write(tmp_path / "b.jsonl", [bad, *good[:98]]))
    assert caught.value.message == (f"b.jsonl: 1 of 99 rows have no text or no label, the first in row 1: {why}")
    assert "--label-field" in caught.value.hint


def test_files_without_labelled_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"a\.txt: labelled rows are jsonl, csv or tsv"):
        read_labelled(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="no such file"):
        read_labelled(tmp_path / "b.jsonl")
    with pytest.raises(UsageError, match="not from stdin"):
        read_labelled(Path("-"))
    with pytest.raises(FormatError, match=r"a\.jsonl has no rows"):
        read_labelled(write(tmp_path / "a.jsonl", []))
    with pytest.raises(FormatError, match="has only the label 'a'"):
        read_labelled(write(tmp_path / "a.jsonl", [{"text": "t", "label": "a"}]))
    (tmp_path / "a.csv").write_text("body,label\nx,1\n", encoding="utf-8")
    with pytest.raises(UsageError, match="no column prompt or text"):
        read_labelled(tmp_path / "a.csv")


letters = st.sampled_from("abcdefghijkl")
rows_of_three = st.lists(
    st.one_of(letters.map(lambda text: (text, ord(text) % 3)), st.tuples(st.sampled_from("abxyz"), st.integers(0, 2))),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(rows=rows_of_three, share=st.floats(0.01, 0.99), seed=st.integers(0, 3))
def test_no_text_is_on_both_sides(rows: list[tuple[str, int]], share: float, seed: int) -> None:
    whole = data([text + " " * (at % 2) for at, (text, _) in enumerate(rows)], [n for _, n in rows], ("x", "y", "z"))
    try:
        parts = split(whole, share, seed)
    except FormatError:
        # A label with two texts that have no other label can be on both sides.
        of = {text: {n for t, n in rows if t == text} for text, _ in rows}
        assert any(sum(found == {label} for found in of.values()) < 2 for label in range(3))
        return
    train, judged = parts.train, parts.validation
    assert not {str(text).strip() for text in train.texts} & {str(text).strip() for text in judged.texts}
    both = sorted(zip(train.texts + judged.texts, train.labels + judged.labels, strict=True))
    assert both == sorted(zip(whole.texts, whole.labels, strict=True))
    assert all(train.counts)
    assert all(judged.counts)


def test_split_is_stratified_and_depends_on_texts_and_seed_only() -> None:
    whole = data([f"t{at}" for at in range(1000)], [int(at % 10 == 0) for at in range(1000)])
    parts = split(whole, 0.2, 0)
    assert (parts.train.counts, parts.validation.counts) == ((720, 80), (180, 20))
    assert parts.train.texts == tuple(sorted(parts.train.texts, key=lambda text: int(str(text)[1:])))
    order = random.Random(1).sample(range(1000), 1000)
    shuffled = split(whole.select(order), 0.2, 0)
    assert set(shuffled.validation.texts) == set(parts.validation.texts)
    assert set(split(whole, 0.2, 1).validation.texts) != set(parts.validation.texts)


def test_a_label_on_one_side_only_is_refused() -> None:
    with pytest.raises(FormatError, match="the label 'b' has 1 different texts"):
        split(data(["t", "u", "v", "v", "v "], [0, 0, 1, 1, 1]), 0.2, 0)
    with pytest.raises(FormatError, match="the label 'c' has 0 different texts"):
        split(data(["t", "u", "v", "w"], [0, 0, 1, 1], ("a", "b", "c")), 0.2, 0)


def test_a_given_file_takes_its_texts_out_of_training() -> None:
    whole = data(["t", "u", "v", "w "], [0, 0, 1, 1])
    judged = data(["x", "w"], [0, 1])
    assert split_given(whole, judged) == Split(data(["t", "u", "v"], [0, 0, 1]), judged, dropped=1)
    with pytest.raises(FormatError, match="no rows of the label 'b' to judge on"):
        split_given(whole, data(["x"], [0]))
    with pytest.raises(FormatError, match="no rows of the label 'b' to train on"):
        split_given(whole, data(["x", "v", "w"], [0, 1, 1]))
    with pytest.raises(ValueError, match="numbered differently"):
        split_given(whole, data(["x", "y"], [0, 1], ("b", "a")))


def test_class_weights_balance() -> None:
    whole = data(["t", "u", "v", "w"], [0, 0, 0, 1])
    weights = class_weights(whole)
    assert weights == (4 / 6, 4 / 2)
    assert sum(weights[label] for label in whole.labels) == len(whole)
    with pytest.raises(FormatError, match="no rows of the label 'b'"):
        class_weights(data(["t"], [0]))


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv"])
def test_a_table_with_bare_carriage_returns_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"text,label\rgood,1\rbad,0\r")
    with pytest.raises(FormatError, match="carriage return"):
        read_labelled(path)
