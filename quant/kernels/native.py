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

from .packing import PackedInt4, pack_int4

MOST_MATRICES = 8  # in one call
CHECK_TOLERANCE = 0.02  # of the largest output; bf16 rounds to 0.004, a wrong lane is off by about 1

FEW_ROWS = 64  # beyond, where many rows have no product of their own, a cast and a fp32 product of torch are faster
# Up to how many rows products of their own for many rows are faster than torch's.
MOST_ROWS = {"avx2": sys.maxsize, "amx": 256}
MOST_INT4_ROWS = {"amx": sys.maxsize}


@dataclass(frozen=True)
class Library:
    """The C module as it can be used here."""

    module: ModuleType
    dense: Callable[..., None]
    int4: Callable[..., None]
    team: int  # address of GOMP_parallel in the OpenMP runtime that torch uses, or 0
    team_size: int  # and of omp_get_num_threads in the same
    isas: dict[str, int]  # instruction sets that this processor has and that passed the check, best first


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


def most_rows(few: int = FEW_ROWS) -> int:
    """Up to how many rows of x `bf16_matmul` is the fastest here: `few` where many have no product of their own."""
    return MOST_ROWS.get(next(iter(instruction_sets()), ""), few)


def most_int4_rows() -> int:
    """As `most_rows`, of `int4_matmul`."""
    return MOST_INT4_ROWS.get(next(iter(instruction_sets()), ""), FEW_ROWS)


def bf16_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, threads: int | None = None, isa: str | None = None
) -> Tensor:
    """Product x [M, K] @ w [N, K].T (+ bias [N]) -> [M, N], all bf16 and contiguous; sums in fp32.

    Any M works; beyond `most_rows()` other products are faster. Up to 16 rows each gets the bits that it gets alone.
    Raises ValueError for other shapes, dtypes or devices, and RuntimeError where `available()` is False.
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


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> PackedInt4:
    """`packing.pack_int4` with the codes laid out by the C module, on all threads. Tensors on the CPU."""
    found = library()

    def write(codes: Tensor, data: Tensor, head: int) -> None:
        at = codes.data_ptr(), *codes.shape, data.shape[1], head, data.data_ptr()
        found.module.pack(found.team, torch.get_num_threads(), *at)

    return pack_int4(codes, scales, zeros, group_size, write=write)


def dequantize(packed: PackedInt4, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of a packed matrix as float32 [stop - start, K]: (code - zero) * scale, unrounded."""
    found = library()
    if not 0 <= start <= stop <= packed.out_features:
        raise ValueError(f"a matrix of {packed.out_features} rows has no rows {start} to {stop}")
    out = torch.empty(stop - start, packed.in_features)
    at = packed.data.data_ptr(), start, stop, packed.in_features, packed.groups, packed.wide, out.data_ptr()
    found.module.dequantize(found.team, torch.get_num_threads(), *at)
    return out


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
    if not hasattr(module, "instruction_sets"):
        return "the C module was built from an older source: install the package again"
    isas = {name: index for index, name in enumerate(module.instruction_sets()) if name is not None}
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
    """Whether an instruction set gives what plain C gives, on small matrices, for few rows and for many."""
    generator = torch.Generator().manual_seed(7)
    N, K, group = 37, 360, 40
    w = torch.randn(N, K, generator=generator).bfloat16()
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = torch.rand(N, K // group, generator=generator).bfloat16().float() + 0.125
    packs = [pack_int4(codes, scales, scales * factor, group) for factor in (8.0, 8.1)]
    for M in (*range(1, 9), 33):  # of 33, panels of either size remain in gemm.c, and a single one in amx.c
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
