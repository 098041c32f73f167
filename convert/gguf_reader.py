"""A GGUF file: its metadata and its tensors, one at a time.

Knows the container format and the `gguf` package's dequantisation. Knows no model, no tokenizer and no Hugging Face
name. The header is parsed here rather than by `gguf.GGUFReader`, which builds a numpy view for every string and takes
15 s for a vocabulary of 150 000 tokens where this takes 0.3 s.

Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
"""

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from ..errors import FormatError, UnsupportedError

_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
_FETCH_AGAIN = "Fetch the file again."
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
# Rows are dequantised in pieces of about this many weights, so that a large embedding never exists in fp32 as a whole.
_PIECE = 1 << 23


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in torch order (rows first), `offset` counts from the start of the file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each weight, scales included."""
        block, size = GGML_QUANT_SIZES[self.type]
        return 8 * size / block


class GgufFile:
    """An open GGUF file, memory-mapped."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        with path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = np.frombuffer(self._mapped, dtype=np.uint8)

    def rows(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Dequantised rows [len(indices), columns] in float32 of a matrix."""
        tensor = self.tensors[name]
        return dequantize(np.array(self._bytes(tensor)[indices]), tensor.type)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor: a matrix in bfloat16, rounded to nearest even after dequantising, or a vector in float32.

        Vectors (norms, biases) stay unrounded, because some of them still have to be shifted.
        """
        tensor = self.tensors[name]
        stored = self._bytes(tensor)
        if tensor.type == GGMLQuantizationType.BF16 and len(tensor.shape) > 1:
            return torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16).reshape(tensor.shape)
        dtype = torch.bfloat16 if len(tensor.shape) > 1 else torch.float32
        columns = tensor.shape[len(tensor.shape) - 1]
        result = torch.empty((stored.shape[0], columns), dtype=dtype)
        step = max(1, _PIECE // columns)
        for start in range(0, stored.shape[0], step):
            piece = np.array(stored[start : start + step])
            result[start : start + step] = torch.from_numpy(dequantize(piece, tensor.type))
        return result.reshape(tensor.shape)

    def release(self, name: str) -> None:
        """Let the pages of this tensor leave memory, where the system can be told so."""
        tensor = self.tensors[name]
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = tensor.offset + tensor.nbytes - start
        if hasattr(mmap, "MADV_DONTNEED") and length > 0:
            self._mapped.madvise(mmap.MADV_DONTNEED, start, length)

    def _bytes(self, tensor: GgufTensor) -> np.ndarray:
        """The stored bytes as [rows, bytes per row]; a vector is one row."""
        rows = math.prod(tensor.shape[:-1])
        return self._data[tensor.offset : tensor.offset + tensor.nbytes].reshape(rows, -1)


class _Cursor:
    """Reads values one after the other from the header."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.position = 0

    def scalar(self, code: str) -> Any:  # noqa: ANN401 - typed by the file
        value = struct.unpack_from("<" + code, self._buffer, self.position)[0]
        self.position += struct.calcsize("<" + code)
        return value

    def scalars(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize("<" + code) * count
        raw = self._take(size)
        return np.frombuffer(raw, dtype=np.dtype(code).newbyteorder("<")).tolist()

    def string(self) -> str:
        return self._take(self.scalar("Q")).decode("utf-8")

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._buffer):
            raise struct.error("past the end")
        raw = self._buffer[self.position : end]
        self.position = end
        return raw

    def value(self, kind: int) -> Any:  # noqa: ANN401 - typed by the file
        kind = GGUFValueType(kind)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = GGUFValueType(self.scalar("I")), self.scalar("Q")
        if kind in _SCALARS:
            return self.scalars(_SCALARS[kind], count)
        read: Callable[[], Any] = self.string if kind == GGUFValueType.STRING else self._array
        return [read() for _ in range(count)]


@contextmanager
def _header(path: Path) -> Iterator[_Cursor]:
    """Map the file; whatever runs past its end or makes no sense inside becomes a `FormatError`."""
    if path.stat().st_size == 0:
        raise FormatError(f"{path.name} is empty", _FETCH_AGAIN)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        try:
            yield _Cursor(buffer)
        except (struct.error, MemoryError, OverflowError, RecursionError) as error:
            raise FormatError(f"{path.name} is truncated: the header runs past its end", _FETCH_AGAIN) from error
        except (ValueError, KeyError) as error:
            raise FormatError(f"{path.name} is damaged: the header makes no sense ({error})", _FETCH_AGAIN) from error


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(len(_LFS_POINTER))
    if head.startswith(_LFS_POINTER):
        raise FormatError(f"{path.name} is a git-lfs pointer, not the file itself", "Run `git lfs pull` where it lies.")
    if head and not head.startswith(_MAGIC):
        raise FormatError(
            f"{path.name} is not a GGUF file: it does not begin as one", "Give another, or fetch it again."
        )


def _check_version(path: Path, version: int) -> None:
    if version & 0xFFFF == 0:
        raise UnsupportedError(f"{path.name} is big-endian", "Only little-endian GGUF files are read.")
    if version not in (2, 3):
        raise UnsupportedError(f"{path.name} has GGUF version {version}", "Convert it again; 2 and 3 are read.")


def _tensor_type(name: str, number: int) -> GGMLQuantizationType:
    """The type, if the `gguf` package can dequantise it."""
    label = f"number {number}"
    try:
        kind = GGMLQuantizationType(number)
        label = kind.name
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedError(
            f"tensor {name} has type {label}, which cannot be dequantised",
            "Use a Q4_0 … Q6_K, Q8_0, F16, BF16 or F32 file, or update the `gguf` package.",
        ) from error
    return kind


def _tensor_infos(cursor: _Cursor, count: int) -> list[GgufTensor]:
    """The tensor table; offsets are still relative to the data section."""
    tensors = []
    for _ in range(count):
        name = cursor.string()
        shape = tuple(reversed(cursor.scalars("Q", cursor.scalar("I"))))
        kind = _tensor_type(name, cursor.scalar("I"))
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or not all(shape) or shape[-1] % block:
            raise ValueError(f"tensor {name} of shape {shape} does not divide into blocks of {block}")
        weights = math.prod(shape)
        tensors.append(GgufTensor(name, kind, shape, cursor.scalar("Q"), weights // block * size))
    return tensors


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file and map its tensors.

    Raises `FormatError` when the file is no GGUF, a git-lfs pointer, truncated or damaged, and `UnsupportedError` for a
    version, byte order or tensor type that is not read, and for one part of a split file.
    """
    _check_magic(path)
    with _header(path) as cursor:
        cursor.scalar("I")
        _check_version(path, cursor.scalar("I"))
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(key_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        infos = _tensor_infos(cursor, tensor_count)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment}")
        start = -(-cursor.position // alignment) * alignment
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedError(
            f"{path.name} is one part of a split file", "Join the parts with `llama-gguf-split --merge`."
        )
    return GgufFile(path, metadata, _placed(path, infos, start, alignment))


def _placed(path: Path, infos: list[GgufTensor], start: int, alignment: int) -> dict[str, GgufTensor]:
    """The tensors by name, with offsets from the start of the file: aligned, inside it, and apart from each other."""
    size = path.stat().st_size
    placed = {}
    for info in infos:
        tensor = GgufTensor(info.name, info.type, info.shape, start + info.offset, info.nbytes)
        if tensor.offset + tensor.nbytes > size:
            raise FormatError(f"{path.name} is truncated: tensor {info.name} lies beyond its end", _FETCH_AGAIN)
        if info.name in placed:
            raise FormatError(f"{path.name} is damaged: it holds tensor {info.name} twice", _FETCH_AGAIN)
        if info.offset % alignment:
            what = f"tensor {info.name} is not aligned to {alignment} bytes"
            raise FormatError(f"{path.name} is damaged: {what}", _FETCH_AGAIN)
        placed[info.name] = tensor
    for one, other in pairwise(sorted(placed.values(), key=lambda tensor: tensor.offset)):
        if one.offset + one.nbytes > other.offset:
            what = f"tensors {one.name} and {other.name} share bytes"
            raise FormatError(f"{path.name} is damaged: {what}", _FETCH_AGAIN)
    return placed
