"""Lossless River: the river drafts, one dense pass verifies; the text is the dense model's, token for token.

The river writes the keys and values of its draft into the cache slots that the dense pass then overwrites, so there is
one cache, and no second model. Drafts are chosen with the numbers that the real choice will draw, so that sampled text,
too, is the dense model's for the same seed. Beyond the paper (River-LLM, arXiv 2604.18396); the scheme is speculative
decoding (Leviathan et al., arXiv 2211.17192). Knows no files and no text.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant.linear import DenseLinear
from .cache import KVCache
from .decoder import Decoder
from .drafting import Costs, Pace
from .generate import StepOutput
from .options import LONGEST_DRAFT
from .river import River
from .sampling import Sampler, argmax
from .stack import run_layers


@dataclass(frozen=True)
class _Ahead:
    """A drafted token whose keys and values are in the cache, and the dense model's logits [1, V] behind it."""

    token: int
    logits: Tensor


class DraftCache(KVCache):
    """A cache that may hold verified draft tokens beyond the sequence: as many as `ahead` has, in that order.

    `confidences`: the probabilities of the last draft's tokens, of which the sequence has got `taken`; `pace` learns
    from them. `single`: one sequence, not a batch nor one of its rows.
    """

    def __init__(self, decoder: Decoder, pace: Pace, *, batch: int, capacity: int) -> None:
        super().__init__(decoder.arch, batch=batch, capacity=capacity, dtype=decoder.dtype, device=decoder.device)
        self.pace = pace
        self.ahead: tuple[_Ahead, ...] = ()
        self.confidences: tuple[float, ...] = ()
        self.taken = 0
        self.single = batch == 1

    def take(self, token: int) -> Tensor | None:
        """Return the logits behind `token` where it is the next drafted one; the sequence has it from now on."""
        if not self.ahead or self.ahead[0].token != token:
            return None
        first, *rest = self.ahead
        self.ahead = tuple(rest)
        self.taken += 1
        return first.logits

    def learn(self) -> None:
        """Let `pace` know what became of the last draft: the sequence went on otherwise, or used it up."""
        if self.confidences:
            self.pace.learn(self.confidences, self.taken)

    def settle(self) -> None:
        """Cut what is beyond the sequence; the draft is over."""
        spare, self.ahead, self.confidences, self.taken = len(self.ahead), (), (), 0
        if spare:
            super().truncate(max(self.lengths[0]) - spare)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """See `KVCache.truncate`; drafts are forgotten."""
        self.settle()
        super().truncate(lengths)

    def narrow(self, first: int, count: int) -> None:
        """See `KVCache.narrow`. Rows of a batch are not drafted for."""
        super().narrow(first, count)
        self.ahead, self.confidences, self.single = (), (), False


