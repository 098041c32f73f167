"""N-vium: a token leaves at the exit that its law settles on; what lies above is run with later tokens.

Prompts run whole, and take along all that waits. Source: N-vium (arXiv 2605.13190). Knows no files and no text;
`flight` runs the passes, `nvium_laws` decides, `piggyback` remembers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import nvium_laws as laws
from .cache import KVCache, KVStore
from .decoder import Decoder
from .flight import Flight, Lane
from .generate import StepOutput
from .junctions import Junctions, log_weights
from .nvium_laws import Exits
from .pass_store import PassStore
from .piggyback import DeferredCache, segments
from .sampling import Sampler
from .side_by_side import rows_of, together

if TYPE_CHECKING:
    from .static_segments import SegmentGraphs

MAX_DEFERRED = 64


@dataclass(frozen=True)
class Reading:
    """All exits of all tokens of a text, before their logits: `log_weights` [N, B, S], `states` N of [B, S, hidden]."""

    exits: Exits
    log_weights: Tensor
    states: tuple[Tensor, ...]

    def log_probabilities(self, rows: slice) -> Tensor:
        """The mixture's [B, S, V] for a stretch of tokens, float32; one exit's logits in memory at a time."""
        mixed: Tensor | None = None
        for weight, part in zip(self.log_weights, self.by_exit(rows), strict=True):
            weighted = part + weight[:, rows, None]
            mixed = weighted if mixed is None else torch.logaddexp(mixed, weighted)
        if mixed is None:
            raise ValueError("a model has at least one exit")
        return mixed

    def by_exit(self, rows: slice) -> Iterator[Tensor]:
        """Each exit's log-probabilities [B, S, V] for a stretch of tokens, float32."""
        return (self.exits.logits(x[:, rows]).log_softmax(-1) for x in self.states)


