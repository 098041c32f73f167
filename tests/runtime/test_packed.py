"""Stretches of several sequences side by side give what each gives alone, whatever the layers that lag."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.packed import PackedStep, PackedStore, SequenceCache, SharedPrefix
from adapt_llm.runtime.pass_store import PassStore

NAMES = ["llama", "llama-dynamic", "mistral", "ministral3", "qwen3", "gemma2", "gemma3", "phi3-longrope",
         "phi3-partial", "smollm3"]  # fmt: skip
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
LENGTHS = (3, 29, 11, 2)


def alone(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """States [1, S, hidden] of a whole sequence, without a cache."""
    return decoder.run(decoder.embed(ids), decoder.step(None, ids), PassStore(decoder.arch))


def run(decoder: Decoder, parts: Sequence[torch.Tensor], starts: Sequence[int], caches: Sequence[Any]) -> torch.Tensor:
    """One packed pass of parts[i] [1, n] at starts[i], of sequences of LENGTHS."""
    steps = [
        decoder.segment(start, part.shape[1], length)
        for part, start, length in zip(parts, starts, LENGTHS, strict=True)
    ]
    return decoder.run(decoder.embed(torch.cat(list(parts), 1)), PackedStep(steps), PackedStore(caches))


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_in_two_passes_as_alone(name: str, tiny: ModuleType, tiny_model: Callable[[str], Any]) -> None:
    decoder: Decoder = tiny_model(name).decoder
    sequences = [tiny.random_ids(1, length) for length in LENGTHS]
    caches = [SequenceCache(decoder, length) for length in LENGTHS]
    cuts = [length // 2 for length in LENGTHS]
    rests = [length - cut for length, cut in zip(LENGTHS, cuts, strict=True)]
    halves = [ids.split([cut, rest], 1) for ids, cut, rest in zip(sequences, cuts, rests, strict=True)]
    first = run(decoder, [head for head, _ in halves], [0] * len(cuts), caches)
    second = run(decoder, [tail for _, tail in halves], cuts, caches)
    for ids, head, tail in zip(sequences, first.split(cuts, 1), second.split(rests, 1), strict=True):
        torch.testing.assert_close(torch.cat((head, tail), 1), alone(decoder, ids), **TOLERANCE)


@torch.inference_mode()
def test_layers_that_lag(tiny: ModuleType, tiny_model: Callable[[str], Any]) -> None:
    """The first layers read on; the others catch up later, from the stored states."""
    decoder: Decoder = tiny_model("gemma3").decoder
    ids = tiny.random_ids(1, 13)
    cache = SequenceCache(decoder, 13)
    early, late = range(2), range(2, decoder.arch.num_layers)
    parts = []
    for start, count in ((0, 5), (5, 7), (12, 1)):
        step, store = PackedStep([decoder.segment(start, count, 13)]), PackedStore([cache])
        parts.append(decoder.run(decoder.embed(ids[:, start : start + count]), step, store, early))
    whole = PackedStep([decoder.segment(0, 13, 13)])
    h = decoder.run(torch.cat(parts, 1), whole, PackedStore([cache]), late)
    torch.testing.assert_close(h, alone(decoder, ids), **TOLERANCE)


@torch.inference_mode()
def test_a_prefix_runs_once_and_only_as_deep_as_needed(tiny: ModuleType, tiny_model: Callable[[str], Any]) -> None:
    decoder: Decoder = tiny_model("mistral").decoder
    before, ids = tiny.random_ids(1, 4), tiny.random_ids(1, 6)
    ran: list[int] = []

    class Counted:
        def __init__(self, index: int) -> None:
            self.index = index

        def __call__(self, h: torch.Tensor, *rest: Any) -> torch.Tensor:
            ran.append(self.index)
            return original[self.index](h, *rest)

    original = list(decoder.blocks)
    counted = Decoder(
        decoder.arch,
        embedding=decoder.embedding,
        blocks=[Counted(index) for index in range(len(original))],  # pyright: ignore[reportArgumentType]
        final_norm=decoder.final_norm,
        head=decoder.head,
    )
    prefix = SharedPrefix(counted, before[0].tolist(), 10)
    for times in range(3):
        cache = SequenceCache(counted, 10, prefix)
        step, store = PackedStep([decoder.segment(4, 6, 10)]), PackedStore([cache])
        h = decoder.run(decoder.embed(ids), step, store, range(2))
        assert ran == ([0, 1, 2] if times else [0, 1])
        keys = decoder.arch.num_kv_heads * 10 * decoder.arch.head_dim
        assert cache.nbytes == 2 * 2 * 4 * keys  # keys and values of two layers, float32
        h = decoder.run(h, step, store, range(2, len(original)))
        torch.testing.assert_close(h, alone(decoder, torch.cat((before, ids), 1))[:, 4:], **TOLERANCE)
    assert ran == [0, 1, 2]


@torch.inference_mode()
def test_memory_is_let_go_behind_the_last_reader(tiny: ModuleType, tiny_model: Callable[[str], Any]) -> None:
    plain: Decoder = tiny_model("llama").decoder
    decoder = Decoder(
        plain.arch.share((0, 1, 0)),
        embedding=plain.embedding,
        blocks=plain.blocks,
        final_norm=plain.final_norm,
        head=plain.head,
    )
    cache = SequenceCache(decoder, 5)
    step = decoder.segment(0, 5, 5)
    keys = torch.randn(1, decoder.arch.num_kv_heads, 5, decoder.arch.head_dim)
    for layer in (0, 1):
        cache.store(step, layer, keys, keys)
    one = cache.nbytes // 2
    for layer, left in ((0, 2), (1, 1), (2, 0)):  # layer 2 reads what layer 0 wrote
        cache.fetch(step, layer)
        cache.release(layer)
        assert cache.nbytes == left * one


def test_a_store_of_one_sequence_is_refused(tiny_model: Callable[[str], Any]) -> None:
    decoder: Decoder = tiny_model("llama").decoder
    h = decoder.embed(torch.tensor([[3, 4]]))
    with pytest.raises(TypeError, match="packed store"):
        decoder.blocks[0](h, PackedStep([decoder.segment(0, 2, 2)]), PassStore(decoder.arch))
    with pytest.raises(TypeError, match="packed step"):
        decoder.blocks[0](h, decoder.segment(0, 2, 2), PackedStore([PassStore(decoder.arch)]))
