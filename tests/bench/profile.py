"""Where the time of one decode step goes: products, head, attention, norms, gates, the choice of a token, the rest.

python tests/bench/profile.py BUNDLE [--tokens 32] [--context 128] [--rounds 5] [--threads N] [--head-bits 8] [--tau X]
    [--pieces]

Makes a table of docs/kernels.md. Calls are timed one by one, which costs less than a microsecond each; the line "step"
is measured without that, in turn with it. "Python and the rest" is what is in no call: the loop, views, residual sums.
`--pieces` runs every operation of a block by itself, as it was before blocks were one call.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adapt_llm.quant.int8 import Int8Linear
from adapt_llm.quant.kernels.chain import Chain
from adapt_llm.quant.kernels.small import TokenAttention
from adapt_llm.quant.linear import DenseGroup, DenseLinear, Int4Linear
from adapt_llm.runtime import stack
from adapt_llm.runtime.attention import Gated, RMSNorm
from adapt_llm.runtime.bench_bundle import BenchOptions, Field, Name
from adapt_llm.runtime.bench_lanes import make_rows
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.traffic import Traffic, traffic_of

CALL = "__call__"
PARTS: dict[tuple[type, str], str] = {
    (Chain, CALL): "blocks, in native calls",
    (Chain, "climb"): "blocks, in native calls",
    (DenseGroup, CALL): "16-bit products",
    (DenseLinear, CALL): "16-bit products",
    (Int4Linear, CALL): "4-bit products",
    (Int8Linear, CALL): "8-bit products",
    (TokenAttention, CALL): "attention",
    (RMSNorm, CALL): "norms",
    (Gated, CALL): "gates",
    (Sampler, CALL): "choice of the token",
}


class Clock:
    """Seconds by part; of calls within calls the outer one counts."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inside = False

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._inside:
                return call(*arguments)
            self._inside = True
            started = time.perf_counter()
            result = call(*arguments)
            self.spent[name] += time.perf_counter() - started
            self._inside = False
            return result

        return timed

    @contextmanager
    def listening(self, decoder: Any) -> Iterator[None]:
        calls = [(kind, method, getattr(kind, method)) for kind, method in PARTS]
        head = decoder.head
        for kind, method, call in calls:
            setattr(kind, method, self.wrap(PARTS[kind, method], call))
        decoder.head = self.wrap("head", head)
        try:
            yield
        finally:
            decoder.head = head
            for kind, method, call in calls:
                setattr(kind, method, call)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--head-bits", type=int, choices=[8, 16], default=16)
    parser.add_argument("--tau", type=float)
    parser.add_argument("--pieces", action="store_true")
    asked = parser.parse_args()
    if asked.pieces:
        stack._chain = lambda arch, count: None
    if asked.threads:
        torch.set_num_threads(asked.threads)
    field = Field(asked.bundle, BenchOptions(session=SessionOptions(tau=asked.tau, head_bits=asked.head_bits)))
    (ids,) = make_rows(field.tokenizer, field.options.text, asked.context, 1)
    print(f"{asked.bundle.name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {asked.rounds} rounds\n")
    for name in ("dense", "method"):
        report(name, field, ids, asked)


def report(name: Name, field: Field, ids: tuple[int, ...], asked: argparse.Namespace) -> None:
    model: Any = field.model(name)
    cache = model.new_cache(1, len(ids) + asked.tokens + 1)
    with torch.inference_mode():
        out = model.prefill(torch.tensor([ids]), cache)
        steps(model, cache, out, asked.tokens)
        plain, parts = [], []
        for _ in range(asked.rounds):
            cache.truncate(len(ids))
            plain.append(steps(model, cache, out, asked.tokens)[0])
            clock = Clock()
            cache.truncate(len(ids))
            with clock.listening(model.decoder):
                total, depths = steps(model, cache, out, asked.tokens)
            parts.append({**clock.spent, "Python and the rest": total - sum(clock.spent.values())})
    table(name, asked.tokens, plain, parts, traffic_of(model), depths)


def steps(model: Any, cache: Any, out: Any, tokens: int) -> tuple[float, list[int]]:
    """Seconds of `tokens` greedy steps, and the depths."""
    sampler, depths = Sampler(Sampling()), []
    started = time.perf_counter()
    for _ in range(tokens):
        out = model.decode(torch.tensor([[sampler(out.logits[0])]]), cache)
        depths.append(model.decoder.arch.num_layers if out.depth is None else out.depth)
    return time.perf_counter() - started, depths


def table(
    name: str,
    tokens: int,
    plain: list[float],
    parts: list[dict[str, float]],
    traffic: Traffic | None,
    depths: list[int],
) -> None:
    whole = statistics.median(plain) / tokens
    print(f"| {name}, mean depth {statistics.mean(depths):.1f} | ms | share |")
    print("|---|--:|--:|")
    middle = {part: statistics.median(each[part] for each in parts) / tokens for part in parts[0]}
    total = sum(middle.values())
    for part, seconds in sorted(middle.items(), key=lambda item: -item[1]):
        print(f"| {part} | {seconds * 1e3:.2f} | {seconds / total:.0%} |")
    read = (
        "" if traffic is None else f", {statistics.mean(traffic.weights([d]) for d in depths) / whole / 1e9:.1f} GB/s"
    )
    print(f"| **step**, untimed inside | {whole * 1e3:.2f}{read} | |\n")


if __name__ == "__main__":
    main()
