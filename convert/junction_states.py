"""The residual stream at the junctions: texts run through blocks once, layer after layer.

Knows blocks and batches; no junction's weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.decoder import Decoder
from ..runtime.pass_store import PassStore
from ..runtime.progress import Task
from .sequences import Batch
from .trainable import IGNORED


@torch.inference_mode()
def states_at(
    frame: Decoder, batches: Sequence[Batch], points: Sequence[int], task: Task | None = None
) -> list[list[Tensor]]:
    """For each batch the stream [R, hidden] of the tokens that count after each of so many blocks, rising.

    All batches go through a block before the next is asked for, so that blocks which are not kept are read once.
    `task` advances by one for each block.
    """
    moved = [batch.to(frame.device) for batch in batches]
    steps = [frame.step(None, batch.ids, _ragged(batch)) for batch in moved]
    streams = [frame.embed(batch.ids) for batch in moved]
    stores = [PassStore(frame.arch) for _ in moved]
    counted = [batch.targets != IGNORED for batch in moved]
    found: list[list[Tensor]] = [[] for _ in moved]
    for layer in range(max(points)):
        block = frame.blocks[layer]
        for number, (step, store) in enumerate(zip(steps, stores, strict=True)):
            streams[number] = block(streams[number], step, store)
            if layer + 1 in points:
                found[number].append(streams[number][counted[number]])
        del block  # no name here holds a block while the next is read
        if task is not None:
            task.advance(1)
    return found


def _ragged(batch: Batch) -> Sequence[int] | None:
    """Lengths where rows are padded."""
    return batch.counts if len(set(batch.counts)) > 1 else None
