"""N-vium against its own dense backbone at several depths, interleaved in one process; and its queues over a long text.

python tests/bench/nvium.py BUNDLE --text FILE [--dense BUNDLE] [--biases=-2,0,2] [--tokens 128] [--rounds 7]
python tests/bench/nvium.py BUNDLE --text FILE --long 2000

A bias is added to every router's score: above 0, tokens leave sooner. Tokens are drawn at temperature 1 (the mixture,
exactly), with the same seed in every round, behind the text's first `--context` tokens; a round decodes once with each
contender. "blocks" is the number of blocks over the blocks that ran before a token was chosen: what the exits give
where junctions, heads and deferred passes cost nothing. "costs" is what they give by the cost model of docs/nvium.md,
whose terms are measured here one by one. `--dense` is a twin of its own (`--from-scratch --exits 1`).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.generate import Model, StepOutput
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
def decode(model: Model, ids: torch.Tensor, tokens: int) -> tuple[float, list[StepOutput]]:
    """Seconds a token, and what was told of each, of one text behind ids [1, S]."""
    cache, sampler = model.new_cache(1, ids.shape[1] + tokens + 1), Sampler(Sampling(temperature=1.0, seed=1))
    out = model.prefill(ids, cache, sampler)
    told: list[StepOutput] = []
    started = time.perf_counter()
    for _ in range(tokens):
        token = sampler(out.logits[0]) if out.token is None else sampler.take(out.token)
        out = model.decode(torch.tensor([[token]]), cache, sampler)
        told.append(out)
    return (time.perf_counter() - started) / tokens, told


def race(contenders: dict[str, Model], ids: torch.Tensor, tokens: int, rounds: int) -> None:
    """Decode in turn and print a table; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    told: dict[str, list[StepOutput]] = {}
    for number in range(rounds + 1):
        for name, model in contenders.items():
            took, told[name] = decode(model, ids, tokens)
            if number:
                seconds[name].append(took)
    dense = contenders["dense"]
    if not isinstance(dense, Dense):
        raise TypeError("the first contender is dense")
    layers = dense.decoder.arch.num_layers
    whole = Costs.of(dense.decoder, ids, tokens)
    print("| | mean depth | ms a token (median, min–max) | over dense (median, min–max) | blocks | costs |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, took in seconds.items():
        ratios = [dense / own for dense, own in zip(seconds["dense"], took, strict=True)]
        model, times = contenders[name], spread([1000 * each for each in took])
        depth, costs = float(layers), whole.of_dense(layers)
        if isinstance(model, Nvium):
            depth = statistics.mean(out.depth or layers for out in told[name])
            costs = Costs.of(model.decoder, ids, tokens).of_mixture(model, told[name])
        blocks, predicted = layers / depth, whole.of_dense(layers) / costs
        print(f"| {name} | {depth:.1f} of {layers} | {times} | {spread(ratios)} | {blocks:.2f} | {predicted:.2f} |")
    rows = "  ".join(f"{count}: {1e6 * cost:.0f}" for count, cost in whole.block.items())
    print(f"\ndense: us a block by rows  {rows}; {1e6 * whole.fixed:.0f} us a token besides")


@dataclass(frozen=True)
class Costs:
    """Seconds of a token's parts: what does not depend on depth, and a block by the rows that go through it."""

    fixed: float
    block: dict[int, float]

    @classmethod
    def of(cls, decoder: Decoder, ids: torch.Tensor, tokens: int) -> "Costs":
        """Measured half way through `tokens` tokens behind ids [1, S]."""
        at = ids.shape[1] + tokens // 2
        model = Dense(decoder)
        cache, sampler = model.new_cache(1, at + 64), Sampler(Sampling(temperature=1.0, seed=1))
        with torch.inference_mode():
            model.prefill(ids.repeat(1, at // ids.shape[1] + 1)[:, :at], cache)
            layers = range(min(4, decoder.arch.num_layers))  # several: weights come from memory

            def token() -> None:
                cache.truncate(at)
                decoder.step(cache, torch.tensor([[1]]))
                sampler(decoder.logits(decoder.embed(torch.tensor([[1]]))[:, -1])[0])

            def rows(count: int) -> None:
                step = decoder.segment(at, count, at + count)
                decoder.run(torch.zeros(1, count, decoder.arch.hidden_size, dtype=decoder.dtype), step, cache, layers)

            taken = {count: quickest(lambda count=count: rows(count)) / len(layers) for count in (1, 2, 4, 8, 16, 32)}
            return cls(quickest(token), taken)

    def of_dense(self, layers: int) -> float:
        """A token of the dense model."""
        return self.fixed + layers * self.block[1]

    def of_mixture(self, model: Nvium, told: list[StepOutput]) -> float:
        """A token of the mixture, on average: `told` says which rows went through which passes."""
        size, junctions = model.decoder.arch.num_layers / len(model.segments), len(model.junctions)
        x = torch.zeros(1, model.decoder.arch.hidden_size, dtype=model.decoder.dtype)
        with torch.inference_mode():
            look, adapt = quickest(lambda: model.exits.look(0, x)), quickest(lambda: model.exits.early(0, x))
        looks = sum(min(round((out.depth or 0) / size), junctions) for out in told)
        passes = sum(self._rows(count) for out in told for count in out.passes)
        return self.fixed + adapt + (looks * look + size * (len(told) * self.block[1] + passes)) / len(told)

    def _rows(self, count: int) -> float:
        """A block with so many rows: on the line between those measured, or beyond."""
        points = sorted(self.block)
        high = next((point for point in points[1:] if point >= count), points[-1])
        low = points[points.index(high) - 1]
        share = (count - low) / (high - low)
        return self.block[low] + share * (self.block[high] - self.block[low])


def quickest(run: Callable[[], object], rounds: int = 20, repeats: int = 10) -> float:
    """Seconds of a call: the median over rounds."""
    found: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        found.append((time.perf_counter() - started) / repeats)
    return statistics.median(found)


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
