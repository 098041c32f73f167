"""What goes to stderr: progress, notices and warnings, for a terminal, for a log, or for nobody.

Implements `runtime.progress.Reporter`. Knows nothing of models. rich is imported when a bar is first drawn.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.progress import Reporter, SilentReporter, Task
from .state import State
from .writing import check_place

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_INTERVAL = 30.0
"""Seconds between lines of progress where stderr is no terminal."""


def make_reporter(state: State) -> Reporter:
    """Return the reporter for this terminal (or log, or pipe) and these options.

    Raises UsageError for a log file that cannot be one.
    """
    if state.log_file is not None:
        check_place(state.log_file)
    if state.quiet:
        inner: Reporter = SilentReporter()
    elif state.progress and sys.stderr.isatty():
        inner = BarReporter(verbose=state.verbose)
    else:
        inner = PlainReporter(progress=state.progress, verbose=state.verbose)
    return inner if state.log_file is None else LogReporter(inner, state.log_file)


def stderr_console() -> "Console":
    """Return a rich console on stderr; rich honours NO_COLOR and a stderr that is no terminal."""
    from rich.console import Console  # noqa: PLC0415 - not for commands that draw nothing

    return Console(stderr=True, highlight=False)


class PlainReporter:
    """Lines: notices as they come, progress at most every `PLAIN_INTERVAL` seconds."""

    def __init__(self, *, progress: bool = True, verbose: bool = False) -> None:
        self._progress, self._verbose = progress, verbose
        self._last = time.monotonic()

    @contextmanager
    def task(self, title: str, total: float) -> Iterator[Task]:
        """See `Reporter.task`."""
        yield _PlainTask(self, title, total)

    def note(self, text: str) -> None:
        """See `Reporter.note`."""
        print(text, file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """See `Reporter.detail`."""
        if self._verbose:
            self.note(text)

    def warn(self, text: str) -> None:
        """See `Reporter.warn`."""
        print(f"adapt: warning: {text}", file=sys.stderr, flush=True)

    def tick(self, title: str, share: float) -> None:
        """Say how far it is, unless something was said lately."""
        now = time.monotonic()
        if self._progress and now - self._last >= PLAIN_INTERVAL:
            self._last = now
            self.note(f"{title}: {share:.0%}")


class _PlainTask:
    def __init__(self, reporter: PlainReporter, title: str, total: float) -> None:
        self._reporter, self._title, self._total = reporter, title, total
        self._done = 0.0

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        self._reporter.tick(self._title, self._done / self._total if self._total else 1.0)


class BarReporter:
    """Bars on a terminal, drawn together while any of them is open."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._console, self._verbose = stderr_console(), verbose
        self._bars: Progress | None = None
        self._open = 0

    @contextmanager
    def task(self, title: str, total: float) -> Iterator[Task]:
        """See `Reporter.task`."""
        bars = self._start()
        number = bars.add_task(title, total=total)
        try:
            yield _BarTask(bars, number)
        finally:
            self._open -= 1
            if self._open == 0:
                bars.stop()
                self._bars = None

    def _start(self) -> "Progress":
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: PLC0415

        if self._bars is None:
            percent = TextColumn("{task.percentage:>3.0f} %")
            times = (TimeElapsedColumn(), TextColumn("/"), TimeRemainingColumn())
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), percent, *times)
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        self._open += 1
        return self._bars

    def note(self, text: str) -> None:
        """See `Reporter.note`."""
        self._console.print(text, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """See `Reporter.detail`."""
        if self._verbose:
            self.note(text)

    def warn(self, text: str) -> None:
        """See `Reporter.warn`."""
        self._console.print(f"adapt: warning: {text}", style="yellow", markup=False, soft_wrap=True)


class _BarTask:
    def __init__(self, bars: "Progress", number: "TaskID") -> None:
        self._bars, self._number = bars, number

    def advance(self, amount: float = 1) -> None:
        self._bars.advance(self._number, amount)


class LogReporter:
    """Everything into a file with the time (UTC) before it, besides what another reporter does."""

    def __init__(self, inner: Reporter, path: Path) -> None:
        self._inner, self._path = inner, path
        self._write("begin")

    def _write(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._path.open("a", encoding="utf-8") as stream:  # opened each time: a killed run leaves a whole log
            stream.write(f"{stamp} {text}\n")

    def task(self, title: str, total: float) -> AbstractContextManager[Task]:
        """See `Reporter.task`."""
        self._write(title)
        return self._inner.task(title, total)

    def note(self, text: str) -> None:
        """See `Reporter.note`."""
        self._write(text)
        self._inner.note(text)

    def detail(self, text: str) -> None:
        """See `Reporter.detail`; a log always has it."""
        self._write(text)
        self._inner.detail(text)

    def warn(self, text: str) -> None:
        """See `Reporter.warn`."""
        self._write(f"warning: {text}")
        self._inner.warn(text)
