"""R-CLA's map against transformers, float32: layers read earlier layers' keys and values, cached or not, with exits.

The reference is transformers' own model with a cache that hands every layer the keys and values of its source.
"""

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from adapt_llm.convert.kv_map import KVMap, every, from_keepers, keepers_of, spread
from adapt_llm.convert.map_loss import Weights, run_maps
from adapt_llm.convert.sequences import Batch
from adapt_llm.convert.trainable import MemoryStore, Trainable
from adapt_llm.quant.layout import Int4Matrix, round_scale
from adapt_llm.runtime.decoder import Decoder, load_block, load_decoder
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.exit_layers import exit_block
from adapt_llm.runtime.exits import CosineExit, FixedExit
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.quality import Track, push
from adapt_llm.runtime.river import River
from adapt_llm.runtime.routing import Ladder

NAMES = [
    "llama",
    "llama-biases",
    "llama-yarn",
    "mistral",
    "ministral",
    "ministral3",
    "qwen2-window",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3-partial",
    "smollm3",
    "smollm3-window",
]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
LENGTH = 17
CPU = {"device": "cpu", "dtype": torch.float32}


class SharedCache(DynamicCache):
    """What transformers' attention gets back is the source's: keys after norm and rotation, and values."""

    def __init__(self, sources: Sequence[int]) -> None:
        super().__init__()
        self._sources, self._kept = sources, {}

    def update(self, key_states, value_states, layer_idx: int, *_: object, **__: object):
        self._kept[layer_idx] = (key_states, value_states)
        return self._kept[self._sources[layer_idx]]


def expected(model: Any, ids: torch.Tensor, sources: Sequence[int]) -> torch.Tensor:
    renamed = "cache" in inspect.signature(type(model.reference).forward).parameters  # transformers 5.24
    cache = {"cache" if renamed else "past_key_values": SharedCache(sources)}
    with torch.inference_mode():
        return model.reference(ids, use_cache=True, **cache).logits


def stripped(model: Any, sources: Sequence[int]) -> MemoryStore:
    """What a bundle holds: no keys and values of followers, and of a fused matrix the query's rows."""
    shapes = model.arch.share(sources).tensors()
    return MemoryStore({name: model.store.read(name)[: shape[0]].clone() for name, shape in shapes.items()})


def shared(model: Any, sources: Sequence[int]) -> Decoder:
    return load_decoder(model.arch.share(sources), stripped(model, sources), **CPU)


def maps_of(arch: Any) -> list[KVMap]:
    kinds = len(arch.kinds)
    found = [every(arch, 1), every(arch, 2), every(arch, 3), spread(arch, kinds)]
    last = [*keepers_of(spread(arch, kinds)), arch.num_layers - 1]  # a last layer of its own
    return list(dict.fromkeys([*found, from_keepers(arch, last)]))


