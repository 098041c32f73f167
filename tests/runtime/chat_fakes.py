"""A tokenizer of single bytes and models whose answer follows from all they have in their cache."""

from collections.abc import Callable

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from adapt_llm.runtime.generate import StepOutput
from adapt_llm.runtime.sampling import Sampler
from adapt_llm.runtime.text import Tokenizer

SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|other|>"]


def byte_tokenizer(**settings: object) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, settings)


class FakeCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: list[int] = []

    def truncate(self, length: int) -> None:
        self.ids = self.ids[:length]


class GrowingCache(FakeCache):
    def grow(self, capacity: int) -> None:
        self.capacity = capacity


class FakeModel:
    """Says what `answer` gives for the text in the cache: the next token, as its text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer: Callable[[str], str],
        *,
        cache: type[FakeCache] = FakeCache,
        depths: Callable[[int], int | None] = lambda length: length % 3,
    ) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        self.cache_type = cache
        self.depths = depths
        self.calls: list[tuple[str, int]] = []
        self.caches: list[FakeCache] = []
        self.break_at: int | None = None

    def new_cache(self, batch: int, capacity: int) -> FakeCache:
        assert batch == 1
        self.caches.append(self.cache_type(capacity))
        return self.caches[-1]

    def prefill(self, ids: torch.Tensor, cache: FakeCache, sampler: Sampler | None = None) -> StepOutput:
        return self._step("prefill", ids, cache)

    def decode(self, ids: torch.Tensor, cache: FakeCache, sampler: Sampler | None = None) -> StepOutput:
        assert ids.shape == (1, 1)
        return self._step("decode", ids, cache)

    def _step(self, kind: str, ids: torch.Tensor, cache: FakeCache) -> StepOutput:
        assert ids.dtype == torch.int64
        self.calls.append((kind, ids.shape[1]))
        cache.ids += ids[0].tolist()
        if self.break_at is not None and len(cache.ids) >= self.break_at:
            raise KeyboardInterrupt
        assert len(cache.ids) <= cache.capacity, "the cache overflows"
        text = self.tokenizer.decode(cache.ids, skip_special_tokens=False)
        return StepOutput(self._logits(self._next(text, cache.ids)), self.depths(len(cache.ids)))

    def _next(self, text: str, ids: list[int]) -> int:
        """First token of the answer that is not there yet; the answer is worked out from what precedes it."""
        wanted = self.tokenizer.encode(self.answer(text), add_special_tokens=False)
        done = next(n for n in range(min(len(wanted), len(ids)), -1, -1) if n == 0 or ids[-n:] == wanted[:n])
        return wanted[done] if done < len(wanted) else self.tokenizer.added_id("<|im_end|>")

    def _logits(self, token: int) -> torch.Tensor:
        logits = torch.full((1, self.tokenizer.backend.get_vocab_size()), -10.0)
        logits[0, token] = 10.0
        return logits


def echo(text: str) -> str:
    """Answer a chatml conversation: how many turns there were, and the last thing that the user said, reversed."""
    turns = text.split("<|im_start|>user\n")[1:]
    last = turns[-1].split("<|im_end|>")[0]
    return f"[{len(turns)}:{last[::-1]}]<|im_end|>"
