"""The decoder's seams: no copies, training, shared caches, lagging blocks, real models, time per block."""

import time
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from adapt_llm.convert.source import open_source
from adapt_llm.errors import FormatError, UsageError
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.store import TensorInfo

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


class MemoryStore:
    """Tensors in a dictionary, as training holds them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(tuple(self.tensors[name].shape), self.tensors[name].dtype)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def release(self, name: str) -> None:
        pass


def score(decoder: Decoder, ids: torch.Tensor, store: PassStore | None = None) -> torch.Tensor:
    step = decoder.step(None, ids)
    return decoder.logits(decoder.run(decoder.embed(ids), step, store or PassStore(decoder.arch)))


def test_an_id_beyond_the_vocabulary_is_named(tiny_model: Callable[[str], Any]) -> None:
    decoder = tiny_model("gemma2").decoder
    size = decoder.arch.vocab_size
    with pytest.raises(FormatError, match=f"the tokenizer knows token {size}, the model only {size}"):
        decoder.embed(torch.tensor([[0, size]]))


def test_nothing_is_copied(tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model("qwen2")
    block = model.decoder.blocks[1]
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    for name, linear in zip(names, (*block.qkv.linears, *block.gate_up.linears), strict=True):
        assert linear.weight.data_ptr() == model.store.read(f"model.layers.1.{name}.weight").data_ptr()
    assert model.decoder.embedding.data_ptr() == model.store.read("model.embed_tokens.weight").data_ptr()


@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "gemma2", "gemma3", "phi3-longrope", "smollm3"])
def test_gradients_are_those_of_transformers(case: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    model, ids = tiny_model(case), tiny.random_ids(2, 14)
    reference = tiny.build(tiny.CASES[case])
    loss = reference(ids, use_cache=False).logits.log_softmax(-1)[:, :, 5].mean()
    loss.backward()
    ours = {name: model.store.read(name).clone().requires_grad_() for name in model.store.names()}
    decoder = load_decoder(model.arch, MemoryStore(ours), device="cpu", dtype=torch.float32)
    score(decoder, ids).log_softmax(-1)[:, :, 5].mean().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(
            ours[name].grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_scoring_then_training(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Tables made in inference mode must not reach a pass that needs gradients."""
    model, ids = tiny_model("llama"), tiny.random_ids(1, 6)
    ours = {name: model.store.read(name).clone().requires_grad_() for name in model.store.names()}
    decoder = load_decoder(model.arch, MemoryStore(ours), device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        score(decoder, ids)
    score(decoder, ids).sum().backward()
    assert ours["model.embed_tokens.weight"].grad is not None


class TestSharedCache:
    """R-CLA: followers read a keeper's keys and values; the map is the architecture's."""

    def shared(self, model: Any, sources: list[int]) -> Decoder:
        arch = model.arch.share(sources)
        return load_decoder(arch, model.store, device="cpu", dtype=torch.float32)

    def test_followers_ignore_their_own_projections(self, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
        """Sharing by the map = a dense model whose pass store hands out the keeper's keys and values."""
        model, ids = tiny_model("llama-llama3"), tiny.random_ids(2, 15)
        with torch.inference_mode():
            shared = score(self.shared(model, [0, 0, 2]), ids)
            expected = score(model.decoder, ids, PassStore(model.arch, [0, 0, 2]))
            dense = score(model.decoder, ids)
        torch.testing.assert_close(shared, expected, **TOLERANCE)
        assert not torch.allclose(shared, dense, atol=1e-2)

    @pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "smollm3"])
    def test_cached_is_uncached(self, case: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
        model, ids = tiny_model(case), tiny.random_ids(2, 15)
        decoder = self.shared(model, [0, 0, 0] if model.arch.num_layers == 3 else [0, 1, 0, 1])
        cache = decoder.new_cache(2, 15)
        parts: list[torch.Tensor] = []
        with torch.inference_mode():
            for part in ids.split([6, 1, 8], 1):
                step = decoder.step(cache, part)
                parts.append(decoder.logits(decoder.run(decoder.embed(part), step, cache)))
            torch.testing.assert_close(torch.cat(parts, 1), score(decoder, ids), **TOLERANCE)
        assert len(cache.lengths) == len(set(decoder.arch.kv_sources))


@pytest.mark.parametrize("case", ["llama", "gemma3", "gemma2"])
def test_blocks_that_lag_behind(case: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Lower blocks token by token, upper blocks later in one pass: the same keys, values and logits (N-vium)."""
    model, ids = tiny_model(case), tiny.random_ids(1, 17)
    decoder, split = model.decoder, 2
    lower, upper = range(split), range(split, model.arch.num_layers)
    cache = decoder.new_cache(1, 17)
    waiting: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        for number, part in enumerate(ids.split(1, 1), 1):
            step = decoder.step(cache, part, layers=lower)
            waiting.append(decoder.run(decoder.embed(part), step, cache, lower))
            if number % 5 == 0 or number == 17:
                h = torch.cat(waiting, 1)
                step = decoder.step(cache, torch.zeros(h.shape[:2], dtype=torch.long), layers=upper)
                logits.append(decoder.logits(decoder.run(h, step, cache, upper)))
                waiting = []
    torch.testing.assert_close(torch.cat(logits, 1), model.expected(ids), **TOLERANCE)


def test_a_full_cache_is_refused(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    decoder = tiny_model("llama").decoder
    with pytest.raises(UsageError, match="needs 9 positions, the cache has 8"):
        decoder.step(decoder.new_cache(1, 8), tiny.random_ids(1, 9))


def test_the_head_may_differ_although_the_config_says_tied(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    model, ids = tiny_model("llama-tied"), tiny.random_ids(1, 4)
    tensors = {name: model.store.read(name) for name in model.store.names()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    decoder = load_decoder(model.arch, MemoryStore(tensors), device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(score(decoder, ids), 2 * score(model.decoder, ids))


@pytest.mark.parametrize("case", ["llama", "gemma2", "phi3", "smollm3", "ministral3"])
def test_bfloat16_is_near_float32(case: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Against transformers' own bf16: rounding may differ, the size of its error may not."""
    model, ids = tiny_model(case), tiny.random_ids(24, 12)
    decoder = load_decoder(model.arch, model.store, device="cpu", dtype=torch.bfloat16)
    exact = model.expected(ids)
    with torch.inference_mode():
        ours = (score(decoder, ids) - exact).square().mean().sqrt()
        theirs = (tiny.build(tiny.CASES[case]).bfloat16()(ids).logits.float() - exact).square().mean().sqrt()
    assert ours < 1.2 * theirs


def test_a_block_costs_little_beside_its_products(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """One token through one tiny block, whose products and attention take next to nothing: an upper bound on Python."""
    decoder = tiny_model("qwen2").decoder
    cache = decoder.new_cache(1, 4)
    ids = tiny.random_ids(1, 1)
    with torch.inference_mode():
        step = decoder.step(cache, ids)
        h, block = decoder.embed(ids), decoder.blocks[0]
        times: list[float] = []
        for _ in range(300):
            start = time.perf_counter()
            block(h, step, cache)
            times.append(time.perf_counter() - start)
    assert min(times) < 400e-6


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct.gguf", "qwen2.5-coder-0.5b-instruct.gguf"])
def test_real_models(name: str, models: Any) -> None:
    source = open_source(str(models[name]))
    arch = Architecture.from_config(source.config)
    decoder = load_decoder(arch, source.store, device="cpu", dtype=torch.float32)
    config = transformers.AutoConfig.for_model(**source.config)
    reference = transformers.AutoModelForCausalLM.from_config(config).float()
    weights = {key: source.store.read(key).float() for key in arch.tensors()}
    left_out = reference.load_state_dict(weights, strict=False)
    assert set(left_out.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    ids = torch.randint(0, arch.vocab_size, (1, 24))
    with torch.inference_mode():
        torch.testing.assert_close(score(decoder, ids), reference.eval()(ids).logits, atol=5e-4, rtol=1e-4)
