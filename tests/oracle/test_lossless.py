"""Lossless River is the dense model: greedy and sampled, over turns, windows, shared caches and changing rotations."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapt_llm.convert.source import open_source
from adapt_llm.errors import UsageError
from adapt_llm.quant.kernels import native
from adapt_llm.quant.quantizers import QUANTIZERS
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.block import Block
from adapt_llm.runtime.cache import RotationChangedError
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.drafting import Costs, Pace
from adapt_llm.runtime.exit_layers import LazyBlocks, exit_block
from adapt_llm.runtime.exits import FixedExit
from adapt_llm.runtime.generate import Model, PromptCache, StepOutput
from adapt_llm.runtime.lossless import DraftCache, LosslessRiver
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.river import River
from adapt_llm.runtime.sampling import Sampler, Sampling, distribution
from adapt_llm.runtime.store import open_safetensors
from adapt_llm.runtime.text import Tokenizer

NAMES = ["llama", "llama-tied", "llama-biases", "llama-dynamic", "mistral", "ministral3", "qwen2", "qwen2-window"]
NAMES += ["qwen3", "gemma2", "gemma3", "phi3", "phi3-longrope", "smollm3-window"]
CPU = {"device": "cpu", "dtype": torch.float32}
LONG = 40
SAMPLINGS = {
    "greedy": Sampling(),
    "plain": Sampling(temperature=1.0, seed=5),
    "filtered": Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=6),
}


class Tiny:
    """A tiny model with exit layers: `noise` of their weights is random, the rest is the block's own, unrounded."""

    def __init__(self, model, noise: float = 0.1, sources: Sequence[int] | None = None) -> None:
        store = open_safetensors(model.folder)
        arch = model.decoder.arch if sources is None else replace(model.decoder.arch, kv_sources=tuple(sources))
        self.decoder: Decoder = load_decoder(arch, store, **CPU)
        noisy = Noisy(store, noise)
        self.exits = load_decoder(arch, noisy, **CPU).blocks
        self.dense = Dense(self.decoder)

    def lossless(self, draft: int | None = None) -> LosslessRiver:
        river = River(self.decoder, self.exits, FixedExit(self.decoder.arch.num_layers))
        return LosslessRiver(river, draft=draft)


class Noisy:
    """A store whose matrices have noise: exit layers that agree with their blocks often, and not always."""

    def __init__(self, store, noise: float) -> None:
        self._store, self._noise = store, noise

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._store.read(name)
        if tensor.dim() < 2 or "layers" not in name:
            return tensor
        generator = torch.Generator().manual_seed(len(name))
        return tensor + self._noise * tensor.std() * torch.randn(tensor.shape, generator=generator)


@pytest.fixture(scope="module")
def tinies(tiny_model: Callable) -> Callable[..., Tiny]:
    made: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in made:
            made[name] = Tiny(tiny_model(name))
        return made[name]

    return get


def continued(
    model: Model, ids: Sequence[int], count: int, sampling: Sampling, cache: PromptCache | None = None
) -> tuple[list[int], int, int]:
    """Choose `count` tokens as the token stream does; return them, and how many were drafted and accepted."""
    cache = cache or PromptCache(model, 64)
    sampler, tokens, drafted, accepted = Sampler(sampling), [], 0, 0
    sampler.saw(ids)
    kv = cache.reserve(len(ids) + count, eventually=len(ids) + count)
    kept = cache.reuse(ids)

    def again(whole: list[int]) -> StepOutput:
        kv.truncate(0)
        return model.prefill(torch.tensor([whole]), kv, sampler)

    with torch.inference_mode():
        try:
            out = model.prefill(torch.tensor([ids[kept:]]), kv, sampler)
        except RotationChangedError:
            out = again(list(ids))
        cache.ids = list(ids)
        while True:
            tokens.append(sampler(out.logits[0]))
            if len(tokens) == count:
                return tokens, drafted, accepted
            try:
                out = model.decode(torch.tensor([tokens[-1:]]), kv, sampler)
            except RotationChangedError:
                out = again([*ids, *tokens])
            cache.ids.append(tokens[-1])
            drafted, accepted = drafted + out.drafted, accepted + out.accepted


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_dense_models(name: str, sampling: str, tinies, tiny: ModuleType) -> None:
    """Across windows (5 to 7 tokens), a switch of rotations (24) and all of the context (64)."""
    model, ids = tinies(name), tiny.random_ids(1, 6)[0].tolist()
    expected, _, _ = continued(model.dense, ids, LONG, SAMPLINGS[sampling])
    for draft in (None, 2, 7):
        got, drafted, accepted = continued(model.lossless(draft), ids, LONG, SAMPLINGS[sampling])
        assert got == expected, draft
        assert accepted <= drafted
        assert draft is None or accepted > 0
        assert draft != 7 or accepted < drafted, "drafts that are always right test nothing"


