"""Several ways through a River model on a text at once, from its files, one block in memory at a time.

Conversion judges with it, `adapt tune` sweeps with it. Knows no manifest and makes no choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .architecture import block_prefix
from .decoder import Decoder, load_block
from .exit_layers import LazyBlocks, load_exit_block
from .exits import HELD, ExitPolicy, FixedExit, Route, cosine
from .progress import Reporter
from .quality import LOGIT_BYTES, Quality, Track, push, score
from .routing import Ladder
from .store import TensorStore

TITLE = "Measure the quality"


@dataclass(frozen=True)
class Files:
    """A model on disk: geometry, embedding and head (`frame`), and the stores of its blocks and exit layers."""

    frame: Decoder
    backbone: TensorStore
    river: TensorStore

    def release(self, index: int) -> None:
        """Let the pages of block `index` and of its exit layer go, so that memory does not grow with what was read."""
        for name in self.frame.arch.block_tensors(index):
            self.backbone.release(name)
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
def measure(
    files: Files, ids: Tensor, ways: Sequence[ExitPolicy | Route], reporter: Reporter, *, title: str = TITLE
) -> list[Quality]:
    """Return the quality of each way on ids [n, S]; the first must be dense."""
    tracks = _climb(files, ids, ways, reporter, title)
    return score(tracks, ids, files.frame.logits, files.frame.arch.num_layers)


@dataclass(frozen=True)
class ExitErrors:
    """What leaving costs, token by token, for L blocks and the T tokens that predict one and may leave.

    `cosines` float32 [L - 1, T]: of the dense residual stream before and after blocks 1 to L - 1. `losses` float32
    [L, T]: KL in nats, dense against everything having left after block l; the last row, nothing left, is 0. The error
    in the keys and values that earlier tokens then wrote is in it.
    """

    cosines: Tensor
    losses: Tensor


@torch.inference_mode()
def measure_errors(files: Files, ids: Tensor, entry_layer: int, reporter: Reporter, *, held: int = HELD) -> ExitErrors:
    """Let all of ids [n, S] but the first `held` leave after each block in turn, at about L / 2 dense passes.

    No row may leave before block `entry_layer - 1`; those rows of `losses` are that block's.
    """
    count = files.frame.arch.num_layers
    watch = _Watch()
    depths = range(entry_layer - 1, count)
    ways = [watch, *(Route(FixedExit(depth), held=held) for depth in depths)]
    tracks = _climb(files, ids, ways, reporter, "Measure what leaving costs")
    losses = torch.stack(_losses(tracks, files.frame, held))
    return ExitErrors(
        cosines=torch.stack([after[:, held:-1].flatten() for after in watch.seen]),
        losses=torch.cat([losses[:1].expand(entry_layer - 2, -1), losses, torch.zeros_like(losses[:1])]),
    )


class _Watch:
    """The dense model, which notes every cosine."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def leaves(self, layer: int, before: Tensor, after: Tensor) -> Tensor:  # noqa: ARG002  (a policy's signature)
        found = cosine(before, after)
        self.seen.append(found.cpu())
        return torch.zeros_like(found, dtype=torch.bool)

    def all_leave(self, layer: int, before: Tensor, after: Tensor) -> bool:
        return bool(self.leaves(layer, before, after).all())

    def asks(self, layer: int) -> bool:  # noqa: ARG002
        return True


def _climb(
    files: Files, ids: Tensor, ways: Sequence[ExitPolicy | Route], reporter: Reporter, title: str
) -> list[Track]:
    frame = files.frame
    ids = ids.to(frame.device)
    start, step, count = frame.embed(ids), frame.step(None, ids[:1]), frame.arch.num_layers
    tracks = [Track.start(way, start) for way in ways]
    with reporter.task(title, count) as task:
        for layer in range(1, count + 1):
            push(tracks, step, files.rung(), layer)
            files.release(layer - 1)
            task.advance(1)
    return tracks


def _losses(tracks: Sequence[Track], frame: Decoder, held: int) -> list[Tensor]:
    """KL [T] of each track after the first, which is dense."""
    dense, *others = [track.h[:, held:-1].flatten(0, 1) for track in tracks]
    rows = max(1, LOGIT_BYTES // (16 * frame.arch.vocab_size))
    found: list[list[Tensor]] = [[] for _ in others]
    for first in range(0, len(dense), rows):
        part = slice(first, first + rows)
        log_probs = frame.logits(dense[part]).log_softmax(-1)
        weights = log_probs.exp()
        for own, h in zip(found, others, strict=True):
            own.append((weights * (log_probs - frame.logits(h[part]).log_softmax(-1))).sum(-1).clamp(min=0).cpu())
    return [torch.cat(parts) for parts in found]
