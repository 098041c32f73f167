"""The cache of a model whose tokens may leave early: keys, values, and the states that wait to go on.

A token that leaves at junction k has keys and values in the segments below it only; its state waits there until later
tokens pass and take it along. What waits at a junction is always the stretch of positions between the lengths of the
segments above and below it, so a pass appends one contiguous stretch. Source: N-vium (arXiv 2605.13190), its
"piggyback" decoding. Remembers only: runs nothing, knows no weights and no law.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ..errors import UnsupportedError, UsageError
from .architecture import Architecture
from .cache import KVCache


def segments(arch: Architecture, points: Sequence[int]) -> tuple[range, ...]:
    """Blocks between the junctions, `points[k - 1]` blocks lying before junction k.

    Raises UsageError for points that do not rise inside the stack, UnsupportedError where a block would read keys and
    values from below a junction: they may not be there yet.
    """
    ends = (*points, arch.num_layers)
    starts = (0, *points)
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise UsageError(
            f"Junctions cannot lie after blocks {list(points)}", f"Rising numbers below {arch.num_layers}."
        )
    for start, end in zip(starts, ends, strict=True):
        for layer in range(start, end):
            if arch.kv_sources[layer] < start:
                raise UnsupportedError(
                    f"Layer {layer + 1} reads the keys and values of layer {arch.kv_sources[layer] + 1}, "
                    f"from below the junction after layer {start}",
                    "Put junctions between the groups of layers that share a cache.",
                )
    return tuple(range(start, end) for start, end in zip(starts, ends, strict=True))


Queue = list[tuple[int, Tensor]]
"""Stretches of states [1, n, hidden], each with the position of its first."""


class DeferredCache(KVCache):
    """Keys and values, and per row and junction (from 0) the states that wait there.

    What waits is asked of one row: a cache of one, or `row` of a larger one. An interrupted pass leaves nothing that
    `truncate` to an earlier length does not put right: states are kept where they waited until the segment above has
    handed its own on (`wait`, then `passed`).
    """

    def __init__(
        self,
        arch: Architecture,
        points: Sequence[int],
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(arch, batch=batch, capacity=capacity, dtype=dtype, device=device)
        self.segments = segments(arch, points)
        self._slots = [sorted({self.slot_of[layer] for layer in blocks}) for blocks in self.segments]
        self._queues: list[list[Queue]] = [[[] for _ in points] for _ in range(batch)]  # shared by parts of the cache
        self._parts: dict[int, Self] = {}

    def row(self, index: int) -> Self:
        """A row as a cache of its own; the same object until the cache grows."""
        if self.batch == 1:
            return self
        if index not in self._parts:
            self._parts[index] = self.rows(index)
        return self._parts[index]

    def length(self, segment: int) -> int:
        """Tokens whose keys and values a segment (from 0) has stored."""
        return self._held.lengths[self._slots[segment][0]][self._first]

    def waiting(self, junction: int) -> int:
        """How many tokens wait at a junction."""
        return sum(states.shape[1] for _, states in self._queues[self._first][junction])

    def wait(self, junction: int, first: int, states: Tensor) -> None:
        """Keep states [1, n, hidden] of the tokens from position `first` on."""
        self._queues[self._first][junction].append((first, states))

    def states(self, junction: int) -> Tensor:
        """Everything that waits at a junction, by position: [1, n, hidden]."""
        parts = [states for _, states in self._queues[self._first][junction]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def passed(self, junction: int) -> None:
        """Let go of what waited at a junction: the segment above has run it, and its results wait or are done."""
        self._queues[self._first][junction] = []

    @property
    def memory(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every slot."""
        return list(zip(self._keys, self._values, strict=True))

    def adopt(self, memory: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Use the memory of an earlier cache of the same shape, at least as large, wiped. This one must be empty."""
        self._keys, self._values = [keys for keys, _ in memory], [values for _, values in memory]
        self.moved()
        self.wipe()
        self.capacity = memory[0][0].shape[2]

    def narrow(self, first: int, count: int) -> None:
        """See `KVCache.narrow`."""
        super().narrow(first, count)
        self._parts = {}

    def move(self, source: int, target: int) -> None:
        """See `KVCache.move`."""
        super().move(source, target)
        queues, first = self._queues, self._first
        queues[first + target], queues[first + source] = queues[first + source], [[] for _ in self.segments[1:]]

    def grow(self, capacity: int) -> None:
        """See `KVCache.grow`."""
        super().grow(capacity)
        self._parts = {}

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """See `KVCache.truncate`."""
        super().truncate(lengths)
        for index in range(self.batch):
            self.row(index).mend()

    def mend(self) -> None:
        """Make lengths and queues of one row fit each other again, after they were cut or a pass was interrupted."""
        counts = [min(self._held.lengths[slot][self._first] for slot in slots) for slots in self._slots]
        queues = self._queues[self._first]
        for junction in reversed(range(len(queues))):
            # States that an interrupted pass had computed and not handed on are computed again, from further below.
            reached = max((first + states.shape[1] for first, states in queues[junction]), default=0)
            counts[junction] = min(counts[junction], max(reached, counts[junction + 1]))
        for slots, count in zip(self._slots, counts, strict=True):
            for slot in slots:
                self._hold(slot, (count,))
        for junction, parts in enumerate(queues):
            kept = [_cut(*part, counts[junction + 1], counts[junction]) for part in parts]
            queues[junction] = [part for part in kept if part[1].shape[1]]


def _cut(first: int, states: Tensor, start: int, stop: int) -> tuple[int, Tensor]:
    """Of states [1, n, hidden] from position `first` on, those at positions `start` to `stop`."""
    low = max(start, first)
    return low, states[:, low - first : max(stop - first, low - first)]
