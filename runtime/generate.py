"""The token stream that run, chat, bench and tests share: prefill, then one record per token.

Knows the model only by the `Model` protocol: no weights, no exit rule, no chat template, no terminal.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import ResourceError
from .cache import KVCache, RotationChangedError
from .continuation import Continuation, Request
from .options import Sampling
from .sampling import Sampler
from .stops import Stops
from .stream import TokenRecord, TokenStream
from .text import Tokenizer

_CAPACITY_STEP = 64
_SOON = 512


@dataclass(frozen=True)
class StepOutput:
    """What one pass of the model says about the next token."""

    logits: Tensor
    """float32 [1, V], of the last position."""
    depth: int | None
    """Backbone blocks executed before the token left; None = the model has no exits."""
    token: int | None = None
    """The next token where the model has chosen it; otherwise it is chosen from `logits`."""
    passes: tuple[int, ...] = ()
    """Rows of each pass above an exit that earlier tokens had left at (N-vium)."""
    drafted: int = 0
    """Tokens drafted ahead in this call (lossless River)."""
    accepted: int = 0
    """1 where the token was such a draft, already verified: nothing ran."""


class Model(Protocol):
    """What generation needs of a model. Ids are int64 on the CPU; the model moves them where it needs them.

    `sampler` is what will choose the next token, for models whose work depends on it (drafts, drawn exits); None is the
    argmax. Whatever else such a model remembers of a sequence lies in its cache, so that `truncate` cuts that too.
    """

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Make an empty cache for `batch` rows of at most `capacity` tokens."""
        ...

    def prefill(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:
        """Append ids [1, S] to the cache."""
        ...

    def decode(self, ids: Tensor, cache: KVCache, sampler: Sampler | None = None) -> StepOutput:
        """Append one token, ids [1, 1], to the cache."""
        ...


@runtime_checkable
class _Growable(Protocol):
    def grow(self, capacity: int) -> None: ...


class PromptCache:
    """A model's KV cache for one sequence, and the ids whose keys and values it holds.

    Invariant between passes: the cache holds exactly `ids`. The last token of a stream is chosen but not passed
    through the model, so it is not among them; a continuation prefills it with what follows. A pass that was
    interrupted leaves `ids` as before it, and the next `reuse` cuts off what it had written.

    Args:
        model: makes the cache.
        context_size: tokens at most.
        whole: a cache that cannot grow in place is made for the whole context at once, so that it lasts for a
            conversation; otherwise for one prompt and its answer.

    """

    def __init__(self, model: Model, context_size: int, *, whole: bool = False) -> None:
        self._model = model
        self._whole = whole
        self.context_size = context_size
        self.ids: list[int] = []
        self.kv: KVCache | None = None
        self.capacity = 0

    def reserve(self, length: int, eventually: int = 0) -> KVCache:
        """Make room for `length` tokens now and, where a cache cannot grow in place, `eventually` at once.

        Grows by doubling. A cache that cannot grow is replaced by an empty one, and `ids` is emptied with it.
        """
        if self.kv is not None and isinstance(self.kv, _Growable):
            if length > self.capacity:
                capacity = self._rounded(max(length, 2 * self.capacity))
                self.kv.grow(capacity)
                self.capacity = capacity
            return self.kv
        needed = self.context_size if self._whole else max(length, eventually)
        if self.kv is None or needed > self.capacity:
            needed = max(needed, 2 * self.capacity)
            self.kv, self.ids = None, []  # free the old one before the new one is made
            self.kv = self._new(length, needed)
        return self.kv

    def _new(self, length: int, needed: int) -> KVCache:
        kv = self._allocate(length)
        return kv if isinstance(kv, _Growable) or self.capacity >= needed else self._allocate(needed)

    def _allocate(self, length: int) -> KVCache:
        self.capacity = self._rounded(length)
        try:
            return self._model.new_cache(1, self.capacity)
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError
            raise ResourceError(
                f"There is no memory for keys and values of {self.capacity} tokens",
                "Lower --max-tokens or --ctx-size.",
            ) from error

    def _rounded(self, length: int) -> int:
        return min(-(-length // _CAPACITY_STEP) * _CAPACITY_STEP, self.context_size)

    def reuse(self, ids: Sequence[int]) -> int:
        """Keep the longest beginning that the cache has in common with `ids`; return its length.

        The last of `ids` is never counted: the model must see at least one token to say what follows.
        """
        limit = min(len(self.ids), len(ids) - 1)
        kept = next((at for at in range(limit) if self.ids[at] != ids[at]), max(limit, 0))
        del self.ids[kept:]  # first: an interrupt may leave the cache with more than `ids`, never with less
        if self.kv is not None:
            self.kv.truncate(kept)
        return kept


def generate(
    model: Model,
    ids: Sequence[int],
    *,
    tokenizer: Tokenizer,
    sampling: Sampling,
    stops: Stops,
    cache: PromptCache,
    max_tokens: int | None = None,
    cancelled: Callable[[], bool] | None = None,
    row: int = 0,
    continues: bool = False,
) -> TokenStream:
    """Continue `ids`. The model runs as the stream is read; arguments are checked at once.

    Args:
        model: what to run.
        ids: the whole prompt; the beginning that `cache` already holds is not computed again.
        tokenizer: for the text of the records.
        sampling: how tokens are chosen.
        stops: what ends the text ("stop").
        cache: holds, after the last record, the prompt and all new tokens but the last (see `PromptCache`).
            One stream at a time works on it.
        max_tokens: new tokens at most ("length"); None = as many as the context holds.
        cancelled: asked after each token; True ends the text with that token ("cancelled").
        row: number of this text among those of one seed.
        continues: the text goes on from the prompt's, whose leading space it keeps (plain completion).

    Raises:
        UsageError: no prompt, or `max_tokens` below 1.
        AdaptError: the prompt does not fit in the context; while reading: the model's logits are broken.
        ResourceError: while reading: no memory for the cache.

    """
    request = Request(ids, sampling, stops, cache.context_size, max_tokens, row, continues)
    return stream(model, request, tokenizer=tokenizer, cache=cache, cancelled=cancelled)


def stream(
    model: Model,
    request: Request,
    *,
    tokenizer: Tokenizer,
    cache: PromptCache,
    cancelled: Callable[[], bool] | None = None,
) -> TokenStream:
    """Do what a request says; see `generate`."""
    text = Continuation(request, tokenizer, cancelled)
    return TokenStream(_Run(model, cache, text).records(list(request.ids)), text.stats)


@dataclass
class _Run:
    """The state of one stream."""

    model: Model
    cache: PromptCache
    text: Continuation

    def records(self, prompt: list[int]) -> Generator[TokenRecord, None, None]:
        started = time.perf_counter()
        output = self._prefill(prompt)
        while True:
            record = self.text.take(output, started)
            yield record
            if record.finish_reason is not None:
                return
            started = time.perf_counter()
            output = self._decode(record.id)

    def _prefill(self, prompt: list[int]) -> StepOutput:
        soon = len(prompt) + min(self.text.limit, _SOON)
        kv = self.cache.reserve(soon, eventually=len(prompt) + self.text.limit)
        kept = self.text.stats.reused_tokens = self.cache.reuse(prompt)
        with torch.inference_mode():
            try:
                output = self.model.prefill(torch.tensor([prompt[kept:]]), kv, self.text.sampler)
            except RotationChangedError:
                output = self._again(prompt, kv)
        self.cache.ids = prompt
        return output

    def _decode(self, token: int) -> StepOutput:
        kv = self.cache.reserve(len(self.cache.ids) + 1)
        with torch.inference_mode():
            try:
                output = self.model.decode(torch.tensor([[token]]), kv, self.text.sampler)
            except RotationChangedError:
                return self._again([*self.cache.ids, token], kv)
        self.cache.ids.append(token)
        return output

    def _again(self, ids: list[int], kv: KVCache) -> StepOutput:
        """Run the whole sequence afresh: longrope rotates all keys otherwise beyond the length first trained."""
        self.cache.ids = []
        kv.truncate(0)
        output = self.model.prefill(torch.tensor([ids]), kv, self.text.sampler)
        self.cache.ids = ids
        return output
