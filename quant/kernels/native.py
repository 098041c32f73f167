"""Products of a few bf16 rows with bf16 or 4-bit weights on the CPU, from a small C module built at install time.

The module is optional: without a compiler the package installs all the same, and `available()` is False. Knows no
layers and no files; docs/kernels.md describes the arithmetic and the packed format.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

TILE = 16  # rows of a packed tile
LINE_INPUTS = 8  # inputs of a packed line, for the 16 rows of its tile
LONGEST_GROUP = 128  # longer groups are packed in parts: x shares a unit, and the C code keeps room, for so many
MOST_MATRICES = 8  # in one call
CHECK_TOLERANCE = 0.02  # of the largest output; bf16 rounds to 0.004, a wrong lane is off by about 1

max_rows = 64  # measured on AVX2: torch's fp32 product, with the weight cast on the way, wins from about 200 rows on


@dataclass(frozen=True)
class Library:
    """The C module as it can be used here."""

    module: ModuleType
    dense: Callable[..., None]
    int4: Callable[..., None]
    team: int  # address of GOMP_parallel in the OpenMP runtime that torch uses, or 0
    team_size: int  # and of omp_get_num_threads in the same
    isas: dict[str, int]  # instruction sets that this processor has and that passed the check, best first


@dataclass(frozen=True)
class PackedInt4:
    """A 4-bit matrix in tiles of 16 rows; see docs/kernels.md."""

    data: Tensor  # uint8, one dimension
    out_features: int
    in_features: int
    groups: int  # as packed: groups longer than 128 are split
    wide: bool  # scales and zeros in fp32, because bf16 would round them

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.data.nbytes


def available() -> bool:
    """Whether the products can be used."""
    return not isinstance(_load(), str)


def why_not() -> str:
    """Why `available()` is False, in words; empty when it is True."""
    found = _load()
    return found if isinstance(found, str) else ""


def instruction_sets() -> tuple[str, ...]:
    """Those that work on this processor, best first; the first one is used."""
    found = _load()
    return () if isinstance(found, str) else tuple(found.isas)


def bf16_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, threads: int | None = None, isa: str | None = None
) -> Tensor:
    """Product x [M, K] @ w [N, K].T (+ bias [N]) -> [M, N], all bf16 and contiguous; sums in fp32.

    Any M works; beyond `max_rows` other products are faster. Raises ValueError for other shapes, dtypes or devices,
    and RuntimeError where `available()` is False.
    """
    found = library()
    M, K = _rows(x)
    N = _weight(w, K)
    out = x.new_empty((M, N))
    at = (w.data_ptr(), N, out.data_ptr(), N, 0 if bias is None else _bias(bias, N))
    found.dense(found.team, *_way(found, threads, isa), x.data_ptr(), M, K, *at)
    return out


def bf16_matmuls(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    threads: int | None = None,
    isa: str | None = None,
) -> Tensor:
    """`bf16_matmul` of one x with up to eight matrices at once, side by side in one result [M, sum of N].

    One call costs less than one for each. Raises as `bf16_matmul` does.
    """
    found = library()
    M, K = _rows(x)
    widths = [_weight(w, K) for w in weights]
    total = sum(widths)
    out = x.new_empty((M, total))
    at, places = out.data_ptr(), []
    for w, N, bias in zip(weights, widths, biases, strict=True):
        places += (w.data_ptr(), N, at, total, 0 if bias is None else _bias(bias, N))
        at += N * out.itemsize
    found.dense(found.team, *_way(found, threads, isa), x.data_ptr(), M, K, *places)
    return out


def int4_matmul(
    x: Tensor, packed: PackedInt4, bias: Tensor | None = None, *, threads: int | None = None, isa: str | None = None
) -> Tensor:
    """Product x [M, K] @ W.T (+ bias [N]) -> [M, N] with the packed W [N, K]; dtypes and errors as `bf16_matmul`."""
    found = library()
    M, K = _rows(x)
    N = packed.out_features
    if packed.in_features != K:
        raise ValueError(f"x has {K} columns, the packed matrix {packed.in_features}")
    out = x.new_empty((M, N))
    at = (packed.data.data_ptr(), N, out.data_ptr(), 0 if bias is None else _bias(bias, N), packed.groups, packed.wide)
    found.int4(found.team, *_way(found, threads, isa), x.data_ptr(), M, K, *at)
    return out


def dequantize(packed: PackedInt4, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of a packed matrix as float32 [stop - start, K]: (code - zero) * scale, unrounded."""
    found = library()
    if not 0 <= start <= stop <= packed.out_features:
        raise ValueError(f"a matrix of {packed.out_features} rows has no rows {start} to {stop}")
    out = torch.empty(stop - start, packed.in_features)
    at = packed.data.data_ptr(), start, stop, packed.in_features, packed.groups, packed.wide, out.data_ptr()
    found.module.dequantize(found.team, torch.get_num_threads(), *at)
    return out


