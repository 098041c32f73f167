"""The KV cache against a model of it in plain lists: appends, ragged rows, rollbacks, bounds, slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import UsageError
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.cache import KVCache
from adapt_llm.runtime.rope import Rotary
from adapt_llm.runtime.step import Step, chunk_counts

CONFIG = {
    "model_type": "mistral",
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "sliding_window": None,
}
ARCH = Architecture.from_config(CONFIG)
CAPACITY = 12
CPU = torch.device("cpu")


def new_cache(batch: int, arch: Architecture = ARCH, capacity: int = CAPACITY) -> KVCache:
    return KVCache(arch, batch=batch, capacity=capacity, dtype=torch.float32, device="cpu")


def new_step(cache: KVCache, counts: tuple[int, ...], arch: Architecture = ARCH) -> Step:
    rotaries = [Rotary(spec, device=CPU, dtype=torch.float32) for spec in arch.ropes]
    starts = cache.starts(range(arch.num_layers))
    cache.check_room(starts, counts)
    return Step(arch, rotaries, starts=starts, counts=counts, dtype=torch.float32, device=CPU)


def fill(step: Step, value: int, arch: Architecture = ARCH) -> torch.Tensor:
    return torch.full((len(step.counts), arch.num_kv_heads, step.width, arch.head_dim), float(value))


actions = st.lists(
    st.one_of(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, CAPACITY)), min_size=1, max_size=8
)


@settings(max_examples=150, deadline=None)
@given(actions=actions, batch=st.integers(1, 3))
def test_against_lists(actions: list[list[int] | int], batch: int) -> None:
    cache = new_cache(batch)
    rows: list[list[int]] = [[] for _ in range(batch)]
    for number, action in enumerate(actions, 1):
        if isinstance(action, int):
            cache.truncate(action)
            rows = [row[:action] for row in rows]
        elif max(action[:batch]) > 0:
            counts = tuple(action[:batch])
            if any(len(row) + count > CAPACITY for row, count in zip(rows, counts, strict=True)):
                with pytest.raises(UsageError, match=f"cache has {CAPACITY}"):
                    new_step(cache, counts)
                continue
            step = new_step(cache, counts)
            for layer in range(ARCH.num_layers):
                cache.store(step, layer, fill(step, number), fill(step, -number))
            rows = [row + [number] * count for row, count in zip(rows, counts, strict=True)]
            keys, values = cache.fetch(step, 2)
            for row, expected in enumerate(rows):
                assert keys[row, 0, : len(expected), 0].tolist() == expected
                assert values[row, 1, : len(expected), 3].tolist() == [-number for number in expected]
        assert set(cache.lengths) == {tuple(len(row) for row in rows)}


def test_storing_a_step_again_overwrites_it() -> None:
    """River may run a layer twice in a pass; the second run counts."""
    cache = new_cache(1)
    step = new_step(cache, (3,))
    for value in (1, 2):
        cache.store(step, 0, fill(step, value), fill(step, value))
    assert cache.lengths[0] == (3,)
    assert cache.fetch(step, 0)[0].unique().tolist() == [2.0]


def test_layers_that_lag_have_an_index_of_their_own() -> None:
    cache = new_cache(2)
    step = new_step(cache, (2, 2))
    for layer in (0, 1):
        cache.store(step, layer, fill(step, 1), fill(step, 1))
    assert cache.starts(range(2)) == (2, 2)
    assert cache.starts(range(2, 4)) == (0, 0)
    with pytest.raises(UsageError, match="different numbers of tokens"):
        cache.starts(range(4))


def test_bytes_are_those_of_the_keepers() -> None:
    dense = new_cache(2)
    assert dense.nbytes == 2 * 4 * 2 * ARCH.num_kv_heads * CAPACITY * ARCH.head_dim * 4
    assert new_cache(2, ARCH.share([0, 0, 2, 2])).nbytes * 2 == dense.nbytes


def test_a_window_fetches_only_what_it_sees() -> None:
    arch = Architecture.from_config({**CONFIG, "sliding_window": 4})
    cache = new_cache(1, arch)
    for value in range(1, 8):
        step = new_step(cache, (1,), arch)
        for layer in range(arch.num_layers):
            cache.store(step, layer, fill(step, value, arch), fill(step, value, arch))
    assert cache.fetch(step, 1)[0][0, 0, :, 0].tolist() == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("lengths", [[1], [1, 2, 3], [-1, 0]])
def test_impossible_cuts(lengths: list[int]) -> None:
    with pytest.raises(UsageError):
        new_cache(2).truncate(lengths)


def test_rows_can_be_cut_apart() -> None:
    cache = new_cache(2)
    step = new_step(cache, (5, 3))
    for layer in range(4):
        cache.store(step, layer, fill(step, 1), fill(step, 1))
    cache.truncate([2, 9])
    assert set(cache.lengths) == {(2, 3)}


def test_a_chunk_of_another_batch() -> None:
    with pytest.raises(UsageError, match="batch 1 does not fit a cache with batch 2"):
        new_cache(2).check_room((0, 0), (1,))


@pytest.mark.parametrize("counts", [[3], [1, 2], [4, 1], [3, -1], []])
def test_counts_that_do_not_fit_the_chunk(counts: list[int]) -> None:
    with pytest.raises(UsageError, match="do not fit a chunk of 2 x 3"):
        chunk_counts(torch.zeros(2, 3, dtype=torch.long), counts)


def test_a_token_needs_no_mask() -> None:
    cache = new_cache(1)
    step = new_step(cache, (1,))
    assert all(step.masked_view(kind).mask is None for kind in range(len(step.views)))
