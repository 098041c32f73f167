"""Products with dense and 4-bit weights: which kernel for which device, dtype and number of rows.

Knows no models and no files. The path is decided when a linear is made or first used, not per call.
"""

import platform
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

# Measured with torch 2.13 on AVX2: the bf16 product costs one pass over the weight per row, a cast to fp32 about four.
MATVEC_ROWS = 4
CHUNK_BYTES = 16 << 20  # of fp32 weight at a time; smaller chunks cost calls, larger ones page faults


class Linear(Protocol):
    """y = x @ W.T + b."""

    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Resident bytes: weight as kept for the product, and bias."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., in_features] to [..., out_features] of the same dtype."""
        ...


class DenseLinear:
    """A product with a weight [N, K] that may be memory-mapped; it is neither copied nor written.

    x must have the weight's dtype. On a CPU without half-precision arithmetic, few rows are multiplied by the
    matrix-vector product, more rows in fp32 with the weight cast chunk by chunk.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._direct = not needs_fp32(weight.device, weight.dtype)
        self._few = MATVEC_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., K] to [..., N]."""
        if self._direct or x.numel() <= self._few * self.in_features:
            return linear(x, self.weight, self.bias)
        return self._by_chunks(x)

    def _by_chunks(self, x: Tensor) -> Tensor:
        weight = self.weight
        return chunked_linear(x, lambda a, b: weight[a:b].float(), self.out_features, self.bias)


class WeightRows(Protocol):
    """Rows `start` to `stop` of a weight, in fp32."""

    def __call__(self, start: int, stop: int, /) -> Tensor:
        """[stop - start, K]."""
        ...


def chunked_linear(x: Tensor, rows: WeightRows, N: int, bias: Tensor | None) -> Tensor:
    """The product x @ W.T + b in fp32, with CHUNK_BYTES of W at a time; the result has the dtype of x."""
    flat = x.reshape(-1, x.shape[-1]).float()
    M, K = flat.shape
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    step = max(1, CHUNK_BYTES // (4 * K))
    for start in range(0, N, step):
        stop = min(start + step, N)
        part = torch.mm(flat, rows(start, stop).t())
        if bias is not None:
            part += bias[start:stop]
        out[:, start:stop] = part
    return out.view(*x.shape[:-1], N)


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
