"""Tokens on disk: a safetensors file that grows row by row and is read memory-mapped.

    ids      int32 [N]     all tokens, row after row
    answers  uint8 [N]     1 where the model should have said it
    ends     int64 [rows]  where each row ends

Knows no tokenizer and no batches.
"""

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ..runtime.safetensors_file import SafetensorsFile
from .stream import Entry, HashingFile, write_safetensors
from .workspace import whole_file

_CHUNK = 8 << 20


class TokenWriter:
    """Writes tokens to raw files beside `path` as they come; `finish` makes the safetensors file of them.

    A context manager: the raw files are gone afterwards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = [path.with_name(f"{path.name}.{kind}") for kind in ("ids", "answers")]
        self._files = [raw.open("wb") for raw in self._raw]
        self._ends = array("q")
        self.tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file, raw in zip(self._files, self._raw, strict=True):
            file.close()
            raw.unlink(missing_ok=True)

    @property
    def rows(self) -> int:
        """Rows that have ended."""
        return len(self._ends)

    def add(self, ids: Iterable[int], answers: Iterable[int]) -> None:
        """Append tokens to the row that is open."""
        tokens = array("i", ids)
        self._files[0].write(tokens.tobytes())
        self._files[1].write(bytes(answers))
        self.tokens += len(tokens)

    def end_row(self) -> None:
        """Close the row, if it has tokens."""
        if self.tokens > (self._ends[-1] if self._ends else 0):
            self._ends.append(self.tokens)

    def finish(self) -> None:
        """Write the file, whole."""
        for file in self._files:
            file.flush()
        ids, answers = self._raw
        ends = self._ends.tobytes()
        entries = [
            Entry("ids", torch.int32, (self.tokens,), lambda: _chunks(ids)),
            Entry("answers", torch.uint8, (self.tokens,), lambda: _chunks(answers)),
            Entry("ends", torch.int64, (self.rows,), lambda: [ends]),
        ]
        with whole_file(self.path) as file:
            write_safetensors(HashingFile(file), entries)


def read_tokens(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, answers and ends, memory-mapped: do not write to them. Raises FormatError for a damaged file."""
    file = SafetensorsFile(path)
    return file.read("ids"), file.read("answers"), file.read("ends")


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
