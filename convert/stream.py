"""safetensors files written tensor by tensor, hashed on the way: memory does not grow with the file.

Knows no models and no bundles. Tensors stand sorted (widest dtype first, then by name, as the reference writer does,
so each is aligned), and the header has one spelling: the same tensors always give the same bytes.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..runtime.manifest import FileRecord
from ..runtime.store import DTYPES, read_header

CHUNK = 8 << 20
_REMEDY = "Fetch or convert it again."

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor to be written: what it is, and where its bytes come from when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def of_tensor(name: str, tensor: Tensor) -> Entry:
    """An entry that holds the tensor."""
    return lazy(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def lazy(name: str, dtype: torch.dtype, shape: tuple[int, ...], load: Callable[[], Tensor]) -> Entry:
    """An entry whose tensor is read, and converted to `dtype`, when its turn comes."""

    def chunks() -> Iterator[memoryview]:
        tensor = load()
        if tuple(tensor.shape) != shape:
            raise FormatError(f"{name} has shape {tuple(tensor.shape)}, not {shape}", _REMEDY)
        if tensor.numel():
            yield from _tensor_chunks(tensor, dtype)

    return Entry(name, dtype, shape, chunks)


def _tensor_chunks(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Rows are converted some at a time: the whole tensor never exists in the second dtype."""
    rows = tensor.detach().reshape(tensor.shape[0] if tensor.ndim else 1, -1)
    step = max(1, CHUNK // max(1, rows.shape[1] * dtype.itemsize))
    for part in rows.split(step):
        flat = part.to(device="cpu", dtype=dtype).contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data


def read_entries(path: Path) -> list[Entry]:
    """Entries of an existing safetensors file; their bytes are read from it in pieces.

    Raises FormatError where the file is damaged or shorter than its header says.
    """
    start, header = read_header(path)
    size = path.stat().st_size
    return [_file_entry(path, name, info, start, size) for name, info in header.items() if name != "__metadata__"]


def entries_by_name(paths: Iterable[Path]) -> dict[str, Entry]:
    """Entries of several files. They are read as plain files: unlike a mapping, that leaves nothing in memory."""
    return {entry.name: entry for path in paths for entry in read_entries(path)}


def _file_entry(path: Path, name: str, info: Mapping[str, Any], start: int, size: int) -> Entry:
    dtype, (begin, end) = DTYPES.get(info["dtype"]), info["data_offsets"]
    if dtype is None:
        raise FormatError(f"{path.name}: {name} has dtype {info['dtype']}, which is not handled")
    if start + end > size:
        raise FormatError(f"{path.name} is cut short: {size} bytes, its header says {start + end}", _REMEDY)
    return Entry(name, dtype, tuple(info["shape"]), lambda: _file_chunks(path, start + begin, end - begin))


def _file_chunks(path: Path, offset: int, length: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while length > 0:
            chunk = file.read(min(CHUNK, length))
            if not chunk:
                raise FormatError(f"{path} became shorter while it was read", _REMEDY)
            length -= len(chunk)
            yield chunk


class HashingFile:
    """A binary file that knows the sha256 and the number of the bytes written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        self._file.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    @property
    def record(self) -> FileRecord:
        """What was written so far."""
        return FileRecord(sha256=self._hash.hexdigest(), bytes=self._bytes)


def write_safetensors(
    file: HashingFile, entries: Sequence[Entry], *, advance: Callable[[int], None] | None = None
) -> None:
    """Write a whole safetensors file; `advance` hears of the bytes as they go. FormatError where a source is short."""
    ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    file.write(_header(ordered))
    for entry in ordered:
        written = 0
        for chunk in entry.chunks():
            file.write(chunk)
            written += len(chunk)
            if advance is not None:
                advance(len(chunk))
        if written != entry.nbytes:
            raise FormatError(f"{entry.name}: {written} bytes came for a tensor of {entry.nbytes}")


def _header(ordered: Sequence[Entry]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        begin, end = end, end + entry.nbytes
        table[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def plan_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in the order given, cut into shards of at most `limit` bytes (one tensor may exceed it alone)."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def shard_name(stem: str, number: int, count: int) -> str:
    """`stem-00001-of-00003.safetensors`; numbers from 1."""
    return f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def index_text(shards: Mapping[str, Sequence[Entry]]) -> bytes:
    """`*.safetensors.index.json` for file -> entries."""
    weight_map = {entry.name: file for file, entries in shards.items() for entry in entries}
    total = sum(entry.nbytes for entries in shards.values() for entry in entries)
    data = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(data, indent=2) + "\n").encode("utf-8")
