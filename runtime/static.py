"""Passes of fixed shape: what a CUDA graph can hold. All that changes from token to token is a tensor on the device.

A static pass attends to the first `bucket` positions of the cache under a mask that is computed where it is used, so
one graph serves every length up to the bucket. Knows no weights and no exit rule.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch
from torch import Tensor

from .architecture import Architecture
from .attention import View, attend
from .cache import KVCache, KVStore
from .rope import RopeSpec, tabulate
from .step import FOLDED_ROWS

LEAST_BUCKET = 256


def bucket_of(length: int, capacity: int) -> int:
    """How many positions a pass looks at that must see `length` of `capacity`: 256, 512, … or all."""
    return min(max(LEAST_BUCKET, 1 << (length - 1).bit_length()), capacity)


class StaticCache(KVCache):
    """A cache whose buffers static passes write themselves; afterwards the host says what is stored."""

    def stored(self, end: int) -> None:
        """Every layer holds `end` tokens of each row."""
        for slot in range(len(self._keys)):
            self._hold(slot, (end,) * self.batch)

    def renewed(self) -> Self:
        """Another empty cache over the same memory, for when this one is no longer used."""
        other = copy.copy(self)
        other.restart()
        return other

    def restart(self) -> None:
        """Be empty, and independent of the cache that this one is a copy of."""
        self._keys, self._values = list(self._keys), list(self._values)
        self._held = copy.deepcopy(self._held)
        self._held.regimes = ()
        self.truncate(0)


def tables_in_turn(specs: Sequence[RopeSpec], count: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Rotations [2, count, rotary_dim] of each spec: row p as token p is rotated when it is the newest.

    So longrope changes its frequencies at the length where it does, and dynamic NTK at every length past the trained
    one. An eager pass does the same, token by token.
    """
    return [_in_turn(spec, count).to(device=device, dtype=dtype) for spec in specs]


def _in_turn(spec: RopeSpec, count: int) -> Tensor:
    parts: list[Tensor] = []
    for _, stretch in groupby(range(count), key=lambda position: spec.regime(position + 1)):
        positions = list(stretch)
        parts.append(tabulate(spec, torch.tensor(positions), positions[-1] + 1))
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class StaticFrame:
    """What passes of one model and one bucket share: geometry, rotations, the numbers 0 … bucket - 1."""

    arch: Architecture
    tables: Sequence[Tensor]
    keys: Tensor
    dtype: torch.dtype


class StaticFrames:
    """The frames of one model, one for each bucket, made when they are first asked for."""

    def __init__(self, arch: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        self._arch, self._device, self._dtype = arch, device, dtype
        self._tables: list[Tensor] = []
        self._capacity = 0
        self._made: dict[int, StaticFrame] = {}

    def fit(self, capacity: int) -> None:
        """Have rotations for `capacity` positions; graphs made before are of no use afterwards."""
        self._made = {}
        if capacity > self._capacity:
            self._capacity = capacity
            self._tables = tables_in_turn(self._arch.ropes, capacity, self._device, self._dtype)

    def of(self, bucket: int) -> StaticFrame:
        """What passes over `bucket` positions share."""
        if bucket not in self._made:
            keys = torch.arange(bucket, device=self._device)
            self._made[bucket] = StaticFrame(self._arch, self._tables, keys, self._dtype)
        return self._made[bucket]


class StaticStep:
    """Rows at `positions` [R] (int64, on the device) of one sequence: a `Pass`.

    Two rows may have one position where they hold the same token: they write the same. That is how a pass of R rows
    serves fewer.
    """

    def __init__(self, frame: StaticFrame, positions: Tensor) -> None:
        self._frame, self._positions = frame, positions
        self._kind_of = frame.arch.kind_of
        self._folded = len(positions) <= FOLDED_ROWS and frame.arch.attention_softcap is None
        masks = {window: self._mask(window) for window in {kind.window for kind in frame.arch.kinds}}
        turns = [table.index_select(1, positions).unbind(0) for table in frame.tables]
        self.views = tuple(
            View(
                *((None, None) if kind.rope is None else turns[kind.rope]),
                mask=masks[kind.window],
                causal=False,
                folded=self._folded,
                first=0,
            )
            for kind in frame.arch.kinds
        )
        self._query_scale = self._scale(frame.arch.query_scaling)

    def attend(
        self,
        q: Tensor,
        own: tuple[Tensor, Tensor] | None,
        kv: KVStore,
        layer: int,
        *,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """See `Pass.attend`; `kv` is a `KVCache` of one row."""
        if not isinstance(kv, KVCache):
            raise TypeError("a static step needs a cache")
        keys, values = kv.buffers(layer)
        if own is not None:
            keys.index_copy_(2, self._positions, own[0])
            values.index_copy_(2, self._positions, own[1])
        if self._query_scale is not None:
            q = q * self._query_scale
        count = len(self._frame.keys)
        seen = keys.narrow(2, 0, count), values.narrow(2, 0, count)
        return attend(q, *seen, self.views[self._kind_of[layer]], scale=scale, softcap=softcap)

    def _mask(self, window: int | None) -> Tensor:
        """0 where a row [R, or heads of a group times R] sees a position of the bucket, else minus infinity."""
        at = self._positions[:, None]
        seen = self._frame.keys <= at
        if window is not None:
            seen &= self._frame.keys > at - window
        mask = torch.zeros(seen.shape, dtype=self._frame.dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        group = self._frame.arch.num_heads // self._frame.arch.num_kv_heads
        return mask.repeat(group, 1) if self._folded and len(self._positions) > 1 else mask

    def _scale(self, scaling: tuple[float, int] | None) -> Tensor | None:
        if scaling is None:
            return None
        beta, original = scaling
        scale = 1 + beta * torch.log1p(torch.floor(self._positions / original))
        return scale[:, None].to(self._frame.dtype)
