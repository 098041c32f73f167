"""What one pass needs and all its blocks share: positions, rotations, masks, write positions; made once per pass.

Knows no weights and stores nothing.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from operator import add
from typing import Protocol

import torch
from torch import Tensor

from ..errors import UsageError
from .architecture import Architecture, LayerSpec
from .attention import View, attend
from .cache import KVStore
from .rope import Rotary

FOLDED_ROWS = 8  # up to here the query heads of a group are stacked as rows: keys are read once per group
FEW_ROWS = 16  # up to here tokens of one sequence take the native attention one by one, each exactly as if alone


class Pass(Protocol):
    """What a block asks of a pass: rotations by kind of layer, and attention over what the pass sees."""

    @property
    def views(self) -> Sequence[View]:
        """One per kind of layer; the step itself may keep their masks."""
        ...

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
        """Attention of rotated q [B, heads, S, D] -> [B, S, heads * D], over what `kv` holds of the layer.

        `own` are the pass's keys and values [B, kv_heads, S, D], stored first; None where the layer reads another's.
        """
        ...


class Step:
    """One pass: rows `starts[i] .. starts[i] + counts[i]` of each sequence, as a chunk of `width` columns.

    Shorter rows are padded on the right. A padding column takes the last valid position of its row, so that it attends
    to something finite; what it computes is never stored. `length` is how long the sequences will become, where that
    is known and decides their rotation; otherwise the length up to here does.
    """

    def __init__(
        self,
        arch: Architecture,
        rotaries: Sequence[Rotary],
        *,
        starts: tuple[int, ...],
        counts: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        length: int | None = None,
    ) -> None:
        self.starts = starts
        self.ends = tuple(map(add, starts, counts))
        self.counts = counts
        self.width = max(counts)
        self.end = max(self.ends)
        self.start = starts[0]
        single = len(starts) == 1
        self.uniform = single or (len(set(starts)) == 1 and len(set(counts)) == 1)
        self.dtype = dtype
        self.device = device
        self._arch, self._rotaries = arch, rotaries
        switching = [rotary.spec for rotary in rotaries if rotary.spec.kind == "longrope"]
        # Per row, which frequencies its keys get; empty for models whose frequencies never switch.
        self._lengths = self.ends if length is None else (length,) * len(starts)
        self.regimes = tuple(tuple(spec.regime(n) for spec in switching) for n in self._lengths) if switching else ()
        self._masked: dict[int, View] = {}
        self._tables: list[Tensor] = []
        # There is a native attention for one token of each sequence, and for few of a single one.
        plain = arch.query_scaling is None
        self.few = plain and single and self.width <= FEW_ROWS
        self.tokens = plain and self.width == 1 and min(counts) == 1

    @property
    def views(self) -> Sequence[View]:
        """See `Pass`."""
        return self._views

    @cached_property
    def _views(self) -> tuple[View, ...]:
        return tuple(map(self._view, self._arch.kinds))

    @cached_property
    def query_scale(self) -> Tensor | None:
        """What rotated queries are multiplied by [B, 1, S, 1], where the family scales them by position."""
        scaling = self._arch.query_scaling
        if scaling is None:
            return None
        beta, original = scaling
        scale = 1 + beta * torch.log1p(torch.floor(self.positions / original))
        return scale[:, None, :, None].to(device=self.device, dtype=self.dtype)

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
        """See `Pass.attend`."""
        if own is not None:
            kv.store(self, layer, *own)
        if self.query_scale is not None:
            q = q * self.query_scale
        k, v = kv.fetch(self, layer)
        return attend(q, k, v, self.masked_view(self._arch.kind_of[layer]), scale=scale, softcap=softcap)

    def first_key(self, layer: int) -> int:
        """The first position that any query of this pass sees in `layer`."""
        return self.views[self._arch.kind_of[layer]].first

    @cached_property
    def seen(self) -> tuple[tuple[range, ...], ...]:
        """The positions that the last token of each row sees, by kind of layer."""
        windows = [kind.window for kind in self._arch.kinds]
        return tuple(tuple(range(_first_seen(end, window), end) for end in self.ends) for window in windows)

    @cached_property
    def rows(self) -> "array[int]":
        """The rows for a native chain (`quant.kernels.chain`): few tokens of one sequence, or one of each."""
        single = len(self.starts) == 1
        places = (
            [(p, 0) for p in range(self.start, self.end)] if single else [(n - 1, r) for r, n in enumerate(self.ends)]
        )
        turns = [self._turn(kind, len(places)) for kind in range(len(self._arch.kinds))]
        numbers = array("q")
        for index, (position, row) in enumerate(places):
            numbers.extend((position, row))
            for kind, (cos, sin, width, apart) in zip(self._arch.kinds, turns, strict=True):
                seen = _first_seen(position + 1, kind.window)
                numbers.extend((cos + index * apart, sin + index * apart, width, seen))
        return numbers

    def _turn(self, kind: int, rows: int) -> tuple[int, int, int, int]:
        """Addresses of the first row's cosine and sine, their width, and bytes to the next row's; zeros where none."""
        rope = self._arch.kinds[kind].rope
        if rope is None:
            return 0, 0, 0, 0
        if not self.uniform:
            return _addresses(self.views[kind], rows)
        table = self._rotaries[rope].table(self.end, self._lengths[0])
        self._tables.append(table)  # another pass may need a longer one, and this one's rows point into it
        _, count, width = table.shape
        size = width * table.itemsize
        cos = table.data_ptr() + self.start * size
        return cos, cos + count * size, width, size if len(self.starts) == 1 else 0  # or one rotation serves all rows

    @cached_property
    def positions(self) -> Tensor:
        """Positions [B, S] on the host."""
        starts = torch.tensor(self.starts)[:, None]
        last = torch.tensor(self.ends)[:, None] - 1
        return (starts + torch.arange(self.width)).minimum(last).clamp(min=0)

    @cached_property
    def scatter(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row, column of the chunk, position in the cache) of every valid token, each [N], on the device."""
        pairs = [(row, column) for row, count in enumerate(self.counts) for column in range(count)]
        rows, columns = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(1)
        target = torch.tensor(self.starts)[rows] + columns
        return rows.to(self.device), columns.to(self.device), target.to(self.device)

    def _view(self, kind: LayerSpec) -> View:
        cos, sin = self._rotation(kind.rope)
        first = _first_seen(min(self.starts) + 1, kind.window)
        folded = self.width <= FOLDED_ROWS and self._arch.attention_softcap is None
        return View(cos, sin, mask=None, causal=False, folded=folded, first=first)

    def masked_view(self, kind: int) -> View:
        """The view of a kind of layer with its mask, made when it is first needed: native attention does without."""
        masked = self._masked.get(kind)
        if masked is None:
            view = self.views[kind]
            mask, causal = self._mask(self._arch.kinds[kind].window, view.first, folded=view.folded)
            masked = self._masked[kind] = replace(view, mask=mask, causal=causal)
        return masked

    def _rotation(self, rope: int | None) -> tuple[Tensor | None, Tensor | None]:
        if rope is None:
            return None, None
        rotary = self._rotaries[rope]
        if self.uniform:
            return rotary.range(self.start, self.end, self._lengths[0])
        return rotary.rows(self.positions, self._lengths)

    def _mask(self, window: int | None, first: int, *, folded: bool) -> tuple[Tensor | None, bool]:
        if self.uniform and self.width == 1:
            return None, False
        plain = self.uniform and self.start == 0 and (window is None or window >= self.width)
        if plain and not folded and self._arch.attention_softcap is None:
            return None, True
        positions = (self.positions[:1] if self.uniform else self.positions)[:, :, None]
        keys = torch.arange(first, self.end)
        seen = keys <= positions
        if window is not None:
            seen &= keys > positions - window
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf"))
        if folded:
            mask = mask.repeat(1, self._arch.num_heads // self._arch.num_kv_heads, 1)
        return (mask[0] if self.uniform else mask[:, None]).to(self.device), False


def _first_seen(end: int, window: int | None) -> int:
    """The first position that the token before `end` sees."""
    return 0 if window is None else max(0, end - window)


def _addresses(view: View, rows: int) -> tuple[int, int, int, int]:
    """See `Step._turn`."""
    if view.cos is None or view.sin is None:
        return 0, 0, 0, 0
    width = view.cos.shape[-1]
    apart = width * view.cos.itemsize if view.cos.numel() == rows * width else 0
    return view.cos.data_ptr(), view.sin.data_ptr(), width, apart


def chunk_counts(ids: Tensor, counts: Sequence[int] | None) -> tuple[int, ...]:
    """Valid tokens per row of ids [B, S]: `counts`, or every column. Raises UsageError when they do not fit."""
    batch, width = ids.shape
    if counts is None:
        return (width,) * batch
    if len(counts) != batch or max(counts) != width or min(counts) < 0:
        raise UsageError(f"{list(counts)} tokens per row do not fit a chunk of {batch} x {width}")
    return tuple(counts)
