"""Our forward against transformers', every family, float32: whole, cached, in chunks, by token, in ragged batches."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from adapt_llm.runtime.cache import KVCache
from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.pass_store import PassStore

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
LENGTH = 21


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", NAMES)


NAMES = [
    "llama", "llama-tied", "llama-head-dim", "llama-biases", "llama-llama3", "llama-linear", "llama-yarn",
    "llama-yarn-mscale", "llama-dynamic", "mistral", "mistral-full", "ministral", "ministral3", "qwen2", "qwen2-window",
    "qwen2-yarn", "qwen3", "qwen3-window", "gemma2", "gemma3", "phi3", "phi3-longrope", "phi3-partial", "smollm3",
    "smollm3-window",
]  # fmt: skip


def test_every_case_is_listed(tiny: ModuleType) -> None:
    assert set(NAMES) == set(tiny.CASES)


def forward(
    decoder: Decoder, ids: torch.Tensor, cache: KVCache | None, counts: list[int] | None = None
) -> torch.Tensor:
    with torch.inference_mode():
        step = decoder.step(cache, ids, counts)
        store = PassStore(decoder.arch) if cache is None else cache
        return decoder.logits(decoder.run(decoder.embed(ids), step, store))


@pytest.fixture
def model(case: str, tiny_model: Callable[[str], Any]) -> Any:
    return tiny_model(case)


def test_uncached(model: Any, tiny: ModuleType) -> None:
    ids = tiny.random_ids(2, LENGTH)
    torch.testing.assert_close(forward(model.decoder, ids, None), model.expected(ids), **TOLERANCE)


@pytest.mark.parametrize(
    "chunks", [[LENGTH], [1] * LENGTH, [5, 1, 9, 2, 4], [11, 10]], ids=["whole", "token", "mixed", "half"]
)
def test_cached_in_chunks(model: Any, tiny: ModuleType, chunks: list[int]) -> None:
    ids = tiny.random_ids(2, LENGTH)
    cache = model.decoder.new_cache(2, LENGTH)
    logits = torch.cat([forward(model.decoder, part, cache) for part in ids.split(chunks, 1)], 1)
    torch.testing.assert_close(logits, model.expected(ids), **TOLERANCE)


@pytest.mark.parametrize("batch", [2, 3])  # 2 is the number of key-value heads: a transposed cache would go unnoticed
def test_ragged_rows(model: Any, tiny: ModuleType, batch: int) -> None:
    """Each row of a ragged batch is what it is alone: prompts of unequal length, then tokens, one row pausing."""
    ids = tiny.random_ids(batch, LENGTH)
    lengths = [13, 4, 9][:batch]
    prompt = ids[:, :13].clone()
    for row, length in enumerate(lengths):
        prompt[row, length:] = 0
    cache = model.decoder.new_cache(batch, LENGTH)
    first = forward(model.decoder, prompt, cache, lengths)
    expected = model.expected(ids)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(first[row, :length], expected[row, :length], **TOLERANCE)
    for count in (1, 3, 1):
        counts = [count] * batch
        counts[0] = 0 if count == 3 else count
        width = max(counts)
        chunk = torch.stack(
            [
                torch.cat((row[n : n + c], row.new_zeros(width - c)))
                for row, n, c in zip(ids, lengths, counts, strict=True)
            ]
        )
        logits = forward(model.decoder, chunk, cache, counts)
        for row, (n, c) in enumerate(zip(lengths, counts, strict=True)):
            torch.testing.assert_close(logits[row, :c], expected[row, n : n + c], **TOLERANCE)
        lengths = [n + c for n, c in zip(lengths, counts, strict=True)]
        assert cache.lengths[0] == tuple(lengths)


def test_rolled_back(model: Any, tiny: ModuleType) -> None:
    """Tokens that were taken back leave no trace."""
    ids = tiny.random_ids(1, LENGTH)
    cache = model.decoder.new_cache(1, LENGTH)
    forward(model.decoder, ids[:, :12], cache)
    forward(model.decoder, tiny.random_ids(1, 5), cache)
    cache.truncate(12)
    logits = forward(model.decoder, ids[:, 12:], cache)
    torch.testing.assert_close(logits, model.expected(ids)[:, 12:], **TOLERANCE)
