"""Families in bf16, token by token: the native operations are as near to float32 as torch's are."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from adapt_llm.quant.kernels import native, small
from adapt_llm.runtime.cache import KVCache
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.store import TensorInfo, TensorStore

pytestmark = pytest.mark.skipif(not small.available(), reason=f"no native module: {native.why_not()}")
CASES = [
    "llama", "llama-tied", "llama-head-dim", "llama-biases", "llama-yarn-mscale", "mistral", "ministral3",
    "qwen2-window", "qwen3", "qwen3-window", "gemma2", "gemma3", "phi3", "phi3-partial", "smollm3",
]  # fmt: skip
TEXTS, LENGTH, PROMPT = 5, 21, 9


class Rounded:
    """A store whose weights are bf16 numbers, so that every dtype computes the same model."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def names(self) -> Collection[str]:
        return self._store.names()

    def info(self, name: str) -> TensorInfo:
        return self._store.info(name)

    def read(self, name: str) -> Tensor:
        return self._store.read(name).bfloat16()

    def release(self, name: str) -> None:
        self._store.release(name)


def load(model: Any, dtype: torch.dtype) -> Decoder:
    return load_decoder(model.arch, Rounded(model.store), device="cpu", dtype=dtype)


@torch.inference_mode()
def logits(decoder: Decoder, ids: Tensor) -> tuple[Tensor, KVCache]:
    """Of a prompt and then one token at a time, [1, S, V] in float64."""
    cache = decoder.new_cache(1, ids.shape[1])
    parts = ids.split([PROMPT] + [1] * (ids.shape[1] - PROMPT), 1)
    out = [decoder.logits(decoder.run(decoder.embed(part), decoder.step(cache, part), cache)) for part in parts]
    return torch.cat(out, 1).double(), cache


def read(decoder: Decoder, texts: Sequence[Tensor]) -> tuple[Tensor, list[KVCache]]:
    """`logits` of several texts, one behind the other: the errors of one alone are a matter of luck."""
    found = [logits(decoder, ids) for ids in texts]
    return torch.cat([each for each, _ in found], 1), [cache for _, cache in found]


@pytest.mark.parametrize("case", CASES)
def test_native_is_as_exact_as_torch(
    case: str, tiny_model: Callable[[str], Any], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(case)
    texts = tiny.random_ids(TEXTS, LENGTH).split(1)
    expected, exact = read(load(model, torch.float32), texts)
    got, caches = read(load(model, torch.bfloat16), texts)
    monkeypatch.setattr(small, "available", lambda: False)
    monkeypatch.setattr(native, "available", lambda: False)
    torchs, _ = read(load(model, torch.bfloat16), texts)
    assert not torch.equal(got, torchs)
    size = expected.norm()
    assert (got - expected).norm() / size < 1.2 * (torchs - expected).norm() / size + 2e-3
    for cache, right in zip(caches, exact, strict=True):
        assert cache.lengths == right.lengths
        for stored, meant in zip(cache._keys + cache._values, right._keys + right._values, strict=True):
            assert (stored.double() - meant).norm() < 0.06 * meant.norm()


def test_a_pass_that_trains_has_gradients(tiny_model: Callable[[str], Any], tiny: Any) -> None:
    """The native operations have none: a residual stream with a gradient takes torch's path."""
    decoder = load(tiny_model("llama"), torch.bfloat16)
    ids = tiny.random_ids(1, 1)
    h = decoder.embed(ids).detach().requires_grad_()
    decoder.logits(decoder.run(h, decoder.step(None, ids), PassStore(decoder.arch))).sum().backward()
    assert h.grad is not None
    with torch.enable_grad():
        plain = decoder.run(h.detach(), decoder.step(None, ids), PassStore(decoder.arch))
    assert not plain.requires_grad
