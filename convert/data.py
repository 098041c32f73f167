"""Texts and rows to train on: tokenised once, into files that training maps into memory.

    data.json             what the tokens were made from, and counts
    train.safetensors     tokens to train on
    held_out.safetensors  tokens that training never sees

Knows files and tokens; no weights.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..runtime.json_text import parse_json
from ..runtime.method_settings import TextUsed
from ..runtime.progress import Reporter
from ..runtime.rows import input_form, read_rows
from .examples import ExampleReader, holds_rows, read_document
from .sequences import LossOn, Sequences
from .token_file import TokenWriter
from .workspace import whole_file

if TYPE_CHECKING:
    from ..runtime.template import Template
    from ..runtime.text import Tokenizer

_LAYOUT = 2  # of the token files; another number tokenises again


@dataclass(frozen=True)
class DataSettings:
    """What to train on, and how it becomes sequences.

    files: texts (.txt and anything else that is text: one document each, kept as it is) and rows (jsonl, csv, tsv).
    evaluation: held-out files; without them the share `held_out` is kept back: of a text its end, of rows some drawn by
    `seed` and what the file holds. length: tokens of a sequence. packed, loss_on: see `sequences.Sequences`.
    """

    files: tuple[Path, ...]
    evaluation: tuple[Path, ...] = ()
    held_out: float = 0.02
    length: int = 1024
    packed: bool = True
    loss_on: LossOn = "all"
    field: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.files:
            raise UsageError("There is nothing to train on", "Name texts or jsonl files.")
        if self.length < 2:
            raise UsageError(f"Sequences of {self.length} tokens are too short", "Use 128 or more.")
        if not 0 <= self.held_out < 1:
            raise UsageError(f"A share of {self.held_out} cannot be held out", "Use 0 to 0.5.")


@dataclass(frozen=True)
class TrainingData:
    """Sequences to train on, those held out (None where nothing is), and what they came from.

    `evaluation` are the files that only judge; without any, what is held out is a part of `used`.
    """

    train: Sequences
    held_out: Sequences | None
    used: tuple[TextUsed, ...]
    evaluation: tuple[TextUsed, ...]
    fingerprint: str


def prepare_data(
    settings: DataSettings,
    tokenizer: "Tokenizer",
    template: "Template | None",
    folder: Path,
    reporter: Reporter,
) -> TrainingData:
    """Tokenise into `folder`, unless that was done, and open the sequences.

    Rows that cannot be used are left out and counted in a warning. Raises UsageError where a file cannot be read or
    nothing is left to train on, FormatError where a file is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digests = [_digest(path) for path in (*settings.files, *settings.evaluation)]
    key = _fingerprint(settings, tokenizer, template, digests)
    record = _read_record(folder)
    if record.get("fingerprint") != key:
        record = _tokenise(settings, digests, ExampleReader(tokenizer, template), folder, reporter)
        record["fingerprint"] = key
        with whole_file(folder / "data.json") as file:
            file.write(json.dumps(record, ensure_ascii=False, indent=2).encode("utf-8"))
    return _open(settings, tokenizer, folder, record, digests)


def _open(
    settings: DataSettings, tokenizer: "Tokenizer", folder: Path, record: dict[str, Any], digests: Sequence[str]
) -> TrainingData:
    bos = tokenizer.bos_id if tokenizer.adds_bos else None

    def sequences(split: str, *, partial: bool) -> Sequences:
        path = folder / f"{split}.safetensors"
        length, packed, loss_on = settings.length, settings.packed, settings.loss_on
        return Sequences(path, length=length, packed=packed, bos=bos, loss_on=loss_on, partial=partial)

    train = sequences("train", partial=False)
    _check(train, settings)
    held_out = sequences("held_out", partial=True) if record["held_out"] else None
    if held_out is not None and len(held_out) == 0:
        raise UsageError("Nothing in the held-out data counts", "Hold out more, or name a file for it.")
    files = (*settings.files, *settings.evaluation)
    texts = [
        TextUsed(name=path.name, sha256=digest, tokens=tokens) if tokens else None
        for path, digest, tokens in zip(files, digests, record["tokens"], strict=True)
    ]
    learnt = len(settings.files)
    used, evaluation = (tuple(filter(None, part)) for part in (texts[:learnt], texts[learnt:]))
    return TrainingData(train, held_out, used, evaluation, record["fingerprint"])


def _check(train: Sequences, settings: DataSettings) -> None:
    if len(train):
        return
    if settings.loss_on == "answers" and train.answers == 0:
        need = "Rows need prompt and completion, or messages with an assistant's turn; or train on all tokens."
        raise UsageError("There is no answer in the data", need)
    what = f"{train.tokens} tokens are too few for one sequence of {settings.length}"
    raise UsageError(what, "Give more text, or shorter sequences.")