def can_pack(K: int, group_size: int) -> bool:
    """Whether a matrix with K inputs in such groups can be packed: both multiples of 8."""
    return group_size > 0 and group_size % LINE_INPUTS == 0 and K % group_size == 0


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> PackedInt4:
    """Pack codes [N, K] (uint8, 0..15), scales and zeros [N, K / group_size]: W = (codes - zeros) * scales, unrounded.

    A group size of -1 is one group per row. Raises ValueError where `can_pack` is False or the shapes do not fit.
    """
    N, K = codes.shape
    group_size = K if group_size == -1 else group_size
    if not can_pack(K, group_size):
        raise ValueError(f"{K} inputs in groups of {group_size} cannot be packed: multiples of {LINE_INPUTS} only")
    if scales.shape != (N, K // group_size) or zeros.shape != scales.shape:
        raise ValueError("scales and zeros must be [N, K / group_size]")
    part = max(size for size in range(LINE_INPUTS, LONGEST_GROUP + 1, LINE_INPUTS) if group_size % size == 0)
    tiles, groups = -(-N // TILE), K // part
    wide = not (_exact_in_bf16(scales) and _exact_in_bf16(zeros))
    heads = [_head(values, group_size // part, tiles, wide=wide) for values in (scales, zeros)]
    data = torch.cat([*heads, _lines(codes, tiles, groups)], dim=2)
    return PackedInt4(data.flatten(), N, K, groups, wide)


def _lines(codes: Tensor, tiles: int, groups: int) -> Tensor:
    """Codes as bytes [tiles, groups, lines * 64]: see the picture in docs/kernels.md."""
    N, K = codes.shape
    padded = torch.zeros(tiles * TILE, K, dtype=torch.uint8)
    padded[:N] = codes
    # A row's eight codes are one int64. Codes 2 and 3 move beside 0 and 1, and 6 and 7 beside 4 and 5, as high nibbles:
    # its bytes 0, 4, 1 and 5 are then the word in which even inputs are the low half and odd ones the high half.
    codes8 = padded.view(torch.int64)
    codes8 |= codes8 >> 12
    words = (codes8 & 0xFF) | (codes8 >> 24 & 0xFF00) | (codes8 << 8 & 0xFF0000) | (codes8 >> 16 & 0xFF000000)
    lines = words.view(torch.int32)[:, ::2].view(tiles, TILE, K // LINE_INPUTS)
    return lines.transpose(1, 2).contiguous().view(torch.uint8).view(tiles, groups, -1)


def _head(values: Tensor, parts: int, tiles: int, *, wide: bool) -> Tensor:
    """One parameter [N, G] as bytes [tiles, G * parts, 16 * 2 or 4]; the rows of padding get zeros."""
    padded = torch.zeros(tiles * TILE, values.shape[1], dtype=torch.float32 if wide else torch.bfloat16)
    padded[: values.shape[0]] = values
    by_group = padded.repeat_interleave(parts, dim=1).view(tiles, TILE, -1).transpose(1, 2).contiguous()
    return by_group.view(torch.uint8)


def _exact_in_bf16(values: Tensor) -> bool:
    return torch.equal(values.float(), values.bfloat16().float())


def _rows(x: Tensor) -> tuple[int, int]:
    if x.dtype is not torch.bfloat16 or x.dim() != 2 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError("x must be a contiguous bf16 [M, K] on the CPU")
    M, K = x.shape
    if K == 0:
        raise ValueError("x must be at least one column wide")
    return M, K


def _weight(w: Tensor, K: int) -> int:
    """Its number of rows."""
    if w.dtype is not torch.bfloat16 or w.dim() != 2 or w.shape[1] != K or not w.is_contiguous() or not w.is_cpu:
        raise ValueError("the weight must be a contiguous bf16 [N, K] on the CPU with the K of x")
    return w.shape[0]


def _bias(bias: Tensor, N: int) -> int:
    if bias.dtype is not torch.bfloat16 or bias.shape != (N,) or not bias.is_contiguous() or not bias.is_cpu:
        raise ValueError("the bias must be a contiguous bf16 [N] on the CPU")
    return bias.data_ptr()


def library() -> Library:
    """The loaded module. Raises RuntimeError where `available()` is False."""
    found = _load()
    if isinstance(found, Library):
        return found
    raise RuntimeError(found)


def _way(found: Library, threads: int | None, name: str | None) -> tuple[int, int]:
    """Number of threads and index of the instruction set."""
    threads = threads or torch.get_num_threads()
    if name is None:
        return threads, next(iter(found.isas.values()))
    if name not in found.isas:
        raise ValueError(f"instruction set {name} is not usable here")
    return threads, found.isas[name]


@cache
def _load() -> Library | str:
    """The library, or why there is none."""
    if sys.byteorder != "little":
        return "the packed formats are little-endian and this machine is not"
    try:
        module = import_module("._native", __package__)
    except ImportError as error:
        return f"the C module was not built (no C compiler at installation?): {error}"
    if not hasattr(module, "cosines"):
        return "the C module was built from an older source: install the package again"
    isas = {name: index for index, name in enumerate(module.names()) if name is not None}
    team, size = _torch_team()
    good = {n: i for n, i in isas.items() if n == "scalar" or _agrees(module, i, isas["scalar"])}
    return Library(module, module.dense, module.int4, team, size, good)


def _torch_team() -> tuple[int, int]:
    """Addresses of GOMP_parallel and omp_get_num_threads in the OpenMP runtime that torch has loaded.

    Both are 0, which means one thread, when they cannot be found.
    """
    if not hasattr(os, "RTLD_NOLOAD"):
        return 0, 0
    lib = Path(torch.__file__ or "").parent
    names = ("libgomp*", "libiomp5*", "libomp*")
    bundled = [str(p) for folder in (lib / "lib", lib.parent / "torch.libs") for n in names for p in folder.glob(n)]
    for path in [*bundled, "libgomp.so.1", "libiomp5.so", "libomp.so"]:
        try:
            runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            team, size = runtime.GOMP_parallel, runtime.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        return ctypes.cast(team, ctypes.c_void_p).value or 0, ctypes.cast(size, ctypes.c_void_p).value or 0
    return 0, 0


def _agrees(module: ModuleType, isa: int, scalar: int) -> bool:
    """Whether an instruction set gives what plain C gives, on small matrices and every number of rows in one pass."""
    generator = torch.Generator().manual_seed(7)
    N, K, group = 37, 200, 40
    w = torch.randn(N, K, generator=generator).bfloat16()
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = torch.rand(N, K // group, generator=generator).bfloat16().float() + 0.125
    packs = [pack_int4(codes, scales, scales * factor, group) for factor in (8.0, 8.1)]
    for M in range(1, 9):
        x = torch.randn(M, K, generator=generator).bfloat16()
        for matrix in (w, *packs):
            expected, got = (_on_one_thread(module, which, x, matrix) for which in (scalar, isa))
            if not (got - expected).abs().max() <= CHECK_TOLERANCE * expected.abs().max():
                return False
    return True


def _on_one_thread(module: ModuleType, isa: int, x: Tensor, matrix: Tensor | PackedInt4) -> Tensor:
    """The product as fp32, by an instruction set that is not trusted yet."""
    (M, K), N = x.shape, matrix.shape[0] if isinstance(matrix, Tensor) else matrix.out_features
    out = x.new_empty((M, N))
    if isinstance(matrix, PackedInt4):
        at = (matrix.data.data_ptr(), N, out.data_ptr(), 0, matrix.groups, matrix.wide)
        module.int4(0, 1, isa, x.data_ptr(), M, K, *at)
    else:
        module.dense(0, 1, isa, x.data_ptr(), M, K, matrix.data_ptr(), N, out.data_ptr(), N, 0)
    return out.float()
