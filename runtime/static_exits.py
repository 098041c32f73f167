"""River's exit rule on the device, and blocks that follow its flag: no host round trip between layers.

The flag is raised by the block after which the token leaves; every block above runs its 4-bit weights then. Knows no
graphs and no cache. Source: River-LLM (arXiv 2604.18396), eq. (1).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..quant.flagged import FlaggedLinear, join_dense
from ..quant.linear import DenseLinear, Int4Linear, Linear
from ..quant.probe import triton_works
from .architecture import Architecture
from .block import Block, Fused, Projection
from .exits import ALWAYS, NEVER, cosine
from .river import River


class DeviceRule:
    """Who leaves, as tensors: `flag` int32 [1] is 1 once the token has left, `depth` int32 [1] counts its blocks.

    `deepest`: the last backbone block that may run. `interpreted`: see `FlaggedLinear`.
    """

    def __init__(
        self,
        thresholds: Sequence[float],
        *,
        held: int,
        deepest: int,
        device: torch.device,
        interpreted: bool = False,
    ) -> None:
        always = next((layer for layer, value in enumerate(thresholds, 1) if value == ALWAYS), deepest)
        self.deepest = deepest if held else min(deepest, always)
        self.first = next((layer for layer, value in enumerate(thresholds, 1) if value < NEVER), len(thresholds))
        self.thresholds = torch.tensor(thresholds, dtype=torch.float32, device=device)
        self.flag, self.depth = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self.interpreted = interpreted
        self._held = held
        self._in_triton = interpreted or triton_works(device)

    def begin(self) -> None:
        """Start a token: it has not left, and runs the first block."""
        self.flag.zero_()
        self.depth.fill_(1)

    def ask(self, layer: int, before: Tensor, after: Tensor, position: Tensor) -> None:
        """Look at the states [1, 1, hidden] around block `layer` (from 1) of the token at `position` int64 [1]."""
        if layer >= self.deepest:
            return
        if self._in_triton:
            from ..quant.gpu.rule import exit_rule  # noqa: PLC0415 - Triton, only where there is a GPU

            told = {"flag": self.flag, "depth": self.depth, "layer": layer, "held": self._held}
            exit_rule(before, after, self.thresholds, position, **told)
            return
        leaves = (cosine(before, after).view(1) > self.thresholds[layer - 1]) & (position >= self._held)
        self.flag.bitwise_or_(leaves.to(torch.int32))
        self.depth.add_(1 - self.flag)


@dataclass(frozen=True)
class FlaggedProjection:
    """A `Projection` through one of two, as the flag says; the host reads it (CPU)."""

    dense: Projection
    river: Projection
    flag: Tensor

    @property
    def linears(self) -> Sequence[Linear]:
        """See `Projection`: none that serves both ways."""
        return ()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """See `Projection`."""
        return self.river(x) if bool(self.flag) else self.dense(x)


def river_blocks(river: River, rule: DeviceRule) -> list[Block]:
    """The blocks of a token: the backbone's where it cannot have left, exit layers where it must have, both between."""
    arch, blocks = river.decoder.arch, []
    for index in range(arch.num_layers):
        if index >= rule.deepest:
            blocks.append(river.exits[index])
            continue
        dense = river.decoder.blocks[index]
        other = dense if index < rule.first else river.exits[index]
        blocks.append(joined(arch, dense) if other is dense else _flagged(arch, dense, other, rule))
    return blocks


def joined(arch: Architecture, block: Block, *, anywhere: bool = False) -> Block:
    """The block with one product for query, key and value, and one for gate and up, where its weights are on a GPU.

    The block itself goes on over the same memory. On a CPU (unless `anywhere`) weights may be a mapped file: they stay.
    """
    parts = [_dense_of(block.qkv), _dense_of(block.gate_up)]
    if not all(part and (anywhere or part[0].weight.is_cuda) for part in parts):
        return block
    whole = copy.copy(block)
    whole.qkv = Fused(join_dense(parts[0]), arch.qkv_sizes(block.index))
    whole.gate_up = Fused(join_dense(parts[1]), (arch.intermediate_size,) * 2)
    return whole


def _flagged(arch: Architecture, dense: Block, exit_: Block, rule: DeviceRule) -> Block:
    dense = joined(arch, dense, anywhere=rule.interpreted)
    block = copy.copy(dense)
    block.qkv = _either(dense.qkv, exit_.qkv, rule, arch.qkv_sizes(dense.index))
    block.gate_up = _either(dense.gate_up, exit_.gate_up, rule, (arch.intermediate_size,) * 2)
    block.output = _flagged_linear(dense.output, exit_.output, rule)
    block.down = _flagged_linear(dense.down, exit_.down, rule)
    return block


def _either(dense: Projection, river: Projection, rule: DeviceRule, sizes: Sequence[int]) -> Projection:
    ours, theirs = (cast("Sequence[Linear]", getattr(part, "linears", ())) for part in (dense, river))
    if len(ours) == len(theirs) == 1:
        return Fused(_flagged_linear(ours[0], theirs[0], rule), sizes)
    return FlaggedProjection(dense, river, rule.flag)


def _flagged_linear(dense: Linear, river: Linear, rule: DeviceRule) -> FlaggedLinear:
    if not isinstance(dense, DenseLinear) or not isinstance(river, Int4Linear):
        raise TypeError("a flagged product is of a dense and a 4-bit weight")
    return FlaggedLinear(dense, river, rule.flag, interpreted=rule.interpreted)


def _dense_of(projection: Projection) -> list[DenseLinear]:
    """The linears of a projection if all of them are dense, else none."""
    linears = cast("Sequence[Linear]", getattr(projection, "linears", ()))
    dense = [linear for linear in linears if isinstance(linear, DenseLinear)]
    return dense if len(dense) == len(linears) else []
