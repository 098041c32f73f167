"""Classification for `adapt run`: the label of one text, and the labels of many rows."""

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import AdaptError
from ..runtime.progress import Reporter
from ..runtime.row_content import CLASSIFY_KEYS
from ..runtime.rows import Row
from . import failures, services
from .answers import Outcome
from .charts import human_bytes
from .classification import Point
from .console import make_reporter
from .heat import heat_map, shades
from .run_record import manifest_digest
from .run_rows import RowsJob, RowsRequest
from .state import State
from .text_classifier import COLUMNS, TextClassifier
from .writing import destination

if TYPE_CHECKING:
    from ..runtime.classify import Verdict
    from ..runtime.documents import Document
    from ..runtime.schedule import Mode

CELLS = 2
"""The first of a result's columns, which a line of text has."""


@dataclass
class Totals:
    """Figures of all documents together; their size does not grow with the rows."""

    rows: int = 0
    layers: int = 0
    sentences: int = 0
    work: float = 0.0
    truncated: int = 0
    labelled: bool = False
    """Whether a row had a label of its own."""
    stops: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, verdict: "Verdict") -> None:
        """Count one document."""
        self.rows += 1
        self.layers += verdict.layers
        self.sentences += verdict.sentences
        self.work += verdict.work
        self.truncated += verdict.truncated
        self.stops[verdict.sentences, verdict.layers] += 1

    def means(self) -> str:
        """Say the means on one line; empty without a document."""
        if not self.rows:
            return ""
        layers, sentences, work = (value / self.rows for value in (self.layers, self.sentences, self.work))
        return f"mean layers {layers:.1f}, sentences {sentences:.1f}, work {work:.3f}"

    def lines(self, layers: int) -> Iterator[str]:
        """Yield what --stats says."""
        width = shutil.get_terminal_size().columns
        yield from heat_map(self.stops, layers, width=width, marks=shades())
        yield f"memory {human_bytes(services.peak_memory())}"


@dataclass(frozen=True)
class Rows:
    """Rows to documents to results, as many at once as the classifier likes (`Answers`)."""

    classifier: TextClassifier
    mode: "Mode"
    batch_size: int
    totals: Totals

    def read(self, row: Row) -> "Document":
        """See `Answers.read`."""
        content = row.content
        if content is None:
            raise RuntimeError("a row without content has no answer")
        self.totals.labelled |= "label" in row.fields
        if isinstance(content, str):
            return self.classifier.read(content)
        sentences = [piece for piece in content if isinstance(piece, str)]
        if len(sentences) != len(content):
            raise AdaptError("a list of messages has no label", "Give a text, or a list of sentences.")
        return self.classifier.read(sentences)

    def answer(self, items: "Iterator[Document | None]") -> Iterator[Outcome]:
        """See `Answers.answer`."""
        for verdict in self.classifier.classify(items, self.mode, batch_size=self.batch_size):
            self.totals.add(verdict)
            yield self.classifier.result(verdict)


@dataclass
class Classify:
    """One call of `adapt run` on a bundle that classifies."""

    state: State
    bundle: Path
    settings: Mapping[str, Any]
    point: Point
    batch_size: int | None
    stats: bool
    reporter: Reporter = field(init=False)

    def __post_init__(self) -> None:
        self.reporter = make_reporter(self.state)

    def _open(self) -> TextClassifier:
        return services.open_classifier(self.bundle, self.settings, self.reporter)

    def _say(self, lines: Iterator[str]) -> None:
        for line in lines:
            print(line, file=sys.stderr)

    def single(self, text: str, output: Path | None, *, as_json: bool) -> None:
        """Classify one text on stdout or into a file."""
        classifier = self._open()
        document, totals = classifier.read(text), Totals()
        (verdict,) = classifier.classify(iter([document]), services.mode(self.point), batch_size=1)
        totals.add(verdict)
        found = classifier.result(verdict)
        line = json.dumps(found, ensure_ascii=False) if as_json else f"{found['label']}\t{found['confidence']}"
        with destination(output) as out:
            out.write(f"{line}\n")
        if verdict.truncated:
            self.reporter.warn("the text is longer than the bundle reads; its end was left out")
        if self.stats:
            how = "the rule decided" if verdict.stopped else "read to the end"
            sentences, layers = (
                f"{verdict.sentences} of {len(document.ends)}",
                f"{verdict.layers} of {classifier.layers}",
            )
            self._say(iter([f"{self.point}: {how}; sentences {sentences}, layers {layers}, work {verdict.work:.3f}"]))

    def rows(self, request: RowsRequest) -> None:
        """Classify every row of a request; exit 3 when some failed."""
        how = {"bundle": manifest_digest(self.bundle), "rule": str(self.point)}
        how |= {"dtype": self.settings.get("dtype")}
        request = replace(request, keys=CLASSIFY_KEYS, settings=how)
        with request.held():
            self._rows(request)

    def _rows(self, request: RowsRequest) -> None:
        job = RowsJob.prepare(request, COLUMNS, self.reporter.warn, cells=CELLS)
        if request.resume and job.finished():
            self.reporter.note(job.nothing_left())
            self._end(job.done.failed)
            return
        classifier, totals = self._open(), Totals()
        answers = Rows(classifier, services.mode(self.point), self.batch_size or classifier.batch_size, totals)
        started = time.monotonic()
        summary = job.run(answers, self.reporter)
        seconds = time.monotonic() - started
        if totals.truncated:
            self.reporter.warn(f"{totals.truncated} texts are longer than the bundle reads; their ends were left out")
        if totals.labelled:
            self.reporter.note("the rows had a label of their own; what is written is ours. `adapt eval` compares them")
        means = totals.means()
        self.reporter.note(summary.line(seconds) + (f", {means}" if means else ""))
        if self.stats:
            self._say(iter([f"{self.point}; {answers.batch_size} documents at once"]))
            self._say(totals.lines(classifier.layers))
        self._end(summary.failed)

    def _end(self, failed: int) -> None:
        if failed:
            raise typer.Exit(failures.SOME_ROWS_FAILED)
