"""Products of a few bf16 rows with 8-bit weights on the CPU: codes with one scale for each row of the matrix.

The C module is that of `native`; where it is missing or fails its check here, `available()` is False. Knows no layers.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import native

STEP = 16  # the inputs must be a multiple of this
LARGEST = 127
_ROWS = 8192  # quantised at a time


@dataclass(frozen=True)
class Int8Matrix:
    """W[n, k] = codes[n, k] * scales[n]."""

    codes: Tensor  # int8 [N, K], -127..127
    scales: Tensor  # float32 [N]

    @classmethod
    def of(cls, weight: Tensor) -> "Int8Matrix":
        """Round a weight [N, K] row by row; the largest of a row becomes 127 or -127. ValueError unless K fits."""
        N, K = weight.shape
        if K == 0 or K % STEP:
            raise ValueError(f"{K} inputs are not a multiple of {STEP}")
        codes, scales = torch.empty(N, K, dtype=torch.int8), torch.empty(N)
        for start in range(0, N, _ROWS):
            part = weight[start : start + _ROWS].float()
            scale = (part.abs().amax(1) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
            codes[start : start + _ROWS] = (part / scale[:, None]).round_()
            scales[start : start + _ROWS] = scale
        return cls(codes, scales)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        return self.codes[start:stop].float() * self.scales[start:stop, None]


def available() -> bool:
    """Whether the product can be used."""
    return bool(instruction_sets())


@cache
def instruction_sets() -> tuple[str, ...]:
    """Those that give what plain C gives, best first; the first one is used."""
    if not native.available() or not hasattr(native.library().module, "int8"):  # a build of an older source
        return ()
    generator = torch.Generator().manual_seed(3)
    matrix = Int8Matrix.of(torch.randn(37, 208, generator=generator))
    x = torch.randn(5, 208, generator=generator).bfloat16()
    expected = x.float() @ matrix.rows(0, 37).t()
    limit = native.CHECK_TOLERANCE * float(expected.abs().max())
    names = native.instruction_sets()
    return tuple(n for n in names if (_multiply(x, matrix, 1, n).float() - expected).abs().max() <= limit)


def int8_matmul(x: Tensor, matrix: Int8Matrix, *, threads: int | None = None, isa: str | None = None) -> Tensor:
    """Product x [M, K] bf16 @ W.T -> [M, N] bf16; sums in fp32. A row's result does not depend on the rows beside it.

    Raises ValueError for another x or instruction set, RuntimeError where `available()` is False.
    """
    names = instruction_sets()
    if not names:
        raise RuntimeError(native.why_not() or "the 8-bit product failed its check")
    if isa is not None and isa not in names:
        raise ValueError(f"instruction set {isa} is not usable here")
    if x.dtype is not torch.bfloat16 or x.dim() != 2 or not x.is_contiguous() or not x.is_cpu:
        raise ValueError("x must be a contiguous bf16 [M, K] on the CPU")
    if x.shape[1] != matrix.codes.shape[1]:
        raise ValueError(f"x has {x.shape[1]} columns, the matrix {matrix.codes.shape[1]}")
    return _multiply(x, matrix, threads or torch.get_num_threads(), isa or names[0])


def _multiply(x: Tensor, matrix: Int8Matrix, threads: int, isa: str) -> Tensor:
    found = native.library()
    (M, K), N = x.shape, matrix.codes.shape[0]
    out = x.new_empty((M, N))
    at = (x.data_ptr(), M, K, matrix.codes.data_ptr(), N, out.data_ptr(), matrix.scales.data_ptr())
    found.module.int8(found.team, threads, found.isas[isa], *at)
    return out
