"""Generation for `adapt run`: the answer to one prompt, and the answer to each of many rows."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer

from ..errors import AdaptError
from ..runtime.progress import Reporter
from ..runtime.rows import Row
from . import failures, services
from .answers import Outcome
from .charts import histogram, human_bytes
from .console import make_reporter
from .generation import Choices, figures, report, rounded
from .run_record import manifest_digest
from .run_rows import RowsJob, RowsRequest
from .state import State
from .writing import destination

if TYPE_CHECKING:
    from ..runtime.continuation import Request
    from ..runtime.session import Session
    from ..runtime.stream import GenerationStats, TokenStream
    from ..runtime.template import Message

ANSWER_SETTINGS = (
    *("dtype", "head_bits", "ctx_size", "tau", "resident", "gpu_memory", "offload", "prefill", "lossless"),
    *("per_exit_truncation", "chat_template"),
)
"""Fields of SessionOptions that answers depend on."""
COLUMNS = ("text", "tokens", "finish_reason", "mean_depth")
"""What a generated row has besides its own keys."""


@dataclass
class Totals:
    """Figures of all rows together; depths are those of the tokens after each row's first."""

    tokens: int = 0
    depths: dict[int, int] = field(default_factory=dict)

    def add(self, stats: "GenerationStats") -> None:
        """Count one row."""
        self.tokens += stats.tokens
        for depth, count in stats.exit_histogram.items():
            self.depths[depth] = self.depths.get(depth, 0) + count

    def mean_depth(self) -> str:
        """Say it for the summary, where there are depths."""
        count = sum(self.depths.values())
        return f", mean depth {sum(depth * n for depth, n in self.depths.items()) / count:.1f}" if count else ""

    def lines(self, seconds: float, at_once: int) -> Iterator[str]:
        """Yield what --stats says."""
        rate = f"{self.tokens / seconds:.1f} tokens/s with prompts"
        yield f"{self.tokens} new tokens, {rate}, {at_once} row{'s' if at_once > 1 else ''} at once"
        deepest = max(self.depths, default=0)
        yield from histogram([self.depths.get(depth, 0) for depth in range(1, deepest + 1)])


@dataclass(frozen=True)
class Rows:
    """Rows to requests to answers, several at once (`Answers`)."""

    session: "Session"
    batch_size: int
    choices: Choices
    system: str | None
    raw: bool
    totals: Totals
    columns: Sequence[str] = COLUMNS

    def read(self, row: Row) -> "Request":
        """See `Answers.read`."""
        if row.content is None:
            raise RuntimeError("a row without content has no answer")
        options = services.generation_options(self.choices, row=row.number)
        content = cast("str | list[Message]", row.content)  # sentences are read for classification only
        return self.session.prepare(content, options, system=self.system, raw=self.raw)

    def answer(self, items: "Iterator[Request | None]") -> Iterator[Outcome]:
        """See `Answers.answer`."""
        for outcome in self.session.answer_all(items, self.batch_size):
            if isinstance(outcome, AdaptError):
                yield outcome
                continue
            stats = outcome.stats
            self.totals.add(stats)
            found = (outcome.text, stats.tokens, stats.finish_reason, rounded(stats.mean_depth, 2))
            yield dict(zip(self.columns, found, strict=True))


@dataclass
class Run:
    """One call of `adapt run`: a bundle and how it is to answer. `columns` names what a row gets, as COLUMNS does."""

    state: State
    bundle: Path
    settings: Mapping[str, Any]
    choices: Choices
    batch_size: int | None
    system: str | None
    raw: bool
    stats: bool
    columns: Sequence[str] = COLUMNS
    reporter: Reporter = field(init=False)

    def __post_init__(self) -> None:
        self.reporter = make_reporter(self.state)

    def _open(self) -> "Session":
        return services.open_session(self.bundle, self.settings, self.reporter)

    def _say(self, lines: Iterator[str]) -> None:
        for line in lines:
            print(line, file=sys.stderr)

    def single(self, prompt: str, output: Path | None, *, as_json: bool, stream: bool) -> None:
        """Answer one prompt on stdout or into a file."""
        options = services.generation_options(self.choices)
        session = self._open()
        answer = session.complete(prompt, options, system=self.system, raw=self.raw)
        with destination(output) as out:
            if as_json:
                text = "".join(record.text for record in answer)
                result = {"text": text, **figures(answer.stats)}
                out.write(json.dumps(result, ensure_ascii=False) + "\n")
            else:
                _write(answer, out, stream=stream)
        if self.stats:
            self._say(report(answer.stats, services.peak_memory()))

    def rows(self, request: RowsRequest) -> None:
        """Answer every row of a request; exit 3 when some failed."""
        request = replace(request, settings=self._record())
        with request.held():
            self._rows(request)

    def _rows(self, request: RowsRequest) -> None:
        services.generation_options(self.choices)  # refuse impossible values before any row
        job = RowsJob.prepare(request, self.columns, self.reporter.warn)
        if request.resume and job.finished():
            self.reporter.note(job.nothing_left())
            self._end(job.done.failed)
            return
        totals, session = Totals(), self._open()
        at_once = session.rows_at_once(self.batch_size)
        started = time.monotonic()
        answers = Rows(session, at_once, self.choices, self.system, self.raw, totals, self.columns)
        summary = job.run(answers, self.reporter)
        seconds = time.monotonic() - started
        self.reporter.note(summary.line(seconds) + totals.mean_depth())
        if self.stats and seconds > 0:
            self._say(totals.lines(seconds, at_once))
            self._say(iter([f"memory {human_bytes(services.peak_memory())}"]))
        self._end(summary.failed)

    def _record(self) -> dict[str, object]:
        """Return what a row's text depends on; not what it is only made faster by."""
        opened = {name: self.settings.get(name) for name in ANSWER_SETTINGS}
        return {
            "bundle": manifest_digest(self.bundle),
            **asdict(self.choices),
            **{name: value if value is None else str(value) for name, value in opened.items()},
            "system": self.system,
            "raw": self.raw,
        }

    def _end(self, failed: int) -> None:
        if failed:
            raise typer.Exit(failures.SOME_ROWS_FAILED)


def _write(answer: "TokenStream", out: TextIO, *, stream: bool) -> None:
    """Write the text as it comes; whatever ends it, the last line is ended."""
    last = ""
    try:
        for record in answer:
            if record.text:
                last = record.text
                out.write(record.text)
            if stream:
                out.flush()
    except KeyboardInterrupt:
        answer.close()
        raise
    finally:
        if last and not last.endswith("\n"):
            out.write("\n")
        out.flush()
