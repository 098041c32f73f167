"""Answering rows several at once, and giving the answers back in the order of the rows.

Knows rows and errors; knows no model, no file and no terminal.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Protocol, Self, TypeVar

from ..errors import AdaptError, attempt
from ..runtime.rows import Row

Result = Mapping[str, object]
Outcome = Result | AdaptError
"""A row's result, or the error that is this row's alone."""

T = TypeVar("T")

MOST_FAILED = 1024
"""Failed rows kept behind an answer that is awaited, before those under way are made to go on."""
READ_AHEAD = 32
"""Rows kept of an input that may pause."""
_GLANCE = 0.5  # seconds: a wait without an end cannot be interrupted on every system


class Answers(Protocol[T]):
    """How rows are answered: any number at once, the outcomes in the order of the rows."""

    def read(self, row: Row) -> T:
        """Make of a row what `answer` takes. Raises AdaptError for a row that cannot be answered."""
        ...

    def answer(self, items: Iterator[T | None]) -> Iterator[Outcome]:
        """Yield one outcome for each item. A None among them says that there is no further one yet.

        Raises what would also befall the next row.
        """
        ...


def _content(row: Row) -> Row:
    if row.error is not None:
        raise AdaptError(row.error)
    return row


class InOrder:
    """Rows under way, oldest first. Whatever can be written is written at once."""

    def __init__(self, write: Callable[[Row, Outcome], None]) -> None:
        self._write = write
        self._waiting: deque[tuple[Row, AdaptError | None]] = deque()
        self._asked = 0

    @property
    def idle(self) -> bool:
        """Whether no answer is awaited."""
        return self._asked == 0

    def run(self, rows: Iterator[Row | None], answers: Answers[T]) -> None:
        """Answer all rows. Raises what `answers` and `write` raise."""
        for outcome in answers.answer(self._items(rows, answers)):
            row, _ = self._waiting.popleft()
            self._asked -= 1
            self._write(row, outcome)
            self._write_failed()

    def _items(self, rows: Iterator[Row | None], answers: Answers[T]) -> Iterator[T | None]:
        for row in rows:
            if row is None:
                yield None
                continue
            item = attempt(lambda row: answers.read(_content(row)), row)
            failed = isinstance(item, AdaptError)
            self._waiting.append((row, item if failed else None))
            if failed:
                self._write_failed()
                if len(self._waiting) - self._asked > MOST_FAILED:
                    yield None
            else:
                self._asked += 1
                yield item

    def _write_failed(self) -> None:
        """Write the failed rows that no answer is awaited before."""
        while self._waiting and self._waiting[0][1] is not None:
            row, error = self._waiting.popleft()
            if error is not None:
                self._write(row, error)


class Pausing:
    """Rows of an input that may pause (a pipe, a terminal), read by a thread.

    `take` yields them, and None for "none yet" unless it is told that nobody has anything else to do.
    """

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._queue: queue.Queue[Row | BaseException | None] = queue.Queue(READ_AHEAD)
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        # A daemon: it may be waiting for a line that never comes.
        threading.Thread(target=self._read, name="adapt-rows", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._closed.set()
        while not self._queue.empty():  # where the thread waits for a place
            self._queue.get_nowait()

    def _read(self) -> None:
        try:
            for row in self._rows:
                self._queue.put(row)
                if self._closed.is_set():
                    return
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where the rows are taken
            self._queue.put(error)

    def take(self, idle: Callable[[], bool]) -> Iterator[Row | None]:
        """Yield rows, and None where none is there. Raises what reading raises."""
        while True:
            try:
                found = self._queue.get(block=idle(), timeout=_GLANCE)
            except queue.Empty:
                if not idle():
                    yield None
                continue
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found
