"""Many rows through one function: in order, each written and flushed at once, failures kept as rows.

Knows rows and outputs, not what a row's answer is made of: generation and classification both bring an `answer`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal

from ..errors import AccessError, AdaptError, ResourceError, UsageError
from ..runtime.progress import Reporter, Task
from ..runtime.rows import STDIN, Row, Shard, check_inputs, read_rows
from .rows_out import Done, Form, form_of, match, open_output, output_form

OnError = Literal["record", "skip", "fail"]
Answer = Callable[[Row], Mapping[str, object]]


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
        if self.output.exists():
            self._check_existing(self.output)

    def _check_existing(self, output: Path) -> None:
        if output.is_dir():
            raise UsageError(f"{output} is a folder", "-o takes a file")
        if any(name != STDIN and output.samefile(name) for name in self.inputs):
            raise UsageError(f"{output} is also an input", "Choose another name for the output")
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
        everything = read_rows(self.inputs, form=self.input_form, field_name=self.field_name)
        return self.shard.select(everything)

    def count(self) -> int | None:
        """Count the rows where the inputs can be read twice, else None."""
        if all(name != STDIN and Path(name).is_file() for name in self.inputs):
            return sum(1 for _ in self.rows())
        return None


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
    form: Form
    rows: Iterator[Row]
    done: Done
    total: int | None

    @classmethod
    def prepare(cls, request: RowsRequest, columns: Sequence[str], warn: Callable[[str], None]) -> "RowsJob":
        """Read what an earlier run has left. Raises UsageError, FormatError; changes nothing on disk."""
        form = output_form(request.output_form, columns, warn)
        total = request.count()
        rows, done = request.rows(), Done()
        if request.resume and request.output is not None and request.output.exists():
            done = match(request.output, form, rows, skipping=request.on_error == "skip")
        return cls(request, form, rows, done, total)

    def finished(self) -> bool:
        """Tell whether no row is left."""
        first = next(self.rows, None)
        if first is None:
            return True
        self.rows = chain([first], self.rows)
        return False

    def run(self, answer: Answer, reporter: Reporter) -> Summary:
        """Answer what is left. Raises the row's AdaptError with `on_error` "fail"."""
        summary = Summary(self.done.rows, self.done.failed, self.done.rows)
        with self._open() as stream, self._task(reporter) as task:
            try:
                for row in self.rows:
                    self._one(row, answer, stream, summary, reporter)
                    task.advance()
            except KeyboardInterrupt:
                if self.request.output is not None:
                    reporter.note(f"stopped; {summary.rows} rows are written. Go on with --resume")
                raise
        return summary

    def _one(self, row: Row, answer: Answer, stream: BinaryIO, summary: Summary, reporter: Reporter) -> None:
        result = _result(row, answer, fail=self.request.on_error == "fail")
        failed = "error" in result
        summary.failed += failed
        if failed and self.request.output_form == "text":
            reporter.warn(f"row {row.number}: {result['error']}")
        if failed and self.request.on_error == "skip":
            return
        summary.rows += 1
        stream.write(self.form.encode(row, result))
        stream.flush()

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self.request.output is None:
            yield sys.stdout.buffer
            return
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


def _result(row: Row, answer: Answer, *, fail: bool) -> Mapping[str, object]:
    """Return the answer, or the error that belongs to this row alone."""
    if row.error is None:
        try:
            return answer(row)
        except (ResourceError, AccessError):
            raise  # the next row would fail the same way
        except AdaptError as error:
            if fail:
                raise type(error)(f"row {row.number}: {error.message}", error.hint) from error
            return _failed(row, str(error))
    if fail:
        raise AdaptError(f"row {row.number}: {row.error}", "Mend it, or use --on-error record or skip")
    return _failed(row, row.error)


def _failed(row: Row, error: str) -> Mapping[str, object]:
    """Return a failed row's result; its own `text`, if it has one, is not to be taken for an answer."""
    return {"text": None, "error": error} if "text" in row.fields else {"error": error}