def test_layers_that_share_keys_and_values(tiny_model, tiny: ModuleType) -> None:
    model, ids = Tiny(tiny_model("llama"), sources=(0, 0, 2)), tiny.random_ids(1, 6)[0].tolist()
    expected, _, _ = continued(model.dense, ids, LONG, Sampling())
    assert continued(model.lossless(), ids, LONG, Sampling())[0] == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_turns_go_on_from_anywhere(data: st.DataObject, tinies) -> None:
    """Stop after any token, cut to any prefix, go on with other tokens: as a fresh run of the dense model."""
    name = data.draw(st.sampled_from(["llama", "mistral", "phi3-longrope", "gemma3"]))
    draft = data.draw(st.one_of(st.none(), st.integers(1, 7)))
    sampling = SAMPLINGS[data.draw(st.sampled_from(sorted(SAMPLINGS)))]
    model = tinies(name)
    river, seen = model.lossless(draft), list[int]()
    cache = PromptCache(river, 64, whole=True)
    for _ in range(data.draw(st.integers(1, 3))):
        kept = data.draw(st.integers(0, len(seen)))
        new = data.draw(st.lists(st.integers(3, 96), min_size=1, max_size=6))
        ids = [*seen[:kept], *new]
        count = data.draw(st.integers(1, min(20, 64 - len(ids))))
        got, _, _ = continued(river, ids, count, sampling, cache)
        assert got == continued(model.dense, ids, count, sampling)[0]
        seen = [*ids, *got]
        if len(seen) > 50:
            return


def test_a_draft_never_leaves_the_cache(tinies, tiny: ModuleType) -> None:
    """A cache of exactly what the text needs, filled to the last position."""
    model, ids = tinies("llama"), tiny.random_ids(1, 6)
    river = model.lossless(15)
    cache = river.new_cache(1, 10)
    with torch.inference_mode():
        out = river.prefill(ids, cache)
        for at in range(6, 10):
            ids = torch.tensor([[(int(out.logits.argmax()) + at) % 90 + 3]])  # hardly what was drafted
            out = river.decode(ids, cache)
            assert out.drafted <= 10 - at - 1
        assert cache.lengths[0] == (10,)
        with pytest.raises(UsageError):
            river.decode(ids, cache)


def test_a_wrong_draft_is_forgotten_and_a_right_one_costs_nothing(tinies, tiny: ModuleType) -> None:
    model, ids = tinies("llama"), tiny.random_ids(1, 6)
    river = LosslessRiver(River(model.decoder, model.decoder.blocks, FixedExit(3)), draft=3)  # drafts itself: all right
    cache = river.new_cache(1, 32)
    with torch.inference_mode():
        out = river.prefill(ids, cache)
        outs = []
        for _ in range(4):
            out = river.decode(out.logits.argmax(-1, keepdim=True), cache)
            outs.append(out)
        assert [out.accepted for out in outs] == [0, 1, 1, 1]
        assert [out.drafted for out in outs] == [3, 0, 0, 0]
        river.decode(out.logits.argmax(-1, keepdim=True), cache)
        assert cache.lengths[0] == (14,)
        cache.truncate(12)
        assert cache.lengths[0] == (11,), "what was drafted and not taken is cut first"
        assert cache.ahead == ()


def test_rows_of_a_batch_are_dense(tinies, tiny: ModuleType) -> None:
    model, ids = tinies("qwen2"), tiny.random_ids(2, 6)
    river = model.lossless()
    cache, plain = river.new_cache(2, 16), model.dense.new_cache(2, 16)
    with torch.inference_mode():
        for row in range(2):
            river.prefill(ids[row : row + 1], cache.rows(row))
        model.dense.prefill(ids, plain)
        for _ in range(3):
            nxt = tiny.random_ids(2, 1)
            got = torch.cat([out.logits for out in river.decode_batch(nxt, cache, [Sampler(Sampling())] * 2)])
            torch.testing.assert_close(got, model.dense.decode(nxt, plain).logits, atol=1e-4, rtol=1e-4)
        alone = cache.rows(1)
        out = river.decode(ids[1:, :1], alone)
        assert out.drafted == 0
        assert alone.lengths[0] == (10,)