class Nvium:
    """The model that generation runs.

    Args:
        decoder: the backbone; its blocks may be of any kind.
        junctions: where tokens may leave.
        per_exit: top-k, top-p, min-p and temperature act on the drawn exit, instead of on the mixture.
        piggyback: False runs the rest of the stack at once after each token; the tokens are the same.
        max_deferred: tokens that may wait at a junction when a pass is over. The draw never depends on it.

    Raises:
        UsageError: junctions outside the stack.
        UnsupportedError: a sharing map that crosses a junction.

    """

    def __init__(
        self,
        decoder: Decoder,
        junctions: Junctions,
        *,
        per_exit: bool = False,
        piggyback: bool = True,
        max_deferred: int = MAX_DEFERRED,
    ) -> None:
        self.decoder = decoder
        self.junctions = junctions
        self.exits = Exits(decoder, junctions)
        self.segments = segments(decoder.arch, junctions.points)
        self._per_exit = per_exit
        # Dynamic NTK rotates a key for the length at which it is written, so it must be written in its turn.
        rotates_by_turn = any(rope.kind == "dynamic" for rope in decoder.arch.ropes)
        self._most = max_deferred if piggyback and not rotates_by_turn else 0
        self.graphs: SegmentGraphs | None = None

    def new_cache(self, batch: int, capacity: int) -> DeferredCache:
        """See `generate.Model`."""
        decoder = self.decoder
        cache = DeferredCache(
            decoder.arch,
            self.junctions.points,
            batch=batch,
            capacity=capacity,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        if batch == 1 and self.graphs is not None:
            self.graphs.lend(cache)
        return cache

    def prefill(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:
        """See `generate.Model`. All blocks run; the last position's exits then choose as those of a decoded token."""
        flight = self._start(ids, [_deferred(cache)])
        (asked,) = laws.start(self.exits, [sampler], per_exit=self._per_exit)
        settled = False
        while flight.more:
            settled = settled or self._leaving(flight, [asked])[0]
            flight.climb()
        if not settled:
            asked.end(flight.lanes[0].last)
        ((logits, token),) = laws.finish(self.exits, [asked])
        return StepOutput(logits, self.decoder.arch.num_layers, token, tuple(flight.lanes[0].passes))

    def decode(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:
        """See `generate.Model`. Blocks run until the token is settled, then only where too many wait."""
        return self._decode(self._start(ids, [_deferred(cache)]), [sampler])[0]

    def decode_batch(self, ids: Tensor, cache: KVCache, samplers: Sequence[Sampler]) -> list[StepOutput]:
        """See `batch.BatchModel`; each row leaves at its own exit."""
        whole = _deferred(cache)
        return self._decode(self._start(ids, [whole.row(index) for index in range(whole.batch)]), samplers)

    def flush(self, cache: KVCache) -> None:
        """Run all that waits to the end, so that every block has stored every token."""
        whole = _deferred(cache)
        for index in range(whole.batch):
            self._flight([Lane(whole.row(index))]).relieve(0)

    def score(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Append ids [1, S] and return the mixture's log-probabilities [1, S, V] of every position, float32."""
        flight = self._start(ids, [_deferred(cache)])
        (lane,) = flight.lanes
        count = ids.shape[1]
        states = [lane.h[:, -count:]]
        while flight.more:
            flight.climb()
            states.append(lane.h[:, -count:])
        return self._reading(states).log_probabilities(slice(None))

    def read(self, ids: Tensor, kv: KVStore | None = None, counts: Sequence[int] | None = None) -> Reading:
        """All exits of ids [B, S], whole sequences without a cache; differentiable where the weights are trained.

        `counts` gives the valid tokens of each row where rows are padded on the right.
        """
        decoder = self.decoder
        ids = ids.to(decoder.device)
        h, step = decoder.embed(ids), decoder.step(None, ids, counts)
        kv = kv or PassStore(decoder.arch)
        states: list[Tensor] = []
        for blocks in self.segments:
            h = decoder.run(h, step, kv, blocks)
            states.append(h)
        return self._reading(states)

    def _reading(self, states: list[Tensor]) -> Reading:
        """From the states [B, S, hidden] after each segment."""
        *early, last = states
        read = [junction.read(h) for junction, h in zip(self.junctions, early, strict=True)]
        scores = [score for _, score in read]
        weights = torch.stack(log_weights(scores)) if scores else last.new_zeros((1, *last.shape[:2])).float()
        return Reading(self.exits, weights, (*(x for x, _ in read), self.exits.last(last)))

    def _start(self, ids: Tensor, caches: Sequence[DeferredCache]) -> Flight:
        """Run ids [B, S], a row for each cache, through the first segment."""
        flight = self._flight([Lane(cache) for cache in caches])
        flight.enter(ids.to(self.decoder.device))
        return flight

    def _flight(self, lanes: list[Lane]) -> Flight:
        return Flight(self.decoder, self.segments, lanes, self.graphs)

    def _leaving(self, flight: Flight, asked: Sequence[laws.Choice]) -> list[bool]:
        """Which of the flight's lanes are settled at the junction that it has reached."""
        x, scores = self.exits.look(flight.segment, together([lane.last for lane in flight.lanes]))
        rows = rows_of(x, len(asked))
        return [it.at(flight.segment, row, score) for it, row, score in zip(asked, rows, scores, strict=True)]

    def _decode(self, flight: Flight, samplers: Sequence[Sampler | None]) -> list[StepOutput]:
        """Choose a token for each lane of a flight that is through the first segment."""
        lanes = flight.lanes
        asked = laws.start(self.exits, samplers, per_exit=self._per_exit)
        flying = asked
        while flight.more:
            left = self._leaving(flight, flying)
            flying = [it for it, leaves in zip(flying, left, strict=True) if not leaves]
            flight.lanes = [lane for lane, leaves in zip(flight.lanes, left, strict=True) if not leaves]
            if not flying:
                break
            flight.climb()
        else:
            for it, lane in zip(flying, flight.lanes, strict=True):
                it.end(lane.last)
        depths = [lane.depth for lane in lanes]
        found = laws.finish(self.exits, asked)
        for lane in lanes:
            self._flight([lane]).relieve(self._most)
        return [
            StepOutput(logits, depth, token, tuple(lane.passes))
            for (logits, token), depth, lane in zip(found, depths, lanes, strict=True)
        ]


def _deferred(cache: KVCache) -> DeferredCache:
    if not isinstance(cache, DeferredCache):
        raise TypeError("the cache was not made by this model's new_cache")
    return cache
