"""N-vium against the mixture written out plainly, float32: its law, its early decisions, its cache."""

import math
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapt_llm.quant.layout import Int4Matrix, round_scale
from adapt_llm.runtime.cache import RotationChangedError
from adapt_llm.runtime.decoder import Decoder, load_decoder, load_frame
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.exit_layers import exit_block
from adapt_llm.runtime.nvium import Nvium
from adapt_llm.runtime.sampling import Sampler, Sampling, distribution

NM = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("nvium_models.py"))))
POINTS = {"gemma2": (2,), "gemma3": (1, 3), "mistral": (1, 2), "smollm3": (1, 2, 3)}
NAMES = ["llama-tied", "mistral", "qwen3-window", "gemma2", "gemma3", "phi3-longrope", "smollm3", "ministral3"]
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
PURE = Sampling(temperature=1.0, seed=3)


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def parts(tiny_model: Callable) -> Callable[[str], tuple[Decoder, tuple[int, ...], dict[str, Tensor]]]:
    """Name of a case -> decoder, points, random junctions. "rcla": a sharing map; "4bit": packed blocks."""

    def get(name: str) -> tuple[Decoder, tuple[int, ...], dict[str, Tensor]]:
        made = tiny_model({"rcla": "gemma3", "4bit": "mistral"}.get(name, name))
        decoder = {"rcla": shared, "4bit": packed}.get(name, lambda it: it.decoder)(made)
        points = {"rcla": (2,), "4bit": (1, 2)}.get(name, POINTS.get(name, (1, 2)))
        return decoder, points, NM.junction_tensors(decoder, points, final_adapter=name == "mistral")

    return get


def shared(made: object) -> Decoder:
    return load_decoder(made.arch.share((0, 0, 2, 3)), made.store, device="cpu", dtype=torch.float32)


def packed(made: object) -> Decoder:
    def rounded(weight: Tensor) -> Int4Matrix:
        low, high = weight.min(1, keepdim=True).values, weight.max(1, keepdim=True).values
        scales = round_scale((high - low) / 15)
        zeros = (-low / scales).round().clamp(1, 15)
        codes = (weight / scales + zeros).round().clamp(0, 15).to(torch.uint8)
        return Int4Matrix(codes, scales, zeros.to(torch.uint8), weight.shape[1])

    to = {"device": "cpu", "dtype": torch.float32}
    blocks = [
        exit_block(
            made.arch,
            made.store,
            layer,
            {name: rounded(made.store.read(name)) for name in made.arch.block_matrices(layer)},
            **to,
        )
        for layer in range(made.arch.num_layers)
    ]
    return load_frame(made.arch, made.store, blocks, **to)


def go_on(
    model: Nvium, prompt: Tensor, count: int, sampling: Sampling, cache: object = None
) -> tuple[list, list, list]:
    """Tokens, depths and passes of a continuation."""
    sampler = Sampler(sampling)
    sampler.saw(prompt[0].tolist())
    cache = cache or model.new_cache(1, prompt.shape[1] + count)
    output = model.prefill(prompt, cache, sampler)
    tokens, depths, passes = [], [], []
    for _ in range(count):
        token = sampler(output.logits[0]) if output.token is None else output.token
        tokens.append(token)
        depths.append(output.depth)
        output = model.decode(torch.tensor([[token]]), cache, sampler)
        passes += output.passes
    return tokens, depths, passes


