"""Sharing maps: which are made, which are refused, what the search finds; and what training draws."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapt_llm.convert.cross_layer import CrossLayer, draw_leaders, draw_sources
from adapt_llm.convert.kv_map import KVMap, count_of, every, from_keepers, keepers_of, search, spread
from adapt_llm.convert.sequences import Batch
from adapt_llm.errors import UsageError
from adapt_llm.runtime.architecture import Architecture, LayerSpec

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "num_hidden_layers": 7,
    "max_position_embeddings": 64,
}
PLAIN = Architecture.from_config({"model_type": "llama", **SIZES})
KINDS = [LayerSpec(None, 0), LayerSpec(4, 0), LayerSpec(4, 1)]


def of_kinds(kinds: Sequence[int]) -> Architecture:
    layers = tuple(KINDS[kind] for kind in kinds)
    return replace(PLAIN, num_layers=len(layers), layers=layers, kv_sources=tuple(range(len(layers))))


ANY_KINDS = st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=12)


def test_the_first_of_every_group_keeps() -> None:
    assert every(PLAIN, 3) == (0, 0, 0, 3, 3, 3, 6)
    assert every(PLAIN, 1) == tuple(range(7))
    assert every(PLAIN, 100) == (0,) * 7
    with pytest.raises(UsageError, match="0 layers"):
        every(PLAIN, 0)


def test_kinds_are_grouped_apart() -> None:
    """Gemma's pattern: sliding and full layers each have leaders of their own kind."""
    arch = of_kinds([1, 0, 1, 0, 1, 0, 1, 0])
    assert every(arch, 2) == (0, 1, 0, 1, 4, 5, 4, 5)
    assert spread(arch, 3) == (0, 1, 0, 1, 4, 1, 4, 1)


@given(ANY_KINDS, st.integers(1, 5), st.data())
def test_every_map_is_one_that_the_model_can_run(kinds: list[int], size: int, data: st.DataObject) -> None:
    arch = of_kinds(kinds)
    keepers = data.draw(st.integers(len(arch.kinds), arch.num_layers))
    grouped, even = every(arch, size), spread(arch, keepers)
    for sources in (grouped, even):
        assert arch.share(sources).kv_sources == sources
        assert from_keepers(arch, keepers_of(sources)) == sources
    assert len(keepers_of(even)) == keepers
    for layer, source in enumerate(grouped):  # the nearest keeper that attends alike
        between = range(source + 1, layer + 1) if source != layer else range(0)
        assert all(arch.kind_of[other] != arch.kind_of[layer] or grouped[other] != other for other in between)


def test_refused_maps_say_why() -> None:
    with pytest.raises(UsageError, match="Layer 1 has no layer before it"):
        from_keepers(PLAIN, [1])
    with pytest.raises(UsageError, match="no layer 9"):
        from_keepers(PLAIN, [0, 8])
    with pytest.raises(UsageError, match=r"Layer 3 attends to 4 tokens, .* that attends alike keeps"):
        from_keepers(of_kinds([0, 0, 1, 1]), [0])
    with pytest.raises(UsageError, match="2 kinds of layers"):
        spread(of_kinds([0, 1]), 1)
    with pytest.raises(UsageError, match="Use 1 to 7"):
        spread(PLAIN, 8)


def test_the_number_of_keepers() -> None:
    assert [count_of(PLAIN, ratio) for ratio in (1.0, 0.5, 0.25, 0.01)] == [7, 4, 2, 1]
    assert count_of(of_kinds([0, 1, 2, 0]), 0.1) == 3


@pytest.mark.parametrize("keepers", [2, 3, 5])
def test_the_search_finds_the_layers_that_matter(keepers: int) -> None:
    """Each follower costs what lies between it and its source: then exchanges reach the best map there is."""
    worth = [0.0, 9.0, 1.0, 1.0, 1.0, 8.0, 7.0]
    asked: list[KVMap] = []

    def measure(maps: Sequence[KVMap]) -> list[float]:
        asked.extend(maps)
        return [sum(sum(worth[source + 1 : layer + 1]) for layer, source in enumerate(each)) for each in maps]

    found = search(PLAIN, measure, keepers)
    every_map = [from_keepers(PLAIN, (0, *rest)) for rest in combinations(range(1, 7), keepers - 1)]
    assert len(keepers_of(found)) == keepers
    assert measure([found])[0] == min(measure(every_map))
    assert measure([found])[0] < measure([spread(PLAIN, keepers)])[0]


