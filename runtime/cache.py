"""What a generation remembers of keys and values: a static cache, and what any store of them offers a block.

Remembers only; which positions a pass writes is decided by the `Step`. Knows no weights.
"""

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ..errors import UnsupportedError, UsageError
from .architecture import Architecture

if TYPE_CHECKING:
    from .step import Step

T = TypeVar("T")


class RotationChangedError(UnsupportedError):
    """The sequence has outgrown the lengths that its stored keys were rotated for; who holds its ids runs it again."""

    def __init__(self) -> None:
        super().__init__(
            "The sequence outgrew the short RoPE factors of this model while it was running",
            "Run the whole sequence again from an empty cache.",
        )


class KVStore(Protocol):
    """Where a block puts its keys and values, and where it finds the ones that it attends to."""

    def store(self, step: "Step", layer: int, k: Tensor, v: Tensor) -> None:
        """Keep k and v [B, kv_heads, S, head_dim] of a layer, at the positions of the step."""
        ...

    def fetch(self, step: "Step", layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, T, head_dim] that the layer attends to, from the step's first key on."""
        ...

    def claim(self, step: "Step", layer: int) -> tuple[Tensor, Tensor] | None:
        """Buffers [B, kv_heads, capacity, head_dim] of a layer, None where there are none.

        The caller writes its keys and values at the positions of the step, which counts as stored from now on.
        """
        ...


@dataclass
class _Held:
    """How far the rows of a cache are filled: tokens per slot and row; how the keys of each row are rotated."""

    rows: int
    lengths: list[tuple[int, ...]]
    regimes: tuple[tuple[int, ...], ...] = ()


