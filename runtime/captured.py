"""Dense models and River whose decoded tokens run as one CUDA graph each: no Python and no wait between layers.

Prompts, several rows at once and caches made elsewhere run as ever. On a CPU the same function is called instead of a
graph, which is how it is tested. Knows no files.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.probe import triton_works
from .block import Block
from .cache import KVCache
from .decoder import Decoder
from .dense import Dense
from .exits import thresholds_of
from .generate import Model, StepOutput
from .graphs import Graphs
from .nvium import Nvium
from .offload import StreamedBlocks
from .progress import Reporter, SilentReporter
from .river import River
from .sampling import Sampler
from .static import LEAST_BUCKET, StaticCache, StaticFrame, StaticFrames, StaticStep, bucket_of
from .static_exits import DeviceRule, joined, river_blocks
from .static_segments import SegmentGraphs

Result = tuple[Tensor, Tensor]
"""Logits float32 [1, V]; int64 [3]: the argmax (lowest id on ties), 1 where its logit is finite, the depth."""


class TokenPass:
    """One token through a model: a function of `ids` int64 [1, 1] and `position` int64 [1], both on the device."""

    def __init__(self, decoder: Decoder, blocks: Sequence[Block], rule: DeviceRule | None) -> None:
        self._decoder, self._blocks, self._rule = decoder, blocks, rule
        device = decoder.device
        self.ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._vocabulary = torch.arange(decoder.arch.vocab_size, device=device)

    def run(self, cache: StaticCache, frame: StaticFrame) -> Result:
        """Append the token to the cache; running it again on the same inputs changes nothing."""
        step, rule = StaticStep(frame, self.position), self._rule
        h = self._decoder.embed(self.ids)
        if rule is not None:
            rule.begin()
        for layer, block in enumerate(self._blocks, 1):
            before, h = h, block(h, step, cache)
            if rule is not None:
                rule.ask(layer, before, h, self.position)
        logits = self._decoder.logits(h[:, -1])
        return logits, self._chosen(logits)

    def _chosen(self, logits: Tensor) -> Tensor:
        best = logits.max()
        lowest = torch.where(logits[0] == best, self._vocabulary, len(self._vocabulary) - 1).min()
        depth = torch.zeros_like(lowest) if self._rule is None else self._rule.depth[0].long()
        return torch.stack((lowest, best.isfinite().long(), depth))


class TokenGraphs:
    """Decodes tokens of one sequence at a time through graphs of a `TokenPass`, one for each bucket of lengths.

    Graphs hold the places of a cache's memory. A cache that is no longer used lends its memory to the next one, so
    that the graphs serve again.
    """

    def __init__(self, decoder: Decoder, token: TokenPass, *, exits: bool, reporter: Reporter | None = None) -> None:
        self._decoder, self._token, self._exits = decoder, token, exits
        self._graphs: Graphs[Result] = Graphs(decoder.device, reporter)
        self._frames = StaticFrames(decoder.arch, decoder.device, decoder.dtype)
        self._lent: weakref.ref[StaticCache] | None = None
        self._home: StaticCache | None = None
        self._owner: weakref.ref[StaticCache] | None = None  # who uses the memory of `_home`
        self._switches = any(rope.kind == "longrope" for rope in decoder.arch.ropes)

    @property
    def broken(self) -> str:
        """Why no graph can be made; empty as long as they can."""
        return self._graphs.broken

    def new_cache(self, capacity: int) -> StaticCache:
        """Make an empty cache of one row, over the memory of an earlier one where that is free and large enough."""
        free = self._owner is None or self._owner() is None
        if self._home is not None and free and self._home.capacity >= capacity:
            cache = self._home.renewed()
            cache.wipe()
            self._owner = weakref.ref(cache)
        else:
            if free:
                self._forget()  # its memory, before more is asked for
            decoder = self._decoder
            rounded = -(-capacity // LEAST_BUCKET) * LEAST_BUCKET
            cache = StaticCache(decoder.arch, batch=1, capacity=rounded, dtype=decoder.dtype, device=decoder.device)
        self._lent = weakref.ref(cache)
        return cache

    def decode(self, ids: Tensor, cache: KVCache, sampler: Sampler | None) -> StepOutput | None:
        """Append one token, ids [1, 1]; None where this cache or this device has no graphs."""
        lent = None if self._lent is None else self._lent()
        if self.broken or lent is None or cache is not lent or ids.numel() != 1:
            return None
        start = self._begin(ids, lent)
        self._token.ids.copy_(ids.view(1, 1))
        self._token.position.fill_(start)
        bucket = bucket_of(start + 1, lent.capacity)
        frame = self._frames.of(bucket)
        found = self._graphs.attempt(bucket, lambda: self._token.run(lent, frame))
        if found is None:
            return None
        lent.stored(start + 1)
        logits, chosen = found
        return self._output(logits.clone(), chosen, sampler)

    def _begin(self, ids: Tensor, cache: StaticCache) -> int:
        """Check that the token fits behind what the cache holds; return its position."""
        if self._switches:
            start = self._decoder.step(cache, ids).start
        else:
            (start,) = cache.starts(range(self._decoder.arch.num_layers))
            cache.check_room((start,), (1,))
        if self._home is None or self._home.buffers(0)[0] is not cache.buffers(0)[0]:
            self._forget()
            self._home, self._owner = cache.renewed(), weakref.ref(cache)
            self._frames.fit(cache.capacity)
        return start

    def _forget(self) -> None:
        """Let go of the graphs and of the memory that they work in."""
        self._graphs.clear()
        self._home = self._owner = None

    def _output(self, logits: Tensor, chosen: Tensor, sampler: Sampler | None) -> StepOutput:
        """One wait for the device at most, and none where nothing is asked for."""
        plain = sampler is not None and sampler.sampling.greedy and sampler.sampling.repetition_penalty == 1
        if not plain and not self._exits:
            return StepOutput(logits, None)
        token, finite, depth = chosen.tolist()
        return StepOutput(logits, depth if self._exits else None, token if plain and finite else None)


def captured(model: Model, *, wanted: bool = True, reporter: Reporter | None = None) -> Model:
    """The model with its tokens as graphs, or the model itself where there can be none; `reporter` is told which."""
    decoder, reporter = getattr(model, "decoder", None), reporter or SilentReporter()
    on_gpu = isinstance(decoder, Decoder) and decoder.device.type == "cuda"
    if not on_gpu or isinstance(model, CapturedDense | CapturedRiver):
        return model
    if not isinstance(model, Dense | River | Nvium):
        reporter.detail("Tokens run kernel by kernel: this way of generating decides between blocks.")
        return model
    reason = "--no-cuda-graphs" if not wanted else why_not(model)
    if reason:
        reporter.detail(f"Tokens run kernel by kernel: {reason}.")
        return model
    reporter.detail("Tokens of a single text run as CUDA graphs.")
    if isinstance(model, Nvium):
        model.graphs = model.graphs or SegmentGraphs(model.decoder, model.segments, reporter)
        return model
    return CapturedRiver(model, reporter) if isinstance(model, River) else CapturedDense(model, reporter)


def why_not(model: Dense | River | Nvium) -> str:
    """Say why the tokens of a model cannot be graphs; empty where they can."""
    if isinstance(model.decoder.blocks, StreamedBlocks):
        return "blocks are streamed from host memory"
    if isinstance(model, River):
        if thresholds_of(model.policy, model.decoder.arch.num_layers) is None:
            return "the exit rule has no form on the device"
        if not triton_works(model.decoder.device):
            return "River needs Triton for it, which is missing or fails its check here"
    return ""


class CapturedDense(Dense):
    """A dense model that decodes single sequences through graphs."""

    def __init__(self, model: Dense, reporter: Reporter | None = None) -> None:
        super().__init__(model.decoder)
        self._reporter = reporter
        self._made: TokenGraphs | None = None

    @property
    def graphs(self) -> TokenGraphs:
        """Made when first needed: all blocks are loaded for it."""
        if self._made is None:
            decoder = self.decoder
            blocks = [joined(decoder.arch, block) for block in decoder.blocks]
            self._made = TokenGraphs(decoder, TokenPass(decoder, blocks, None), exits=False, reporter=self._reporter)
        return self._made

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """See `generate.Model`."""
        return self.graphs.new_cache(capacity) if batch == 1 else super().new_cache(batch, capacity)

    @torch.inference_mode()
    def decode(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:
        """See `generate.Model`; ids [B, 1]."""
        return self.graphs.decode(ids, cache, sampler) or super().decode(ids, cache, sampler)


class CapturedRiver(River):
    """River that decodes single sequences through graphs; each holds the dense and the 4-bit way of every block."""

    def __init__(self, model: River, reporter: Reporter | None = None, *, interpreted: bool = False) -> None:
        super().__init__(
            model.decoder,
            model.exits,
            model.policy,
            resident=model.deepest,
            dense_prefill=model.dense_prefill,
            held=model.held,
        )
        self._reporter, self._interpreted = reporter, interpreted
        self._made: TokenGraphs | None = None

    @property
    def graphs(self) -> TokenGraphs:
        """Made when first needed: all blocks and exit layers are loaded for it."""
        if self._made is None:
            decoder = self.decoder
            thresholds = thresholds_of(self.policy, decoder.arch.num_layers)
            if thresholds is None:
                raise TypeError("this exit rule has no form on the device")
            rule = DeviceRule(
                thresholds,
                held=self.held,
                deepest=self.deepest,
                device=decoder.device,
                interpreted=self._interpreted,
            )
            token = TokenPass(decoder, river_blocks(self, rule), rule)
            self._made = TokenGraphs(decoder, token, exits=True, reporter=self._reporter)
        return self._made

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """See `generate.Model`."""
        return self.graphs.new_cache(capacity) if batch == 1 else super().new_cache(batch, capacity)

    @torch.inference_mode()
    def decode(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:
        """See `generate.Model`; ids [B, 1]."""
        return self.graphs.decode(ids, cache, sampler) or super().decode(ids, cache, sampler)