@pytest.mark.parametrize("name", [*NAMES, "rcla", "4bit"])
def test_scores_are_the_mixture_in_chunks_too(name: str, parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts(name)
    model = NM.model(decoder, points, tensors)
    ids = tiny.random_ids(1, 21)
    expected = NM.mixture(decoder, points, tensors, ids[0].tolist()).log().float()
    cache = model.new_cache(1, 21)
    chunks = [model.score(part, cache)[0] for part in ids.split([9, 1, 1, 10], 1)]
    torch.testing.assert_close(torch.cat(chunks), expected, **CLOSE)
    torch.testing.assert_close(model.read(ids).log_probabilities(slice(None))[0], expected, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_routers_that_never_leave_give_the_dense_model(name: str, parts: Callable, tiny: ModuleType) -> None:
    decoder, points, _ = parts(name)
    model = NM.model(decoder, points, NM.junction_tensors(decoder, points, biases=NM.NEVER))
    dense = Dense(decoder)
    ids = tiny.random_ids(1, 12)
    caches = model.new_cache(1, 16), dense.new_cache(1, 16)
    for law in (None, Sampler(PURE), Sampler(Sampling(temperature=0.7, top_p=0.9))):
        for cache in caches:
            cache.truncate(0)
        for part, run in ((ids, "prefill"), (ids[:, 3:4], "decode"), (ids[:, 5:6], "decode")):
            found = getattr(model, run)(part, caches[0], law)
            expected = getattr(dense, run)(part, caches[1]).logits
            assert found.depth == decoder.arch.num_layers
            wanted = expected if law is not None and law.sampling is PURE else expected.log_softmax(-1)
            torch.testing.assert_close(found.logits, wanted, atol=1e-5, rtol=1e-5)
            assert found.token in {None, int(expected.argmax())}


def undecided(decoder: Decoder, points: Sequence[int], tensors: dict[str, Tensor]) -> Tensor:
    """A prompt after which every exit has its share."""
    ids = torch.randint(3, 97, (1, 30))
    weights = torch.stack(NM.exits(decoder, points, tensors, ids[0].tolist())[0])
    return ids[:, : int(weights[:, 1:].min(0).values.argmax()) + 2]


def statistic(counts: Tensor, law: Tensor) -> tuple[float, float]:
    """Chi-square over tokens expected at least five times, the others as one; and its 1 - 1e-5 bound."""
    expected = law * counts.sum()
    often = expected >= 5
    observed = torch.cat((counts[often], counts[~often].sum()[None]))
    wanted = torch.cat((expected[often], expected[~often].sum()[None]))
    kept = wanted > 0
    if observed[~kept].any():
        return math.inf, 0.0
    freedom = int(kept.sum()) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty
    return float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum()), bound


def counted(model: Nvium, ids: Tensor, sampling: Sampling, draws: int) -> tuple[Tensor, set[int]]:
    """Counts of the token after ids, decoded afresh each time, and the depths it left at."""
    sampler, cache = Sampler(sampling), model.new_cache(1, 32)
    model.prefill(ids[:, :-1], cache)
    counts, depths = torch.zeros(97, dtype=torch.float64), set()
    for _ in range(draws):
        cache.truncate(ids.shape[1] - 1)
        output = model.decode(ids[:, -1:], cache, sampler)
        counts[sampler(output.logits[0])] += 1
        depths.add(output.depth)
    return counts, depths


def truncated(law: Tensor, sampling: Sampling) -> Tensor:
    """The law that `sampling` makes of probabilities [V]."""
    ids, kept = distribution(law.log(), sampling)
    return torch.zeros(len(law), dtype=torch.float64).index_put((ids,), kept)


def test_drawn_tokens_follow_the_mixture(parts: Callable) -> None:
    decoder, points, tensors = parts("mistral")
    ids = undecided(decoder, points, tensors)
    law = NM.mixture(decoder, points, tensors, ids[0].tolist())[-1]
    counts, depths = counted(NM.model(decoder, points, tensors), ids, PURE, 1200)
    found, bound = statistic(counts, law)
    assert found < bound
    assert depths == {1, 2, 3}
    last = NM.exits(decoder, points, tensors, ids[0].tolist())[1][-1][-1]
    assert statistic(counts, last)[0] > bound  # the last exit alone is another law


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.6, "temperature": 1.7}, {"min_p": 0.1}])
def test_per_exit_truncation_is_a_mixture_of_truncations(options: dict, parts: Callable) -> None:
    decoder, points, tensors = parts("mistral")
    ids = undecided(decoder, points, tensors)
    sampling = Sampling(**{"temperature": 1.0, "seed": 5, **options})
    weights, exits = NM.exits(decoder, points, tensors, ids[0].tolist())
    law = sum(float(p[-1]) * truncated(own[-1], sampling) for p, own in zip(weights, exits, strict=True))
    counts, depths = counted(NM.model(decoder, points, tensors, per_exit=True), ids, sampling, 600)
    found, bound = statistic(counts, law)
    assert found < bound
    assert len(depths) == 3
    assert (
        statistic(counts, truncated(sum(p[-1] * own[-1] for p, own in zip(weights, exits, strict=True)), sampling))[0]
        > bound
    )  # the truncated mixture is another law


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.6}, {"temperature": 1.8}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 1.3}],
)
def test_other_laws_are_the_truncated_mixture(options: dict, parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts("gemma3")
    ids = tiny.random_ids(1, 8)
    sampling = Sampling(**{"temperature": 1.0, "seed": 1, **options})
    law = truncated(NM.mixture(decoder, points, tensors, ids[0].tolist())[-1], sampling)
    model, sampler = NM.model(decoder, points, tensors), Sampler(sampling)
    cache, counts = model.new_cache(1, 8), torch.zeros(97, dtype=torch.float64)
    model.prefill(ids[:, :-1], cache)
    output = model.decode(ids[:, -1:], cache, sampler)
    for _ in range(2000):
        counts[sampler(output.logits[0])] += 1
    found, bound = statistic(counts, law)
    assert found < bound
    assert counts[law == 0].sum() == 0


def test_a_penalty_acts_on_the_mixture(parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts("mistral")
    model, ids = NM.model(decoder, points, tensors), tiny.random_ids(1, 8)
    for sampling in (Sampling(repetition_penalty=1.3), Sampling(temperature=1.0, repetition_penalty=1.3)):
        found = model.prefill(ids, model.new_cache(1, 8), Sampler(sampling))
        expected = NM.mixture(decoder, points, tensors, ids[0].tolist())[-1]
        torch.testing.assert_close(found.logits[0], expected.log().float(), **CLOSE)
        assert found.token is None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(3, 96), min_size=1, max_size=10), name=st.sampled_from(["mistral", "gemma3", "rcla"])
)
def test_greedy_is_the_argmax_of_the_mixture(prompt: Sequence[int], name: str, parts: Callable) -> None:
    decoder, points, tensors = parts(name)
    model = NM.model(decoder, points, tensors)
    tokens, depths, _ = go_on(model, torch.tensor([prompt]), 12, Sampling())
    law = NM.mixture(decoder, points, tensors, [*prompt, *tokens])[len(prompt) - 1 : -1]
    assert law.argmax(-1).tolist() == tokens
    assert depths[0] == decoder.arch.num_layers


