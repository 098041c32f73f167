"""Many rows through one function: in order, each written and flushed at once, failures kept as rows.

Knows rows and outputs, not what a row's answer is made of: generation and classification both bring `Answers`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from ..errors import AdaptError, UsageError
from ..runtime.progress import Reporter, Task
from ..runtime.row_content import CONTENT_KEYS
from ..runtime.rows import STDIN, Row, Shard, check_inputs, read_rows
from .answers import Answers, InOrder, Outcome, Pausing, Result
from .rows_out import Done, Form, form_of, match, open_output, output_form
from .run_record import Settings, begin, check, end
from .writing import alone, check_place

OnError = Literal["record", "skip", "fail"]

T = TypeVar("T")


@dataclass(frozen=True)
class RowsRequest:
    """Which rows go where. `output` None is stdout; `form` None is told by the output's name."""

    inputs: Sequence[str]
    output: Path | None = None
    form: str | None = None
    input_form: str | None = None
    field_name: str | None = None
    shard: Shard = field(default_factory=Shard)
    on_error: OnError = "record"
    force: bool = False
    resume: bool = False
    keys: Sequence[str] = CONTENT_KEYS
    """Where a row has its content."""
    settings: Settings = field(default_factory=dict)
    """What answers depend on besides the row; empty: not known."""

    def check(self) -> None:
        """Raise UsageError for what can be known to fail before a model is loaded."""
        check_inputs(self.inputs, self.input_form)
        if self.force and self.resume:
            raise UsageError("--force starts again and --resume goes on", "Give one of them")
        if self.output is None:
            if self.resume:
                raise UsageError("--resume needs an output file", "Give one with -o")
            return
        form = self.output_form
        if self.resume and form == "text" and self.on_error == "skip":
            raise UsageError("a text output does not say which rows were skipped", "Use jsonl with --resume")
        check_place(self.output)
        if self.output.exists():
            self._check_no_input(self.output)
            with alone(self.output):
                self._check_new(self.output)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Check, and keep the output from other processes: within, it is read, cut and continued row by row.

        Raises UsageError as `check` does, and where another process is writing the output.
        """
        self.check()
        with alone(self.output):
            if self.output is not None:
                self._check_new(self.output)  # another process may just have finished it
            yield

    def _check_no_input(self, output: Path) -> None:
        if any(name != STDIN and output.samefile(name) for name in self.inputs):
            raise UsageError(f"{output} is also an input", "Choose another name for the output")

    def _check_new(self, output: Path) -> None:
        if output.is_file() and output.stat().st_size and not (self.force or self.resume):
            raise UsageError(f"{output} is there already", "Continue it with --resume, or replace it with --force")

    @property
    def output_form(self) -> str:
        """The form of the output. Raises UsageError for a name that tells none."""
        if self.form is not None:
            return self.form
        return "jsonl" if self.output is None else form_of(self.output)

    def rows(self) -> Iterator[Row]:
        """Return the rows that are to be done."""
        everything = read_rows(self.inputs, form=self.input_form, field_name=self.field_name, keys=self.keys)
        return self.shard.select(everything)

    def count(self) -> int | None:
        """Count the rows where the inputs can be read twice, else None."""
        return None if self.may_pause else sum(1 for _ in self.rows())

    @property
    def may_pause(self) -> bool:
        """Whether some input is no file: it may pause, and is read only once."""
        return any(name == STDIN or not Path(name).is_file() for name in self.inputs)


@dataclass
class Summary:
    """What became of the rows, those of an earlier run included."""

    rows: int = 0
    failed: int = 0
    earlier: int = 0

    def line(self, seconds: float) -> str:
        """Say it on one line."""
        done = self.rows - self.earlier
        parts = [f"{self.rows} rows"]
        parts += [f"{self.earlier} of them from before"] if self.earlier else []
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{done / seconds:.2f} rows/s"] if done and seconds > 0 else []
        return ", ".join(parts)


@dataclass
class RowsJob:
    """A request whose output has been matched against its input: what is left to do, and where it goes on."""

    request: RowsRequest
    columns: Sequence[str]
    form: Form
    rows: Iterator[Row]
    done: Done
    total: int | None

    @classmethod
    def prepare(
        cls, request: RowsRequest, columns: Sequence[str], warn: Callable[[str], None], *, cells: int = 1
    ) -> "RowsJob":
        """Read what an earlier run has left. Raises UsageError, FormatError; changes nothing on disk.

        `columns` are a result's keys; the first `cells` of them are what a text output shows.
        """
        form = output_form(request.output_form, columns, warn, cells=cells)
        total = request.count()
        rows, done = request.rows(), Done()
        if request.resume and request.output is not None and request.output.exists():
            done = match(request.output, form, rows, skipping=request.on_error == "skip")
            if done.rows:
                check(request.output, request.settings)
        return cls(request, columns, form, rows, done, total)

    def finished(self) -> bool:
        """Tell whether no row is left; what is torn behind the last one is cut off then."""
        first = next(self.rows, None)
        if first is None:
            output = self.request.output
            if output is not None and output.is_file() and output.stat().st_size > self.done.end:
                open_output(output, keep=self.done.end).close()
            self._end()
            return True
        self.rows = chain([first], self.rows)
        return False

    def nothing_left(self) -> str:
        """Say that an output is whole, on one line. What its rows were made with is no longer kept."""
        failed = f", {self.done.failed} of them failed" if self.done.failed else ""
        return f"{self.done.rows} rows are there{failed}; nothing is left to do. --force makes them again"

    def run(self, answers: Answers[T], reporter: Reporter) -> Summary:
        """Answer what is left. Raises AdaptError for the first row that fails with `on_error` "fail"."""
        summary = Summary(self.done.rows, self.done.failed, self.done.rows)
        with self._open() as stream, self._task(reporter) as task:

            def write(row: Row, outcome: Outcome) -> None:
                self._write(row, outcome, stream, summary, reporter)
                task.advance()

            order = InOrder(write)
            try:
                with self._source(lambda: order.idle) as rows:
                    order.run(rows, answers)
            except KeyboardInterrupt:
                if self.request.output is not None:
                    reporter.note(f"stopped; {summary.rows} rows are written. Go on with --resume")
                raise
        self._end()
        return summary

    def _end(self) -> None:
        if self.request.output is not None:
            end(self.request.output)

    @contextmanager
    def _source(self, idle: Callable[[], bool]) -> Iterator[Iterator[Row | None]]:
        """Give the rows; where an input may pause, with a None while it does and answers are awaited."""
        if not self.request.may_pause:
            yield self.rows
            return
        with Pausing(self.rows) as pausing:
            yield pausing.take(idle)

    def _write(self, row: Row, outcome: Outcome, stream: BinaryIO, summary: Summary, reporter: Reporter) -> None:
        failed = isinstance(outcome, AdaptError)
        if failed and self.request.on_error == "fail":
            hint = outcome.hint or "Mend it, or use --on-error record or skip"
            raise AdaptError(f"row {row.number}: {outcome.message}", hint) from outcome
        summary.failed += failed
        if failed and self.request.output_form == "text":
            reporter.warn(f"row {row.number}: {outcome}")
        if failed and self.request.on_error == "skip":
            return
        summary.rows += 1
        stream.write(self.form.encode(row, self._failed(row, outcome) if failed else outcome))
        stream.flush()

    def _failed(self, row: Row, error: AdaptError) -> Result:
        """Return a failed row's result; what it has of its own under our keys is not to be taken for an answer."""
        return {**{key: None for key in self.columns if key in row.fields}, "error": str(error)}

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self.request.output is None:
            yield sys.stdout.buffer
            return
        begin(self.request.output, self.request.settings)
        with open_output(self.request.output, keep=self.done.end) as stream:
            yield stream

    def _task(self, reporter: Reporter) -> AbstractContextManager[Task]:
        on_screen = self.request.output is None and sys.stdout.isatty()
        if self.total is None or on_screen:
            return nullcontext(_NoTask())
        return reporter.task("Rows", self.total - self.done.rows)


class _NoTask:
    def advance(self, amount: float = 1) -> None:
        pass
