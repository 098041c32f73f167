"""Rows that have left the backbone and rows that have not, through one block.

A routed block is an ordinary `Block` whose linears take each row through the dense or the 4-bit weights; attention
sees one set of keys and values. Knows no exit rule: who has left is said by the caller through `Rows`.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..quant.linear import Linear
from .architecture import Architecture
from .block import Block, Projection, Separate
from .cache import KVStore
from .stack import run_layers
from .step import Pass


class Rows:
    """Which rows of the present pass have left; the routed linears of a block share one."""

    def __init__(self, left: Tensor) -> None:
        flat = left.flatten()
        self.staying = (~flat).nonzero().squeeze(1)
        self.gone = flat.nonzero().squeeze(1)


def _route(
    parts: Callable[[Tensor], Sequence[Tensor]], x: Tensor, rows: Tensor, out: list[Tensor] | None
) -> list[Tensor]:
    """Write `parts` of the chosen rows of x [R, K] into `out` (made on the first call)."""
    results = parts(x[rows])
    if out is None:
        out = [x.new_empty(x.shape[0], part.shape[-1]) for part in results]
    for whole, part in zip(out, results, strict=True):
        whole[rows] = part
    return out


class RoutedProjection:
    """A `Projection` that sends each row through one of two."""

    def __init__(self, dense: Projection, river: Projection, rows: Rows) -> None:
        self._dense, self._river, self._rows = dense, river, rows

    @property
    def linears(self) -> Sequence[Linear]:
        """See `Projection`: none that serves all rows."""
        return ()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """See `Projection`."""
        flat = x.reshape(-1, x.shape[-1])
        out = _route(self._dense, flat, self._rows.staying, None)
        out = _route(self._river, flat, self._rows.gone, out)
        return [part.view(*x.shape[:-1], -1) for part in out]


class RoutedLinear:
    """A `Linear` that sends each row through one of two."""

    def __init__(self, dense: Linear, river: Linear, rows: Rows) -> None:
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self._both = RoutedProjection(Separate([dense]), Separate([river]), rows)
        self._linears = (dense, river)

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(linear.nbytes for linear in self._linears)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._both(x)[0]


@dataclass(frozen=True)
class Ladder:
    """The backbone's blocks and their exit layers, side by side; `exits[l]` is the 4-bit copy of `dense[l]`."""

    arch: Architecture
    dense: Sequence[Block]
    exits: Sequence[Block]

    def run(self, h: Tensor, step: Pass, kv: KVStore, index: int, left: Tensor) -> Tensor:
        """Take h [B, S, hidden] through block `index` (from 0): rows marked in `left` bool [B, S] by the exit layer.

        A side that no row uses is not touched, so it need not be there. Both may be the same block.
        """
        gone, count = int(left.sum()), left.numel()  # the host asks once
        if 0 < gone < count and self.dense[index] is not self.exits[index]:
            return self._routed(index, left)(h, step, kv)
        return run_layers(self.exits if gone == count else self.dense, h, step, kv, range(index, index + 1))

    def _routed(self, index: int, left: Tensor) -> Block:
        one, other = self.dense[index], self.exits[index]
        rows, routed = Rows(left), copy.copy(one)
        routed.qkv = RoutedProjection(one.qkv, other.qkv, rows)
        routed.output = RoutedLinear(one.output, other.output, rows)
        routed.gate_up = RoutedProjection(one.gate_up, other.gate_up, rows)
        routed.down = RoutedLinear(one.down, other.down, rows)
        return routed
