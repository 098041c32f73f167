"""R-CLA's training: in every pass some layers read the keys and values of an earlier layer.

Source: Stochastic KV Routing (arXiv 2604.22782), section 3.2. Knows no optimiser and no files.
"""

import random
from dataclasses import dataclass

from torch import Tensor

from ..runtime.architecture import Architecture
from ..runtime.methods import CrossDraw
from .kv_map import KVMap, from_keepers
from .self_distillation import imitation
from .sequences import Batch
from .trainable import IGNORED, Trainable


def draw_sources(arch: Architecture, probability: float, draws: random.Random) -> KVMap:
    """For each layer (from 0) the layer whose keys and values it reads in one pass: the paper's draw.

    With `probability` a layer reads one of the layers before it that attend alike, all equally likely, and what that
    layer itself made of its input: reading is not chained. Otherwise, and where there is none, it reads its own.
    """
    sources: list[int] = []
    for layer, kind in enumerate(arch.kind_of):
        crosses = draws.random() < probability
        earlier = [other for other in range(layer) if arch.kind_of[other] == kind]
        sources.append(draws.choice(earlier) if crosses and earlier else layer)
    return tuple(sources)


def draw_leaders(arch: Architecture, share: float, draws: random.Random) -> KVMap:
    """A map as bundles have it, where followers read the nearest leader before them: ours.

    How many layers follow is drawn first, from one to this share of all; any of them are equally likely to. So there
    are passes in which little is amiss, from which a layer learns most, and some like those that will be run.
    """
    kinds = arch.kind_of
    free = [layer for layer, kind in enumerate(kinds) if kind in kinds[:layer]]
    most = min(len(free), round(share * len(kinds)))
    followers = set(draws.sample(free, draws.randint(min(1, most), most)))
    return from_keepers(arch, [layer for layer in range(len(kinds)) if layer not in followers])


DRAWS = {"layers": draw_sources, "leaders": draw_leaders}


@dataclass(frozen=True)
class CrossLayer:
    """The summed loss of a batch under a map drawn for this pass. A `training.Objective`.

    probability: see the draws. plain: of a pass in which no layer crosses (ours; the paper has none, so that with many
    layers the model hardly ever meets the map that keeps every cache). draw: the paper's, or leaders.
    distill: None, the paper's cross-entropy under the map; a number: the cross-entropy without crossing, and that many
    times the divergence of what is predicted under the map from that (ours).
    """

    probability: float
    plain: float = 0.0
    draw: CrossDraw = "layers"
    distill: float | None = None

    def __call__(self, model: Trainable, batch: Batch, draws: random.Random) -> tuple[Tensor, int]:
        """See `training.Objective`. One draw holds for all sequences of the pass (paper, figure 4)."""
        crossing = not self.plain or draws.random() >= self.plain
        own = tuple(range(model.arch.num_layers))
        sources = DRAWS[self.draw](model.arch, self.probability, draws) if crossing else own
        if self.distill is None or sources == own:
            return model(batch.ids, batch.targets, batch.counts, sources), batch.counted
        plain = model.hidden(batch.ids, batch.counts, own)
        crossed = model.states(batch.ids, batch.counts, sources, after=own)
        apart = imitation(model, crossed, plain, batch.targets != IGNORED, self.distill)
        return model.loss(plain, batch.targets) + apart, batch.counted