def test_greedy_decides_early_where_it_can_and_not_where_it_cannot(parts: Callable, tiny: ModuleType) -> None:
    decoder, points, _ = parts("mistral")
    ids = tiny.random_ids(1, 6)
    depths = {}
    for bias in (-3.0, 0.0, 3.0):
        model = NM.model(decoder, points, NM.junction_tensors(decoder, points, biases=bias))
        depths[bias] = go_on(model, ids, 40, Sampling())[1][1:]
    assert set(depths[0.0]) == {1, 2, 3} or set(depths[0.0]) == {1, 3}
    assert sum(depths[3.0]) < sum(depths[0.0]) < sum(depths[-3.0])


@pytest.mark.parametrize("name", ["mistral", "gemma3", "rcla", "smollm3", "4bit", "llama-dynamic"])
@pytest.mark.parametrize("sampling", [PURE, Sampling()], ids=["drawn", "greedy"])
def test_deferring_changes_no_token(name: str, sampling: Sampling, parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts(name)
    ids = tiny.random_ids(1, 5)
    count = 18 if name == "llama-dynamic" else 50
    at_once, *others = [
        go_on(NM.model(decoder, points, tensors, **options), ids, count, sampling)
        for options in ({"piggyback": False}, {}, {"max_deferred": 1}, {"max_deferred": 2}, {"max_deferred": 5})
    ]
    assert all(other[:2] == at_once[:2] for other in others)
    if sampling is PURE:
        assert (max(others[0][2]) > 1) == (name != "llama-dynamic")  # something was taken along
    assert max(others[1][2]) <= 4


def test_dynamic_rotation_defers_nothing(parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts("llama-dynamic")
    ids = tiny.random_ids(1, 20)
    assert set(go_on(NM.model(decoder, points, tensors), ids, 12, PURE)[2]) == {1}


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2", "rcla", "phi3-longrope", "4bit"])
def test_keys_and_values_after_a_flush_are_those_of_a_full_pass(name: str, parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts(name)
    model, ids = NM.model(decoder, points, tensors), tiny.random_ids(1, 4)
    cache = model.new_cache(1, 40)
    tokens, depths, _ = go_on(model, ids, 19, PURE, cache)
    assert min(depths) < decoder.arch.num_layers
    waited = [cache.waiting(junction) for junction in range(len(points))]
    assert [n > cache.length(1 + k) for k, n in enumerate([cache.length(k) for k in range(len(points))])] == [
        n > 0 for n in waited
    ]
    model.flush(cache)
    assert set(cache.lengths) == {(23,)}
    full = decoder.new_cache(1, 40)
    Dense(decoder).score(torch.tensor([[*ids[0].tolist(), *tokens]]), full)
    for mine, theirs in zip((*cache._keys, *cache._values), (*full._keys, *full._values), strict=True):
        torch.testing.assert_close(mine[:, :, :23], theirs[:, :, :23], **CLOSE)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "rcla"])
def test_rows_of_a_batch_are_what_they_are_alone(name: str, parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts(name)
    model = NM.model(decoder, points, tensors)
    laws = [PURE, Sampling(), Sampling(temperature=0.8, top_k=7, seed=2), Sampling(temperature=1.0, seed=9)]
    prompts = [tiny.random_ids(1, length) for length in (3, 9, 5, 4)]
    alone = [go_on(model, prompt, 25, law)[:2] for prompt, law in zip(prompts, laws, strict=True)]
    cache, samplers = model.new_cache(4, 40), [Sampler(law) for law in laws]
    outputs = [model.prefill(prompt, cache.rows(row), samplers[row]) for row, prompt in enumerate(prompts)]
    found = [([], []) for _ in prompts]
    for _ in range(25):
        for (tokens, depths), output, sampler in zip(found, outputs, samplers, strict=True):
            tokens.append(sampler(output.logits[0]) if output.token is None else output.token)
            depths.append(output.depth)
        ids = torch.tensor([[tokens[-1]] for tokens, _ in found])
        outputs = model.decode_batch(ids, cache, samplers)
    assert found == alone


def test_a_moved_row_goes_on_as_it_was(parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts("mistral")
    model, prompt = NM.model(decoder, points, tensors), tiny.random_ids(1, 5)
    expected = go_on(model, prompt, 30, PURE)[0]
    cache, sampler = model.new_cache(2, 40), Sampler(PURE)
    output, tokens, row = model.prefill(prompt, cache.rows(1), sampler), [], 1
    for index in range(30):
        tokens.append(sampler(output.logits[0]))
        if index == 12:
            cache.move(1, 0)
            row = 0
        output = model.decode(torch.tensor([[tokens[-1]]]), cache.rows(row), sampler)
    assert tokens == expected


def test_longrope_asks_for_the_whole_sequence_again(parts: Callable, tiny: ModuleType) -> None:
    decoder, points, tensors = parts("phi3-longrope")
    model, ids = NM.model(decoder, points, tensors), tiny.random_ids(1, 24)
    cache = model.new_cache(1, 64)
    model.prefill(ids, cache, Sampler(PURE))
    with pytest.raises(RotationChangedError):
        model.decode(ids[:, :1], cache, Sampler(PURE))
    cache.truncate(0)
    whole = torch.cat((ids, ids[:, :1]), 1)
    found = model.score(whole, cache)[0]
    torch.testing.assert_close(found, NM.mixture(decoder, points, tensors, whole[0].tolist()).log().float(), **CLOSE)
