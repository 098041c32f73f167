"""Log-probabilities that a model gives to tokens which are there already: teacher-forced, many sequences at once.

What a token is predicted from is what generation would have: River's token leaves where the rule says so for it alone,
with everything before it in the shared cache. Knows no text, no files and no harness.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedError, UsageError
from .dense import Dense
from .generate import Model
from .lossless import LosslessRiver
from .nvium import Nvium, Reading
from .pass_store import PassStore
from .quality import LOGIT_BYTES, TOKENS_AT_ONCE
from .river import River


@dataclass(frozen=True)
class Passage:
    """A sequence of which the tokens from `first` on are predicted, each from all before it; `first` is 1 or more."""

    ids: tuple[int, ...]
    first: int

    def __post_init__(self) -> None:
        if not 1 <= self.first < len(self.ids):
            raise UsageError(f"A passage of {len(self.ids)} tokens predicts none from the {self.first}. on")


@dataclass(frozen=True)
class Score:
    """What a passage got. `log_prob` in nats; `greedy`: every token is the most probable one, lowest id on ties."""

    log_prob: float
    greedy: bool


@dataclass(frozen=True)
class Read:
    """Sequences that a model has read: what it would say behind each of the B * S places.

    `depths` float32 [B * S], in blocks (of a mixture, the expected depth); `log_probs` maps places [R] to float32
    log-probabilities [R, V].
    """

    depths: Tensor
    log_probs: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reader:
    """How a model of `layers` blocks and `vocab` tokens reads sequences.

    `read` takes ids [B, S], and how many tokens of each are valid; the others pad on the right.
    """

    layers: int
    vocab: int
    read: Callable[[Tensor, Sequence[int]], Read]


def reader_of(model: Model) -> Reader:
    """Return how a model reads. Raises UnsupportedError for one that has no such way."""
    if isinstance(model, LosslessRiver):
        model = Dense(model.decoder)
    if not isinstance(model, Dense | River | Nvium):
        raise UnsupportedError(f"{type(model).__name__} cannot be scored token by token")
    arch = model.decoder.arch
    ways = {River: _river, Nvium: _mixture}
    return Reader(arch.num_layers, arch.vocab_size, ways.get(type(model), _dense)(model))


class LastExit(Dense):
    """The last exit of a mixture alone: every token through all blocks."""

    def __init__(self, model: Nvium) -> None:
        super().__init__(model.decoder)
        self._exits = model.exits

    def logits(self, h: Tensor) -> Tensor:
        """See Dense; the last exit may have an adapter."""
        return self._exits.logits(self._exits.last(h))


def full_depth(model: Model) -> Model:
    """Return a model with every token through all blocks: the same one where it has no exits, a mixture's last exit.

    Raises UsageError where blocks were dropped, which cannot run.
    """
    if isinstance(model, Nvium):
        return LastExit(model)
    if not isinstance(model, River):
        return model
    count = model.decoder.arch.num_layers
    if model.deepest < count:
        raise UsageError(f"Full depth needs all {count} blocks, {model.deepest} are resident", "Leave out --resident.")
    return Dense(model.decoder)


ReadIds = Callable[[Tensor, Sequence[int]], Read]


def _dense(model: Dense) -> ReadIds:
    decoder = model.decoder

    def read(ids: Tensor, counts: Sequence[int]) -> Read:
        ids = ids.to(decoder.device)
        h = decoder.run(decoder.embed(ids), decoder.step(None, ids, counts), PassStore(decoder.arch)).flatten(0, 1)
        return Read(torch.full((ids.numel(),), float(decoder.arch.num_layers)), _by(model.logits, h))

    return read


def _river(model: River) -> ReadIds:
    decoder = model.decoder

    def read(ids: Tensor, counts: Sequence[int]) -> Read:
        ids = ids.to(decoder.device)
        h, depths = model.climb_rows(decoder.embed(ids), decoder.step(None, ids, counts), PassStore(decoder.arch))
        return Read(depths.flatten().cpu().float(), _by(decoder.logits, h.flatten(0, 1)))

    return read


def _by(logits: Callable[[Tensor], Tensor], h: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda places: logits(h[places.to(h.device)]).log_softmax(-1)


def _mixture(model: Nvium) -> ReadIds:
    ends = torch.tensor([*model.junctions.points, model.decoder.arch.num_layers], dtype=torch.float32)

    def read(ids: Tensor, counts: Sequence[int]) -> Read:
        found = model.read(ids, counts=counts)
        weights = found.log_weights.flatten(1)
        return Read(ends @ weights.exp().cpu(), lambda places: picked(found, places).log_probabilities(slice(None))[0])

    return read


def picked(reading: Reading, places: Tensor | slice) -> Reading:
    """Return some places of all B * S, as one sequence."""
    if isinstance(places, Tensor):
        places = places.to(reading.log_weights.device)
    states = (x.flatten(0, 1)[None, places] for x in reading.states)
    return Reading(reading.exits, reading.log_weights.flatten(1)[:, None, places], tuple(states))


class Scorer:
    """Scores passages, some at once: those of like length together, and equal inputs only once.

    `batch_size`: sequences at once, None for as many as TOKENS_AT_ONCE hold. `depths` counts predicted tokens by the
    depth at which the token before them left, from 1; an expected depth counts at the nearest. `blocks` is their sum.
    """

    def __init__(self, reader: Reader, *, batch_size: int | None = None) -> None:
        self._reader = reader
        self._batch_size = batch_size
        self.depths = torch.zeros(reader.layers, dtype=torch.int64)
        self.blocks = 0.0

    def score(self, passages: Sequence[Passage], advance: Callable[[int], None] = lambda _: None) -> list[Score]:
        """Score in the order given; `advance` hears how many more passages are done."""
        places: dict[tuple[int, ...], list[int]] = {}
        for place, passage in enumerate(passages):
            places.setdefault(passage.ids[:-1], []).append(place)
        found: dict[int, Score] = {}
        for batch in self._batches(sorted(places, key=len, reverse=True)):
            groups = [[(place, passages[place]) for place in places[inputs]] for inputs in batch]
            scores = self._batch(batch, groups)
            found |= scores
            advance(len(scores))
        return [found[place] for place in range(len(passages))]

    def _batches(self, inputs: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
        first = 0
        while first < len(inputs):
            count = self._batch_size or max(1, TOKENS_AT_ONCE // len(inputs[first]))
            yield inputs[first : first + count]
            first += count

    @torch.inference_mode()
    def _batch(
        self, inputs: Sequence[tuple[int, ...]], groups: Sequence[Sequence[tuple[int, Passage]]]
    ) -> dict[int, Score]:
        counts = [len(row) for row in inputs]
        width = max(counts)
        read = self._reader.read(torch.tensor([[*row, *[0] * (width - len(row))] for row in inputs]), counts)
        asked = [(row * width, place, passage) for row, group in enumerate(groups) for place, passage in group]
        rows = torch.cat([torch.arange(at + passage.first - 1, at + len(passage.ids) - 1) for at, _, passage in asked])
        targets = torch.cat([torch.tensor(passage.ids[passage.first :]) for _, _, passage in asked])
        depths = read.depths[rows]
        self.blocks += float(depths.double().sum())
        self.depths += torch.bincount(depths.round().long() - 1, minlength=len(self.depths))
        logs, best = self._pick(read, rows, targets)
        sizes = [len(passage.ids) - passage.first for _, _, passage in asked]
        parts = zip(asked, logs.split(sizes), best.split(sizes), strict=True)
        return {place: Score(float(log.sum()), bool(same.all())) for (_, place, _), log, same in parts}

    def _pick(self, read: Read, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities float64 [R] of the targets, and whether each is the best; some rows at a time."""
        size = max(1, LOGIT_BYTES // (4 * self._reader.vocab))
        logs: list[Tensor] = []
        best: list[Tensor] = []
        for part, wanted in zip(rows.split(size), targets.split(size), strict=True):
            every = read.log_probs(part).cpu()
            logs.append(every.gather(-1, wanted[:, None])[:, 0].double())
            best.append(every.argmax(-1) == wanted)
        return torch.cat(logs), torch.cat(best)
