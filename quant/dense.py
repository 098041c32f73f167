"""Products with dense weights: which one for how many rows; and what every product, dense or 4-bit, looks like.

Knows no models and no files.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from .forms import Rows
from .kernels import native
from .probe import needs_fp32

# Measured with torch 2.13 on AVX2: the bf16 product costs one pass over the weight per row, a cast to fp32 about four.
MATVEC_ROWS = 4
NATIVE_ROWS = 16  # what drafts are verified in; each of them is exactly what it would be alone
CHUNK_BYTES = 16 << 20  # of fp32 weight at a time; smaller chunks cost calls, larger ones page faults
CUDA_CHUNK_BYTES = 512 << 20

Product = Callable[[Tensor], Tensor]


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

    x must have the weight's dtype. On a CPU few rows are multiplied by a matrix-vector product; more rows, where the
    CPU has no half-precision arithmetic, in fp32 with the weight cast chunk by chunk.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        slow = needs_fp32(weight.device, weight.dtype)
        self._many: Product = self._by_chunks if slow else self._direct
        self._few: Product = self._direct
        few_rows = MATVEC_ROWS
        fixed = not weight.requires_grad and weight.is_contiguous()
        self.is_native = fixed and weight.dtype is torch.bfloat16 and weight.is_cpu and native.available()
        if self.is_native:
            self._few = self._native
            few_rows = native.most_rows(native.FEW_ROWS if slow else NATIVE_ROWS)
        self.few_elements = few_rows * self.in_features  # of x, for which the product for few rows is used

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., K] to [..., N]."""
        return self._few(x) if 0 < x.numel() <= self.few_elements and not x.requires_grad else self._many(x)

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        return self.weight[start:stop].float()

    def _direct(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def _native(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).contiguous()
        return native.bf16_matmul(flat, self.weight, self.bias).view(*x.shape[:-1], self.out_features)

    def _by_chunks(self, x: Tensor) -> Tensor:
        return chunked_linear(x, self, self.out_features, self.bias)


class DenseGroup:
    """Few rows times several dense matrices in one native call: it costs less than one for each. Nothing is copied."""

    def __init__(self, linears: Sequence[DenseLinear]) -> None:
        self._weights = [linear.weight for linear in linears]
        self._biases = [linear.bias for linear in linears]
        self._in_features, self._out_features = linears[0].in_features, sum(linear.out_features for linear in linears)
        self._few_elements = min(linear.few_elements for linear in linears)

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> "DenseGroup | None":
        """The group, or None where there is nothing to gain or a linear is of another kind."""
        dense = [linear for linear in linears if isinstance(linear, DenseLinear) and linear.is_native]
        return cls(dense) if len(dense) == len(linears) and 1 < len(dense) <= native.MOST_MATRICES else None

    def fits(self, x: Tensor) -> bool:
        """Whether x [..., K] has few enough rows, and no gradient."""
        return 0 < x.numel() <= self._few_elements and not x.requires_grad

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., K], which must fit, to the outputs side by side [..., sum of N]."""
        out = native.bf16_matmuls(x.reshape(-1, self._in_features).contiguous(), self._weights, self._biases)
        return out.view(*x.shape[:-1], self._out_features)


def chunked_linear(
    x: Tensor, weight: Rows, N: int, bias: Tensor | None, compute: torch.dtype = torch.float32
) -> Tensor:
    """The product x @ W.T + b in dtype `compute`, a chunk of W's rows at a time; the result has the dtype of x."""
    K = x.shape[-1]
    flat = x.reshape(-1, K).to(compute)
    out = torch.empty(flat.shape[0], N, dtype=x.dtype, device=x.device)
    step = max(1, (CUDA_CHUNK_BYTES if x.is_cuda else CHUNK_BYTES) // (4 * K))
    for start in range(0, N, step):
        stop = min(start + step, N)
        part = None if bias is None else bias[start:stop].to(compute)
        out[:, start:stop] = linear(flat, weight.rows(start, stop).to(compute), part)
    return out.view(*x.shape[:-1], N)
