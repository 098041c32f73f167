"""Named tensors on disk: safetensors folders, memory-mapped, one tensor at a time.

Reads the headers itself, to say exactly what is wrong with a damaged folder. Knows no models.
"""

import json
import mmap
import struct
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import FormatError

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
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


class TensorStore(Protocol):
    """Tensors by name, read one at a time."""

    def names(self) -> Collection[str]:
        """Every name."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype; KeyError for an unknown name."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor. It may share a read-only mapping of the file: do not write to it."""
        ...


class SafetensorsFile:
    """One .safetensors file, mapped into memory when its first tensor is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start, header = read_header(path)
        self._entries = {name: _entry(path, name, item) for name, item in header.items() if name != "__metadata__"}
        self._map: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        _check_extent(path, self._start, max((stop for _, _, stop in self._entries.values()), default=0))

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._entries.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`."""
        return self._entries[name][0]

    def read(self, name: str) -> Tensor:
        """See `TensorStore.read`."""
        info, begin, stop = self._entries[name]
        if self._bytes is None:
            self._map, self._bytes = _map(self._path)
        raw = self._bytes[self._start + begin : self._start + stop]
        if raw.data_ptr() % info.dtype.itemsize:
            raw = raw.clone()  # the format aligns tensors, some writers do not
        return raw.view(info.dtype).view(info.shape)


class ShardedStore:
    """Several files under one set of names."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self._files = files

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._files.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`."""
        return self._files[name].info(name)

    def read(self, name: str) -> Tensor:
        """See `TensorStore.read`."""
        return self._files[name].read(name)


class RenamedStore:
    """Some of another store's tensors under other names: `renamed` maps the new name to the stored one."""

    def __init__(self, store: TensorStore, renamed: Mapping[str, str]) -> None:
        self._store = store
        self._renamed = renamed

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._renamed.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`."""
        return self._store.info(self._renamed[name])

    def read(self, name: str) -> Tensor:
        """See `TensorStore.read`."""
        return self._store.read(self._renamed[name])


def open_safetensors(folder: Path) -> TensorStore:
    """Open model.safetensors, or the shards that model.safetensors.index.json names, or every shard of the folder.

    Headers are read, data is not. Raises FormatError when a file is missing, cut short, or no safetensors file.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _open_indexed(folder, _read_index(index))
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("model-*-of-*.safetensors"))
    if not paths:
        raise FormatError(f"{folder} has no model.safetensors", "Download the model's weights into it.")
    if paths != [single]:
        _check_complete(paths)
    return open_files(paths)


def open_files(paths: Collection[Path]) -> TensorStore:
    """Open these files as one store; FormatError when two of them hold a tensor of one name."""
    files: dict[str, SafetensorsFile] = {}
    origin: dict[str, str] = {}
    for path in paths:
        file = SafetensorsFile(path)
        for name in file.names():
            if name in files:
                raise FormatError(f"{name} is in {origin[name]} and again in {path.name}", "Remove the stale file.")
            files[name], origin[name] = file, path.name
    return ShardedStore(files)


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a .safetensors file starts, and its header. Raises FormatError naming what is wrong."""
    remedy = "Download it again."
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
        header = json.loads(text)
    except ValueError as error:
        raise FormatError(f"{path.name} is no safetensors file: its header is not JSON", remedy) from error
    if not isinstance(header, dict):
        raise FormatError(f"{path.name} is no safetensors file: its header is not a table", remedy)
    return 8 + length, header


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
        info = TensorInfo(shape, DTYPES[dtype])
        sound = 0 <= begin and stop - begin == info.nbytes
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path.name} describes {name} in a way this program cannot read", str(error)) from error
    if not sound:
        raise FormatError(f"{path.name} gives {name} {stop - begin} bytes, its shape needs {info.nbytes}")
    return info, begin, stop


def _check_extent(path: Path, start: int, end: int) -> None:
    size = path.stat().st_size
    if size < start + end:
        raise FormatError(
            f"{path.name} is cut short: {size} bytes, its header says {start + end}", "Download it again."
        )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weights = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weights.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FormatError(f"{path.name} is no index of shards", "Download it again.") from error


def _open_indexed(folder: Path, weights: Mapping[str, str]) -> TensorStore:
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weights.values())):
        if Path(shard).name != shard:
            raise FormatError(
                f"The index of {folder.name} points outside its folder: {shard}", "Do not use this model."
            )
        if not (folder / shard).is_file():
            raise FormatError(f"{shard} is missing, the index names it", "Download the model again.")
        shards[shard] = SafetensorsFile(folder / shard)
    for name, shard in weights.items():
        if name not in shards[shard].names():
            raise FormatError(f"{shard} has no tensor {name}, the index puts it there", "Download the shard again.")
    _refuse_duplicates(shards, weights)
    return ShardedStore({name: shards[shard] for name, shard in weights.items()})


def _refuse_duplicates(shards: Mapping[str, SafetensorsFile], weights: Mapping[str, str]) -> None:
    for name, shard in _stored(shards):
        if weights.get(name, shard) != shard:
            raise FormatError(f"{name} is in {weights[name]} and again in {shard}", "Download the model again.")


def _stored(shards: Mapping[str, SafetensorsFile]) -> Iterator[tuple[str, str]]:
    for shard, file in shards.items():
        for name in file.names():
            yield name, shard


def _check_complete(paths: Collection[Path]) -> None:
    """Shards without an index: their names say how many there should be."""
    expected = {int(path.stem.rsplit("-of-", 1)[1]) for path in paths if path.stem.rsplit("-of-", 1)[1].isdigit()}
    if expected != {len(paths)}:
        raise FormatError(f"{len(paths)} shards, their names say {max(expected, default=0)}", "Download the rest.")
