"""The sampled law, its ties, its order of filters and its seeds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import AdaptError, UsageError
from adapt_llm.runtime.sampling import (
    Sampler,
    Sampling,
    argmax,
    distribution,
    draw,
    penalize,
    row_generator,
    sample,
)


def reference(logits: list[float] | torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """The same law written the slow way, in plain floats."""
    scaled = [float(x) / sampling.temperature for x in logits]
    best = max(scaled)
    weights = {i: math.exp(x - best) for i, x in enumerate(scaled)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        wanted, mass, kept = sampling.top_p * sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            mass += weights[i]
            if mass >= wanted:
                break
        order = kept
    order = [i for i in order if weights[i] >= sampling.min_p]
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
    ],
)
def test_values_outside_their_range_are_a_usage_error_that_names_the_setting(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^--{field.replace('_', '-')} "):
        Sampling(**{field: value})


@pytest.mark.parametrize("size", [1, 7, 33, 1000, 151936])
def test_greedy_takes_the_lowest_id_of_equals(size: int) -> None:
    logits = torch.full((size,), -3.0)
    at = sorted({size // 2, size - 1, size // 3})
    logits[at] = 5.0
    assert argmax(logits) == at[0]
    assert sample(logits, Sampling()) == at[0]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0, 0.999), st.floats(0.01, 5))
def test_top_k_of_one_is_the_argmax_even_on_ties(values: list[float], uniform: float, temperature: float) -> None:
    logits = torch.tensor(values, dtype=torch.float32)
    assert sample(logits, Sampling(temperature=temperature, top_k=1), uniform) == values.index(max(values))


@settings(max_examples=200)
@given(
    values=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=60),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
)
def test_the_law_is_the_documented_one(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor(values, dtype=torch.float64)
    ids, probabilities = distribution(logits, sampling)
    got = dict(zip(ids.tolist(), probabilities.tolist(), strict=True))
    expected = reference(values, sampling)
    # A sum on the border of top-p may round either way; there, at most one token differs.
    assert len(set(got) ^ set(expected)) <= (1 if top_p < 1 else 0)
    if set(got) == set(expected):
        assert got == pytest.approx(expected, abs=1e-9)
    assert sum(got.values()) == pytest.approx(1)


def test_top_p_over_a_large_flat_vocabulary_widens_its_candidates() -> None:
    logits = torch.zeros(5000)
    ids, _ = distribution(logits, Sampling(temperature=1, top_p=0.5))
    assert ids.tolist() == list(range(2500))


def test_the_law_agrees_with_transformers() -> None:
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    torch.manual_seed(0)
    logits = torch.randn(500) * 3
    chain = [
        logits_process.TemperatureLogitsWarper(0.8),
        logits_process.TopKLogitsWarper(40),
        logits_process.TopPLogitsWarper(0.9),
        logits_process.MinPLogitsWarper(0.05),
    ]
    scores = logits[None]
    for step in chain:
        scores = step(None, scores)
    expected = scores.softmax(-1)[0]
    ids, probabilities = distribution(logits, Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05))
    got = torch.zeros(500, dtype=torch.float64).scatter(0, ids, probabilities)
    assert torch.allclose(got, expected.double(), atol=1e-6)
    penalised = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[3, 9, 3]]), logits[None].clone())[0]
    seen = torch.zeros(500, dtype=torch.bool)
    seen[[3, 9]] = True
    assert torch.equal(penalize(logits, seen, 1.3), penalised)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=5),
        Sampling(temperature=0.7, seed=6),
        Sampling(temperature=1.3, top_k=5, seed=7),
        Sampling(temperature=1.0, top_p=0.8, seed=8),
        Sampling(temperature=1.0, min_p=0.1, seed=9),
        Sampling(temperature=1.5, top_k=8, top_p=0.9, min_p=0.05, seed=10),
    ],
)
def test_draws_follow_the_law_by_chi_square(sampling: Sampling) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0, 0.5, 2.0, -0.5, 0.2, 1.1])
    law = reference(logits, sampling)
    sampler, draws = Sampler(sampling), 3000
    counts = torch.bincount(torch.tensor([sampler(logits) for _ in range(draws)]), minlength=10).tolist()
    assert all(counts[i] == 0 for i in range(10) if i not in law)
    statistic = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in law.items())
    freedom = len(law) - 1
    # Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square; the seeds are fixed, so this does not flake.
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < quantile


def test_the_ends_of_the_unit_interval_never_choose_an_impossible_token() -> None:
    ids, probabilities = torch.tensor([4, 5, 6, 7]), torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64)
    assert draw(ids, probabilities, 0.0) == 5
    assert draw(ids, probabilities, math.nextafter(1.0, 0.0)) == 6


def test_a_row_depends_on_seed_and_row_only() -> None:
    def numbers(seed: int | None, row: int) -> list[float]:
        return torch.rand(4, generator=row_generator(seed, row)).tolist()

    assert numbers(1, 2) == numbers(1, 2)
    assert len({tuple(numbers(seed, row)) for seed in range(5) for row in range(5)}) == 25
    assert numbers(None, 0) != numbers(None, 0)
    assert numbers(-1, 0) != numbers(-1, 0)


def test_repetition_penalty_moves_greedy_off_the_token_seen() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    logits = torch.tensor([3.0, 2.0, -1.0])
    assert [sampler(logits), sampler(logits), sampler(logits)] == [0, 1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_not_a_token(bad: float, temperature: float) -> None:
    with pytest.raises(AdaptError, match="logit"):
        sample(torch.tensor([1.0, bad, 2.0]), Sampling(temperature=temperature), 0.5)


@pytest.mark.parametrize(
    "settings",
    [
        *({"repetition_penalty": penalty} for penalty in (1e-6, 1e6)),
        *({"temperature": temperature} for temperature in (5e-324, 1e-300, 1e-40, 1e40, 1e308)),
        {"temperature": 1.0, "top_p": 5e-324},
        {"temperature": 1e-300, "top_p": 0.5, "min_p": 1.0, "repetition_penalty": 1e-6},
    ],
)
def test_no_value_in_range_makes_sound_logits_look_broken(settings: dict[str, float]) -> None:
    sampler = Sampler(Sampling(**settings, seed=1))
    sampler.saw(range(3))
    for logits in (torch.tensor([0.0, 1e4, -1e4, 3.0]), torch.zeros(300)):
        assert 0 <= sampler(logits) < len(logits)


def test_masked_tokens_are_allowed() -> None:
    assert sample(torch.tensor([-math.inf, 1.0, -math.inf]), Sampling(temperature=1.0), 0.99) == 1


def test_a_copy_chooses_alike_and_changes_nothing() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(Sampling(temperature=1.3, seed=5, repetition_penalty=1.5))
    sampler(logits)
    ahead = sampler.copy()
    seen = [ahead(logits) for _ in range(20)]
    assert [sampler(logits) for _ in range(20)] == seen
    assert len(set(seen)) > 1


def test_what_was_chosen_elsewhere_counts_as_seen() -> None:
    logits = torch.tensor([2.0, 1.9, 0.0])
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    assert sampler.take(0) == 0
    assert sampler(logits) == 1