@given(ANY_KINDS, st.data())
def test_the_search_is_never_worse_than_the_even_map(kinds: list[int], data: st.DataObject) -> None:
    arch = of_kinds(kinds)
    keepers = data.draw(st.integers(len(arch.kinds), arch.num_layers))
    seed = data.draw(st.integers(0, 2**32))

    def measure(maps: Sequence[KVMap]) -> list[float]:
        return [random.Random(f"{seed}{each}").random() for each in maps]

    found = search(arch, measure, keepers)
    assert len(keepers_of(found)) == keepers
    assert measure([found]) <= measure([spread(arch, keepers)])


@given(ANY_KINDS, st.floats(0, 1), st.integers())
def test_draws_stay_among_layers_that_attend_alike(kinds: list[int], probability: float, seed: int) -> None:
    arch = of_kinds(kinds)
    sources = draw_sources(arch, probability, random.Random(seed))
    assert sources == draw_sources(arch, probability, random.Random(seed))
    for layer, source in enumerate(sources):
        assert source <= layer
        assert arch.layers[source] == arch.layers[layer]


def test_how_often_and_where_layers_cross() -> None:
    draws = [draw_sources(PLAIN, 0.6, random.Random(seed)) for seed in range(4000)]
    for layer in range(1, 7):
        found = [sources[layer] for sources in draws]
        assert found.count(layer) / 4000 == pytest.approx(0.4, abs=0.04)
        for earlier in range(layer):  # uniform
            assert found.count(earlier) / 4000 == pytest.approx(0.6 / layer, abs=0.04)
    assert {sources[0] for sources in draws} == {0}
    assert any(sources[source] != source for sources in draws for source in sources), "reading is not chained"
    assert draw_sources(PLAIN, 0.0, random.Random(1)) == tuple(range(7))
    assert all(source < layer for layer, source in enumerate(draw_sources(PLAIN, 1.0, random.Random(1))) if layer)


@given(ANY_KINDS, st.floats(0, 1), st.integers())
def test_leaders_are_drawn_as_a_bundle_has_them(kinds: list[int], share: float, seed: int) -> None:
    arch = of_kinds(kinds)
    sources = draw_leaders(arch, share, random.Random(seed))
    assert sources == draw_leaders(arch, share, random.Random(seed))
    assert arch.share(sources).kv_sources == sources
    followers = arch.num_layers - len(keepers_of(sources))
    most = min(round(share * arch.num_layers), arch.num_layers - len(arch.kinds))
    assert min(1, most) <= followers <= most


def test_how_many_layers_follow_and_which() -> None:
    draws = [draw_leaders(PLAIN, 0.6, random.Random(seed)) for seed in range(4000)]
    sizes = [7 - len(keepers_of(sources)) for sources in draws]
    for followers in (1, 2, 3, 4):  # 0.6 of 7 layers
        assert sizes.count(followers) / 4000 == pytest.approx(0.25, abs=0.04)
    for layer in range(1, 7):  # 2.5 of the 6 that may
        assert sum(sources[layer] != layer for sources in draws) / 4000 == pytest.approx(2.5 / 6, abs=0.04)
    assert draw_leaders(PLAIN, 1.0, random.Random(5)) != draw_leaders(PLAIN, 1.0, random.Random(6))
    assert draw_leaders(PLAIN, 0.0, random.Random(1)) == tuple(range(7))


def test_in_plain_passes_no_layer_crosses() -> None:
    batch = Batch(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64), (4,))
    seen: list[tuple[int, ...]] = []

    class Model:
        arch = PLAIN

        def __call__(self, *given: object) -> torch.Tensor:
            seen.append(given[3])  # pyright: ignore[reportArgumentType] - the map
            return torch.zeros(())

    for seed in range(2000):
        CrossLayer(1.0, plain=0.25)(Model(), batch, random.Random(seed))  # pyright: ignore[reportArgumentType]
    own = tuple(range(7))
    assert seen.count(own) / 2000 == pytest.approx(0.25, abs=0.04)
    assert all(source < layer for sources in seen if sources != own for layer, source in enumerate(sources) if layer)
