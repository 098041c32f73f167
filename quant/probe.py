"""Which 4-bit products work on a device: private operators of torch, or an optional C module; tried, not assumed.

Each is tried once per device on a small matrix; one that is missing or gives other numbers is not used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from .forms import aten_scales
from .kernels import native
from .layout import Int4Matrix, pack_pairs

Kernel = Literal["native", "aten_cpu", "aten_cuda"]
_ATEN_CPU_ROWS = 4  # it works in blocks of four rows; from five on it gains nothing
_ATEN_CUDA_ROWS = 16  # one tile of rows; for many more, dequantising once is faster


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
        return Kernels("native", native.max_rows)
    if kind == "cpu" and _works("aten_cpu", device):
        return Kernels("aten_cpu", _ATEN_CPU_ROWS)
    if kind == "cuda" and _works("aten_cuda", device):
        return Kernels("aten_cuda", _ATEN_CUDA_ROWS)
    return Kernels(None, 0)


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
    generator = torch.Generator().manual_seed(11)
    N, K, group_size = 32, 256, 64
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = torch.rand(N, K // group_size, generator=generator).bfloat16().float() + 0.125
    zeros = torch.randint(1, 16, (N, K // group_size), dtype=torch.uint8, generator=generator)
    matrix = Int4Matrix(codes, scales, zeros, group_size)
    x = torch.randn(3, K, generator=generator).bfloat16()
    try:
        weight = aten_weight(kernel, codes, device)
        out = aten_product(kernel)(x.to(device), weight, group_size, aten_scales(matrix).to(device))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    expected = x.float() @ matrix.dequantize().t()
    return bool((out.float().cpu() - expected).abs().max() <= 0.02 * expected.abs().max())