class KVCache:
    """Static buffers [B, kv_heads, capacity, head_dim], one pair per slot, and how much of each row is filled.

    `slot_of` maps layers to slots; by default the architecture's map (one slot per layer that keeps a cache). Each slot
    has lengths of its own, since blocks may lag behind others. Lengths are plain ints: no pass waits for the device.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        slot_of: Sequence[int] | None = None,
    ) -> None:
        self.slot_of = arch.slots if slot_of is None else tuple(slot_of)
        self.batch = batch
        self.capacity = capacity
        shape = (batch, arch.num_kv_heads, capacity, arch.head_dim)
        slots = range(max(self.slot_of) + 1)
        # Zeroed, since masked entries are multiplied by a weight of 0 and must be finite.
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in slots]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in slots]
        self._held = _Held(batch, [(0,) * batch for _ in slots])
        self._first = 0  # of the rows held: a part of a cache shares all of it
        self._places: tuple[array[int], array[int]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._keys[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self._keys[0].device

    @property
    def lengths(self) -> Sequence[tuple[int, ...]]:
        """Tokens stored, per slot and row."""
        return tuple(map(self._of, self._held.lengths))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers at full capacity."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values))

    def starts(self, layers: range) -> tuple[int, ...]:
        """Tokens that every one of `layers` has stored, per row. Layers that lag are stepped apart: UsageError."""
        lengths, first, last = self._held.lengths, self._first, self._first + self.batch
        found = {lengths[self.slot_of[layer]][first:last] for layer in layers}
        if len(found) != 1:
            raise UsageError(f"Layers {layers.start} to {layers.stop - 1} have stored different numbers of tokens")
        return found.pop()

    def check_room(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Raise UsageError unless `counts` tokens more fit behind `starts`, row by row."""
        if len(starts) != len(counts):
            raise UsageError(f"A chunk with batch {len(counts)} does not fit a cache with batch {len(starts)}")
        needed = max(start + count for start, count in zip(starts, counts, strict=True))
        if needed > self.capacity:
            raise UsageError(
                f"The sequence needs {needed} positions, the cache has {self.capacity}",
                "Shorten the input or allow a longer context.",
            )

    def begin(self, step: "Step") -> None:
        """Refuse a step whose keys would be rotated otherwise than the stored ones (longrope past its switch)."""
        held = self._held
        stored = self._of(held.regimes)
        if step.regimes == stored:
            return
        if stored and any(a != b for a, b, n in zip(stored, step.regimes, step.starts, strict=True) if n):
            raise RotationChangedError
        others = held.regimes or step.regimes[:1] * held.rows  # of rows without a token: any will do
        held.regimes = _spliced(others, self._first, step.regimes)

    def rows(self, first: int, count: int = 1) -> Self:
        """Rows `first` .. `first + count` as a cache of their own, over the same memory; good until the whole grows.

        A subclass that keeps more of its rows hands that on here.
        """
        if not 0 <= first < first + count <= self.batch:
            raise UsageError(f"A cache of {self.batch} rows has no rows {first} to {first + count - 1}")
        part = copy.copy(self)
        part.narrow(first, count)
        return part

    def narrow(self, first: int, count: int) -> None:
        """Be a cache of rows `first` .. `first + count` only from now on."""
        self.batch = count
        self._first += first
        self._keys = [buffer.narrow(0, first, count) for buffer in self._keys]
        self._values = [buffer.narrow(0, first, count) for buffer in self._values]
        self.moved()

    def move(self, source: int, target: int) -> None:
        """Put row `source` in the place of row `target`, and leave it empty. A subclass moves what it keeps besides."""
        lengths = self.lengths
        for buffers in (self._keys, self._values):
            for buffer, kept in zip(buffers, lengths, strict=True):
                buffer[target, :, : kept[source]] = buffer[source, :, : kept[source]]
        for slot, kept in enumerate(lengths):
            self._hold(slot, _spliced(_spliced(kept, target, kept[source : source + 1]), source, (0,)))
        held = self._held
        at = self._first + source
        held.regimes = _spliced(held.regimes, self._first + target, held.regimes[at : at + 1])

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens a row, keeping what is stored."""
        if capacity <= self.capacity:
            return
        if self.batch != self._held.rows:
            raise UsageError("Some rows of a cache cannot grow by themselves")
        for buffers in (self._keys, self._values):
            for slot, old in enumerate(buffers):
                buffers[slot] = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
                buffers[slot][:, :, : self.capacity] = old
        self.capacity = capacity
        self.moved()

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget what lies beyond `lengths` (one for all rows, or one per row) in every slot."""
        limits = (lengths,) * self.batch if isinstance(lengths, int) else tuple(lengths)
        if len(limits) != self.batch or min(limits) < 0:
            raise UsageError(f"A cache of {self.batch} rows cannot be cut to {list(limits)}")
        for slot, kept in enumerate(self.lengths):
            self._hold(slot, tuple(map(min, kept, limits)))

    def store(self, step: "Step", layer: int, k: Tensor, v: Tensor) -> None:
        """See `KVStore.store`. Padding is not stored; storing the same step again overwrites it."""
        slot = self.slot_of[layer]
        keys, values = self._keys[slot], self._values[slot]
        if step.uniform:
            keys.narrow(2, step.start, step.width).copy_(k)
            values.narrow(2, step.start, step.width).copy_(v)
        else:
            rows, source, target = step.scatter
            keys[rows, :, target] = k[rows, :, source]
            values[rows, :, target] = v[rows, :, source]
        self._hold(slot, step.ends)

    def fetch(self, step: "Step", layer: int) -> tuple[Tensor, Tensor]:
        """See `KVStore.fetch`. Views, not copies."""
        slot = self.slot_of[layer]
        first = step.first_key(layer)
        count = step.end - first
        return self._keys[slot].narrow(2, first, count), self._values[slot].narrow(2, first, count)

    def claim(self, step: "Step", layer: int) -> tuple[Tensor, Tensor]:
        """See `KVStore.claim`."""
        self._hold(self.slot_of[layer], step.ends)
        return self.buffers(layer)

    def claim_all(self, step: "Step", layers: range) -> "tuple[array[int], array[int]]":
        """`claim` for a stretch of layers and a native chain (`quant.kernels.chain`): its `places` and `strides`."""
        for slot in {self.slot_of[layer] for layer in layers}:
            self._hold(slot, step.ends)
        if self._places is None:
            buffers = [self.buffers(layer) for layer in range(len(self.slot_of))]
            row, group = self._keys[0].stride()[:2]
            self._places = array("q", [part.data_ptr() for pair in buffers for part in pair]), array("q", [group, row])
        return self._places

    def moved(self) -> None:
        """The buffers are others from now on; for subclasses that change them."""
        self._places = None

    def buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, capacity, head_dim] that `layer` reads, and writes where it keeps any."""
        slot = self.slot_of[layer]
        return self._keys[slot], self._values[slot]

    @torch.inference_mode()  # the memory may be of a cache that was made in it
    def wipe(self) -> None:
        """Zero the memory: masked entries are multiplied by a weight of 0, so an earlier text's NaN would spread."""
        for buffer in (*self._keys, *self._values):
            buffer.zero_()

    def _hold(self, slot: int, lengths: tuple[int, ...]) -> None:
        held = self._held.lengths
        held[slot] = _spliced(held[slot], self._first, lengths)

    def _of(self, rows: tuple[T, ...]) -> tuple[T, ...]:
        """What belongs to the rows of this cache."""
        return rows[self._first : self._first + self.batch]


def _spliced(row: tuple[T, ...], first: int, part: tuple[T, ...]) -> tuple[T, ...]:
    """`row` with `part` from `first` on."""
    return row[:first] + part + row[first + len(part) :]
