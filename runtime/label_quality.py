"""Several ways to decide, measured on the same labelled rows and side by side: `adapt eval --labels`.

Chunks of rows go through all of them in turn, so that what else the machine does falls on all alike; decisions and
times are of the same runs. Knows no files and no terminal.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UsageError
from .progress import Reporter
from .scores import DIGITS, Confusion

if TYPE_CHECKING:
    from .classify import Verdict
    from .documents import Document
    from .schedule import Mode

CHUNK_BATCHES = 8
"""Batches a chunk: at its end the batch runs empty, which costs a mode that stops early the most."""


class Labeller(Protocol):
    """A bundle that classifies, once it is open."""

    @property
    def labels(self) -> Sequence[str]:
        """Names; a verdict's label is a place in them."""
        ...

    @property
    def layers(self) -> int:
        """How many blocks there are."""
        ...

    def read(self, content: str | Sequence[str]) -> "Document":
        """Tokenise a text, or its sentences. Raises UsageError for one that cannot be read."""
        ...

    def classify(self, documents: "Iterator[Document]", mode: "Mode", *, batch_size: int) -> "Iterator[Verdict]":
        """Answer documents in their order."""
        ...


@dataclass(frozen=True)
class Rows:
    """Texts and their labels. `numbers`: where in their file they are, from 1; empty where that is not known."""

    texts: Sequence[str | Sequence[str]]
    labels: Sequence[int]
    numbers: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.texts)

    def some(self, start: int, count: int) -> "Rows":
        """Return the rows from `start` on, `count` at most."""
        part = slice(start, start + count)
        return Rows(self.texts[part], self.labels[part], self.numbers[part])


@dataclass
class Tally:
    """What one way to decide gave."""

    mode: "Mode"
    confusion: Confusion
    layers: int = 0
    sentences: int = 0
    operations: float = 0.0
    cells: int = 0
    stops: Counter[tuple[int, int]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    """Of each chunk, reading the texts included."""
    answers: list[int] = field(default_factory=list)

    def add(self, verdict: "Verdict", label: int, cells: int) -> None:
        """Count one row; `cells` are layers times sentences of its document."""
        self.confusion.add(label, verdict.label)
        self.layers += verdict.layers
        self.sentences += verdict.sentences
        self.operations += verdict.work * cells
        self.cells += cells
        self.stops[verdict.sentences, verdict.layers] += 1
        self.answers.append(verdict.label)

    def figures(self, reference: "Tally") -> dict[str, Any]:
        """Return the figures by stable keys; `work` is a ratio of sums, `same_as_dense` compares answers."""
        rows, matrix = self.confusion.rows, self.confusion
        same = sum(one == other for one, other in zip(self.answers, reference.answers, strict=True))
        numbers = {
            "accuracy": matrix.accuracy,
            "macro_f1": matrix.macro_f1,
            "work": self.operations / self.cells,
            "mean_layers": self.layers / rows,
            "mean_sentences": self.sentences / rows,
            "rows_per_s": rows / sum(self.seconds),
            "same_as_dense": same / rows,
        }
        return {
            **{name: round(value, DIGITS) for name, value in numbers.items()},
            "per_class": _rounded(matrix.per_class()),
            "confusion": matrix.counts,
            "stops": [[*cell, count] for cell, count in sorted(self.stops.items())],
        }

    def speedup(self, other: "Tally") -> dict[str, float]:
        """Return how much faster this is than `other`, chunk by chunk."""
        ratios = [theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True)]
        found = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
        return {name: round(value, 3) for name, value in found.items()}


@dataclass
class Comparison:
    """Tallies by name (`dense`, `one_d`, `two_d`), and what became of the rows."""

    tallies: Mapping[str, Tally]
    batch_size: int
    truncated: int = 0
    unreadable: int = 0
    first_unreadable: str = ""


def spread(rows: int, limit: int | None) -> list[int]:
    """Return the places of at most `limit` rows, evenly over all: files are often sorted by label."""
    wanted = rows if limit is None else min(limit, rows)
    return [place * rows // wanted for place in range(wanted)]


def compare(
    classifier: Labeller,
    rows: Rows,
    modes: "Mapping[str, Mode]",
    *,
    batch_size: int,
    reporter: Reporter,
    chunk: int | None = None,
) -> Comparison:
    """Take all rows through every mode, `chunk` rows at a time. Raises UsageError where no row has a token."""
    tallies = {name: Tally(mode, Confusion(classifier.labels)) for name, mode in modes.items()}
    found = Comparison(tallies, batch_size)
    _warm_up(classifier, rows.some(0, batch_size), tallies, batch_size)
    size = chunk or CHUNK_BATCHES * batch_size
    with reporter.task("Rows", len(rows)) as task:
        for number, start in enumerate(range(0, len(rows), size)):
            part = rows.some(start, size)
            _chunk(classifier, part, _turn(tallies, number), found)
            task.advance(len(part))
    if any(not tally.confusion.rows for tally in tallies.values()):
        raise UsageError("no row has a text that can be read", found.first_unreadable)
    return found


def _turn(tallies: Mapping[str, Tally], number: int) -> Sequence[Tally]:
    """Each begins in its turn: whoever comes after another finds caches warmer."""
    order = list(tallies.values())
    shift = number % len(order)
    return [*order[shift:], *order[:shift]]


def _read(classifier: Labeller, rows: Rows, found: Comparison | None = None) -> "Iterator[Document | None]":
    for place, text in enumerate(rows.texts):
        try:
            yield classifier.read(text)
        except UsageError as error:
            if found is not None:
                found.unreadable += 1
                where = f"row {rows.numbers[place]}: " if rows.numbers else ""
                found.first_unreadable = found.first_unreadable or f"{where}{error}"
            yield None


def _warm_up(classifier: Labeller, rows: Rows, tallies: Mapping[str, Tally], batch_size: int) -> None:
    """Read weights and start threads before the clock runs."""
    documents = [document for document in _read(classifier, rows) if document is not None]
    for tally in tallies.values():
        for _ in classifier.classify(iter(documents), tally.mode, batch_size=batch_size):
            pass


def _chunk(classifier: Labeller, rows: Rows, turn: Sequence[Tally], found: Comparison) -> None:
    started = time.perf_counter()
    read = list(_read(classifier, rows, found))
    reading = time.perf_counter() - started
    pairs = [(document, label) for document, label in zip(read, rows.labels, strict=True) if document is not None]
    if not pairs:
        return
    documents = [document for document, _ in pairs]
    found.truncated += sum(document.truncated for document in documents)
    for tally in turn:
        started = time.perf_counter()
        verdicts = list(classifier.classify(iter(documents), tally.mode, batch_size=found.batch_size))
        tally.seconds.append(time.perf_counter() - started + reading)
        for verdict, (document, label) in zip(verdicts, pairs, strict=True):
            tally.add(verdict, label, classifier.layers * len(document.ends))


def _rounded(classes: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    return {
        name: {key: None if value is None else round(value, DIGITS) for key, value in figures.items()}
        for name, figures in classes.items()
    }
