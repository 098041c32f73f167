"""Rows answered several at once: order, reading ahead, errors, memory over a hundred thousand rows."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from adapt_llm.cli import services
from adapt_llm.cli.answers import MOST_FAILED, READ_AHEAD, InOrder, Pausing
from adapt_llm.cli.classification import Asked, choose
from adapt_llm.cli.rows_out import TextLines
from adapt_llm.cli.run_classify import Rows, Totals
from adapt_llm.cli.run_rows import RowsJob, RowsRequest
from adapt_llm.errors import UsageError
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.rows import Row


def _wait(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert what()


# --- the seam


def test_answers_are_written_in_order_and_at_once() -> None:
    written: list[tuple[int, str]] = []
    order = InOrder(lambda row, outcome: written.append((row.number, str(outcome))))
    rows = [Row(1, "", content="a"), Row(2, "", error="no"), Row(3, "", content="b"), Row(4, "", error="no")]
    asked: list[str] = []

    class Late:
        def read(self, row: Row) -> str:
            return str(row.content)

        def answer(self, items: Iterator[str | None]) -> Iterator[dict[str, object]]:
            asked.extend(str(item) for item in items)  # all of them before the first answer
            assert written == []
            yield {"is": 1}
            assert [number for number, _ in written] == [1, 2]
            yield {"is": 3}

    order.run(iter(rows), Late())
    assert asked == ["a", "b"]
    assert written == [(1, "{'is': 1}"), (2, "no"), (3, "{'is': 3}"), (4, "no")]
    assert order.idle


class Empty:
    """Answers of nothing, one row after the other."""

    def read(self, row: Row) -> Row:
        return row

    def answer(self, items: Iterator[Row | None]) -> Iterator[dict[str, object]]:
        return ({} for row in items if row is not None)


def test_a_row_that_fails_first_is_written_before_the_next_is_read() -> None:
    written: list[int] = []
    order = InOrder(lambda row, _: written.append(row.number))

    def rows() -> Iterator[Row]:
        yield Row(1, "", error="no")
        assert written == [1]
        yield Row(2, "", content="a")

    order.run(rows(), Empty())
    assert written == [1, 2]


def test_failed_rows_do_not_pile_up_behind_an_answer() -> None:
    """A slow document before very many bad rows: it goes on while they are read, and memory stays bounded."""
    read: list[int] = []
    written: list[int] = []
    order = InOrder(lambda row, _: written.append(row.number))

    def rows() -> Iterator[Row]:
        yield Row(1, "", content="a")
        for number in range(2, 5 * MOST_FAILED):
            read.append(number)
            yield Row(number, "", error="no")

    class Slow:
        def read(self, row: Row) -> str:
            return str(row.content)

        def answer(self, items: Iterator[str | None]) -> Iterator[dict[str, object]]:
            assert [next(items) for _ in range(4)] == ["a", None, None, None]  # three turns
            assert len(read) < MOST_FAILED + 5
            yield {}
            assert next(items, None) is None

    order.run(rows(), Slow())
    assert written == list(range(1, 5 * MOST_FAILED))


def test_an_error_of_reading_reaches_the_caller(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.csv"
    os.mkfifo(fifo)
    with subprocess.Popen([sys.executable, "-c", f"open({str(fifo)!r}, 'w').write('a,b\\n1,2\\n')"]):
        request = RowsRequest([str(fifo)], output=tmp_path / "o.jsonl")
        assert request.may_pause
        job = RowsJob.prepare(request, ["x"], print)
        with pytest.raises(UsageError, match="has no column"):
            job.run(Empty(), SilentReporter())


def test_a_thread_reads_a_little_ahead_and_ends() -> None:
    read: list[int] = []

    def rows() -> Iterator[Row]:
        for number in range(1, 1_000):
            read.append(number)
            yield Row(number, "", content="a")

    with Pausing(rows()) as pausing:
        taken = pausing.take(lambda: True)
        first = next(taken)
        assert first is not None
        assert first.number == 1
        _wait(lambda: len(read) > READ_AHEAD)
        time.sleep(0.1)
        assert len(read) <= READ_AHEAD + 2
    _wait(lambda: not any(thread.name == "adapt-rows" for thread in threading.enumerate()))
    assert len(read) <= 2 * READ_AHEAD + 3


def test_none_is_there_yet() -> None:
    pause = threading.Event()

    def rows() -> Iterator[Row]:
        yield Row(1, "", content="a")
        pause.wait(20)
        yield Row(2, "", content="b")

    with Pausing(rows()) as pausing:
        idle = True
        taken = pausing.take(lambda: idle)
        first = next(taken)
        assert first is not None
        idle = False
        assert next(taken) is None  # somebody is waited for: do not wait for the input
        pause.set()
        later = [row for row in taken if row is not None]
    assert [row.number for row in later] == [2]


def test_text_of_two_values() -> None:
    form = TextLines(2)
    row = Row(1, "")
    assert form.encode(row, {"label": "a\tb\nc", "confidence": 0.5, "scores": {}}) == b"a\\tb\\nc\t0.5\n"
    assert form.encode(row, {"label": None, "error": "x"}) == b"\t\n"
    assert TextLines().encode(row, {"text": "a\tb", "tokens": 3}) == b"a\tb\n"


# --- memory


def test_a_hundred_thousand_rows(fake: ModuleType, opened: Any, tmp_path: Path) -> None:
    """Through the real path of rows. Sixty bytes kept of each row would be seen."""
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with rows.open("w", encoding="utf-8") as stream:
        for n in range(100_000):
            stream.write(f'{{"id": {n}, "text": "{"good" if n % 3 else "bad"} film. It ends."}}\n')
    answers = Rows(opened, services.mode(choose(fake.settings(), Asked())), 16, Totals())
    job = RowsJob.prepare(RowsRequest([str(rows)], out), ("label",), print)
    memory: list[int] = []

    class Watching:
        def read(self, row: Row) -> Any:
            if row.number in {5_000, 99_000}:
                memory.append(psutil.Process().memory_info().rss)
            return answers.read(row)

        answer = staticmethod(answers.answer)

    started = time.process_time()
    summary = job.run(Watching(), SilentReporter())
    assert time.process_time() - started < 20
    assert (summary.rows, summary.failed) == (100_000, 0)
    assert memory[1] - memory[0] < 6 * 2**20
    with out.open(encoding="utf-8") as stream:
        found = [(line["id"], line["label"]) for line in map(json.loads, stream)]
    assert found == [(n, "pos" if n % 3 else "neg") for n in range(100_000)]
