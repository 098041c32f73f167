"""What a conversion cost in quality, measured on text that the quantiser never saw, and the threshold chosen by it.

Goes through the model block by block, all thresholds at once, from the files just written. Knows no manifest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.architecture import block_prefix
from ..runtime.decoder import Decoder, load_block
from ..runtime.exit_layers import LazyBlocks, load_exit_block
from ..runtime.exits import CosineExit, ExitPolicy, FixedExit
from ..runtime.progress import Reporter
from ..runtime.quality import Quality, Track, push, score
from ..runtime.routing import Ladder
from ..runtime.store import TensorStore
from .quantise import release

TAUS = (0.5, 0.8, 0.9, 0.95, 0.98)
"""Thresholds of the curve in the manifest."""


@dataclass(frozen=True)
class Verdict:
    """`dense` and `floor` (every exit layer in use) bracket the curve; `curve` is by threshold."""

    dense: Quality
    floor: Quality
    curve: dict[float, Quality]


@dataclass(frozen=True)
class Files:
    """A model on disk: geometry, embedding and head (`frame`), and the stores of its blocks and exit layers."""

    frame: Decoder
    backbone: TensorStore
    river: TensorStore

    def release(self, index: int) -> None:
        """Let the pages of block `index` and of its exit layer go."""
        release(self.backbone, self.frame.arch, index)
        for name in [name for name in self.river.names() if name.startswith(block_prefix(index))]:
            self.river.release(name)

    def rung(self) -> Ladder:
        """Return blocks that are loaded when asked for, and forgotten with the ladder."""
        arch, place = self.frame.arch, {"device": self.frame.device, "dtype": self.frame.dtype}
        return Ladder(
            arch,
            LazyBlocks(arch.num_layers, lambda index: load_block(arch, self.backbone, index, **place)),
            LazyBlocks(arch.num_layers, lambda index: load_exit_block(arch, self.backbone, self.river, index, **place)),
        )


@torch.inference_mode()
def measure(files: Files, ids: Tensor, policies: Sequence[ExitPolicy], reporter: Reporter) -> list[Quality]:
    """Return the quality of each policy on ids [n, S]; the first must be dense. One block is in memory at a time."""
    frame = files.frame
    ids = ids.to(frame.device)
    start, step, count = frame.embed(ids), frame.step(None, ids[:1]), frame.arch.num_layers
    tracks = [Track.start(policy, start) for policy in policies]
    with reporter.task("Measure the quality", count + 1) as task:
        for layer in range(1, count + 1):
            push(tracks, step, files.rung(), layer)
            files.release(layer - 1)
            task.advance(1)
        result = score(tracks, ids, frame.logits, count)
        task.advance(1)
    return result


def judge(
    files: Files, ids: Tensor, *, entry_layer: int, resident: int | None, taus: Sequence[float], reporter: Reporter
) -> Verdict:
    """Measure the dense model, the floor and a threshold curve on ids [n, S]."""
    count = files.frame.arch.num_layers
    policies: list[ExitPolicy] = [FixedExit(count), FixedExit(entry_layer - 1)]
    policies += [CosineExit.uniform(tau, count, entry_layer, resident) for tau in taus]
    dense, floor, *curve = measure(files, ids, policies, reporter)
    return Verdict(dense, floor, dict(zip(taus, curve, strict=True)))


def loss(quality: Quality, dense: Quality) -> float:
    """Return how much the perplexity grew, as a share of the dense model's."""
    return quality.perplexity / dense.perplexity - 1


def choose_tau(verdict: Verdict, max_loss: float) -> float:
    """Return the lowest threshold of the curve whose loss stays within `max_loss`; the highest where none does."""
    for tau in sorted(verdict.curve):
        if loss(verdict.curve[tau], verdict.dense) <= max_loss:
            return tau
    return max(verdict.curve)
