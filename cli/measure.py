"""Several ways to decide, measured on the same labelled rows and side by side.

Chunks of rows go through all of them in turn, so that what else the machine does falls on all alike; decisions and
times are of the same runs. Knows no files and no terminal.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..runtime.progress import Reporter
from . import services
from .classification import Point
from .scores import Confusion
from .text_classifier import DIGITS, TextClassifier

if TYPE_CHECKING:
    from ..runtime.classify import Verdict
    from ..runtime.documents import Document

CHUNK_BATCHES = 8
"""Batches a chunk: at its end the batch runs empty, which costs a mode that stops early the most."""

Texts = Sequence[str | Sequence[str]]


@dataclass
class Tally:
    """What one way to decide gave."""

    point: Point
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
            "point": {"name": self.point.name, "thresholds": self.point.thresholds, "layer": self.point.layer},
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
    classifier: TextClassifier,
    texts: Texts,
    labels: Sequence[int],
    points: Mapping[str, Point],
    *,
    batch_size: int,
    reporter: Reporter,
) -> Comparison:
    """Take all rows through every point of `points`. Raises UsageError where no row has a token."""
    tallies = {name: Tally(point, Confusion(classifier.labels)) for name, point in points.items()}
    found = Comparison(tallies, batch_size)
    _warm_up(classifier, texts[:batch_size], tallies, batch_size)
    size = CHUNK_BATCHES * batch_size
    with reporter.task("Rows", len(texts)) as task:
        for number, start in enumerate(range(0, len(texts), size)):
            chunk = texts[start : start + size]
            _chunk(classifier, chunk, labels[start : start + size], _turn(tallies, number), found)
            task.advance(len(chunk))
    if any(not tally.confusion.rows for tally in tallies.values()):
        raise UsageError("no row has a text that can be read", found.first_unreadable)
    return found


def _turn(tallies: Mapping[str, Tally], number: int) -> Sequence[Tally]:
    """Each begins in its turn: whoever comes after another finds caches warmer."""
    order = list(tallies.values())
    shift = number % len(order)
    return [*order[shift:], *order[:shift]]


def _read(classifier: TextClassifier, texts: Texts, found: Comparison | None = None) -> "Iterator[Document | None]":
    for text in texts:
        try:
            yield classifier.read(text)
        except UsageError as error:
            if found is not None:
                found.unreadable += 1
                found.first_unreadable = found.first_unreadable or str(error)
            yield None


def _warm_up(classifier: TextClassifier, texts: Texts, tallies: Mapping[str, Tally], batch_size: int) -> None:
    """Read weights and start threads before the clock runs."""
    documents = [document for document in _read(classifier, texts) if document is not None]
    for tally in tallies.values():
        for _ in classifier.classify(iter(documents), services.mode(tally.point), batch_size=batch_size):
            pass


def _chunk(
    classifier: TextClassifier, texts: Texts, labels: Sequence[int], turn: Sequence[Tally], found: Comparison
) -> None:
    started = time.perf_counter()
    read = list(_read(classifier, texts, found))
    reading = time.perf_counter() - started
    pairs = [(document, label) for document, label in zip(read, labels, strict=True) if document is not None]
    if not pairs:
        return
    documents = [document for document, _ in pairs]
    found.truncated += sum(document.truncated for document in documents)
    for tally in turn:
        started = time.perf_counter()
        mode = services.mode(tally.point)
        verdicts = list(classifier.classify(iter(documents), mode, batch_size=found.batch_size))
        tally.seconds.append(time.perf_counter() - started + reading)
        for verdict, (document, label) in zip(verdicts, pairs, strict=True):
            tally.add(verdict, label, classifier.layers * len(document.ends))


def _rounded(classes: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    return {
        name: {key: None if value is None else round(value, DIGITS) for key, value in figures.items()}
        for name, figures in classes.items()
    }
