"""N-vium's passes as CUDA graphs: a stretch of waiting tokens through one segment, in shapes of 1, 2, 4, … rows.

A shorter stretch repeats its last token, which writes the same keys and values again and is cut off. Elsewhere than on
a GPU the function is called. Knows no junctions and no law; see `flight.Flight`.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .decoder import Decoder
from .graphs import Graphs
from .piggyback import DeferredCache
from .progress import Reporter
from .static import StaticFrame, StaticFrames, StaticStep, bucket_of
from .static_exits import joined
from .step import Step

MOST_ROWS = 128
"""Longer stretches (prompts) run kernel by kernel: their products keep a GPU busy."""


class SegmentGraphs:
    """Graphs by segment, number of rows and bucket of lengths, over the memory of one cache.

    A cache that is no longer used gives its memory to the next, so that the graphs serve again.
    """

    def __init__(self, decoder: Decoder, segments: Sequence[range], reporter: Reporter | None = None) -> None:
        self._decoder, self._segments = decoder, segments
        self._blocks = [joined(decoder.arch, block) for block in decoder.blocks]
        self._graphs: Graphs[Tensor] = Graphs(decoder.device, reporter)
        self._frames = StaticFrames(decoder.arch, decoder.device, decoder.dtype)
        self._home: list[tuple[Tensor, Tensor]] = []
        self._owner: weakref.ref[DeferredCache] | None = None  # who uses the memory of `_home`
        self._lent: weakref.ref[DeferredCache] | None = None
        hidden = decoder.arch.hidden_size
        self._states = torch.zeros(1, MOST_ROWS, hidden, dtype=decoder.dtype, device=decoder.device)
        self._positions = torch.zeros(MOST_ROWS, dtype=torch.int64, device=decoder.device)

    @property
    def broken(self) -> str:
        """Why no graph can be made; empty as long as they can."""
        return self._graphs.broken

    def lend(self, cache: DeferredCache) -> None:
        """Let a new cache of one row be the one that has graphs, in the memory of the one before where that is free."""
        free = self._owner is None or self._owner() is None
        self._lent = weakref.ref(cache)
        if free and self._home and self._home[0][0].shape[2] >= cache.capacity:
            cache.adopt(self._home)
            self._owner = self._lent

    def run(self, segment: int, step: Step, cache: DeferredCache, h: Tensor) -> Tensor | None:
        """Take the states h [1, n, hidden] at the step's positions through a segment; None where there is no graph."""
        count = h.shape[1]
        lent = None if self._lent is None else self._lent()
        if self.broken or lent is None or cache is not lent or count > MOST_ROWS or self._turns(step):
            return None
        self._settle(lent)
        rows = 1 << (count - 1).bit_length()
        states, positions = self._states[:, :rows], self._positions[:rows]
        positions.copy_(torch.arange(rows).clamp_(max=count - 1) + step.start)
        states[:, :count] = h
        states[:, count:] = h[:, -1:]
        frame = self._frames.of(bucket_of(step.end, lent.capacity))
        key = (segment, rows, len(frame.keys))
        out = self._graphs.attempt(key, lambda: self._pass(segment, states, positions, frame, lent))
        if out is None:
            return None
        for layer in self._segments[segment]:
            lent.claim(step, layer)
        return out[:, :count].clone()

    def _turns(self, step: Step) -> bool:
        """Whether the tables rotate the step's first token otherwise than its last (longrope, dynamic NTK).

        An eager pass rotates all of a stretch as its last one.
        """
        return any(rope.regime(step.start + 1) != rope.regime(step.end) for rope in self._decoder.arch.ropes)

    def _pass(self, segment: int, h: Tensor, positions: Tensor, frame: StaticFrame, cache: DeferredCache) -> Tensor:
        step = StaticStep(frame, positions)
        for layer in self._segments[segment]:
            h = self._blocks[layer](h, step, cache)
        return h

    def _settle(self, cache: DeferredCache) -> None:
        """Forget all graphs where the cache's memory is not the one that they were made for."""
        if self._home and self._home[0][0] is cache.buffers(0)[0]:
            return
        self._graphs.clear()
        self._home, self._owner = cache.memory, weakref.ref(cache)
        self._frames.fit(cache.capacity)
