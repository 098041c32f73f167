"""R-CLA's training: in every pass some layers read the keys and values of a random earlier layer.

Source: Stochastic KV Routing (arXiv 2604.22782), section 3.2. Knows no optimiser and no files.
"""

import random
from dataclasses import dataclass

from torch import Tensor

from ..runtime.architecture import Architecture
from .sequences import Batch
from .trainable import Trainable


def draw_sources(arch: Architecture, probability: float, draws: random.Random) -> tuple[int, ...]:
    """For each layer (from 0) the layer whose keys and values it reads in one pass.

    With `probability` a layer reads one of the layers before it that attend alike, all equally likely, and what that
    layer itself made of its input: reading is not chained. Otherwise, and where there is none, it reads its own.
    """
    sources: list[int] = []
    for layer, kind in enumerate(arch.kind_of):
        crosses = draws.random() < probability
        earlier = [other for other in range(layer) if arch.kind_of[other] == kind]
        sources.append(draws.choice(earlier) if crosses and earlier else layer)
    return tuple(sources)


@dataclass(frozen=True)
class CrossLayer:
    """The summed cross-entropy of a batch under a map drawn for this pass. A `training.Objective`.

    probability: of a layer to read another's keys and values. plain: of a pass in which none does (ours; the paper has
    none, so that with many layers the model hardly ever meets the map that keeps every cache).
    """

    probability: float
    plain: float = 0.0

    def __call__(self, model: Trainable, batch: Batch, draws: random.Random) -> tuple[Tensor, int]:
        """See `training.Objective`. One draw holds for all sequences of the pass (paper, figure 4)."""
        crossing = not self.plain or draws.random() >= self.plain
        sources = draw_sources(model.arch, self.probability if crossing else 0.0, draws)
        return model(batch.ids, batch.targets, batch.counts, sources), batch.counted
