"""N-vium against its own dense backbone at several depths, interleaved in one process; and its queues over a long text.

python tests/bench/nvium.py BUNDLE --text FILE [--dense BUNDLE] [--biases=-2,0,2] [--tokens 128] [--rounds 7]
python tests/bench/nvium.py BUNDLE --text FILE --long 2000

A bias is added to every router's score: above 0, tokens leave sooner. Tokens are drawn at temperature 1 (the mixture,
exactly), with the same seed in every round, behind the text's first `--context` tokens; a round decodes once with each
contender. "predicted" is the number of blocks over the blocks that ran before a token was chosen: what the exits give
where junctions, heads and deferred passes cost nothing. `--dense` is a twin of its own (`--from-scratch --exits 1`).
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.generate import Model
from adapt_llm.runtime.models import load_model
from adapt_llm.runtime.nvium import Nvium
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.piggyback import DeferredCache
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.text import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--dense", type=Path)
    parser.add_argument("--biases", default="-2,0,2")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--long", type=int)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = load_model(Bundle.open(arguments.bundle), SessionOptions())
    if not isinstance(model, Nvium):
        raise SystemExit(f"{arguments.bundle} is not an N-vium bundle")
    text = arguments.text.read_text(encoding="utf-8")[: 20 * arguments.context]
    ids = torch.tensor([Tokenizer.load(arguments.bundle).encode(text)[: arguments.context]])
    print(f"{arguments.bundle.name}, torch {torch.__version__}, {torch.get_num_threads()} threads, bf16\n")
    if arguments.long:
        queues(model, ids, arguments.long)
        return
    twin = (
        Dense(model.decoder) if arguments.dense is None else load_model(Bundle.open(arguments.dense), SessionOptions())
    )
    contenders: dict[str, Model] = {"dense": twin}
    for bias in map(float, arguments.biases.split(",")):
        contenders[f"bias {bias:g}"] = Nvium(model.decoder, model.junctions.shifted(bias))
    race(contenders, ids, arguments.tokens, arguments.rounds)


@torch.inference_mode()
def decode(model: Model, ids: torch.Tensor, tokens: int) -> tuple[float, list[int | None]]:
    """Seconds a token, and the depth of each, of one text behind ids [1, S]."""
    cache, sampler = model.new_cache(1, ids.shape[1] + tokens + 1), Sampler(Sampling(temperature=1.0, seed=1))
    out = model.prefill(ids, cache, sampler)
    depths: list[int | None] = []
    started = time.perf_counter()
    for _ in range(tokens):
        token = sampler(out.logits[0]) if out.token is None else sampler.take(out.token)
        out = model.decode(torch.tensor([[token]]), cache, sampler)
        depths.append(out.depth)
    return (time.perf_counter() - started) / tokens, depths


def race(contenders: dict[str, Model], ids: torch.Tensor, tokens: int, rounds: int) -> None:
    """Decode in turn and print a table; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    depths: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, model in contenders.items():
            took, left = decode(model, ids, tokens)
            depths[name] = statistics.mean(layers for layers in left if layers is not None) if left[0] else 0.0
            if number:
                seconds[name].append(took)
    layers = contenders["dense"].decoder.arch.num_layers  # pyright: ignore[reportAttributeAccessIssue] - a Dense
    print("| | mean depth | ms a token (median, min–max) | over dense (median, min–max) | predicted |")
    print("|---|--:|--:|--:|--:|")
    for name, took in seconds.items():
        ratios = [dense / own for dense, own in zip(seconds["dense"], took, strict=True)]
        depth = depths[name] or layers
        times = spread([1000 * each for each in took])
        print(f"| {name} | {depth:.1f} of {layers} | {times} | {spread(ratios)} | {layers / depth:.2f} |")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


@torch.inference_mode()
def queues(model: Nvium, ids: torch.Tensor, tokens: int) -> None:
    """Longest queues, rows of deferred passes, time and memory in ten stretches of one long text."""
    cache, sampler = model.new_cache(1, ids.shape[1] + tokens + 1), Sampler(Sampling(temperature=1.0, seed=1))
    if not isinstance(cache, DeferredCache):
        raise TypeError("an N-vium model makes deferred caches")
    out = model.prefill(ids, cache, sampler)
    print("| tokens | ms a token | mean depth | rows of a deferred pass (mean, most) | longest queue |")
    print("|--:|--:|--:|--:|--:|")
    for stretch in range(10):
        started, depths, rows, longest = time.perf_counter(), [], [], 0
        for _ in range(tokens // 10):
            token = sampler(out.logits[0]) if out.token is None else sampler.take(out.token)
            out = model.decode(torch.tensor([[token]]), cache, sampler)
            depths.append(out.depth or 0)
            rows += out.passes
            longest = max([longest, *(cache.waiting(k) for k in range(len(model.junctions)))])
        took = 1000 * (time.perf_counter() - started) / (tokens // 10)
        mean = statistics.mean(rows) if rows else 0.0
        end = (stretch + 1) * (tokens // 10)
        print(
            f"| {end} | {took:.2f} | {statistics.mean(depths):.1f} | {mean:.1f}, {max(rows, default=0)} | {longest} |"
        )


if __name__ == "__main__":
    main()
