"""A climb in native calls gives, bit for bit, what its blocks and questions give one by one, and the same depths.

That holds for rows that leave together and for rows that leave each at its own depth.
"""

import copy
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from adapt_llm.quant.kernels import native
from adapt_llm.quant.kernels.chain import Climbed
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
    climb = Stack.climb

    def counted(self: Stack, *arguments: Any) -> Climbed:
        found = climb(self, *arguments)
        ran.append(found.done)
        return found

    monkeypatch.setattr(Stack, "climb", counted)
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
    native, pieces = both(model, policy, **options)
    logits, depths, cache = run(native, ids, sizes)
    others, same, other = run(pieces, ids, sizes)
    assert depths == same
    for one, two in zip(logits, others, strict=True):
        assert torch.equal(one, two)
    assert_same(cache, other)
    return depths


def both(model: Any, policy: ExitPolicy, **options: Any) -> tuple[River, River]:
    """A river of stacks, and the same in pieces."""
    decoder, exits = stacks(model)
    pieces = copy.copy(decoder)
    pieces.blocks = list(decoder.blocks)
    return River(decoder, exits, policy, **options), River(pieces, list(exits), policy, **options)


def assert_same(one: KVCache, other: KVCache) -> None:
    """Both hold the same."""
    assert one.lengths == other.lengths
    for buffer, same in zip(one._keys + one._values, other._keys + other._values, strict=True):
        assert torch.equal(buffer, same)


def run_rows(river: River, prompts: Sequence[Tensor], more: Tensor) -> tuple[Tensor, Tensor, KVCache]:
    """Prompts [1, S_i], then tokens `more` [B, N] one by one, a row each: logits [B, N, V], depths [B, N]."""
    cache = river.new_cache(len(prompts), PROMPT + more.shape[1])
    with torch.inference_mode():
        for row, prompt in enumerate(prompts):
            river.prefill(prompt, cache.rows(row))
        found = [river.decode_rows(ids, cache) for ids in more.split(1, 1)]
    return torch.cat([logits for logits, _ in found], 1), torch.cat([depths for _, depths in found], 1), cache


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
    layers = model.arch.num_layers
    assert climbed == [0, *[layers] * (len(sizes) - 1)]  # the prompt is too long


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["llama", "qwen3-window", "gemma3", "phi3", "smollm3"])
def test_rows_leave_each_at_its_own_depth(
    name: str, tiny_model: Callable[[str], Any], tiny: ModuleType, climbed: list[int]
) -> None:
    """And each gets what it gets alone."""
    model, prompts = tiny_model(name), [tiny.random_ids(1, length) for length in (3, 7, 1, 12, 5)]
    more = tiny.random_ids(len(prompts), 6)
    middle = cosines(load_decoder(model.arch, model.store, **BF16), tiny.random_ids(1, 32)).median(1).values
    river, pieces = both(model, CosineExit.by_layer(middle.tolist()), held=1)
    logits, depths, cache = run_rows(river, prompts, more)
    assert any(len(set(column)) > 1 for column in depths.T.tolist())
    assert climbed[-6:] == [model.arch.num_layers] * 6
    others, same, other = run_rows(pieces, prompts, more)
    assert torch.equal(depths, same)
    assert torch.equal(logits, others)
    assert_same(cache, other)
    for row, prompt in enumerate(prompts):
        alone, left, _ = run_rows(river, [prompt], more[row : row + 1])
        assert torch.equal(left, depths[row : row + 1])
        assert torch.equal(alone, logits[row : row + 1])


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


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rule", RULES)
def test_rules_for_each_row(rule: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    policy, options = RULES[rule]
    prompts, more = [tiny.random_ids(1, length) for length in (1, 4, 2)], tiny.random_ids(3, 4)
    one, other = (run_rows(river, prompts, more) for river in both(tiny_model("llama"), policy, **options))
    for found, same in zip(one[:2], other[:2], strict=True):
        assert torch.equal(found, same)
    assert_same(one[2], other[2])


def test_layers_that_stay_dense_in_the_river(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """A block that is its own exit layer is gone through by all rows at once."""
    model, prompts, more = tiny_model("llama"), [tiny.random_ids(1, 3) for _ in range(3)], tiny.random_ids(3, 4)
    decoder, exits = stacks(model)
    mixed = [decoder.blocks[1] if index == 1 else exits[index] for index in range(len(exits))]
    middle = cosines(decoder, tiny.random_ids(1, 32)).median(1).values
    rule = CosineExit.by_layer([float(middle[0]), *[1.0] * (len(middle) - 1)])
    pieces = copy.copy(decoder)
    pieces.blocks = list(decoder.blocks)
    rivers = River(decoder, Stack(model.arch, mixed), rule, held=1), River(pieces, mixed, rule, held=1)
    one, other = (run_rows(river, prompts, more) for river in rivers)
    assert len(set(one[1].flatten().tolist())) > 1
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[0], other[0])
    assert_same(one[2], other[2])


@pytest.mark.usefixtures("climbed")
def test_not_a_number_does_not_leave(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """Broken states compare with nothing, so that the rule never fires; the blocks that run are the same."""
    model = tiny_model("llama")
    decoder, exits = stacks(model)
    decoder.embedding = torch.full_like(decoder.embedding, float("nan"))
    assert run(River(decoder, exits, CosineExit.uniform(-1.0, 3)), tiny.random_ids(1, 4), [1] * 4)[1] == [3] * 4