def scored(decoder: Decoder, ids: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    model = Dense(decoder)
    cache = model.new_cache(len(ids), ids.shape[1])
    with torch.inference_mode():
        return torch.cat([model.score(part, cache) for part in ids.split(list(sizes), 1)], 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_map_gives_what_the_reference_gives_however_it_is_run(
    name: str, tiny_model: Callable[[str], Any], tiny: ModuleType
) -> None:
    """Uncached = cached whole = chunked = token by token, across the edges of windows."""
    model, ids = tiny_model(name), tiny.random_ids(2, LENGTH)
    seen = []
    for sources in maps_of(model.arch):
        decoder, wanted = shared(model, sources), expected(model, ids, sources)
        with torch.inference_mode():
            h = decoder.run(decoder.embed(ids), decoder.step(None, ids), PassStore(decoder.arch))
            torch.testing.assert_close(decoder.logits(h), wanted, **TOLERANCE)
        for sizes in ([LENGTH], [5, 1, 8, 3], [1] * LENGTH):
            torch.testing.assert_close(scored(decoder, ids, sizes), wanted, **TOLERANCE)
        seen.append(wanted)
    torch.testing.assert_close(seen[0], model.expected(ids), **TOLERANCE)  # all layers keep: the model itself
    assert all(not torch.allclose(one, seen[0], atol=1e-2) for one in seen[1:]), "a map must show in the logits"


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen3"])
def test_rows_of_unequal_length_are_as_if_alone(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    model, ids = tiny_model(name), tiny.random_ids(3, LENGTH)
    sources = every(model.arch, 2)
    decoder, counts = shared(model, sources), (LENGTH, 4, 11)
    cache = decoder.new_cache(3, LENGTH + 4)
    more = tiny.random_ids(3, 4)
    with torch.inference_mode():
        first = decoder.logits(decoder.run(decoder.embed(ids), decoder.step(cache, ids, counts), cache))
        second = decoder.logits(decoder.run(decoder.embed(more), decoder.step(cache, more), cache))
    for row, count in enumerate(counts):
        alone = torch.cat([ids[row : row + 1, :count], more[row : row + 1]], 1)
        wanted = expected(model, alone, sources)[0]
        torch.testing.assert_close(first[row, :count], wanted[:count], **TOLERANCE)
        torch.testing.assert_close(second[row], wanted[count:], **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_followers_are_absent_from_file_memory_and_cache(name: str, tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model(name)
    arch = model.arch
    per_layer = 2 * arch.num_kv_heads * arch.head_dim
    narrow = arch.num_kv_heads * arch.head_dim
    for sources in maps_of(arch):
        decoder, store = shared(model, sources), stripped(model, sources)
        keepers = keepers_of(sources)
        for layer in range(arch.num_layers):
            prefix = f"model.layers.{layer}.self_attn."
            own = {key.removeprefix(prefix) for key in store.names() if key.startswith(prefix)}
            assert any(part.startswith(("k_", "v_")) for part in own) == (layer in keepers and not arch.fused_qkv)
            width = sum(linear.out_features for linear in decoder.blocks[layer].qkv.linears)
            assert width == arch.num_heads * arch.head_dim + (2 * narrow if layer in keepers else 0)
        cache = decoder.new_cache(2, 10)
        assert cache.nbytes == len(keepers) * per_layer * 2 * 10 * 4


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "gemma2", "phi3", "smollm3"])
def test_training_scoring_and_running_are_one_function(
    name: str, tiny_model: Callable[[str], Any], tiny: ModuleType
) -> None:
    """A map given to the pass over all weights = the decoder without the followers' weights."""
    model, ids = tiny_model(name), tiny.random_ids(2, LENGTH)
    trainable = Trainable(model.arch, model.store, checkpointing=True)
    whole = Weights(model.decoder, lambda index: load_block(model.arch, model.store, index, **CPU))
    maps = maps_of(model.arch)
    streamed = run_maps(whole, [Batch(ids, ids, (LENGTH, LENGTH))], maps)
    for sources in maps:
        decoder = shared(model, sources)
        wanted = scored(decoder, ids, [LENGTH])
        torch.testing.assert_close(model.decoder.logits(streamed[sources][0]), wanted, **TOLERANCE)
        hidden = trainable.hidden(ids, sources=sources)  # with gradients: the path of training
        torch.testing.assert_close(model.decoder.logits(hidden).detach(), wanted, **TOLERANCE)


def test_reading_is_not_chained(tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    """In training layer 3 may read what layer 2 itself made, although layer 2 reads layer 1's."""
    model, ids = tiny_model("llama"), tiny.random_ids(1, LENGTH)
    trainable = Trainable(model.arch, model.store)
    hidden = trainable.hidden(ids, sources=(0, 0, 1)).detach()
    torch.testing.assert_close(model.decoder.logits(hidden), expected(model, ids, (0, 0, 1)), **TOLERANCE)


def rounded(weight: torch.Tensor) -> Int4Matrix:
    """Round to 4 bits, one group per row: coarse enough for every exit to show in the logits."""
    low, high = weight.float().min(1, keepdim=True).values, weight.float().max(1, keepdim=True).values
    scales = round_scale((high - low) / 15)
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (weight.float() / scales + zeros).round().clamp(0, 15).to(torch.uint8)
    return Int4Matrix(codes, scales, zeros.to(torch.uint8), weight.shape[1])


class SharedRiver:
    """A tiny model under a map, with an exit layer for every block."""

    def __init__(self, model: Any, sources: KVMap) -> None:
        self.model, self.sources = model, sources
        self.decoder = shared(model, sources)
        self.arch, store = self.decoder.arch, stripped(model, sources)
        self.matrices = [
            {name: rounded(store.read(name)) for name in self.arch.block_matrices(index)}
            for index in range(self.arch.num_layers)
        ]
        self.exits = [exit_block(self.arch, store, index, m, **CPU) for index, m in enumerate(self.matrices)]

    def oracle(self, ids: torch.Tensor, depth: int) -> torch.Tensor:
        """transformers' logits under the map, blocks depth + 1 … L replaced by their dequantised copies."""
        state = {name: tensor.clone() for name, tensor in self.model.reference.state_dict().items()}
        replaced = {name: tensor.clone() for name, tensor in state.items()}
        for matrices in self.matrices[depth:]:
            for name, matrix in matrices.items():
                rows = matrix.dequantize()
                replaced[name][: len(rows)] = rows
        try:
            self.model.reference.load_state_dict(replaced)
            return expected(self.model, ids, self.sources)
        finally:
            self.model.reference.load_state_dict(state)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "smollm3"])
def test_exit_layers_follow_the_map(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    model, ids = tiny_model(name), tiny.random_ids(1, LENGTH)
    for sources in (every(model.arch, 2), spread(model.arch, len(model.arch.kinds))):
        tested = SharedRiver(model, sources)
        for depth in (1, 2, model.arch.num_layers):
            river = River(tested.decoder, tested.exits, FixedExit(depth))
            cache, wanted = river.new_cache(1, LENGTH), tested.oracle(ids, depth)
            with torch.inference_mode():
                out = river.prefill(ids[:, :9], cache)
                torch.testing.assert_close(out.logits, wanted[:, 8], **TOLERANCE)
                for at in range(9, LENGTH):
                    out = river.decode(ids[:, at : at + 1], cache)
                    torch.testing.assert_close(out.logits, wanted[:, at], **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_quality_block_by_block_is_the_river_under_the_map(
    name: str, tiny_model: Callable[[str], Any], tiny: ModuleType
) -> None:
    """Policies that leave at different tokens each go on from their own keys and values."""
    model, ids = tiny_model(name), tiny.random_ids(3, LENGTH)
    tested = SharedRiver(model, spread(model.arch, len(model.arch.kinds)))
    count, decoder = model.arch.num_layers, tested.decoder
    with torch.inference_mode():
        start, step = decoder.embed(ids), decoder.step(None, ids[:1])
        after = decoder.blocks[0](start, decoder.step(None, ids), PassStore(tested.arch))
        middle = float(torch.cosine_similarity(start, after, dim=-1).median())
        policies = [FixedExit(count), CosineExit.uniform(middle, count, 2), FixedExit(1)]
        tracks = [Track.start(policy, start) for policy in policies]
        for layer in range(1, count + 1):
            push(tracks, step, Ladder(tested.arch, decoder.blocks, tested.exits), layer)
        for policy, track in zip(policies, tracks, strict=True):
            river = River(decoder, tested.exits, policy)
            h, depths = river.climb_rows(start, decoder.step(None, ids), PassStore(tested.arch))
            assert torch.equal(track.depth, depths)
            torch.testing.assert_close(track.h, h, **TOLERANCE)
    assert len(tracks[1].depth.unique()) > 1, "some leave, some stay"
