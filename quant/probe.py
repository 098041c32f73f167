"""Which products work on a device: private operators of torch, an optional C module, Triton; tried, not assumed.

Each is tried once per device on a small matrix; one that is missing or gives other numbers is not used.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from .forms import aten_scales
from .kernels import native
from .layout import Int4Matrix, pack_pairs
from .planes import Planes

Kernel = Literal["native", "aten_cpu", "aten_cuda", "triton"]
_ATEN_CPU_ROWS = 4  # it works in blocks of four rows; from five on it gains nothing
_ATEN_CUDA_ROWS = 16  # one tile of rows; for many more, dequantising once is faster
TRITON_ROWS = 16
"""Rows of a Triton product at most: likewise."""


@dataclass(frozen=True)
class Kernels:
    """The 4-bit product for few bf16 rows on one device, and up to how many; None: dequantise."""

    few: Kernel | None
    max_rows: int


def probe(device: torch.device) -> Kernels:
    """What works on `device`; cached."""
    return _probe(device.type, device.index)


@cache
def _probe(kind: str, index: int | None) -> Kernels:
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    if kind == "cpu" and native.available():
        return Kernels("native", native.most_int4_rows())
    if kind == "cpu" and _works("aten_cpu", device):
        return Kernels("aten_cpu", _ATEN_CPU_ROWS)
    if kind == "cuda" and _works("aten_cuda", device):
        return Kernels("aten_cuda", _ATEN_CUDA_ROWS)
    if kind == "cuda" and triton_works(device):
        return Kernels("triton", TRITON_ROWS)
    return Kernels(None, 0)


def triton_works(device: torch.device) -> bool:
    """Whether the Triton products (`quant.gpu`) are here and right on a CUDA device; cached."""
    return device.type == "cuda" and _triton_works(device.index)


@cache
def _triton_works(index: int | None) -> bool:
    matrix, x = _trial()
    device = torch.device("cuda") if index is None else torch.device("cuda", index)
    try:
        from .gpu.products import int4_product  # noqa: PLC0415 - Triton, only where there is a GPU

        outs = [int4_product(x[:rows].to(device), Planes.of(matrix, device)) for rows in (1, 3)]
        return all(_agrees(out, x[: len(out)], matrix) for out in outs)
    except Exception:  # noqa: BLE001 - a compiler, a driver and perhaps a C compiler: without them torch's products serve
        return False


def aten_weight(kernel: Kernel, codes: Tensor, device: torch.device) -> Tensor:
    """Codes uint8 [N, K] in the layout of torch's int4 product."""
    if kernel == "aten_cpu":
        return _aten("_convert_weight_to_int4pack_for_cpu")(codes.to(torch.int32), 1)
    swapped = codes.view(codes.shape[0], -1, 2).flip(-1).reshape(codes.shape)  # the first code in the high nibble
    return _aten("_convert_weight_to_int4pack")(pack_pairs(swapped).to(device), inner_k_tiles(codes.shape[1]))


def inner_k_tiles(K: int) -> int:
    """How many tiles of 16 inputs the CUDA layout interleaves; 0 where K does not fit."""
    return next((tiles for tiles in (8, 4, 2) if K % (16 * tiles) == 0), 0)


def aten_product(kernel: Kernel) -> Callable[[Tensor, Tensor, int, Tensor], Tensor]:
    """The product: (x bf16 [M, K], weight, group size, scales [G, N, 2]) -> bf16 [M, N]."""
    return _aten("_weight_int4pack_mm_for_cpu" if kernel == "aten_cpu" else "_weight_int4pack_mm")


def _aten(name: str) -> Callable[..., Tensor]:
    return getattr(torch.ops.aten, name)


def _works(kernel: Kernel, device: torch.device) -> bool:
    matrix, x = _trial()
    try:
        weight = aten_weight(kernel, matrix.codes, device)
        out = aten_product(kernel)(x.to(device), weight, matrix.group_size, aten_scales(matrix).to(device))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return _agrees(out, x, matrix)


def _trial() -> tuple[Int4Matrix, Tensor]:
    """A small matrix, and three rows to multiply it with."""
    generator = torch.Generator().manual_seed(11)
    N, K, group_size = 32, 256, 64
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = torch.rand(N, K // group_size, generator=generator).bfloat16().float() + 0.125
    zeros = torch.randint(1, 16, (N, K // group_size), dtype=torch.uint8, generator=generator)
    return Int4Matrix(codes, scales, zeros, group_size), torch.randn(3, K, generator=generator).bfloat16()


def _agrees(out: Tensor, x: Tensor, matrix: Int4Matrix) -> bool:
    expected = x.float() @ matrix.dequantize().t()
    return bool((out.float().cpu() - expected).abs().max() <= 0.02 * expected.abs().max())


def needs_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether many rows are multiplied faster in fp32: half-precision weights on a CPU without such arithmetic."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    onednn = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    if onednn is None or not onednn():
        return True
    # oneDNN also says yes where AVX-512 only emulates the arithmetic.
    return platform.machine() in ("x86_64", "AMD64") and not any(probe() for probe in _arithmetic_probes(dtype))


def _arithmetic_probes(dtype: torch.dtype) -> list[Callable[[], bool]]:
    bf16 = dtype is torch.bfloat16
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported") if bf16 else ("_is_amx_fp16_supported",)
    return [getattr(torch.cpu, name) for name in names if hasattr(torch.cpu, name)]