class LosslessRiver:
    """The dense backbone of a River bundle, made faster by its exit layers.

    Args:
        river: all its backbone blocks may run; its exit rule is not asked.
        entry_layer: the first layer that has an exit layer, from 1.
        draft: tokens to draft each time; None = as many as pay.

    """

    def __init__(self, river: River, *, entry_layer: int = 2, draft: int | None = None) -> None:
        decoder, first = river.decoder, entry_layer - 1
        self.river, self.entry_layer = river, entry_layer
        self.decoder = decoder
        self.exits = river.exits
        self._first = first
        self._draft = draft
        self._costs = Costs.of(decoder.arch, first)
        self._drafters: dict[int, Decoder] = {}
        self._longest = LONGEST_DRAFT if draft is None else draft

    def new_cache(self, batch: int, capacity: int) -> DraftCache:
        """See `generate.Model`."""
        pace = Pace(self._costs, self.decoder.arch.vocab_size, self._draft)
        return DraftCache(self.decoder, pace, batch=batch, capacity=capacity)

    def prefill(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:  # noqa: ARG002 - see Model
        """Append ids [B, S] through the whole backbone."""
        if isinstance(cache, DraftCache):
            cache.settle()
            cache.pace.saw(ids.flatten().tolist())
        return StepOutput(self.decoder.logits(self._dense(ids, cache)[:, -1]), None)

    def decode(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:
        """Append one token, ids [1, 1]: at no cost where it was drafted, else with a new draft behind it."""
        if not isinstance(cache, DraftCache) or not cache.single:
            return self.prefill(ids, cache)
        token = int(ids)
        cache.pace.saw((token,))
        known = cache.take(token)
        if known is not None:
            return StepOutput(known, None, accepted=1)
        cache.learn()
        cache.settle()
        tokens, confidences = self._drafted(token, cache, sampler)
        logits = self.decoder.logits(self._dense(torch.tensor([[token, *tokens]]), cache)[0])
        cache.ahead = tuple(map(_Ahead, tokens, logits[1:].split(1)))
        cache.confidences, cache.taken = tuple(confidences), 0
        return StepOutput(logits[:1], None, drafted=len(tokens))

    def decode_batch(self, ids: Tensor, cache: KVCache, samplers: Sequence[Sampler]) -> list[StepOutput]:  # noqa: ARG002 - see BatchModel
        """See `batch.BatchModel`. A batch reads the weights once for all its rows as it is: nothing is drafted."""
        logits = self.decoder.logits(self._dense(ids, cache)[:, -1])
        return [StepOutput(row, None) for row in logits.split(1)]

    def _dense(self, ids: Tensor, cache: KVCache) -> Tensor:
        decoder = self.decoder
        ids = ids.to(decoder.device)
        return decoder.run(decoder.embed(ids), decoder.step(cache, ids), cache)

    def _drafted(self, token: int, cache: DraftCache, sampler: Sampler | None) -> tuple[list[int], list[float]]:
        """Tokens that the river expects behind `token`, and their probabilities; the cache is left as it was."""
        start = cache.lengths[0][0]
        pace, limit = cache.pace, min(self._room(cache, start), cache.pace.limit())
        tokens: list[int] = []
        confidences: list[float] = []
        drafter = self._drafter(pace.vocabulary()) if limit else self.decoder
        look_ahead = None if sampler is None else sampler.copy()
        while len(tokens) < limit and pace.more(confidences):
            logits = self._river(drafter, tokens[-1] if tokens else token, cache)
            tokens.append(argmax(logits) if look_ahead is None else look_ahead(logits))
            temperature = 1.0 if sampler is None else sampler.sampling.temperature or 1.0
            confidences.append(float((logits / temperature).softmax(-1)[tokens[-1]]))
        if tokens:
            cache.truncate(start)
        return tokens, confidences

    def _river(self, drafter: Decoder, token: int, cache: KVCache) -> Tensor:
        """Append a token through the dense blocks that have no exit layer, then the exit layers; logits [V]."""
        ids = torch.tensor([[token]], device=drafter.device)
        h, step = drafter.embed(ids), drafter.step(cache, ids)
        h = drafter.run(h, step, cache, range(self._first))
        h = run_layers(self.exits, h, step, cache, range(self._first, len(self.exits)))
        return drafter.logits(h[0])[0]

    def _room(self, cache: KVCache, start: int) -> int:
        """Tokens that may be drafted behind one at `start`: they fit, and are rotated as if they came one by one."""
        most = max(min(self._longest, cache.capacity - start - 1), 0)
        for spec in self.decoder.arch.ropes:
            regime = spec.regime(start + 1)
            most = next((extra for extra in range(most) if spec.regime(start + 2 + extra) != regime), most)
        return most

    def _drafter(self, vocabulary: int) -> Decoder:
        """The decoder with a head for the first ids only: a view of the same weights, far less to read."""
        head = self.decoder.head
        if not isinstance(head, DenseLinear) or head.bias is not None or vocabulary >= head.out_features:
            return self.decoder
        if vocabulary not in self._drafters:
            drafter = copy.copy(self.decoder)
            drafter.head = DenseLinear(head.weight[:vocabulary])
            self._drafters[vocabulary] = drafter
        return self._drafters[vocabulary]
