"""Training data: what counts, how rows become sequences, in which order, and what is refused."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from adapt_llm.convert import examples
from adapt_llm.convert.data import DataSettings, TrainingData, prepare_data
from adapt_llm.convert.examples import ExampleReader, look_into
from adapt_llm.convert.sequences import Order, Sequences
from adapt_llm.convert.token_file import TokenWriter
from adapt_llm.convert.trainable import IGNORED
from adapt_llm.errors import FormatError, UsageError
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.rows import read_rows
from adapt_llm.runtime.template import Template
from adapt_llm.runtime.text import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.last %}hmm {% endif %}{{ m.content }}."
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS, EOS = "<bos>", "<|im_end|>"


def make_tokenizer(*, bos: bool = False, around: str | None = None, eos: str | None = EOS) -> Tokenizer:
    """A token a byte; `around` is a post-processor's template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS, "<|im_start|>"])
    if around is not None:
        special = [(name, backend.token_to_id(name)) for name in (BOS, EOS)]
        backend.post_processor = processors.TemplateProcessing(around, special_tokens=special)
    return Tokenizer(backend, {"bos_token": BOS, "eos_token": eos, "add_bos_token": bos})


TOKENIZER, WITH_BOS = make_tokenizer(), make_tokenizer(bos=True)
EOS_ID, BOS_ID = TOKENIZER.added_id(EOS), TOKENIZER.added_id(BOS)


class Warnings(SilentReporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, text: str) -> None:
        self.lines.append(text)


def example(row: dict, template: str | None = CHATML, tokenizer: Tokenizer = TOKENIZER) -> examples.Example:
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder) / "rows.jsonl", [row])
        (only,) = read_rows([str(path)])
    return ExampleReader(tokenizer, template and Template(template)).read(only)


def answer(found: examples.Example, tokenizer: Tokenizer = TOKENIZER) -> str:
    ids = [index for index, counts in zip(found.ids, found.answers, strict=True) if counts]
    return tokenizer.decode(ids, skip_special_tokens=False)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepare(path: Path, *, tokenizer: Tokenizer = TOKENIZER, reporter=None, template=CHATML, **given) -> TrainingData:
    given = {"length": 8, "held_out": 0.0, **given}
    made = DataSettings(files=(path,), **given)
    chosen = template and Template(template)
    return prepare_data(made, tokenizer, chosen, path.parent / "work", reporter or SilentReporter())


def text_of(sequences: Sequences) -> list[str]:
    batches = [sequences.batch([index]) for index in range(len(sequences))]
    return [TOKENIZER.decode(batch.ids[0].tolist(), skip_special_tokens=False) for batch in batches]


# -- rows ----------------------------------------------------------------------------------------------------------


def test_a_text_row_has_no_answers_and_ends_with_eos() -> None:
    found = example({"text": "abc"})
    assert TOKENIZER.decode(found.ids, skip_special_tokens=False) == f"abc{EOS}"
    assert not any(found.answers)


def test_every_assistant_turn_of_a_chat_is_an_answer() -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
    found = example({"messages": [{"role": role, "content": content} for role, content in turns]})
    assert answer(found) == f"one{EOS}\ntwo{EOS}\n"
    assert found.ids.count(EOS_ID) == 5  # the template's own, none added


def test_a_turn_that_the_template_writes_otherwise_later_is_not_learnt() -> None:
    turns = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
    found = example({"messages": [{"role": r, "content": c} for r, c in turns]}, DROPS_THOUGHTS)
    assert answer(found) == f"hmm two.{EOS}"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WITH_BOS])
def test_prompt_and_completion_are_turns_or_one_text(tokenizer: Tokenizer) -> None:
    row = {"prompt": "question ", "completion": "réponse"}
    assert answer(example(row, CHATML, tokenizer)) == f"réponse{EOS}\n"
    plain = example(row, None, tokenizer)
    assert answer(plain) == f"réponse{EOS}"
    assert (plain.ids[0] == BOS_ID) == (tokenizer is WITH_BOS)
    assert tokenizer.decode(plain.ids, skip_special_tokens=True) == "question réponse"


