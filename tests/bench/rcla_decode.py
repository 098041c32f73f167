"""Decode speed and bytes of the cache at long contexts, dense and shared, interleaved in one process.

python tests/bench/rcla_decode.py MODEL [--share-every 4] [--contexts 8192,32768] [--rounds 7] [--tokens 16]

MODEL is a Hugging Face folder or a .gguf: speed depends on shapes, not on training, so both contenders run its weights
(read once). The cache is filled with random keys and values instead of prefilling, and cut back after every round, so
that each token attends to the whole context. A model may be asked beyond its trained positions.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from adapt_llm.convert.kv_map import every
from adapt_llm.convert.source import open_source
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.cache import KVCache
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.store import TensorStore


class Contender:
    """A model with a full context behind it."""

    def __init__(self, arch: Architecture, store: TensorStore, context: int, tokens: int) -> None:
        self.model = Dense(load_decoder(arch, store, device="cpu", dtype=torch.bfloat16))
        self.cache = self.model.new_cache(1, context + tokens)
        self.context, self.tokens = context, tokens
        fill(self.model.decoder, self.cache, context)

    @torch.inference_mode()
    def seconds(self) -> float:
        """Of one token, over `tokens` greedy steps behind the context."""
        self.cache.truncate(self.context)
        ids = torch.tensor([[1]])
        started = time.perf_counter()
        for _ in range(self.tokens):
            ids = self.model.decode(ids, self.cache).logits.argmax(-1, keepdim=True)
        return (time.perf_counter() - started) / self.tokens


def fill(decoder: Decoder, cache: KVCache, context: int) -> None:
    """Random keys and values, as large as those of a model."""
    arch, generator = decoder.arch, torch.Generator().manual_seed(0)
    step = decoder.segment(0, context, context)
    for layer in range(arch.num_layers):
        if arch.has_kv(layer):
            shape = (1, arch.num_kv_heads, context, arch.head_dim)
            k, v = (torch.randn(shape, generator=generator).to(decoder.dtype) for _ in range(2))
            cache.store(step, layer, k, v)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--share-every", type=int, default=4)
    parser.add_argument("--contexts", default="8192,32768")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    source = open_source(arguments.model)
    arch = source.architecture
    archs = {"dense": arch, f"share every {arguments.share_every}": arch.share(every(arch, arguments.share_every))}
    print(f"{source.identity.id}, torch {torch.__version__}, {torch.get_num_threads()} threads, bf16\n")
    print("| context | | KV bytes | layers | ms a token (median, min–max) | tokens/s | over dense (median, min–max) |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for context in map(int, arguments.contexts.split(",")):
        contenders = {name: Contender(each, source.store, context, arguments.tokens) for name, each in archs.items()}
        report(context, contenders, race(list(contenders.values()), arguments.rounds))


def race(contenders: Sequence[Contender], rounds: int) -> list[list[float]]:
    """Seconds a token of each contender, round by round in turn; the first round warms up."""
    for contender in contenders:
        contender.seconds()
    laps = [[contender.seconds() for contender in contenders] for _ in range(rounds)]
    return [list(column) for column in zip(*laps, strict=True)]


def report(context: int, contenders: dict[str, Contender], times: list[list[float]]) -> None:
    dense = next(iter(contenders.values())).cache
    for (name, contender), values in zip(contenders.items(), times, strict=True):
        arch = contender.model.decoder.arch
        whole = contender.cache.nbytes
        keepers = len(set(arch.kv_sources))
        if whole * arch.num_layers != dense.nbytes * keepers:
            raise SystemExit(f"{whole} bytes are not {keepers} of {arch.num_layers} layers of {dense.nbytes}")
        ratios, middle = [one / other for one, other in zip(times[0], values, strict=True)], statistics.median(values)
        print(
            f"| {context} | {name} | {whole * context // contender.cache.capacity} | {keepers}/{arch.num_layers} "
            f"| {middle * 1e3:.1f} ({min(values) * 1e3:.1f}–{max(values) * 1e3:.1f}) | {1 / middle:.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
