"""Stretches of several sequences side by side as one chunk [1, R, hidden], without padding.

Products and norms see all R rows at once; every row is rotated by its own position, and attention goes sequence by
sequence, each over keys and values of its own. Layers of a sequence may lag behind others. Knows no documents.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import View
from .cache import KVStore
from .decoder import Decoder
from .step import Step


def mean_states(h: Tensor, lengths: Tensor) -> Tensor:
    """Mean of each stretch of `lengths` rows of h [1, R, hidden] -> [stretches, hidden], float32."""
    return torch.segment_reduce(h[0].float(), "mean", lengths=lengths.to(h.device), axis=0, unsafe=True)


class PackedStore:
    """The stores of the sequences of a `PackedStep`, in its order; it asks each of them itself."""

    def __init__(self, parts: Sequence[KVStore]) -> None:
        self.parts = tuple(parts)

    def store(self, step: Step, layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002 - see KVStore
        """Raise TypeError: the pass is over one sequence."""
        raise TypeError("a packed store is for a packed step")

    def fetch(self, step: Step, layer: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - see KVStore
        """Raise TypeError: the pass is over one sequence."""
        raise TypeError("a packed store is for a packed step")

    def claim(self, step: Step, layer: int) -> None:
        """See `KVStore.claim`."""


class PackedStep:
    """Passes over one sequence each, run as one: see `Pass`."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.sizes = [step.width for step in steps]
        self.views = tuple(self._view([step.views[kind] for step in steps]) for kind in range(len(steps[0].views)))

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
        """See `Pass.attend`; `kv` is a `PackedStore`."""
        if not isinstance(kv, PackedStore):
            raise TypeError("a packed step needs a packed store")
        parts: list[Tensor] = []
        first = 0
        for step, store in zip(self.steps, kv.parts, strict=True):
            size = step.width
            mine = None if own is None else (own[0].narrow(2, first, size), own[1].narrow(2, first, size))
            rows = q.narrow(2, first, size)
            parts.append(step.attend(rows, mine, store, layer, scale=scale, softcap=softcap))
            first += size
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @staticmethod
    def _view(views: Sequence[View]) -> View:
        """Rotations of all rows; what a row sees is said by the view of its own sequence."""
        cos = [view.cos for view in views if view.cos is not None]
        sin = [view.sin for view in views if view.sin is not None]
        if not cos:
            return views[0]
        return View(torch.cat(cos), torch.cat(sin), mask=None, causal=False, folded=False, first=0)


class SequenceCache:
    """Keys and values of one sequence of known length. A layer takes memory from its first token on.

    `prefix` is what comes before the sequence; its keys and values are copied in as layers are reached.
    """

    def __init__(self, decoder: Decoder, capacity: int, prefix: "SharedPrefix | None" = None) -> None:
        self._slots = decoder.arch.slots
        self._last_reader = {slot: layer for layer, slot in enumerate(self._slots)}
        self._shape = (1, decoder.arch.num_kv_heads, capacity, decoder.arch.head_dim)
        self._dtype, self._device = decoder.dtype, decoder.device
        self._prefix = prefix
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the layers reached so far."""
        return sum(k.nbytes + v.nbytes for k, v in self._kept.values())

    def store(self, step: Step, layer: int, k: Tensor, v: Tensor) -> None:
        """See `KVStore.store`; k, v [1, kv_heads, S, head_dim]."""
        keys, values = self._buffers(layer)
        keys.narrow(2, step.start, step.width).copy_(k)
        values.narrow(2, step.start, step.width).copy_(v)

    def fetch(self, step: Step, layer: int) -> tuple[Tensor, Tensor]:
        """See `KVStore.fetch`. Views, not copies."""
        keys, values = self._kept[self._slots[layer]]
        first = step.first_key(layer)
        return keys.narrow(2, first, step.end - first), values.narrow(2, first, step.end - first)

    def claim(self, step: Step, layer: int) -> None:
        """See `KVStore.claim`."""

    def read(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` keys and values of a layer."""
        keys, values = self._kept[self._slots[layer]]
        return keys.narrow(2, 0, count), values.narrow(2, 0, count)

    def release(self, layer: int) -> None:
        """Let go of what only layers up to `layer` read: the sequence will not run through it again."""
        slot = self._slots[layer]
        if self._last_reader[slot] == layer:
            self._kept.pop(slot, None)

    def _buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        slot = self._slots[layer]
        buffers = self._kept.get(slot)
        if buffers is None:
            # Not zeroed: only positions that were written are ever read.
            keys, values = (torch.empty(self._shape, dtype=self._dtype, device=self._device) for _ in range(2))
            if self._prefix is not None:
                k, v = self._prefix.read(layer)
                keys.narrow(2, 0, k.shape[2]).copy_(k)
                values.narrow(2, 0, v.shape[2]).copy_(v)
            buffers = self._kept[slot] = (keys, values)
        return buffers


class SharedPrefix:
    """Tokens that all sequences begin with. They run once, layer by layer as a sequence first gets there.

    `length` is that of a sequence that it serves, by which some models rotate.
    """

    def __init__(self, decoder: Decoder, ids: Sequence[int], length: int) -> None:
        self.count = len(ids)
        self._blocks = decoder.blocks
        self._cache = SequenceCache(decoder, self.count)
        self._step = decoder.segment(0, self.count, length)
        self._states = decoder.embed(torch.tensor([list(ids)], device=decoder.device))
        self._depth = 0

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, count, head_dim] of `layer`."""
        while self._depth <= layer:
            self._states = self._blocks[self._depth](self._states, self._step, self._cache)
            self._depth += 1
        return self._cache.read(layer, self.count)
