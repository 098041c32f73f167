"""Many texts at once: prompts enter free rows of one cache, all rows decode in one pass, finished rows leave.

Knows the model only by a protocol: no weights, no exit rule, no chat template, no file and no terminal.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from .cache import KVCache
from .generate import Model, StepOutput
from .sampling import Sampler


@runtime_checkable
class BatchModel(Model, Protocol):
    """A model that continues several sequences in one pass.

    A sequence enters by `prefill` into its row of the cache alone (`KVCache.rows(i)`, cut to 0 before), and may be
    moved to another row between passes (`KVCache.move`). What a model keeps of a sequence besides keys and values goes
    with both: its cache overrides `KVCache.narrow` and `move` as it does `truncate`. Every row of a cache that
    `decode_batch` is given holds a sequence: batches shrink, so that no pass computes for nobody.
    """

    def decode_batch(self, ids: Tensor, cache: KVCache, samplers: Sequence[Sampler]) -> list[StepOutput]:
        """Append one token to every row of `cache`: ids [B, 1], a sampler and a result (logits [1, V]) per row.

        Rows may be of different lengths. Each result is what `decode` would give the row alone. Raises
        RotationChangedError before anything is stored or drawn.
        """
        ...
