"""Exits beside a frozen backbone, before training: the linear map from what a junction sees to what the head sees.

The states at a junction are written in another basis than the final ones, so the model's own norm and head make little
of them. The best linear map between the two is known in closed form and costs no training; what it leaves is learnt
from there. Ours; the idea is the tuned lens (arXiv 2303.08112), which trains such a map. Knows tensors only.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from ..errors import FormatError

TOKENS, TOKENS_A_WIDTH = 1 << 15, 16
RIDGE, RIDGE_FEW = 1e-3, 0.1
"""Of a state's own square: with many tokens, and times hidden size over tokens with few."""
_LEAST_SCALE = 0.1
"""Of the median of the norm's factors: the adapter's first matrix divides by them."""
_HEAD_ROWS = 8192
_EPS = 1e-9
"""Of the largest eigenvalue: below it a direction counts as empty."""


def fit_tokens(hidden: int) -> int:
    """Tokens that a fit needs: enough that one more changes nothing that matters."""
    return max(TOKENS, TOKENS_A_WIDTH * hidden)


@dataclass
class Moments:
    """Sums over tokens of products of a junction's normalised states x and the final ones y: x xᵀ and x yᵀ [d, d]."""

    squares: Tensor
    products: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, hidden: int) -> "Moments":
        """Of no tokens."""
        squares, products = torch.zeros(2, hidden, hidden, dtype=torch.float64).unbind()
        return cls(squares, products)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count tokens: x and y [R, d], float32."""
        self.squares += (x.T @ x).double()
        self.products += (x.T @ y).double()
        self.tokens += len(x)


def fit_exits(
    start: Mapping[str, Tensor], parts: Iterable[tuple[Tensor, Tensor]], head: Tensor, eps: float
) -> dict[str, Tensor]:
    """Junctions (by their stored names) whose norms and adapters are the best linear map to the final states.

    start: junctions as they would begin otherwise; routers are kept.
    parts: the states at the junctions [K, R, d] and, of the same tokens, what the last exit gives the head [R, d].
    head: [V, d]; an error counts by what it does to the logits. eps: of the norms.

    A junction of which no token was counted stays as it was. Raises FormatError where states are not finite.
    """
    hidden = head.shape[1]
    moments: list[Moments] = []
    for states, ends in parts:
        moments = moments or [Moments.empty(hidden) for _ in states]
        for each, h in zip(moments, states, strict=True):
            each.add(rms_norm(h.float(), (hidden,), None, eps), ends.float())
    root, back = _roots(_gram(head))
    fitted = dict(start)
    for number, each in enumerate(moments, start=1):
        if not each.tokens:
            continue
        if not bool(torch.isfinite(each.squares).all() & torch.isfinite(each.products).all()):
            what = f"The states at junction {number} are not finite: the model's numbers overflow on this text"
            raise FormatError(what, "Try --dtype fp32, or another text.")
        names = (f"junctions.{number}.{name}.weight" for name in ("norm", "adapter.up", "adapter.down"))
        fitted |= zip(names, linear_exit(each, root, back), strict=True)
    return fitted


def linear_exit(moments: Moments, root: Tensor, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A norm's factors [d] and an adapter's matrices up and down [d, d], float32, that are a linear map between them.

    `root` and `back` [d, d]: the root of the head's WᵀW and its inverse. The map is ridge regression A; the norm takes
    its diagonal, and the adapter the d / 2 directions of the rest that change logits most: since
    SiLU(z) - SiLU(-z) = z, a pair of its units passes on one direction as it is.
    """
    squares, products = moments.squares / moments.tokens, moments.products / moments.tokens
    hidden = len(squares)
    ridge = max(RIDGE, RIDGE_FEW * hidden / moments.tokens)
    squares = squares + torch.diag(ridge * squares.diag().clamp(min=_EPS * float(squares.diag().max())))
    best = torch.linalg.solve(squares, products)
    scale = _scale(best.diag())
    spread, gather = _roots(squares)
    left, sizes, right = torch.linalg.svd(spread @ (best - torch.diag(scale)) @ root)
    pairs = hidden // 2
    into = (gather @ left[:, :pairs]) / scale[:, None]  # unit variance behind it
    out = sizes[:pairs, None] * (right[:pairs] @ back)
    up, down = torch.zeros(2, hidden, hidden, dtype=torch.float64).unbind()
    up[: 2 * pairs] = torch.cat((into.T, -into.T))
    down[:, : 2 * pairs] = torch.cat((out.T, -out.T), 1)
    return scale.float(), up.float(), down.float()


def _scale(diagonal: Tensor) -> Tensor:
    """Factors of the norm: the map's diagonal, kept away from 0."""
    least = _LEAST_SCALE * float(diagonal.abs().median()) or 1.0
    return torch.where(diagonal < 0, -1.0, 1.0) * diagonal.abs().clamp(min=least)


def _roots(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """The root of a matrix that is positive, and the root's inverse."""
    values, vectors = torch.linalg.eigh(symmetric)
    values = values.clamp(min=_EPS * float(values.max())).sqrt()
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T


def _gram(head: Tensor) -> Tensor:
    """WᵀW [d, d] of a head [V, d]."""
    total = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64)
    for part in _rows(head):
        total += (part.T @ part).double()
    return total


def _rows(head: Tensor) -> Iterator[Tensor]:
    parts: Sequence[Tensor] = head.split(_HEAD_ROWS)
    return (part.to("cpu", torch.float32) for part in parts)
