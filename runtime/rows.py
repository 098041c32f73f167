r"""Rows of data in: text lines, jsonl, csv and tsv files, plain or gzipped, one row at a time.

Pure Python: knows no model, no tensor and no terminal. A row that cannot be read is a row with an `error`,
so that the output keeps one row for each input row. Lines end at `\n` only (`str.splitlines` would also cut at
U+2028 and friends, which are legal inside JSON strings and ordinary in text).
"""

import csv
import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import FormatError, UsageError
from .json_text import parse_json
from .row_content import CONTENT_KEYS, Content, Wanted, content_problem, has_surrogate

STDIN = "-"
MAX_SHOWN = 200  # characters of an input that a message repeats
MAX_LINE_BYTES = 64 * 2**20  # a longer line is that row's error; memory stays bounded


@dataclass(frozen=True)
class Row:
    """One input row. `number` counts from 1 over all inputs; `digest` is a short hash of what the row says.

    `content` is the text, the chat messages or the sentences, None when `error` says why there is none.
    """

    number: int
    digest: str
    fields: Mapping[str, object] = field(default_factory=dict)
    content: Content | None = None
    error: str | None = None


@dataclass(frozen=True)
class Shard:
    """Every `count`-th row, beginning with row `index` (from 1)."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read `I/N`. Raises UsageError."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            message = f"--shard {text} is not I/N with 1 <= I <= N"
            raise UsageError(message, "For example --shard 1/4, 2/4, 3/4 and 4/4 on four machines")
        return cls(int(index), int(count))

    def select(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows of this shard, in order, with the numbers they have in the whole."""
        return (row for row in rows if (row.number - 1) % self.count == self.index - 1)


