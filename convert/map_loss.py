"""What a sharing map costs: the loss of a text under many maps at once, one block in memory at a time.

Maps that agree up to a layer are computed once up to there. The weights are those of a model in which every layer has
keys and values of its own; which of them are read is the map's business. Knows no manifest and no training.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..runtime.block import Block
from ..runtime.decoder import Decoder
from ..runtime.pass_store import OneLayer
from ..runtime.progress import Task
from ..runtime.quality import LOGIT_BYTES
from ..runtime.step import Step
from .kv_map import KVMap
from .sequences import Batch
from .trainable import IGNORED

Pairs = Mapping[int, tuple[Tensor, Tensor]]
"""Keys and values by layer."""


@dataclass(frozen=True)
class Weights:
    """A whole model: embedding and head (`frame`), and its blocks as they are asked for, layer after layer."""

    frame: Decoder
    block: Callable[[int], Block]


@dataclass(frozen=True)
class _State:
    """Where maps that agree so far are: for each batch the residual stream, and the keys and values still needed."""

    h: Sequence[Tensor]
    kept: Sequence[Pairs]


@torch.inference_mode()
def run_maps(
    weights: Weights, batches: Sequence[Batch], maps: Iterable[KVMap], task: Task | None = None
) -> dict[KVMap, Sequence[Tensor]]:
    """The residual stream [B, S, hidden] of every batch behind the last block, under each map."""
    frame, wanted = weights.frame, list(dict.fromkeys(maps))
    moved = [batch.to(frame.device) for batch in batches]
    steps = [frame.step(None, batch.ids, _ragged(batch)) for batch in moved]
    states: dict[KVMap, _State] = {(): _State([frame.embed(batch.ids) for batch in moved], [{} for _ in moved])}
    for layer in range(frame.arch.num_layers):
        block = weights.block(layer)
        states = {
            prefix: _advance(states[prefix[:-1]], block, steps, prefix[-1], _read_later(wanted, prefix))
            for prefix in dict.fromkeys(each[: layer + 1] for each in wanted)
        }
        if task is not None:
            task.advance(1)
    return {each: states[each].h for each in wanted}


def losses(weights: Weights, batches: Sequence[Batch], maps: Sequence[KVMap], task: Task | None = None) -> list[float]:
    """The mean loss in nats of a target under each map; perplexity is its exponential."""
    found = run_maps(weights, batches, maps, task)
    return [mean_loss(weights.frame, found[each], batches) for each in maps]


@torch.inference_mode()
def mean_loss(frame: Decoder, h: Sequence[Tensor], batches: Sequence[Batch]) -> float:
    """The mean loss in nats of a target, from residual streams as `run_maps` gives them."""
    total, count = 0.0, 0
    for (rows,), targets in _slices([frame], [h], batches):
        total += float(cross_entropy(rows, targets, reduction="sum"))
        count += targets.numel()
    return total / max(1, count)


@torch.inference_mode()
def divergence(
    one: tuple[Decoder, Sequence[Tensor]], other: tuple[Decoder, Sequence[Tensor]], batches: Sequence[Batch]
) -> tuple[float, float]:
    """How far one model's predictions are from another's: KL(one || other) in nats, share of equal best next tokens."""
    kl, same, count = 0.0, 0, 0
    for (first, second), targets in _slices([one[0], other[0]], [one[1], other[1]], batches):
        log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
        kl += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
        same += int((first.argmax(-1) == second.argmax(-1)).sum())
        count += targets.numel()
    return max(0.0, kl / max(1, count)), same / max(1, count)


def _slices(
    frames: Sequence[Decoder], streams: Sequence[Sequence[Tensor]], batches: Sequence[Batch]
) -> Iterable[tuple[list[Tensor], Tensor]]:
    """Logits [R, V] of each model and targets [R], for some of the positions that count at a time."""
    arch = frames[0].arch
    step = max(1, LOGIT_BYTES // (4 * arch.vocab_size * len(frames)))
    for number, batch in enumerate(batches):
        counted = batch.targets != IGNORED
        targets = batch.targets[counted].to(frames[0].device).split(step)
        rows = [stream[number][counted.to(stream[number].device)].split(step) for stream in streams]
        for wanted, *parts in zip(targets, *rows, strict=True):
            if wanted.numel():
                yield [frame.logits(part) for frame, part in zip(frames, parts, strict=True)], wanted


def _advance(state: _State, block: Block, steps: Sequence[Step], source: int, needed: frozenset[int]) -> _State:
    """One block further; `needed` are the layers up to this one that a layer above will read."""
    streams: list[Tensor] = []
    kept: list[Pairs] = []
    for h, below, step in zip(state.h, state.kept, steps, strict=True):
        store = OneLayer(None if source == block.index else below[source])
        streams.append(block(h, step, store))
        pairs = below if store.own is None else {**below, block.index: store.own}
        kept.append({layer: pair for layer, pair in pairs.items() if layer in needed})
    return _State(streams, kept)


def _read_later(maps: Sequence[KVMap], prefix: KVMap) -> frozenset[int]:
    """The layers of a beginning that some map which begins so reads above it."""
    size = len(prefix)
    return frozenset(source for each in maps if each[:size] == prefix for source in each[size:] if source < size)


def _ragged(batch: Batch) -> Sequence[int] | None:
    """Lengths where rows are padded."""
    return batch.counts if len(set(batch.counts)) > 1 else None
