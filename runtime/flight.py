"""One pass up a stack whose tokens may leave early, segment by segment: of one sequence, or of several side by side.

Every segment runs all that waits at the junction below it, the new tokens last, as one stretch; so keys and values are
never missing where a token attends. Source: N-vium (arXiv 2605.13190). Knows no law: who runs it takes lanes out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .decoder import Decoder
from .packed import PackedStep, PackedStore
from .piggyback import DeferredCache
from .side_by_side import rows_of
from .step import Step

if TYPE_CHECKING:
    from .static_segments import SegmentGraphs


@dataclass(slots=True)
class Lane:
    """One sequence in a pass: its cache, its step, its states in flight [1, n, hidden], blocks run, rows per pass."""

    cache: DeferredCache
    step: Step | None = None
    h: Tensor = field(default_factory=lambda: torch.empty(0))
    depth: int = 0
    passes: list[int] = field(default_factory=list)

    @property
    def last(self) -> Tensor:
        """The newest token's state [1, hidden]."""
        return self.h.select(1, -1)


class Flight:
    """The pass of all `lanes`. `segment` is the one that ran last; a lane may be taken out."""

    def __init__(
        self, decoder: Decoder, segments: tuple[range, ...], lanes: list[Lane], graphs: "SegmentGraphs | None" = None
    ) -> None:
        self._decoder, self._segments, self._graphs = decoder, segments, graphs
        self.lanes = lanes
        self.segment = 0

    @property
    def more(self) -> bool:
        """Whether there are segments above."""
        return self.segment + 1 < len(self._segments)

    def enter(self, ids: Tensor) -> None:
        """Run new ids [B, S] through the first segment."""
        decoder, blocks, count = self._decoder, self._segments[0], len(self.lanes)
        rows = zip(self.lanes, rows_of(ids, count), strict=True)
        steps = [decoder.step(lane.cache, row, layers=blocks) for lane, row in rows]
        for lane, h in zip(self.lanes, rows_of(decoder.embed(ids), count), strict=True):
            lane.h = h
        self._run(steps)

    def climb(self) -> None:
        """Run all that waits at the next junction, the newest tokens last, through the segment above it."""
        junction, self.segment = self.segment, self.segment + 1
        for lane in self.lanes:
            lane.h = lane.cache.states(junction)
            lane.passes.append(lane.h.shape[1])
        self._run([self._prepare(lane) for lane in self.lanes])
        for lane in self.lanes:
            lane.cache.passed(junction)

    def relieve(self, most: int) -> None:
        """Where more than `most` tokens of a lone lane wait, run them and all above them to the end."""
        cache, last = self.lanes[0].cache, len(self._segments) - 1
        self.segment = next((k for k in range(last) if cache.waiting(k) > most), last)
        while self.more:
            if cache.waiting(self.segment):
                self.climb()
            else:
                self.segment += 1

    def _prepare(self, lane: Lane) -> Step:
        """The step of a lane's next pass; that of the segment below where both run the same positions."""
        below, start, count = lane.step, lane.cache.length(self.segment), lane.h.shape[1]
        if below is not None and below.start == start and below.width == count:
            return below
        return self._decoder.segment(start, count, start + count)

    def _run(self, steps: list[Step]) -> None:
        """Take the lanes' states through the blocks of `segment`."""
        parts = [self._alone(steps[0])] if len(steps) == 1 else self._packed(steps)
        depth, more = self._segments[self.segment].stop, self.more
        for lane, step, part in zip(self.lanes, steps, parts, strict=True):
            lane.step, lane.h, lane.depth = step, part, depth
            if more:
                lane.cache.wait(self.segment, step.start, part)

    def _alone(self, step: Step) -> Tensor:
        (lane,), blocks = self.lanes, self._segments[self.segment]
        whole = None if self._graphs is None else self._graphs.run(self.segment, step, lane.cache, lane.h)
        return self._decoder.run(lane.h, step, lane.cache, blocks) if whole is None else whole

    def _packed(self, steps: list[Step]) -> Sequence[Tensor]:
        states = [lane.h for lane in self.lanes]
        store = PackedStore([lane.cache for lane in self.lanes])
        h = self._decoder.run(torch.cat(states, 1), PackedStep(steps), store, self._segments[self.segment])
        return h.split([each.shape[1] for each in states], 1)
