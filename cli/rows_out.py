"""Rows of results out: jsonl, csv, tsv or text, each row whole and flushed at once, and resuming a cut file.

Pure Python: knows no model and no terminal. Every row of a jsonl, csv or tsv output carries `row` (the number of
its input row, from 1) and `row_hash` (a short hash of its content): with them a cut output is matched row by row
against the input before it is continued. A text output has only its lines; they are counted.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ..errors import FormatError, UsageError
from ..runtime.json_text import parse_json
from ..runtime.rows import Row

FORMS = ("text", "jsonl", "csv", "tsv")


@dataclass(frozen=True)
class Mark:
    """A whole row of an output file: which input row it is of, whether it failed, and where it ends (bytes).

    `counted`: the form records no number, so the row stands for the next input row.
    """

    number: int | None
    digest: str | None
    failed: bool
    end: int
    counted: bool = False


class Form(Protocol):
    """How rows become bytes, and how a cut file is read back."""

    def encode(self, row: Row, result: Mapping[str, object]) -> bytes:
        """Return one whole row, its ending included."""
        ...

    def marks(self, stream: BinaryIO) -> Iterator[Mark]:
        """Yield the whole rows of an output file, in order; stop before a torn one."""
        ...


def output_form(name: str, columns: Sequence[str], warn: Callable[[str], None], *, cells: int = 1) -> Form:
    """Return the form called `name` (text, jsonl, csv, tsv) for results with these columns.

    A text has the first `cells` of them.
    """
    if name == "jsonl":
        return JsonLines()
    if name == "text":
        return TextLines(cells)
    return Table("\t" if name == "tsv" else ",", columns, warn)


def form_of(path: Path) -> str:
    """Return the form that a file name stands for. Raises UsageError."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        raise UsageError(f"{path}: rows are written plain, so that a cut file can be continued", "Leave out .gz")
    forms = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".txt": "text"}
    if suffix not in forms:
        raise UsageError(f"{path}: not a name for jsonl, csv, tsv or txt rows", "Say which with --format")
    return forms[suffix]


def _record(row: Row, result: Mapping[str, object]) -> dict[str, object]:
    """Return the row's own keys, then ours, which win; `error` is only ever ours."""
    own = {key: value for key, value in row.fields.items() if key != "error"}
    return {**own, "row": row.number, "row_hash": row.digest, **result}


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _encoded(text: str) -> bytes | None:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate came in as a JSON escape
        return None


class JsonLines:
    """One JSON object a line: the row's own keys, then ours, which win."""

    def encode(self, row: Row, result: Mapping[str, object]) -> bytes:
        """See `Form.encode`."""
        record = _record(row, result)
        return (_encoded(_dumps(record)) or json.dumps(record).encode("ascii")) + b"\n"

    def marks(self, stream: BinaryIO) -> Iterator[Mark]:
        """See `Form.marks`."""
        end = 0
        for line in stream:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            record = _json_object(line)
            yield Mark(_int(record.get("row")), _str(record.get("row_hash")), "error" in record, end)