def _tokenise(
    settings: DataSettings, digests: Sequence[str], reader: ExampleReader, folder: Path, reporter: Reporter
) -> dict[str, Any]:
    (folder / "data.json").unlink(missing_ok=True)  # half-made files are never taken up
    files = (*settings.files, *settings.evaluation)
    tokens: list[int] = []
    with (
        TokenWriter(folder / "train.safetensors") as train,
        TokenWriter(folder / "held_out.safetensors") as held_out,
        reporter.task("Tokenising", sum(path.stat().st_size for path in files)) as task,
    ):
        learn = _Tokenising(settings, reader, train, held_out, 0.0 if settings.evaluation else settings.held_out)
        judge = _Tokenising(settings, reader, held_out, held_out, 0.0)
        for number, (path, digest) in enumerate(zip(files, digests, strict=True)):
            before = train.tokens + held_out.tokens
            (learn if number < len(settings.files) else judge).add_file(path, digest, reporter)
            tokens.append(train.tokens + held_out.tokens - before)
            task.advance(path.stat().st_size)
        train.finish()
        held_out.finish()
        return {"tokens": tokens, "held_out": held_out.tokens}


@dataclass(frozen=True)
class _Tokenising:
    """Files into tokens: most go to `kept`, the share `share` to `back`."""

    settings: DataSettings
    reader: ExampleReader
    kept: TokenWriter
    back: TokenWriter
    share: float

    def add_file(self, path: Path, digest: str, reporter: Reporter) -> None:
        """Add a text or rows; a warning counts the rows that cannot be used."""
        if holds_rows(path):
            self._warn(path, self._add_rows(path, digest), reporter)
        else:
            self._add_document(read_document(path))

    def _add_document(self, text: str) -> None:
        """A text: its end is kept back, cut where a line begins, so that what is kept back follows what is learnt."""
        cut = len(text)
        if self.share:
            wanted = int(len(text) * (1 - self.share))
            cut = text.rfind("\n", 0, wanted) + 1 or wanted
        for part, writer in ((text[:cut], self.kept), (text[cut:], self.back)):
            for ids in self.reader.document(part) if part.strip() else ():
                writer.add(ids, bytes(len(ids)))
            writer.end_row()

    def _add_rows(self, path: Path, digest: str) -> Counter[str]:
        """Why rows were left out, and how often."""
        held_out = self._drawn(path, digest)
        refused: Counter[str] = Counter()
        for row in read_rows([str(path)], field_name=self.settings.field):
            try:
                example = self.reader.read(row)
            except ValueError as error:
                refused[str(error)] += 1
                continue
            writer = self.back if row.number in held_out else self.kept
            writer.add(*example)
            writer.end_row()
        return refused

    def _drawn(self, path: Path, digest: str) -> set[int]:
        """Numbers (from 1) of the rows that are held out: exactly the share, one at least, whatever the file's name."""
        if not self.share:
            return set()
        count = sum(1 for _ in read_rows([str(path)], field_name=self.settings.field))
        number = min(max(1, round(count * self.share)), max(0, count - 1))
        draws = random.Random(f"{self.settings.seed}:{digest}")  # noqa: S311 - not for secrets
        return set(draws.sample(range(1, count + 1), number))

    @staticmethod
    def _warn(path: Path, refused: Counter[str], reporter: Reporter) -> None:
        for reason, _ in refused.most_common(1):
            reporter.warn(f"{path.name}: {refused.total()} rows are left out; mostly: {reason}")


def _fingerprint(
    settings: DataSettings, tokenizer: "Tokenizer", template: "Template | None", digests: Sequence[str]
) -> str:
    """What the token files depend on."""
    parts = {
        "layout": _LAYOUT,
        "rows": [
            input_form(path.name) if holds_rows(path) else None for path in (*settings.files, *settings.evaluation)
        ],
        "digests": list(digests),
        "held_out": settings.held_out,
        "field": settings.field,
        "seed": settings.seed,
        "tokenizer": tokenizer.backend.to_str(),
        "settings": {key: repr(value) for key, value in tokenizer.settings.items()},
        "template": None if template is None else template.source,
    }
    if settings.evaluation:  # the same files that are all learnt give other tokens
        parts["evaluation"] = len(settings.evaluation)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8")).hexdigest()


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _read_record(folder: Path) -> dict[str, Any]:
    """What was tokenised before; nothing where the record is not there, or damaged: it is made again."""
    path = folder / "data.json"
    try:
        record: object = parse_json(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
