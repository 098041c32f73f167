"""Backbone blocks that do not fit in device memory: how many fit, and streaming the others.

`drop` (the paper's mode) never loads them and a token that would go deeper continues in the river. `stream` keeps them
in pinned host memory and copies each to the device while the block before it runs. Knows no exit rule.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from ..errors import ResourceError, UsageError
from .block import Block

MARGIN = 0.08
"""Share of the memory that is left for activations and the allocator."""
TRAVELLING = 3
"""Streamed blocks on the device at once: one that its reader may still hold, one at work, one on its way."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device: what must be there, what each backbone block adds, and how many blocks fit."""

    budget: int
    fixed: int
    per_block: int
    resident: int

    def describe(self, num_layers: int, offload: str) -> str:
        """Say the plan in one line."""
        rest = num_layers - self.resident
        fate = {"drop": "not loaded", "stream": "streamed from host memory"}[offload]
        others = f"; the other {rest} are {fate}" if rest else ""
        used = (self.fixed + self.resident * self.per_block) / 2**30
        return f"{self.resident} of {num_layers} backbone blocks in {used:.2f} GiB of device memory{others}."


def parse_memory(text: str, *, free: int, total: int) -> int:
    """Return the bytes that "8GiB", "8GB", "8G", "90%" (of the total) or "auto" (what is free) mean.

    Raises UsageError for anything else.
    """
    if text == "auto":
        return free
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?|%)\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{text} is no amount of memory", "Use auto, a share such as 90%, or a size such as 8GiB.")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        return int(total * number / 100)
    base = 1000 if unit.endswith("b") and "i" not in unit and len(unit) == 2 else 1024
    return int(number * base ** " kmgt".index(unit[0] if unit and unit[0] in "kmgt" else " "))


def plan_resident(*, budget: int, fixed: int, per_block: int, num_layers: int, least: int) -> MemoryPlan:
    """Return how many backbone blocks fit beside `fixed` (embeddings, head, exit layers, KV cache) in `budget` bytes.

    Raises ResourceError where not even `least` blocks do.
    """
    usable = int(budget * (1 - MARGIN))
    resident = min(num_layers, (usable - fixed) // per_block)
    if resident < least:
        need = (fixed + least * per_block) / (1 - MARGIN)
        raise ResourceError(
            f"{budget / 2**30:.2f} GiB of device memory do not hold the river: it needs {need / 2**30:.2f} GiB",
            "Give it more with --gpu-memory, shorten --ctx-size, or run with --device cpu.",
        )
    return MemoryPlan(budget, fixed, per_block, int(resident))


class StreamedBlocks(Sequence[Block]):
    """Backbone blocks of which only the first `resident` stay on the device.

    The others are copied from the host when asked for; asking for one starts the copy of the next on a second stream,
    so that it travels while this one computes. `TRAVELLING` blocks beyond the resident ones are on the device at most.

    A block's memory belongs to the second stream, and is given out again there as soon as Python lets go of the block,
    which may be before its work is done. So each copy first waits for all work that the reading stream has been given;
    the block that is asked for now is not yet part of that, and computes beside the copy.
    """

    def __init__(
        self, resident: Sequence[Block], count: int, fetch: Callable[[int], Block], device: torch.device
    ) -> None:
        self._resident = resident
        self._count = count
        self._fetch = fetch
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: dict[int, tuple[Block, torch.cuda.Event | None]] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        if index < len(self._resident):
            if index + 1 == len(self._resident):
                self._prefetch(index + 1)
            return self._resident[index]
        return self._arrived(index)

    def __iter__(self) -> Iterator[Block]:
        return (self[index] for index in range(self._count))

    def _arrived(self, index: int) -> Block:
        self._prefetch(index)
        block, event = self._ahead.pop(index)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._ahead = {}
        self._prefetch(index + 1)
        return block

    def _prefetch(self, index: int) -> None:
        if index >= self._count or index in self._ahead:
            return
        if self._stream is None:
            self._ahead[index] = (self._fetch(index), None)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            block = self._fetch(index)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._ahead[index] = (block, event)
