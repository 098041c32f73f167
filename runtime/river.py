"""River: a 16-bit backbone beside its 4-bit exit layers, over one KV cache.

A pass climbs the backbone until the exit rule fires (or the resident blocks end), and goes on through the exit layers;
both write the same cache slots, so no key or value is ever missing. Prompts leave at one depth, generated tokens
each at their own; the first positions of a sequence may be held back (`exits.Route`), which the paper does not do.
Source: River-LLM (arXiv 2604.18396), sections 4.1 and 4.2. Knows no files, no text, no sampling.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.kernels.chain import Climbed, Rungs
from .block import Block
from .cache import KVCache, KVStore
from .decoder import Decoder
from .exits import ExitPolicy, FixedExit, Route, thresholds_of
from .generate import StepOutput
from .routing import Ladder
from .sampling import Sampler
from .stack import Stack, run_layers
from .step import Step


class River:
    """The model that generation runs. `exits[l]` is the 4-bit copy of block l (from 0); the first ones are never used.

    `resident` is the number of backbone blocks that may run: a token that would go deeper leaves there (the paper's
    backbone offloading). `dense_prefill` runs prompts through all resident blocks instead of asking the rule. `held`:
    see `exits.Route`; 0, the default, is the paper's rule.
    """

    def __init__(
        self,
        decoder: Decoder,
        exits: Sequence[Block],
        policy: ExitPolicy,
        *,
        resident: int | None = None,
        dense_prefill: bool = False,
        held: int = 0,
    ) -> None:
        self.decoder = decoder
        self.exits = exits
        self.policy, self.held, self.dense_prefill = policy, held, dense_prefill
        count = decoder.arch.num_layers
        self.deepest = count if resident is None else min(resident, count)
        self._rungs: dict[tuple[ExitPolicy, bool], Rungs | None] = {}
        self._prefill_policy: ExitPolicy = FixedExit(self.deepest) if dense_prefill else policy

    @property
    def route(self) -> Route:
        """The rule of its own, all of it but for what the river is made of."""
        return Route(self.policy, held=self.held, resident=self.deepest)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """See `generate.Model`."""
        return self.decoder.new_cache(batch, capacity)

    def prefill(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:  # noqa: ARG002 - see Model
        """Append ids [B, S], all leaving at one depth: the rule must hold for every token (paper section 4.2).

        Tokens that are held do not count, and stay.
        """
        h, step = self._enter(ids, cache)
        h, depth = self._climb(h, step, cache, self._prefill_policy)
        return StepOutput(self.decoder.logits(h[:, -1]), depth)

    def decode(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:  # noqa: ARG002 - see Model
        """Append one token per row, ids [B, 1]; the batch leaves together (eq. 1: the minimum over its rows).

        Rows that are held do not count, and stay.
        """
        h, step = self._enter(ids, cache)
        h, depth = self._climb(h, step, cache, self.policy)
        return StepOutput(self.decoder.logits(h[:, -1]), depth)

    def decode_batch(self, ids: Tensor, cache: KVCache, samplers: Sequence[Sampler]) -> list[StepOutput]:  # noqa: ARG002 - see BatchModel
        """See `batch.BatchModel`; each row leaves at its own depth."""
        logits, depths = self.decode_rows(ids, cache)
        found = zip(logits[:, -1].split(1), depths[:, -1].tolist(), strict=True)
        return [StepOutput(row, depth) for row, depth in found]

    def decode_rows(self, ids: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Append tokens ids [B, S], each leaving at its own depth. Returns logits [B, S, V] and depths [B, S].

        Beyond the paper: a row's result does not depend on the rows beside it.
        """
        h, step = self._enter(ids, cache)
        h, depths = self.climb_rows(h, step, cache)
        return self.decoder.logits(h), depths

    def climb_rows(self, h: Tensor, step: Step, kv: KVStore) -> tuple[Tensor, Tensor]:
        """Take h [B, S, hidden] through all layers, each row at its own depth; returns h and depths [B, S]."""
        arch = self.decoder.arch
        climbed = self._climb_natively(h, step, kv, self.policy, together=False)
        h, depths = climbed.h, torch.tensor(climbed.depths, device=h.device).view(h.shape[:2])
        if climbed.done == arch.num_layers:
            return h, depths
        left = depths > 0
        ladder, route = Ladder(arch, self.decoder.blocks, self.exits), self.route
        positions = step.positions.to(h.device)
        for layer in range(climbed.done + 1, arch.num_layers + 1):
            if bool(left.all()):
                return run_layers(self.exits, h, step, kv, range(layer - 1, arch.num_layers)), depths
            before, h = h, ladder.run(h, step, kv, layer - 1, left)
            depths[~left] = layer
            left = left | route.leaves(layer, before, h, positions)
        return h, depths

    def _enter(self, ids: Tensor, cache: KVCache) -> tuple[Tensor, Step]:
        ids = ids.to(self.decoder.device)
        return self.decoder.embed(ids), self.decoder.step(cache, ids)

    def _climb(self, h: Tensor, step: Step, kv: KVStore, policy: ExitPolicy) -> tuple[Tensor, int]:
        """All rows but those held leave together; returns h and the depth where they did."""
        free = self._free(step, h.device)
        h, gone, depth = self._climb_backbone(h, step, kv, policy, free)
        if free is not None:
            ladder, gone = Ladder(self.decoder.arch, self.decoder.blocks, self.exits), self.deepest
            for index in range(depth, gone):  # behind them nobody is left in the backbone
                h = ladder.run(h, step, kv, index, free)
        return run_layers(self.exits, h, step, kv, range(gone, self.decoder.arch.num_layers)), depth

    def _climb_backbone(
        self, h: Tensor, step: Step, kv: KVStore, policy: ExitPolicy, free: Tensor | None
    ) -> tuple[Tensor, int, int]:
        """Run dense blocks until the rows leave; those after which none can go in one stretch.

        Returns h, how many blocks have run, exit layers among them, and after how many the rows left.
        """
        climbed = self._climb_natively(h, step, kv, policy, together=True)
        h, done, depth = climbed.h, climbed.done, climbed.depths[0]
        if depth:
            return h, done, depth
        run = self.decoder.run
        for layer in range(done + 1, self.deepest):
            if not policy.asks(layer):
                continue
            before = run(h, step, kv, range(done, layer - 1))
            h, done = run(before, step, kv, range(layer - 1, layer)), layer
            if _all_leave(policy, layer, before, h, free):
                return h, layer, layer
        return run(h, step, kv, range(done, self.deepest)), self.deepest, self.deepest

    def _climb_natively(self, h: Tensor, step: Step, kv: KVStore, policy: ExitPolicy, *, together: bool) -> Climbed:
        """As much of the climb as native calls can do: see `Stack.climb`. They know of no rows that are held."""
        rule = policy, together
        if rule not in self._rungs:
            thresholds = thresholds_of(policy, self.decoder.arch.num_layers)
            self._rungs[rule] = None if thresholds is None else Rungs(array("d", thresholds), self.deepest, together)
        rungs, blocks, exits = self._rungs[rule], self.decoder.blocks, self.exits
        if rungs is None or not isinstance(blocks, Stack) or not isinstance(exits, Stack):
            return Climbed.begin(h)
        return Climbed.begin(h) if min(step.starts) < self.held else blocks.climb(exits, rungs, h, step, kv)

    def _free(self, step: Step, device: torch.device) -> Tensor | None:
        """Which rows may leave, bool [B, S]; None: all of them."""
        return None if min(step.starts) >= self.held else (step.positions >= self.held).to(device)


def _all_leave(policy: ExitPolicy, layer: int, before: Tensor, after: Tensor, free: Tensor | None) -> bool:
    if free is None:
        return policy.all_leave(layer, before, after)
    return bool(free.any()) and policy.all_leave(layer, before[free], after[free])
