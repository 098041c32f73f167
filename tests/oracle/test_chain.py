"""Blocks in one native call give, bit for bit, what they give one by one: every family, rows of every kind."""

import copy
import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapt_llm.convert.kv_map import every
from adapt_llm.quant.kernels import chain, native, small
from adapt_llm.quant.layout import Int4Matrix, round_scale
from adapt_llm.runtime.cache import KVCache
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.exit_layers import exit_block
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.stack import Stack
from adapt_llm.runtime.store import open_safetensors

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native module: {native.why_not()}")
NAMES = [
    "llama", "llama-head-dim", "llama-yarn-mscale", "mistral", "qwen2-window", "qwen3", "qwen3-window",
    "gemma3", "phi3", "phi3-partial", "smollm3",
]  # fmt: skip
NM = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("nvium_models.py"))))
PROMPT = 9
BF16: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}


class Counted(chain.Chain):
    """A chain that says how many blocks it ran."""

    ran = 0

    def __call__(self, h: Tensor, blocks: range, *tables: Any) -> Tensor:
        Counted.ran += len(blocks)
        return super().__call__(h, blocks, *tables)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapt_llm.runtime.stack.Chain", Counted)
    Counted.ran = 0


def load(model: Any, share: int = 1) -> Decoder:
    arch = model.arch.share(every(model.arch, share)) if share > 1 else model.arch
    return load_decoder(arch, model.store, **BF16)


def one_by_one(decoder: Decoder) -> Decoder:
    """The same blocks, without a chain."""
    plain = copy.copy(decoder)
    plain.blocks = list(decoder.blocks)
    return plain


def passes(decoder: Decoder, parts: list[Tensor]) -> tuple[list[Tensor], KVCache]:
    """States after each part, one behind the other; ids [B, S]."""
    cache = decoder.new_cache(parts[0].shape[0], sum(part.shape[1] for part in parts))
    with torch.inference_mode():
        return [decoder.run(decoder.embed(part), decoder.step(cache, part), cache) for part in parts], cache


