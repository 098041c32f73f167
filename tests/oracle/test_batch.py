"""Many texts at once are the texts that each would be alone: every family, float32, rows that come and go."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models as tokenizer_models

from adapt_llm.quant.kernels import small
from adapt_llm.quant.layout import Int4Matrix, round_scale
from adapt_llm.runtime.batch import Answer, BatchModel, answer_all
from adapt_llm.runtime.continuation import Request
from adapt_llm.runtime.decoder import load_decoder
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.exit_layers import exit_block
from adapt_llm.runtime.exits import CosineExit
from adapt_llm.runtime.generate import PromptCache, stream
from adapt_llm.runtime.river import River
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.stops import Stops
from adapt_llm.runtime.text import Tokenizer

NAMES = ["llama", "mistral", "ministral3", "qwen2-yarn", "qwen3-window", "gemma2", "gemma3", "phi3-longrope", "smollm3"]
CPU = {"device": "cpu", "dtype": torch.float32}
SIZE = 97


@cache
def letters() -> Tokenizer:
    """A vocabulary of one-character tokens."""
    return Tokenizer(Backend(tokenizer_models.WordLevel({chr(0x4E00 + i): i for i in range(SIZE)}, "一")), {})


def rounded(weight: torch.Tensor) -> Int4Matrix:
    """Round to 4 bits, one group per row: coarse enough for an exit to show in the tokens."""
    low, high = weight.float().min(1, keepdim=True).values, weight.float().max(1, keepdim=True).values
    scales = round_scale((high - low) / 15)
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (weight.float() / scales + zeros).round().clamp(0, 15).to(torch.uint8)
    return Int4Matrix(codes, scales, zeros.to(torch.uint8), weight.shape[1])


def river(model) -> River:
    """A river whose tokens leave at different depths, but for the first of each text."""
    arch = model.arch
    exits = [
        exit_block(arch, model.store, i, {n: rounded(model.store.read(n)) for n in arch.block_matrices(i)}, **CPU)
        for i in range(arch.num_layers)
    ]
    return River(model.decoder, exits, CosineExit.uniform(0.8, arch.num_layers), held=1)


def request(ids: Sequence[int], row: int = 0, *, tokens: int = 20, temperature: float = 0.0, stop: int = -1) -> Request:
    sampling = Sampling(temperature=temperature, seed=5, repetition_penalty=1.1)
    return Request(list(ids), sampling, Stops(frozenset({stop})), 90, tokens, row, continues=True)


def alone(model: BatchModel, one: Request) -> Answer:
    run = stream(model, one, tokenizer=letters(), cache=PromptCache(model, one.context_size))
    return Answer("".join(record.text for record in run), run.stats)


def check(model: BatchModel, requests: Sequence[Request], batch_size: int) -> None:
    found = list(answer_all(model, requests, tokenizer=letters(), batch_size=batch_size))
    assert len(found) == len(requests)
    for answer, one in zip(found, requests, strict=True):
        expected = alone(model, one)
        assert isinstance(answer, Answer)
        assert answer.text == expected.text
        stats, other = answer.stats, expected.stats
        assert (stats.tokens, stats.finish_reason) == (other.tokens, other.finish_reason)
        assert (stats.prefill_depth, stats.exit_histogram) == (other.prefill_depth, other.exit_histogram)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [torch.randint(3, SIZE, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("kind", ["dense", "river"])
@pytest.mark.parametrize("name", NAMES)
def test_a_text_is_what_it_is_alone(name: str, kind: str, tiny_model: Callable) -> None:
    """More texts than rows, of lengths that pass windows and, for phi3-longrope, the switch of its rotation."""
    tiny = tiny_model(name)
    model = Dense(tiny.decoder) if kind == "dense" else river(tiny)
    texts = [
        request(ids, row, tokens=12 + 3 * row % 11, temperature=row % 2)
        for row, ids in enumerate(prompts((3, 17, 1, 9, 22, 5, 12)))
    ]
    check(model, texts, 3)


def test_rows_of_a_river_leave_at_different_depths(tiny_model: Callable) -> None:
    """The tests above would mean little if they did not."""
    found = answer_all(
        river(tiny_model("llama")), [request(ids) for ids in prompts((5, 6))], tokenizer=letters(), batch_size=2
    )
    histograms = [answer.stats.exit_histogram for answer in found if isinstance(answer, Answer)]
    assert len(set(itertools.chain(*histograms))) > 1


rows = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 10), st.sampled_from((0.0, 1.5)), st.integers(3, 30)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(texts=rows, batch_size=st.integers(1, 4), seed=st.integers(0, 99))
def test_whatever_comes_and_goes(texts: list, batch_size: int, seed: int, rivers: Callable) -> None:
    torch.manual_seed(seed)
    requests = [
        request(torch.randint(3, SIZE, (length,)).tolist(), row, tokens=tokens, temperature=temperature, stop=stop)
        for row, (length, tokens, temperature, stop) in enumerate(texts)
    ]
    check(rivers("mistral"), requests, batch_size)


@pytest.fixture(scope="module")
def rivers(tiny_model: Callable) -> Callable[[str], River]:
    return cache(lambda name: river(tiny_model(name)))


native = pytest.mark.skipif(not small.available(), reason="the C module was not built")


@native
@pytest.mark.parametrize(("queries", "rotary"), [(6, 12), (2, 8), (6, 0)])
def test_attention_of_several_rows_is_that_of_each(queries: int, rotary: int) -> None:
    """Bit for bit, keys and values stored included; `value` None is a layer that reads another one's."""
    groups, width, capacity, seen = 2, 12, 20, (range(5), range(3, 19), range(7, 8))
    attention = small.TokenAttention(queries, groups, width, scale=0.3)
    stored = torch.randn(2, 3, groups, capacity, width).bfloat16()
    both = torch.randn(3, 1, (queries + 2 * groups) * width).bfloat16()
    turn = torch.randn(2, 3, 1, 1, rotary).bfloat16().unbind() if rotary else (None, None)
    for sizes in ([(queries + groups) * width, groups * width], [queries * width]):
        parts = both[..., : sum(sizes)].split_with_sizes(sizes, -1)
        heads, value = parts if len(parts) == 2 else (parts[0], None)
        one, other = stored.clone(), stored.clone()
        together = attention.rows(heads, value, *turn, one[0], one[1], seen)
        each = [
            attention(
                *(None if t is None else t[row : row + 1].contiguous() for t in (heads, value, *turn)),
                *(kept[row : row + 1] for kept in other),
                positions,
            )
            for row, positions in enumerate(seen)
        ]
        assert torch.equal(together, torch.cat(each))
        assert torch.equal(one, other)
        assert torch.equal(one, stored) == (value is None)


@native
@pytest.mark.parametrize("name", ["qwen3-window", "smollm3", "llama-biases"])
def test_rows_in_bf16_are_those_alone_to_the_bit(name: str, tiny_model: Callable) -> None:
    tiny = tiny_model(name)
    decoder = load_decoder(tiny.arch, tiny.store, device="cpu", dtype=torch.bfloat16)
    model, whole, lengths = Dense(decoder), decoder.new_cache(4, 32), (3, 17, 8)
    expected = []
    with torch.inference_mode():
        for row, ids in enumerate(prompts(lengths)):
            for cache in (whole.rows(row), alone_cache := decoder.new_cache(1, 32)):
                model.prefill(torch.tensor([ids]), cache)
            expected.append(model.decode(torch.tensor([[5 + row]]), alone_cache).logits)
        found = model.decode_batch(torch.tensor([[5], [6], [7]]), whole.rows(0, 3), [Sampler(Sampling())] * 3)
    assert torch.equal(torch.cat([out.logits for out in found]), torch.cat(expected))
    assert set(whole.lengths) == {(4, 18, 9, 0)}
