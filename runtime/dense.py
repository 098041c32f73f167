"""A model without exits: every token runs through every block. R-CLA bundles run as this, their map in the blocks.

Knows no files, no text, no sampling.
"""

from collections.abc import Sequence

from torch import Tensor

from .cache import KVCache
from .decoder import Decoder
from .generate import StepOutput
from .sampling import Sampler


class Dense:
    """The model that generation runs where there is no exit rule."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """See `generate.Model`."""
        return self.decoder.new_cache(batch, capacity)

    def prefill(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:  # noqa: ARG002 - see Model
        """See `generate.Model`; ids [B, S]."""
        return StepOutput(self.logits(self._pass(ids, cache)[:, -1]), None)

    def decode(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:  # noqa: ARG002 - see Model
        """See `generate.Model`; ids [B, 1]."""
        return self.prefill(ids, cache)

    def decode_batch(self, ids: Tensor, cache: KVCache, samplers: Sequence[Sampler]) -> list[StepOutput]:  # noqa: ARG002 - see BatchModel
        """See `batch.BatchModel`."""
        logits = self.logits(self._pass(ids, cache)[:, -1])
        return [StepOutput(row, None) for row in logits.split(1)]

    def score(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Append ids [B, S] and return the logits [B, S, V] of every position, float32."""
        return self.logits(self._pass(ids, cache))

    def logits(self, h: Tensor) -> Tensor:
        """From the last block's states [..., hidden] to logits [..., V], float32."""
        return self.decoder.logits(h)

    def _pass(self, ids: Tensor, cache: KVCache) -> Tensor:
        decoder = self.decoder
        ids = ids.to(decoder.device)
        return decoder.run(decoder.embed(ids), decoder.step(cache, ids), cache)
