"""A climb in one native call gives, bit for bit, what its blocks and questions give one by one, and the same depths."""

import copy
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from adapt_llm.quant.kernels import chain, native
from adapt_llm.quant.layout import Int4Matrix, round_scale
from adapt_llm.runtime.block import Block
from adapt_llm.runtime.cache import KVCache
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.exit_layers import LazyBlocks, exit_block
from adapt_llm.runtime.exits import CosineExit, ExitPolicy, FixedExit, cosine
from adapt_llm.runtime.river import River
from adapt_llm.runtime.stack import Stack
from adapt_llm.runtime.store import open_safetensors

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native module: {native.why_not()}")
BF16: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
PROMPT = 18  # more than a native call takes


@pytest.fixture
def climbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each climb ran."""
    ran: list[int] = []
    climb = chain.Chain.climb

    def counted(self: chain.Chain, *arguments: Any) -> tuple[Tensor, int, int]:
        found = climb(self, *arguments)
        ran.append(found[1])
        return found

    monkeypatch.setattr(chain.Chain, "climb", counted)
    return ran


def rounded(weight: Tensor) -> Int4Matrix:
    """4 bits, a group to a row."""
    low, high = weight.float().aminmax(dim=1, keepdim=True)
    scales = round_scale((high - low) / 15)
    codes = (weight.float() / scales + 8).round().clamp(0, 15).to(torch.uint8)
    return Int4Matrix(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8), weight.shape[1])


def stacks(model: Any) -> tuple[Decoder, Stack]:
    """A backbone and its exit layers."""
    arch, store = model.arch, open_safetensors(model.folder)

    def load(index: int) -> Block:
        matrices = {matrix: rounded(store.read(matrix)) for matrix in arch.block_matrices(index)}
        return exit_block(arch, store, index, matrices, **BF16)

    return load_decoder(arch, model.store, **BF16), Stack(arch, LazyBlocks(arch.num_layers, load))


def run(river: River, ids: Tensor, sizes: Sequence[int]) -> tuple[list[Tensor], list[int | None], KVCache]:
    """Logits and depths of the parts of ids [B, S], one behind the other."""
    cache = river.new_cache(*ids.shape)
    with torch.inference_mode():
        found = [river.prefill(part, cache) for part in ids.split(list(sizes), 1)]
    return [out.logits for out in found], [out.depth for out in found], cache


def cosines(decoder: Decoder, ids: Tensor) -> Tensor:
    """Of the dense model's blocks but the last, [L - 1, S]."""
    cache, seen = decoder.new_cache(*ids.shape), []
    with torch.inference_mode():
        h, step = decoder.embed(ids), decoder.step(cache, ids)
        for layer in range(decoder.arch.num_layers - 1):
            before, h = h, decoder.run(h, step, cache, range(layer, layer + 1))
            seen.append(cosine(before, h)[0])
    return torch.stack(seen)


def compare(model: Any, policy: ExitPolicy, ids: Tensor, sizes: Sequence[int], **options: Any) -> list[int | None]:
    """Runs both ways, which must agree; the depths."""
    decoder, exits = stacks(model)
    logits, depths, cache = run(River(decoder, exits, policy, **options), ids, sizes)
    pieces = copy.copy(decoder)
    pieces.blocks = list(decoder.blocks)
    others, same, other = run(River(pieces, list(exits), policy, **options), ids, sizes)
    assert depths == same
    for one, two in zip(logits, others, strict=True):
        assert torch.equal(one, two)
    assert cache.lengths == other.lengths
    for one, two in zip(cache._keys + cache._values, other._keys + other._values, strict=True):
        assert torch.equal(one, two)
    return depths


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["llama", "qwen3-window", "gemma3", "phi3", "smollm3"])
def test_tokens_leave_where_the_rule_says(
    name: str, tiny_model: Callable[[str], Any], tiny: ModuleType, climbed: list[int]
) -> None:
    model, ids = tiny_model(name), tiny.random_ids(1, PROMPT + 16)
    sizes = [PROMPT, *[1] * 11, 4, 1]
    middle = cosines(load_decoder(model.arch, model.store, **BF16), ids).median(1).values
    rule = CosineExit.by_layer(middle.tolist())
    depths = compare(model, rule, ids, sizes)
    assert len(set(depths)) > 1
    # The prompt is too long; blocks that have not run before end the first climbs early.
    assert len(climbed) == len(sizes) - 1
    assert climbed[-1] == model.arch.num_layers


RULES: dict[str, tuple[ExitPolicy, dict[str, Any]]] = {
    "nobody leaves": (CosineExit.uniform(1.0, 3), {}),
    "all leave at once": (CosineExit.uniform(-1.0, 3), {}),
    "whatever they do": (FixedExit(1), {}),
    "a fixed depth": (FixedExit(2), {}),
    "the backbone ends": (CosineExit.uniform(1.0, 3), {"resident": 2}),
    "the first ones stay": (CosineExit.uniform(-1.0, 3), {"held": 3}),
    "prompts are dense": (FixedExit(1), {"dense_prefill": True}),
    "no exit behind the first": (CosineExit.uniform(-1.0, 3, entry_layer=3), {}),
}


@pytest.mark.usefixtures("threads", "climbed")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", [1, 3])
def test_rules(rule: str, batch: int, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    policy, options = RULES[rule]
    compare(tiny_model("llama"), policy, tiny.random_ids(batch, 8), [2, 1, 3, 1, 1], **options)


@pytest.mark.usefixtures("climbed")
def test_not_a_number_does_not_leave(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Broken states compare with nothing, so that the rule never fires; the blocks that run are the same."""
    model = tiny_model("llama")
    decoder, exits = stacks(model)
    decoder.embedding = torch.full_like(decoder.embedding, float("nan"))
    assert run(River(decoder, exits, CosineExit.uniform(-1.0, 3)), tiny.random_ids(1, 4), [1] * 4)[1] == [3] * 4
