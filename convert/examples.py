"""From what a user has (texts, prompts with completions, chats) to token ids and which of them are answers.

Knows tokens and chat templates; no weights, no files of tokens, no batches.
"""

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ..errors import AdaptError, FormatError, UsageError
from ..runtime.rows import Row, input_form, read_rows

if TYPE_CHECKING:
    from ..runtime.template import Template
    from ..runtime.text import Tokenizer

CHUNK = 1 << 20
"""Characters of a text that are tokenised at a time."""
ROW_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".tab")
_BREAK = re.compile(r"\n(?=\S)")
_LOOK = 1 << 16  # bytes of a text that a plan looks at
_GZIP = b"\x1f\x8b"
_END_MARKS = 3  # tokens at the end of a chat among which its end-of-turn is


class Example(NamedTuple):
    """One row as tokens. `answers[i]`: token i is something that the model should say."""

    ids: Sequence[int]
    answers: Sequence[bool]


class ExampleReader:
    """Rows to examples, as `adapt run` shows rows to the model.

    `text` is taken as it is. `prompt` with `completion` is a user's turn and its answer where there is a chat
    template, else one text. `messages` need a template; every assistant turn is an answer. EOS ends every example.
    """

    def __init__(self, tokenizer: "Tokenizer", template: "Template | None") -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._after = _put_after(tokenizer)
        eos = tokenizer.eos_token
        self.eos = next(iter(self._after), None) if eos is None else tokenizer.backend.token_to_id(eos)

    def read(self, row: Row) -> Example:
        """Raise ValueError, saying why, for a row that cannot be trained on."""
        if row.error is not None:
            raise ValueError(row.error)
        if "messages" in row.fields:
            return self._chat(cast("list[Mapping[str, object]]", row.fields["messages"]))
        if "prompt" in row.fields and "text" not in row.fields:
            return self._answered(row.fields["prompt"], row.fields.get("completion"))
        if not isinstance(row.content, str):
            raise ValueError("there is neither text, nor prompt and completion, nor messages")  # noqa: TRY004 - a row
        return self._ended(self._begun(row.content), None)

    def document(self, text: str) -> Iterator[list[int]]:
        """One long text, begun as the tokenizer begins texts and ended with EOS, in pieces.

        It is cut where a line begins, which is where no token of a usual vocabulary reaches across.
        """
        starts = [0]
        while starts[-1] + CHUNK < len(text) and (found := _BREAK.search(text, starts[-1] + CHUNK)):
            starts.append(found.end())
        for begin, end in pairwise([*starts, len(text)]):
            part = text[begin:end]
            yield self._tokenizer.encode(part, add_special_tokens=False) if begin else self._begun(part)
        if self.eos is not None:
            yield [self.eos]

    def _answered(self, prompt: object, completion: object) -> Example:
        if completion is None:
            raise ValueError("there is a prompt and no completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            if self._template is None:
                return self._spans(prompt + completion, [(len(prompt), len(prompt + completion))], special=True)
            prompt, completion = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": completion}]
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            raise ValueError("prompt and completion are neither two strings nor two lists of messages")  # noqa: TRY004
        return self._chat([*prompt, *completion])

    def _chat(self, messages: Sequence[Mapping[str, object]]) -> Example:
        if self._template is None:
            raise ValueError("the model has no chat template")
        if not any(message.get("role") == "assistant" for message in messages):
            raise ValueError("no message is the assistant's")
        try:
            text = self._template.render(messages, add_generation_prompt=False)
            spans = list(_answer_spans(self._template, messages, text))
        except AdaptError as error:
            raise ValueError(error.message) from error
        if not spans:
            raise ValueError("the chat template does not show where the answers begin")
        return self._spans(text, spans, special=False)

    def _spans(self, text: str, spans: Sequence[tuple[int, int]], *, special: bool) -> Example:
        """Tokens of the text; those that begin in one of the spans are answers."""
        encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
        answers = [any(begin <= at < end for begin, end in spans) for at, _ in encoding.offsets]
        ids = self._begun(text) if special else encoding.ids
        # Both end alike: BOS may come before the text's tokens, or one that the text spells may be gone.
        return self._ended(ids, ([False] * len(ids) + answers)[len(answers) :])

    def _begun(self, text: str) -> list[int]:
        """Tokens of a text, begun as the tokenizer begins texts; what it puts after them is left to `_ended`."""
        ids = self._tokenizer.encode(text)
        return ids[: len(ids) - len(self._after)]

    def _ended(self, ids: Sequence[int], answers: Sequence[bool] | None) -> Example:
        marks = list(answers) if answers is not None else [False] * len(ids)
        if self.eos is None or any(index in self._tokenizer.stop_ids for index in ids[-_END_MARKS:]):
            return Example(ids, marks)
        return Example([*ids, self.eos], [*marks, answers is not None])


def _put_after(tokenizer: "Tokenizer") -> list[int]:
    """Tokens that the tokenizer puts after every text."""
    encoding = tokenizer.backend.encode("a")
    inside = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
    return encoding.ids[inside[-1] + 1 :] if inside else []


def _answer_spans(
    template: "Template", messages: Sequence[Mapping[str, object]], text: str
) -> Iterator[tuple[int, int]]:
    """Where the assistant's turns stand in the rendered `text`, found by rendering its beginnings.

    A turn that the template writes otherwise once others follow (Qwen 3 drops thoughts) is no answer to learn.
    """
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = template.render(messages[:index], add_generation_prompt=True)
        after = template.render(messages[: index + 1], add_generation_prompt=False)
        if text.startswith(after) and after.startswith(before):
            yield len(before), len(after)


def holds_rows(path: Path) -> bool:
    """Whether the file holds rows (jsonl, csv, tsv) rather than one text. Raises UsageError for .json."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix == ".json":
        raise UsageError(f"{path.name} is JSON: rows are jsonl, one object a line", "Rewrite it: jq -c '.[]' FILE.")
    return suffix in ROW_SUFFIXES and input_form(path.name) != "txt"


def read_document(path: Path) -> str:
    """Return a UTF-8 text, plain or gzipped. Raises UsageError where it cannot be read, FormatError for other bytes."""
    with _told_of(path):
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == _GZIP else data
        return data.decode("utf-8-sig")


def look_into(path: Path) -> None:
    """Raise UsageError or FormatError where the beginning of a file shows already that nothing can be learnt from it.

    A plan asks, before hours of work: is there a row, or text, at all? What comes later is read when it is used.
    """
    if holds_rows(path):
        if next(read_rows([str(path)]), None) is None:
            raise UsageError(f"{path.name} has no rows", "Give one row a line, or name a text (.txt).")
        return
    with _told_of(path):
        with path.open("rb") as file:
            opened = gzip.open if file.read(2) == _GZIP else Path.open
        with opened(path, "rb") as file:
            begin = file.read(_LOOK)
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(begin, final=len(begin) < _LOOK)
    if len(begin) < _LOOK and not text.strip():
        raise UsageError(f"{path.name} is empty", "Name a file with text in it.")


@contextmanager
def _told_of(path: Path) -> Iterator[None]:
    """What can be wrong with a file of text, as errors that say what to do."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise FormatError(f"{path.name} is not UTF-8 text", "Save it as UTF-8.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{path.name} is cut short or damaged", "Fetch it again.") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
