"""One .safetensors file: its header, checked, and its tensors, memory-mapped.

Reads the header itself, to say exactly what is wrong with a damaged file. Knows no other files.
"""

import mmap
import operator
import struct
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from .json_text import parse_json

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_DAMAGED = "Download it again; of a bundle: convert again, or fetch the bundle again."
LFS_MARK = b"version https://git-lfs"

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as stored."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One .safetensors file, mapped into memory when its first tensor is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start, header = read_header(path)
        self._entries = {name: _entry(path, name, item) for name, item in header.items() if name != "__metadata__"}
        self._mapping: tuple[mmap.mmap, Tensor] | None = None
        _check_layout(path, self._start, {name: (begin, stop) for name, (_, begin, stop) in self._entries.items()})

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._entries.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`."""
        return self._entries[name][0]

    def read(self, name: str) -> Tensor:
        """See `TensorStore.read`."""
        info, begin, stop = self._entries[name]
        raw = self._mapped()[self._start + begin : self._start + stop]
        if raw.data_ptr() % info.dtype.itemsize:
            raw = raw.clone()  # the format aligns tensors, some writers do not
        return raw.view(info.dtype).view(info.shape)

    def release(self, name: str) -> None:
        """See `TensorStore.release`."""
        if self._mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        _, begin, stop = self._entries[name]
        first = -(-(self._start + begin) // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages of this tensor alone
        last = (self._start + stop) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._mapping[0].madvise(mmap.MADV_DONTNEED, first, last - first)

    def _mapped(self) -> Tensor:
        if self._mapping is None:
            self._mapping = _map(self.path)
        return self._mapping[1]


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a .safetensors file starts, and its header. Raises FormatError naming what is wrong."""
    remedy = _DAMAGED
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if (head + file.read(len(LFS_MARK) - 8)).startswith(LFS_MARK):
            raise FormatError(f"{path.name} is a git-lfs pointer, not the weights", "Run `git lfs pull` in its folder.")
        if len(head) < 8:
            raise FormatError(f"{path.name} has {size} bytes, too few for a safetensors file", remedy)
        length = struct.unpack("<Q", head)[0]
        if length > MAX_HEADER:
            raise FormatError(f"{path.name} is no safetensors file: it claims a header of {length} bytes", remedy)
        if 8 + length > size:
            raise FormatError(f"{path.name} is cut short: {size} bytes, the header alone needs {8 + length}", remedy)
        file.seek(8)
        text = file.read(length)
    try:
        header = parse_json(text, pairs=_once_each(path))
    except ValueError as error:
        raise FormatError(f"{path.name} is no safetensors file: its header is not JSON", remedy) from error
    if not isinstance(header, dict):
        raise FormatError(f"{path.name} is no safetensors file: its header is not a table", remedy)
    return 8 + length, header


def _once_each(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """What makes a table of a header's pairs; two of one name are damage, since readers differ in which they take."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in made if names.count(name) > 1)
            raise FormatError(f"{path.name} is damaged: its header has {twice} twice", _DAMAGED)
        return made

    return table


def _map(path: Path) -> tuple[mmap.mmap, Tensor]:
    """The file as bytes. A read-only mapping: a private one counts as memory, and files may be larger than memory."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that writing to it is undefined
        return mapped, torch.frombuffer(mapped, dtype=torch.uint8)


def _entry(path: Path, name: str, item: Any) -> tuple[TensorInfo, int, int]:  # noqa: ANN401 - JSON from outside
    try:
        dtype, shape, (begin, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        info = TensorInfo(tuple(map(operator.index, shape)), DTYPES[dtype])
        sound = begin >= 0 and stop - begin == info.nbytes
        whole = all(isinstance(number, int) for number in (begin, stop)) and all(size >= 0 for size in info.shape)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path.name} describes {name} in a way this program cannot read", _DAMAGED) from error
    if not whole:
        raise FormatError(f"{path.name} describes {name} in a way this program cannot read", _DAMAGED)
    if not sound:
        raise FormatError(f"{path.name} gives {name} {stop - begin} bytes, its shape needs {info.nbytes}", _DAMAGED)
    return info, begin, stop


def _check_layout(path: Path, start: int, places: Mapping[str, tuple[int, int]]) -> None:
    """The tensors fill the data from its first byte to its last, each byte once, as the format demands."""
    size, end = path.stat().st_size, max((stop for _, stop in places.values()), default=0)
    if size < start + end:
        raise FormatError(f"{path.name} is cut short: {size} bytes, its header says {start + end}", _DAMAGED)
    filled, before = 0, "its header"
    for name, (begin, stop) in sorted(places.items(), key=operator.itemgetter(1)):
        if begin < filled:
            raise FormatError(f"{path.name} is damaged: {before} and {name} share bytes", _DAMAGED)
        if begin > filled:
            what = f"{begin - filled} bytes between {before} and {name} belong to no tensor"
            raise FormatError(f"{path.name} is damaged: {what}", _DAMAGED)
        filled, before = stop, name
    if size > start + end:
        what = f"{size - start - end} bytes behind its last tensor belong to none"
        raise FormatError(f"{path.name} is damaged: {what}", _DAMAGED)