def test_sampled_tokens_follow_the_dense_law(tinies, tiny: ModuleType) -> None:
    """Chi-square of the second token of many seeds against the dense model's own law, summed over the first."""
    model, ids = tinies("llama"), tiny.random_ids(1, 6)[0].tolist()
    sampling, runs = Sampling(temperature=1.5, top_k=4), 300
    river, cache = model.lossless(2), None
    cache = PromptCache(river, 64)
    pairs = Counter(tuple(continued(river, ids, 2, replace(sampling, seed=seed), cache)[0]) for seed in range(runs))
    expected: dict[tuple[int, int], float] = {}
    with torch.inference_mode():
        kv = model.dense.new_cache(1, 16)
        firsts, shares = distribution(model.dense.prefill(torch.tensor([ids]), kv).logits[0], sampling)
        for first, share in zip(firsts.tolist(), shares.tolist(), strict=True):
            kv.truncate(len(ids))
            law = distribution(model.dense.decode(torch.tensor([[first]]), kv).logits[0], sampling)
            for second, part in zip(law[0].tolist(), law[1].tolist(), strict=True):
                expected[first, second] = runs * share * part
    assert set(pairs) <= set(expected)
    likely = {pair: count for pair, count in expected.items() if count >= 5}
    rest = runs - sum(likely.values())
    chi = sum((pairs[pair] - count) ** 2 / count for pair, count in likely.items())
    if rest >= 5:
        chi += (runs - sum(pairs[pair] for pair in likely) - rest) ** 2 / rest
    freedom = len(likely)
    assert chi < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_pace_drafts_more_where_more_is_accepted() -> None:
    def after(accepted: int) -> int:
        pace, drafted = Pace(Costs(0.3, 0.2), 1000), [0.95]
        for _ in range(60):
            pace.learn([0.95] * 4, accepted)
        while len(drafted) < 15 and pace.more(drafted):
            drafted.append(0.95)
        return len(drafted) if pace.limit() > 1 else 0

    assert after(0) == 0
    assert after(4) > after(2) > 0


def test_pace_tries_again_where_drafts_were_useless() -> None:
    pace = Pace(Costs(0.3, 0.2), 1000)
    for _ in range(60):
        pace.learn([0.95], 0)
    assert sorted({pace.limit() for _ in range(16)}) == [0, 1]


def test_pace_looks_at_the_vocabulary_in_use() -> None:
    pace = Pace(Costs(0.3, 0.3), 1600)
    assert pace.vocabulary() <= 1600
    pace.saw(range(90))
    assert pace.vocabulary() == 100
    pace.saw(range(1000, 1400))
    assert pace.vocabulary() == 1400


def test_a_longer_draft_than_few_rows_is_refused() -> None:
    for wrong in ({"draft": 3}, {"lossless": True, "draft": 16}, {"lossless": True, "tau": 0.5}):
        with pytest.raises(UsageError):
            SessionOptions(**wrong)


def test_caches_start_without_drafts(tinies) -> None:
    cache = tinies("llama").lossless().new_cache(1, 8)
    assert isinstance(cache, DraftCache)
    assert cache.take(5) is None


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_in_bf16_to_the_last_bit(models: Any, tmp_path: Path) -> None:
    source = open_source(str(models["smollm2-135m-instruct.gguf"]))
    arch, store, kind = (
        Architecture.from_config(source.config),
        source.store,
        {"device": "cpu", "dtype": torch.bfloat16},
    )
    for name, data in source.text_files().items():
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.read_bytes())
    quantize = QUANTIZERS["rtn"]

    def exit_layer(index: int) -> Block:
        matrices = {name: quantize(store.read(name).float(), group_size=32) for name in arch.block_matrices(index)}
        return exit_block(arch, store, index, matrices, **kind)

    decoder = load_decoder(arch, store, **kind)
    river = River(decoder, LazyBlocks(arch.num_layers, exit_layer), FixedExit(arch.num_layers))
    ids = Tokenizer.load(tmp_path).encode("The history of the bridge begins with a ferry. For two hundred years")
    for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=1)):
        expected, _, _ = continued(Dense(decoder), ids, 24, sampling)
        got, drafted, accepted = continued(LosslessRiver(river), ids, 24, sampling)
        assert accepted > drafted / 3
        if native.available():
            assert got == expected