def same(decoder: Decoder, parts: list[Tensor], chained: int) -> None:
    """The chain ran in `chained` of the parts, and made no difference."""
    got, cache = passes(decoder, parts)
    assert Counted.ran == chained * decoder.arch.num_layers
    expected, other = passes(one_by_one(decoder), parts)
    for one, two in zip(got, expected, strict=True):
        assert torch.equal(one, two)
    assert cache.lengths == other.lengths
    for one, two in zip(cache._keys + cache._values, other._keys + other._values, strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", NAMES)
def test_tokens_one_and_several(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    ids = tiny.random_ids(1, PROMPT + 10 + 1 + 16 + 1)
    same(load(tiny_model(name)), list(ids.split([PROMPT + 10, 1, 16, 1], 1)), chained=3)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["llama", "qwen3-window", "gemma3"])
def test_one_token_of_each_text(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Texts of one length, and of several lengths, where each has a rotation of its own."""
    decoder, ids = load(tiny_model(name)), tiny.random_ids(3, PROMPT + 4)
    same(decoder, list(ids.split([PROMPT, 1, 1, 1, 1], 1)), chained=4)
    found = []
    for model in (decoder, one_by_one(decoder)):
        cache = model.new_cache(3, PROMPT + 4)
        with torch.inference_mode():
            prompt, token = ids[:, :PROMPT], ids[:, -1:]
            model.run(model.embed(prompt), model.step(cache, prompt, [PROMPT, 2, 5]), cache)
            found.append(model.run(model.embed(token), model.step(cache, token), cache))
    assert torch.equal(*found)
    assert Counted.ran == 5 * decoder.arch.num_layers


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_layers_that_read_an_earlier_ones_cache(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    same(load(tiny_model(name), share=2), list(tiny.random_ids(1, PROMPT + 6).split([PROMPT, 1, 5], 1)), chained=3)


def rounded(weight: Tensor) -> Int4Matrix:
    """4 bits, a group to a row."""
    low, high = weight.float().aminmax(dim=1, keepdim=True)
    scales = round_scale((high - low) / 15)
    codes = (weight.float() / scales + 8).round().clamp(0, 15).to(torch.uint8)
    return Int4Matrix(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8), weight.shape[1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["llama", "smollm3", "qwen3", "gemma3", "phi3"])
def test_exit_layers(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """4-bit blocks and dense ones in one stack."""
    model = tiny_model(name)
    decoder, store = load(model), open_safetensors(model.folder)
    blocks = list(decoder.blocks)
    for index in range(1, model.arch.num_layers):
        matrices = {matrix: rounded(store.read(matrix)) for matrix in model.arch.block_matrices(index)}
        blocks[index] = exit_block(model.arch, store, index, matrices, **BF16)
    decoder.blocks = Stack(model.arch, blocks)
    same(decoder, list(tiny.random_ids(1, PROMPT + 11 + 6).split([PROMPT + 11, 1, 5], 1)), chained=2)


@pytest.mark.parametrize("name", ["llama-biases", "gemma2", "ministral3"])
def test_families_that_no_chain_can_run(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Another gate, capped scores, and queries scaled by their position."""
    same(load(tiny_model(name)), list(tiny.random_ids(1, PROMPT + 1).split([PROMPT, 1], 1)), chained=0)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["llama", "qwen3-window"])
def test_a_context_of_several_spans(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Tokens around position 1,024, in which attention is cut into spans that threads share."""
    same(load(tiny_model(name)), list(tiny.random_ids(1, 1020 + 16 + 2).split([1020, 1, 16, 1], 1)), chained=3)


def test_a_cache_that_grows_and_one_of_some_rows(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Where keys and values lie is asked again after they moved."""
    decoder, ids = load(tiny_model("llama")), tiny.random_ids(1, 6)
    found = []
    for model in (decoder, one_by_one(decoder)):
        cache = model.new_cache(2, 3)
        part = cache.rows(1)
        with torch.inference_mode():
            model.run(model.embed(ids[:, :3]), model.step(part, ids[:, :3]), part)
            cache.grow(9)
            part = cache.rows(1)
            found.append(model.run(model.embed(ids[:, 3:]), model.step(part, ids[:, 3:]), part))
        assert cache.lengths[0] == (0, 6)
    assert torch.equal(*found)
    assert Counted.ran == 2 * decoder.arch.num_layers


@pytest.mark.parametrize("isa", native.instruction_sets() if native.available() else ())
def test_every_instruction_set(isa: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Each gives what the others give, up to rounding."""
    decoder, ids = load(tiny_model("qwen3")), tiny.random_ids(1, 7)
    expected, _ = passes(one_by_one(decoder), [ids])
    stack = decoder.blocks
    assert isinstance(stack, Stack)
    stack._chain = chain.Chain(stack_shape(decoder), len(stack), isa=isa)
    (got,), _ = passes(decoder, [ids])
    assert (got - expected[0]).abs().max() <= 0.03 * expected[0].abs().max()


def stack_shape(decoder: Decoder) -> chain.Shape:
    arch = decoder.arch
    sizes = arch.hidden_size, arch.intermediate_size, arch.num_heads, arch.num_kv_heads, arch.head_dim
    return chain.Shape(*sizes, arch.activation, arch.norm_eps, arch.attention_scale, len(arch.kinds))


def test_gradients_take_the_blocks(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    decoder, ids = load(tiny_model("llama")), tiny.random_ids(1, 1)
    cache = decoder.new_cache(1, 1)
    h = decoder.embed(ids).detach().requires_grad_()
    decoder.run(h, decoder.step(cache, ids), cache)
    assert Counted.ran == 0


def test_without_the_small_operations_there_is_no_chain(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "available", lambda: False)
    stack = load(tiny_model("llama")).blocks
    assert isinstance(stack, Stack)
    assert stack._chain is None


@pytest.mark.usefixtures("threads")
def test_tokens_that_wait_at_a_junction(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """N-vium: segments that lag behind each other, several deferred rows to a pass."""
    decoder, ids = load(tiny_model("llama")), tiny.random_ids(1, PROMPT)
    tensors = NM.junction_tensors(decoder, (1, 2))
    exact = ("router.norm", "router.head")
    tensors = {name: each if any(part in name for part in exact) else each.bfloat16() for name, each in tensors.items()}
    texts = []
    for backbone in (decoder, one_by_one(decoder)):
        mixture, sampler = NM.model(backbone, (1, 2), tensors), Sampler(Sampling(temperature=1.0, seed=3))
        cache = mixture.new_cache(1, PROMPT + 40)
        with torch.inference_mode():
            out, text = mixture.prefill(ids, cache, sampler), []
            for _ in range(39):
                token = sampler(out.logits[0]) if out.token is None else out.token
                out = mixture.decode(torch.tensor([[token]]), cache, sampler)
                text.append((token, out.depth, out.passes))
        texts.append(text)
    assert texts[0] == texts[1]
    assert {depth for _, depth, _ in texts[0]} == {1, 2, 3}
    assert Counted.ran > 0