def input_form(name: str) -> str:
    """Return txt, jsonl, csv or tsv from a file name, with or without `.gz`. Raises UsageError for others."""
    suffix = Path(name.removesuffix(".gz")).suffix.lower()
    forms = {"": "txt", ".txt": "txt", ".text": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
    form = (forms | {".tsv": "tsv", ".tab": "tsv"}).get(suffix)
    if form is None:
        raise UsageError(f"{name}: rows are txt, jsonl, csv or tsv", "Say which with --input-format")
    return form


def check_inputs(names: Sequence[str], form: str | None = None) -> None:
    """Raise UsageError for an input that is missing or of an unknown form, before any work is done."""
    for name in names:
        if name == STDIN:
            continue
        if not Path(name).exists():
            raise UsageError(f"{name}: no such file", "Give a file of rows, or - for stdin")
        if Path(name).is_dir():
            raise UsageError(f"{name} is a folder", "Name the files in it")
        if form is None:
            input_form(name)
    if names.count(STDIN) > 1:
        raise UsageError("stdin can be read only once")


def read_rows(
    names: Sequence[str],
    *,
    form: str | None = None,
    field_name: str | None = None,
    keys: Sequence[str] = CONTENT_KEYS,
) -> Iterator[Row]:
    """Yield the rows of all inputs in order; `-` is stdin (txt unless `form` says otherwise).

    Content is looked for under `keys` (CONTENT_KEYS or CLASSIFY_KEYS), or under `field_name` alone. A list of messages
    or of sentences is content where `keys` has that key.

    Raises FormatError for a file that is no text at all, UsageError for a table without the wanted column.
    """
    number = 0
    for name in names:
        chosen = form or ("txt" if name == STDIN else input_form(name))
        for raw in _read_one(name, chosen, Wanted(field_name, tuple(keys))):
            number += 1
            yield Row(number, raw.digest, raw.fields, raw.content, raw.error)


def _read_one(name: str, form: str, wanted: Wanted) -> Iterator[Row]:
    with _open_bytes(name) as stream:
        lines = _lines(name, stream)
        if form == "txt":
            yield from (_text_row(line) for line in lines)
        elif form == "jsonl":
            yield from (_json_row(line, wanted) for line in lines if line.strip())
        else:
            yield from _table_rows(name, lines, form, wanted)


@contextmanager
def _open_bytes(name: str) -> Iterator[BinaryIO]:
    if name == STDIN:
        yield _decompressed(_stdin())
        return
    with Path(name).open("rb") as stream:
        yield _decompressed(stream)


def _stdin() -> BinaryIO:
    """A reader of stdin of its own.

    Where a thread reads, Python on its way out would wait for the lock of `sys.stdin.buffer`, and give up in the end.
    """
    stdin = sys.stdin
    if stdin is None:  # closed by the shell: reading it says so
        return open(0, "rb", closefd=False)
    try:
        return open(stdin.fileno(), "rb", closefd=False)
    except (OSError, ValueError):  # no file: a test's
        return cast("BinaryIO", stdin.buffer)


def _decompressed(stream: BinaryIO) -> BinaryIO:
    peek = getattr(stream, "peek", None)
    if peek is not None and peek(2)[:2] == b"\x1f\x8b":
        return cast("BinaryIO", gzip.GzipFile(fileobj=stream))
    return stream


def _lines(name: str, stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines with their ending; of a line that is too long, its beginning, which is longer than allowed."""
    first = True
    try:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            if first:
                line = _without_bom(name, line)
                first = False
            end = line
            while len(end) > MAX_LINE_BYTES and not end.endswith(b"\n"):
                end = stream.readline(MAX_LINE_BYTES + 1)
            yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f"{name}: the gzip file is damaged or cut short", "Fetch it again") from error


def _without_bom(name: str, line: bytes) -> bytes:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise FormatError(f"{name} is UTF-16", "Save it as UTF-8")
    return line.removeprefix(b"\xef\xbb\xbf")


def _strip_ending(line: bytes) -> bytes:
    return line.removesuffix(b"\n").removesuffix(b"\r")


def digest(data: bytes) -> str:
    """Return 12 hex digits that tell one row's content from another's."""
    return hashlib.sha256(data).hexdigest()[:12]


def _decode(data: bytes) -> str:
    """Decode one line. Raises ValueError that says what is wrong."""
    if len(data) > MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}") from error


def _text_row(line: bytes) -> Row:
    data = _strip_ending(line)
    try:
        text = _decode(data)
    except ValueError as error:
        return Row(0, digest(data), error=str(error))
    if not text.strip():
        return Row(0, digest(data), error="the line is empty")
    return Row(0, digest(data), content=text)


def _no_number(text: str) -> object:
    raise ValueError(f"not JSON: {text} is no JSON number")


def _json_row(line: bytes, wanted: Wanted) -> Row:
    data = _strip_ending(line)
    key = digest(data)
    try:
        value: object = parse_json(_decode(data), constant=_no_number)
    except ValueError as error:
        problem = str(error) if not isinstance(error, json.JSONDecodeError) else f"not JSON: {error}"
        return Row(0, key, error=problem)
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        return Row(0, key, error="not a JSON object")
    return _content_row(key, cast("dict[str, object]", value), wanted)


def _content_row(key: str, fields: dict[str, object], wanted: Wanted) -> Row:
    name = wanted.key_in(fields)
    if name is None:
        return Row(0, key, fields, error=f"no key {wanted.described()}")
    problem = content_problem(name, fields[name], wanted.keys)
    if problem:
        return Row(0, key, fields, error=problem)
    return Row(0, key, fields, content=cast("Content", fields[name]))


def _table_rows(name: str, lines: Iterable[bytes], form: str, wanted: Wanted) -> Iterator[Row]:
    csv.field_size_limit(MAX_LINE_BYTES)  # csv's own limit is 128 kB, for the whole process; there is no other way
    # Bytes that are not UTF-8 travel as surrogates, so that a bad cell spoils its row and no other.
    text = (line.decode("utf-8", "surrogateescape") for line in lines)
    quoting = csv.QUOTE_NONE if form == "tsv" else csv.QUOTE_MINIMAL  # tsv has no quoting: a " is a "
    reader = csv.reader(text, delimiter="\t" if form == "tsv" else ",", quoting=quoting)
    header = _next_cells(reader)
    if header is None:
        return
    if isinstance(header, str):
        raise FormatError(f"{name}: the header is {header}", "Save it with lines that end in LF or CRLF")
    header = _distinct(header)
    column = Wanted(_column(name, header, wanted), wanted.keys)
    while (cells := _next_cells(reader)) is not None:
        if isinstance(cells, str):
            yield Row(0, digest(cells.encode()), dict.fromkeys(header, ""), error=cells)
        elif cells:
            yield _table_row(header, cells, column)


def _distinct(header: Sequence[str]) -> list[str]:
    """Columns by names of their own: a second `x` is `x.1`, so that no cell takes the place of another."""
    names: list[str] = []
    for name in header:
        again = (f"{name}.{count}" for count in range(1, len(names) + 2))
        names.append(name if name not in names else next(new for new in again if new not in (*names, *header)))
    return names


def _next_cells(reader: Iterator[list[str]]) -> list[str] | str | None:
    """Return the next row's cells, the error that it has, or None at the end."""
    try:
        return next(reader, None)
    except csv.Error as error:
        if "new-line character" in str(error):  # csv goes on with advice to a programmer
            return "not a table row: a carriage return without a line feed ends no line"
        return f"not a table row: {error}"


def _column(name: str, header: Sequence[str], wanted: Wanted) -> str:
    if not wanted.field_name and len(header) == 1:
        return header[0]
    for candidate in wanted.columns:
        if candidate in header:
            return candidate
    columns = ", ".join(header)
    raise UsageError(
        f"{name} has no column {' or '.join(wanted.columns)}", f"It has {columns}; choose one with --field"
    )


def _table_row(header: Sequence[str], cells: Sequence[str], column: Wanted) -> Row:
    key = digest("\x1f".join(cells).encode("utf-8", "surrogateescape"))
    fields: dict[str, object] = dict.fromkeys(header, "")
    fields.update(zip(header, cells, strict=False))
    bad = [name for name, cell in fields.items() if has_surrogate(cast("str", cell))]
    if bad:
        clean = {name: _replaced(cast("str", cell)) for name, cell in fields.items()}
        return Row(0, key, clean, error=f"column '{bad[0]}' is not UTF-8")
    if len(cells) != len(header):
        extra = f": {', '.join(map(repr, cells[len(header) :]))}" if len(cells) > len(header) else ""
        return Row(0, key, fields, error=f"{len(cells)} cells where the header has {len(header)}{extra[:MAX_SHOWN]}")
    return _content_row(key, fields, column)


def _replaced(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
