"""Blocks one behind the other: a stretch of them runs as one native call where that can be, else block by block.

Either way the numbers are the same. Knows no files, and not what the blocks are for: a backbone is a stack, and so are
the exit layers; a climb goes over from one to the other.
"""

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from ..quant.kernels import small
from ..quant.kernels.chain import MOST_ROWS, Chain, Climbed, Rungs, Shape
from .architecture import Architecture
from .block import Block
from .cache import KVCache, KVStore
from .step import Pass, Step


class Stack(Sequence[Block]):
    """Blocks of one model, counted from 0 as its layers are. They may be loaded when asked for, and are then kept."""

    def __init__(self, arch: Architecture, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._chain = _chain(arch, len(blocks))
        self._unfit = self._chain is None  # or one block of them is

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        return self._blocks[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def run(self, h: Tensor, step: Pass, kv: KVStore, layers: range) -> Tensor:
        """Take h [B, S, hidden] through `layers`."""
        if isinstance(step, Step) and isinstance(kv, KVCache) and self._fits(h, step, kv) and self._linked(layers):
            return self._run_chain(h, step, kv, layers)
        for layer in layers:
            h = self._blocks[layer](h, step, kv)
        return h

    def climb(self, exits: "Stack", rungs: Rungs, h: Tensor, step: Pass, kv: KVStore) -> Climbed:
        """Take rows of h [B, S, hidden] through these blocks until they leave, then through `exits`, natively.

        It ends early where a block cannot run so: then the caller goes on from there.
        """
        climbed, chain, other = Climbed.begin(h), self._chain, exits._chain  # noqa: SLF001 - its own kind
        if chain is None or other is None or not isinstance(step, Step) or not isinstance(kv, KVCache):
            return climbed
        if not self._fits(h, step, kv):
            return climbed
        tables = step.rows, *kv.claim_all(step, range(len(self)))
        while True:
            climbed = chain.climb(other, rungs, climbed, tables)
            if climbed.done == len(self) or not self._linked_for(climbed, exits):
                return climbed

    def _linked_for(self, climbed: Climbed, exits: "Stack") -> bool:
        """Whether the chains have what rows need next: one that needs a block first ends a native call."""
        needed, block = [(self, not all(climbed.depths)), (exits, any(climbed.depths))], climbed.done
        return all(stack._linked(range(block, block + 1)) for stack, needs in needed if needs)  # noqa: SLF001

    def _fits(self, h: Tensor, step: Step, kv: KVCache) -> bool:
        if self._unfit or not (step.few or (step.tokens and h.shape[0] <= MOST_ROWS)):
            return False
        fits = h.dtype is torch.bfloat16 and h.is_cpu and not h.requires_grad and h.is_contiguous()
        return fits and kv.dtype is torch.bfloat16

    def _linked(self, layers: range) -> bool:
        """Whether the chain has these blocks; those that it has not met yet are put in."""
        chain = self._chain
        if chain is None:
            return False
        for layer in layers:
            if not chain.has(layer):
                link = self._blocks[layer].link()
                if link is None:
                    self._unfit = True
                    return False
                chain.put(layer, link)
        return True

    def _run_chain(self, h: Tensor, step: Step, kv: KVCache, layers: range) -> Tensor:
        if self._chain is None or not layers:
            return h
        places, strides = kv.claim_all(step, layers)
        return self._chain(h, layers, step.rows, places, strides)


def _chain(arch: Architecture, count: int) -> Chain | None:
    """An empty chain, where there is one for such models."""
    if not small.available() or arch.activation not in small.GATES or arch.attention_softcap is not None:
        return None
    shape = Shape(
        hidden=arch.hidden_size,
        inner=arch.intermediate_size,
        queries=arch.num_heads,
        groups=arch.num_kv_heads,
        width=arch.head_dim,
        gate=arch.activation,
        eps=arch.norm_eps,
        scale=arch.attention_scale,
        kinds=len(arch.kinds),
    )
    return Chain(shape, count)


def run_layers(blocks: Sequence[Block], h: Tensor, step: Pass, kv: KVStore, layers: range) -> Tensor:
    """Take h [B, S, hidden] through `layers` of these blocks, which may be loaded one by one."""
    if isinstance(blocks, Stack):
        return blocks.run(h, step, kv, layers)
    for layer in layers:
        h = blocks[layer](h, step, kv)
    return h