@pytest.mark.parametrize("around", ["$A <|im_end|>", "<bos> $A <|im_end|>", "<bos> $A", "$A"])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("prompt", ["question ", f"{BOS}question "])
@pytest.mark.parametrize("eos", [EOS, None])
def test_what_a_tokenizer_puts_around_a_text_shifts_no_answer(
    around: str, bos: bool, prompt: str, eos: str | None
) -> None:
    tokenizer = make_tokenizer(bos=bos, around=around, eos=eos)
    end = EOS if eos or EOS in around else ""
    found = example({"prompt": prompt, "completion": "réponse"}, None, tokenizer)
    assert answer(found, tokenizer) == f"réponse{end}"
    whole = [*tokenizer.backend.encode("question réponse", add_special_tokens=False).ids, *([EOS_ID] if end else [])]
    begun = [BOS_ID] if bos or (prompt.startswith(BOS) and not around.startswith(BOS)) else []
    assert found.ids == [*begun, *whole]
    text = example({"text": "question réponse"}, None, tokenizer)
    (*pieces,) = ExampleReader(tokenizer, None).document("question réponse")
    assert text.ids == [index for piece in pieces for index in piece] == [*[BOS_ID] * bos, *whole]
    assert not any(text.answers)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "no completion"),
        ({"prompt": "a", "completion": 3}, "neither two strings"),
        ({"messages": [{"role": "user", "content": "a"}]}, "assistant"),
        ({"other": "a"}, "no key"),
        ({"text": " "}, "empty"),
    ],
)
def test_rows_without_use_say_why(row: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        example(row)
    with pytest.raises(ValueError, match="no chat template"):
        example({"messages": [{"role": "assistant", "content": "a"}]}, None)


@given(st.text(alphabet="ab \n\té", max_size=60), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_pieces_of_a_document_are_its_tokens(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "CHUNK", size)
        pieces = list(ExampleReader(WITH_BOS, None).document(text))
    assert [index for piece in pieces for index in piece] == [*WITH_BOS.encode(text), EOS_ID]


# -- sequences -----------------------------------------------------------------------------------------------------

ROWS = st.lists(st.lists(st.tuples(st.integers(3, 90), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=8)


def open_rows(rows: list[list[tuple[int, bool]]], **given) -> Sequences:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.safetensors"
        with TokenWriter(path) as writer:
            for row in rows:
                ids, answers = zip(*row, strict=True)
                writer.add(ids, answers)
                writer.end_row()
            writer.finish()
        assert [item.name for item in Path(folder).iterdir()] == [path.name]
        return Sequences(path, **given)


def predicted(sequences: Sequences) -> list[int]:
    """Targets that count, in order."""
    batches = [sequences.batch([index]) for index in range(len(sequences))]
    return [int(t) for batch in batches for t in batch.targets[0] if t != IGNORED]


@given(ROWS, st.integers(2, 7), st.booleans())
@settings(max_examples=80, deadline=None)
def test_packed_predicts_every_token_once(rows: list, length: int, bos: bool) -> None:
    stream = [index for row in rows for index, _ in row]
    sequences = open_rows(rows, length=length, packed=True, bos=1 if bos else None, partial=True)
    assert predicted(sequences) == (stream if bos else stream[1:])
    whole = open_rows(rows, length=length, packed=True, bos=1 if bos else None)
    assert len(whole) == (len(stream) - (not bos)) // length
    for index in range(len(whole)):
        assert whole.batch([index]).ids.shape == (1, length)
        assert (whole.batch([index]).ids[0, 0] == 1) == bos


@given(ROWS, st.integers(2, 7))
@settings(max_examples=60, deadline=None)
def test_packed_answers_are_the_marked_tokens(rows: list, length: int) -> None:
    stream = [token for row in rows for token in row]
    sequences = open_rows(rows, length=length, packed=True, bos=None, loss_on="answers", partial=True)
    assert predicted(sequences) == [index for index, counts in stream[1:] if counts]
    assert all(sequences.batch([index]).counted for index in range(len(sequences)))


@given(ROWS, st.integers(2, 7), st.sampled_from(["all", "answers"]))
@settings(max_examples=60, deadline=None)
def test_unpacked_keeps_rows_apart(rows: list, length: int, loss_on: str) -> None:
    sequences = open_rows(rows, length=length, packed=False, bos=None, loss_on=loss_on)
    kept = [row[: length + 1] for row in rows if len(row) > 1]
    if loss_on == "answers":
        kept = [row for row in kept if any(counts for _, counts in row[1:])]
    assert len(sequences) == len(kept)
    if not kept:
        return
    batch = sequences.batch(list(range(len(kept))))
    for ids, targets, count, row in zip(batch.ids, batch.targets, batch.counts, kept, strict=True):
        assert ids[:count].tolist() == [index for index, _ in row[:-1]]
        wanted = [index if counts or loss_on == "all" else IGNORED for index, counts in row[1:]]
        assert targets.tolist() == wanted + [IGNORED] * (batch.ids.shape[1] - count)


@given(ROWS, st.integers(2, 7))
@settings(max_examples=40, deadline=None)
def test_a_bos_put_before_a_row_counts_as_one_of_its_tokens(rows: list, length: int) -> None:
    sequences = open_rows(rows, length=length, packed=False, bos=1)
    assert len(sequences) == len(rows)
    for index, row in enumerate(rows):
        ids = [token for token, _ in row[:length]]
        batch = sequences.batch([index])
        assert batch.ids.tolist() == [[1, *ids[:-1]]]
        assert batch.targets.tolist() == [ids]


def test_a_row_that_begins_with_bos_gets_no_second_one() -> None:
    rows = [[(1, False), (5, False), (6, False), (7, False), (8, False)]]
    sequences = open_rows(rows, length=2, packed=True, bos=1)
    assert [sequences.batch([index]).ids[0].tolist() for index in range(2)] == [[1, 5], [1, 7]]


@given(st.integers(1, 30), st.integers(0, 5), st.integers(1, 7))
def test_an_epoch_takes_each_sequence_once(count: int, seed: int, batch: int) -> None:
    order = Order(count, seed)
    places = [index for first in range(0, 3 * count, batch) for index in order.take(first, batch)][: 3 * count]
    for epoch in range(3):
        assert sorted(places[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert Order(count, seed).take(count, 5) == places[count : count + 5] or 2 * count < 5
    assert count < 10 or places[:count] != places[count : 2 * count]


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_text_is_one_document_and_its_end_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number:02d}\n" for number in range(10)), encoding="utf-8")
    data = prepare(path, held_out=0.25)
    assert "".join(text_of(data.train)) == "line 00\nline 01\nline 02\nline 03\nline 04\nline 05\nline 06\n"
    assert data.held_out is not None
    assert "".join(text_of(data.held_out)) == "line 07\nline 08\nline 09\n"
    (used,) = data.used
    assert (used.name, used.tokens) == ("book.txt", 82)


def test_rows_are_held_out_whole(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": f"row {number:04d}"} for number in range(40)])
    data = prepare(path, held_out=0.1, packed=False, length=20)
    kept, back = text_of(data.train), text_of(data.held_out)
    assert (len(kept), len(back)) == (36, 4)
    assert sorted(kept + back) == [f"row {number:04d}" for number in range(40)]
    assert back != kept[-4:]


def test_what_is_held_out_depends_on_the_rows_and_not_on_their_name(tmp_path: Path) -> None:
    def held_out(name: str, first: int = 0) -> tuple[list[str], str]:
        path = write_rows(tmp_path / name, [{"text": f"row {first + number:04d}"} for number in range(40)])
        data = prepare(path, held_out=0.1, packed=False, length=20)
        return text_of(data.held_out), data.fingerprint

    assert held_out("a.jsonl") == held_out("b.jsonl")
    numbers = [[int(text.split()[1]) % 100 for text in held_out("a.jsonl", first)[0]] for first in (0, 100, 200)]
    assert numbers[0] != numbers[1] or numbers[0] != numbers[2]


def test_the_same_bytes_as_rows_and_as_a_text_are_other_data(tmp_path: Path) -> None:
    rows = [{"text": "abcdefgh"}] * 9
    names = ("a.jsonl", "a.txt")
    assert len({prepare(write_rows(tmp_path / name, rows)).fingerprint for name in names}) == 2


def test_evaluation_files_are_held_out(tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    path.write_text("a" * 50, encoding="utf-8")
    other.write_bytes(gzip.compress(b"b" * 20))
    data = prepare(path, evaluation=(other,), held_out=0.5)
    assert set("".join(text_of(data.train))) == {"a"}
    assert set("".join(text_of(data.held_out))) == {"b"}
    assert [used.tokens for used in data.used] == [51]
    assert [used.tokens for used in data.evaluation] == [21]


def test_the_same_files_are_not_the_same_data_when_one_of_them_judges(tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("a" * 50, encoding="utf-8")
    other.write_text("b" * 50, encoding="utf-8")
    judged = prepare(path, evaluation=(other,))
    made = DataSettings(files=(path, other), held_out=0.0, length=8)
    learnt = prepare_data(made, TOKENIZER, Template(CHATML), tmp_path / "work", SilentReporter())
    assert learnt.fingerprint != judged.fingerprint
    assert set("".join(text_of(learnt.train)).replace(EOS, "")) == {"a", "b"}


def test_tokens_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc " * 20, encoding="utf-8")
    first = prepare(path)
    with monkeypatch.context() as patch:
        patch.setattr(ExampleReader, "document", lambda *_: pytest.fail("tokenised again"))
        again = prepare(path)
    assert again.fingerprint == first.fingerprint
    assert torch.equal(again.train.batch([0]).ids, first.train.batch([0]).ids)
    path.write_text("abd " * 20, encoding="utf-8")
    assert prepare(path).fingerprint != first.fingerprint
    assert "abd" in text_of(prepare(path).train)[0]


@pytest.mark.parametrize("record", ["", "{", "[]", "[" * 200_000])
def test_tokens_whose_record_is_damaged_are_made_again(tmp_path: Path, record: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc " * 20, encoding="utf-8")
    first = prepare(path)
    (made,) = tmp_path.rglob("data.json")
    made.write_text(record, encoding="utf-8")
    assert prepare(path).fingerprint == first.fingerprint
    assert json.loads(made.read_text(encoding="utf-8"))["fingerprint"] == first.fingerprint


def test_rows_left_out_are_counted(tmp_path: Path) -> None:
    reporter = Warnings()
    path = write_rows(
        tmp_path / "rows.jsonl", [{"text": "abcdefghijkl"}, {"prompt": "a"}, {"prompt": "b"}, {"text": ""}]
    )
    prepare(path, reporter=reporter)
    assert reporter.lines == ["rows.jsonl: 3 rows are left out; mostly: there is a prompt and no completion"]


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        ([{"text": "abc"}], {}, "4 tokens are too few for one sequence of 8"),
        ([{"text": "abc" * 20}], {"loss_on": "answers"}, "no answer"),
        ([{"other": 1}], {}, "0 tokens are too few"),
    ],
)
def test_data_without_use_is_refused(rows: list, given: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(write_rows(tmp_path / "rows.jsonl", rows), **given)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="jsonl"):
        prepare(tmp_path / "a.json")
    (tmp_path / "a.txt").write_bytes(b"\xff\x00")
    with pytest.raises(FormatError, match="UTF-8"):
        prepare(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="cannot read"):
        prepare(tmp_path / "missing.txt")


@pytest.mark.parametrize("wrong", [{"files": ()}, {"length": 1}, {"held_out": 1.0}])
def test_settings_that_mean_nothing_are_refused(wrong: dict) -> None:
    with pytest.raises(UsageError):
        DataSettings(**{"files": (Path("a"),), **wrong})


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("a.txt", b"", UsageError, "is empty"),
        ("a.txt", b" \n\n", UsageError, "is empty"),
        ("a.md", "gr\u00fc\u00df".encode("latin-1"), FormatError, "not UTF-8"),
        ("a.txt", "gr\u00fc\u00df".encode()[:-1], FormatError, "not UTF-8"),
        ("a.txt.gz", gzip.compress(b"long " * 999)[:30], FormatError, "cut short"),
        ("a.txt.gz", gzip.compress(b"")[:20], UsageError, "is empty"),
        ("a.jsonl", b"", UsageError, "has no rows"),
        ("a.csv", b"", UsageError, "has no rows"),
        ("a.json", b"[]", UsageError, "rows are jsonl"),
    ],
)
def test_a_plan_sees_a_file_that_nothing_can_be_learnt_from(
    tmp_path: Path, name: str, content: bytes, error: type[Exception], says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=says):
        look_into(tmp_path / name)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), st.booleans())
def test_a_plan_looks_at_the_beginning_only(letters: str, zipped: bool) -> None:
    """Wherever the look ends, in the middle of a character too, a good text is good."""
    data = ("x" + letters * (examples._LOOK // len(letters.encode()) + 1)).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.txt.gz" if zipped else "a.txt")
        path.write_bytes(gzip.compress(data, 1) if zipped else data)
        look_into(path)
