"""Who decides at which depth a token leaves the backbone.

A policy sees the residual stream before and after a backbone block and says which rows may leave; a route adds what
does not depend on the stream: the positions that never leave, and where the backbone ends.
Neither knows blocks, caches or 4-bit weights; `runtime.river` acts on what they say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..quant.kernels import small

ALWAYS = -2.0
"""A threshold below every cosine."""
NEVER = math.inf
"""A threshold above every cosine."""
HELD = 1
"""Tokens at the beginning of a sequence that never leave. All later ones attend to the first, whatever it says (an
attention sink; Xiao et al., arXiv 2309.17453), so the error of its 4-bit keys and values reaches every one of them."""


class ExitPolicy(Protocol):
    """Decides after each backbone block (counted from 1) which rows leave."""

    def leaves(self, layer: int, before: Tensor, after: Tensor) -> Tensor:
        """Return bool [...]: the rows of `before`, `after` [..., hidden] that leave after block `layer`."""
        ...

    def all_leave(self, layer: int, before: Tensor, after: Tensor) -> bool:
        """Return whether every row leaves after block `layer` (the paper's minimum over the batch); one at least."""
        ...

    def asks(self, layer: int) -> bool:
        """Return whether any row can leave after block `layer` by this rule; the others need not be looked at."""
        ...


def cosine(before: Tensor, after: Tensor) -> Tensor:
    """Return the cosine of the angle between the two residual streams, float32 [B, S] (River eq. 1)."""
    if small.cosines_fit(before, after):
        return small.cosines(before, after)
    return torch.cosine_similarity(before.float(), after.float(), dim=-1)


@dataclass(frozen=True)
class CosineExit:
    """River eq. (1): rows whose residual stream turned little in block l, cos(h(l-1), h(l)) > τ, leave after it.

    `thresholds[l - 1]` is τ of block l; a threshold of 1 or more never fires (not even where rounding lifts
    a cosine above 1). Blocks before `entry_layer - 1` have no exit behind them and are not asked.
    """

    thresholds: tuple[float, ...]
    entry_layer: int = 2

    @classmethod
    def uniform(cls, tau: float, num_layers: int, entry_layer: int = 2) -> "CosineExit":
        """One τ for all layers, as in the paper."""
        return cls.by_layer((tau,) * (num_layers - 1), entry_layer)

    @classmethod
    def by_layer(cls, thresholds: Sequence[float], entry_layer: int = 2) -> "CosineExit":
        """A τ for each of blocks 1 to L - 1."""
        return cls((*thresholds, ALWAYS), entry_layer)

    def leaves(self, layer: int, before: Tensor, after: Tensor) -> Tensor:
        """See `ExitPolicy.leaves`."""
        if not self.asks(layer):
            return torch.zeros(after.shape[:-1], dtype=torch.bool, device=after.device)
        return cosine(before, after) > self.thresholds[layer - 1]

    def all_leave(self, layer: int, before: Tensor, after: Tensor) -> bool:
        """See `ExitPolicy.all_leave`."""
        return self.asks(layer) and float(cosine(before, after).min()) > self.thresholds[layer - 1]

    def asks(self, layer: int) -> bool:
        """See `ExitPolicy.asks`."""
        return layer >= self.entry_layer - 1 and self.thresholds[layer - 1] < 1


@dataclass(frozen=True)
class FixedExit:
    """Every row leaves after block `depth`: for tests, floors and drafts. A depth of L is the dense model."""

    depth: int

    def leaves(self, layer: int, before: Tensor, after: Tensor) -> Tensor:  # noqa: ARG002  (a policy's signature)
        """See `ExitPolicy.leaves`."""
        return torch.full(after.shape[:-1], layer >= self.depth, dtype=torch.bool, device=after.device)

    def all_leave(self, layer: int, before: Tensor, after: Tensor) -> bool:  # noqa: ARG002
        """See `ExitPolicy.all_leave`."""
        return self.asks(layer)

    def asks(self, layer: int) -> bool:
        """See `ExitPolicy.asks`."""
        return layer >= self.depth


@dataclass(frozen=True)
class Route:
    """A way through the layers: who leaves, and what those who left run through.

    Blocks in `dense_layers` (from 1) have no 4-bit copy in the river: every row runs them with the backbone's weights.
    The first `held` positions of a sequence do not leave, 0 being the paper's rule; after block `resident`, the last
    one that may run, every row does.
    """

    policy: ExitPolicy
    dense_layers: frozenset[int] = frozenset()
    held: int = HELD
    resident: int | None = None

    @classmethod
    def of(cls, way: "ExitPolicy | Route") -> "Route":
        """A bare policy is asked for every token, as in the paper."""
        return way if isinstance(way, Route) else cls(way, held=0)

    def leaves(self, layer: int, before: Tensor, after: Tensor, positions: Tensor) -> Tensor:
        """Return bool [B, S]: the rows that leave after block `layer`; `positions` [B or 1, S] in their sequences."""
        if self.resident is not None and layer >= self.resident:
            return torch.ones(after.shape[:-1], dtype=torch.bool, device=after.device)
        return self.policy.leaves(layer, before, after) & (positions >= self.held)


def thresholds_of(policy: ExitPolicy, num_layers: int) -> tuple[float, ...] | None:
    """The cosine that blocks 1 to L must exceed for a token to leave, `NEVER` where none does; None: another rule."""
    match policy:
        case CosineExit():
            asked = range(1, len(policy.thresholds) + 1)
            found = [policy.thresholds[layer - 1] if policy.asks(layer) else NEVER for layer in asked]
            return (*found, *[NEVER] * (num_layers - len(found)))
        case FixedExit():
            return tuple(ALWAYS if layer >= policy.depth else NEVER for layer in range(1, num_layers + 1))
        case _:
            return None


def exit_histogram(depths: Sequence[int], num_layers: int) -> list[int]:
    """Return how many tokens executed exactly 1, 2, … L backbone blocks."""
    counts = [0] * num_layers
    for depth in depths:
        counts[depth - 1] += 1
    return counts