def _json_object(line: bytes) -> Mapping[str, object]:
    try:
        value = parse_json(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _int(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) else None


def _str(value: object) -> str | None:
    return value if isinstance(value, str) else None


class TextLines:
    r"""One line a row: the result's first `cells` values, tabs between them, line breaks written as `\n`.

    With more than one, tabs inside a value are `\t`. A failed row has empty values.
    """

    def __init__(self, cells: int = 1) -> None:
        self._cells = cells
        self._failed = "\t" * (cells - 1)

    def encode(self, row: Row, result: Mapping[str, object]) -> bytes:
        """See `Form.encode`."""
        del row  # a line of text has no place for it
        values = [] if "error" in result else [_cell(value) for value in result.values()][: self._cells]
        text = "\t".join(_escaped(value) for value in values) if self._cells > 1 else _one_line("".join(values))
        return (text or self._failed).encode("utf-8", "replace") + b"\n"

    def marks(self, stream: BinaryIO) -> Iterator[Mark]:
        """See `Form.marks`."""
        end = 0
        for line in stream:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield Mark(None, None, line == f"{self._failed}\n".encode(), end, counted=True)


class Table:
    r"""csv (quoted where needed) or tsv (tabs and line breaks inside a cell written as `\t`, `\n`).

    The header is the first row's own keys, then `row`, `row_hash`, the result's columns and `error`. A key that
    turns up later has no column: it is left out and said once.
    """

    def __init__(self, delimiter: str, columns: Sequence[str], warn: Callable[[str], None]) -> None:
        self._delimiter = delimiter
        self._ours = ("row", "row_hash", *columns, "error")
        self._header: list[str] | None = None
        self._warn = warn
        self._warned = False

    def encode(self, row: Row, result: Mapping[str, object]) -> bytes:
        """See `Form.encode`."""
        record = _record(row, result)
        beginning = b""
        if self._header is None:
            self._header = [*(key for key in row.fields if key not in self._ours), *self._ours]
            beginning = self._line(self._header)
        missing = [key for key in record if key not in self._header]
        if missing and not self._warned:
            self._warned = True
            self._warn(f"row {row.number} has keys that the header lacks ({', '.join(missing)}); jsonl keeps them")
        return beginning + self._line([_cell(record.get(key)) for key in self._header])

    def _line(self, cells: Sequence[str]) -> bytes:
        if self._delimiter == "\t":
            text = "\t".join(_escaped(cell) for cell in cells) + "\n"
        else:
            buffer = io.StringIO(newline="")
            csv.writer(buffer, lineterminator="\r\n").writerow(cells)  # so that a bare \r in a cell is quoted too
            text = buffer.getvalue().removesuffix("\r\n") + "\n"
        return text.encode("utf-8", "replace")

    def marks(self, stream: BinaryIO) -> Iterator[Mark]:
        """See `Form.marks`; takes the header of the file, which later rows then follow."""
        lines = self._whole_lines(stream)
        first = next(lines, b"")
        end = len(first)
        for line in lines:
            end += len(line)
            self._header = self._header or self._cells(first)  # a header without rows does not count: it is rewritten
            record = dict(zip(self._header, self._cells(line), strict=False))
            yield Mark(_int(record.get("row")), record.get("row_hash"), bool(record.get("error")), end)

    def _whole_lines(self, stream: BinaryIO) -> Iterator[bytes]:
        """Yield table rows as bytes; a csv row goes on while a quote is open."""
        pending, quotes = b"", 0
        for line in stream:
            pending += line
            quotes += line.count(b'"') if self._delimiter == "," else 0
            if not line.endswith(b"\n"):
                return
            if quotes % 2 == 0:
                yield pending
                pending = b""

    def _cells(self, line: bytes) -> list[str]:
        text = line.decode("utf-8", "replace")
        if self._delimiter == "\t":
            return text.removesuffix("\n").split("\t")
        return next(csv.reader(io.StringIO(text, newline="")), [])


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | list | dict):
        return _dumps(value)
    return str(value)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _escaped(cell: str) -> str:
    return _one_line(cell.replace("\t", "\\t"))


@dataclass(frozen=True)
class Done:
    """What a cut output already holds: whole rows, how many of them failed, and where they end (bytes)."""

    rows: int = 0
    failed: int = 0
    end: int = 0


def match(path: Path, form: Form, rows: Iterator[Row], *, skipping: bool) -> Done:
    """Match the whole rows of `path` against the input and leave `rows` at the first one that is not done.

    `skipping`: failed rows were left out of the output, so gaps are in order. Changes nothing on disk.
    Raises FormatError when the output is of other inputs.
    """
    done = Done()
    with path.open("rb") as stream:
        for mark in form.marks(stream):
            _find(path, rows, mark, done.rows + 1, skipping=skipping)
            done = Done(done.rows + 1, done.failed + mark.failed, mark.end)
    return done


def _find(path: Path, rows: Iterator[Row], mark: Mark, place: int, *, skipping: bool) -> None:
    for row in rows:
        if mark.counted or (row.number, row.digest) == (mark.number, mark.digest):
            return
        if not skipping or mark.number is None or row.number >= mark.number:
            break
    message = f"{path}: output row {place} does not come from the input rows given"
    raise FormatError(message, "Give the inputs, --shard and --format of the first run, or start again with --force")


def open_output(path: Path, *, keep: int) -> BinaryIO:
    """Open an output file for writing after its first `keep` bytes; the rest, a torn row, is cut off."""
    stream = path.open("ab")
    if path.is_file():  # a pipe or a device has nothing to cut
        stream.truncate(keep)
    return stream
