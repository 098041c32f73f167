"""What a pass remembers of keys and values without a cache: of whole sequences, or of one block.

Nothing is written in place, so gradients pass. Remembers only; knows no weights.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .architecture import Architecture

if TYPE_CHECKING:
    from .step import Step


class PassStore:
    """Keys and values of one pass over whole sequences, for scoring and training: nothing is written in place.

    `sources` says whose keys and values a layer reads; by default the architecture's own map. What no layer above will
    read is let go. A pass that stops between two blocks goes on from a copy, or from `kept` of the one before.
    """

    def __init__(
        self,
        arch: Architecture,
        sources: Sequence[int] | None = None,
        kept: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._arch = arch
        self._sources = arch.kv_sources if sources is None else tuple(sources)
        self._last_reader = {source: layer for layer, source in enumerate(self._sources)}
        self._kept = dict(kept or {})

    def kept(self, layer: int) -> dict[int, tuple[Tensor, Tensor]]:
        """What `layer` and those above it will read of the layers below it: layer -> keys and values."""
        return {below: pair for below, pair in self._kept.items() if self._last_reader.get(below, -1) >= layer}

    def copy(self) -> "PassStore":
        """Another store of the same pass, which goes on by itself. Tensors are shared."""
        return PassStore(self._arch, self._sources, self._kept)

    def store(self, step: "Step", layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002 - see KVStore
        """See `KVStore.store`."""
        self._kept = self.kept(layer)
        self._kept[layer] = (k, v)

    def fetch(self, step: "Step", layer: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - the step starts at 0
        """See `KVStore.fetch`."""
        return self._kept[self._sources[layer]]

    def claim(self, step: "Step", layer: int) -> None:
        """See `KVStore.claim`."""


class OneLayer:
    """The store of one block in one pass: it reads the keys and values that it was given, or its own."""

    def __init__(self, given: tuple[Tensor, Tensor] | None) -> None:
        self._given = given
        self.own: tuple[Tensor, Tensor] | None = None

    def store(self, step: "Step", layer: int, k: Tensor, v: Tensor) -> None:  # noqa: ARG002 - see KVStore
        """See `KVStore.store`."""
        self.own = (k, v)

    def fetch(self, step: "Step", layer: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 - see KVStore
        """See `KVStore.fetch`."""
        pair = self._given or self.own
        if pair is None:
            raise ValueError(f"layer {layer + 1} has stored no keys and values")
        return pair

    def claim(self, step: "Step", layer: int) -> None:
        """See `KVStore.claim`."""
