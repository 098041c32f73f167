"""What an early exit computes of few bf16 rows, in one call each: how much a row wants to leave, and its adapter.

The arithmetic is that of `native` and `small` with torch's activations between, rounded to bf16 in the same places.
Knows no layers, no laws and no cache.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from . import native, small

MOST_ROWS: Final = 16  # enum in exits.c


class Pair:
    """Two products, bf16 [inner, K] and [K, inner] with biases or without; what all of its calls begin with.

    Two instruction sets may be named, of products and of small operations; by default the best.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), *, isa: str | None = None) -> None:
        found = native.library()
        first, second = weights
        inner, self.width = first.shape
        fits = second.shape == (self.width, inner) and [len(bias) for bias in biases] in ([], [inner, self.width])
        small.check(fits, "the matrices must be [inner, K] and [K, inner], with a bias for each or none")
        self._kept = *weights, *biases
        small.check(all(map(_plain, self._kept)), "matrices and biases must be contiguous bf16 on the CPU")
        bias = [each.data_ptr() for each in biases] or [0, 0]
        self._isa = next(iter(found.isas.values())) if isa is None else found.isas[isa]
        self._before = found.team, found.team_size
        self._sizes = self.width, inner, first.data_ptr(), bias[0], second.data_ptr(), bias[1]

    @classmethod
    def of(cls, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> "Pair | None":
        """The pair, or None where these tensors, or this machine, do without native calls."""
        usable = all(_plain(each) and not each.requires_grad for each in (*weights, *biases))
        return cls(weights, biases) if usable and small.available() else None

    def fits(self, x: Tensor) -> bool:
        """Whether x [..., K] has few enough rows, contiguous bf16 on the CPU, and no gradient."""
        return 0 < x.numel() <= MOST_ROWS * self.width and _plain(x) and not x.requires_grad

    def common(self, x: Tensor) -> tuple[int, ...]:
        """The arguments that both functions begin with, for x [..., K], which must fit."""
        rows = x.numel() // self.width
        return (*self._before, torch.get_num_threads(), self._isa, rows, *self._sizes)


class Look:
    """Rows normed, and the score of each: the norm and head of what two products with an exact GELU between give.

    factor: float32 [K] of the first norm. head: float32 [K], with the factor of the second norm in it. eps: of both.
    """

    def __init__(self, pair: Pair, factor: Tensor, head: Tensor, eps: float, *, isa: str | None = None) -> None:
        small.check(
            all(t.dtype is torch.float32 and t.is_contiguous() for t in (factor, head)), "norms must be float32"
        )
        small.check(factor.shape == head.shape == (pair.width,), "factor and head must be [K]")
        self._kept = factor, head
        self._at, self._eps = (factor.data_ptr(), head.data_ptr()), float(eps)
        self._isa, self._call = small.index(isa), native.library().module.look
        self.pair = pair

    def __call__(self, h: Tensor, bias: float) -> tuple[Tensor, list[float]]:
        """From h [R, K], which must fit the pair, to its normed rows [R, K] and scores, `bias` added to each."""
        normed = torch.empty_like(h)
        at = h.data_ptr(), normed.data_ptr()
        return normed, self._call(*self.pair.common(h), self._isa, *at, *self._at, self._eps, bias)


class Adapter:
    """x + W2 SiLU(W1 x)."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._call = native.library().module.adapter

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., K], which must fit the pair, to the same shape."""
        out = torch.empty_like(x)
        self._call(*self.pair.common(x), x.data_ptr(), out.data_ptr())
        return out


def _plain(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and x.is_cpu and x.is_contiguous()
