"""Decode speed at batch 1, interleaved in one process: River, its own dense backbone, its 4-bit floor, transformers.

python tests/bench/decode.py BUNDLE [--against transformers] [--rounds 7] [--tokens 32] [--prompt-tokens 64]

Every round runs each contender once, in turn; a contender's time is that of `tokens` greedy decode steps behind the
same prompt. Prints medians, and the medians of the ratios taken round by round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.exits import CosineExit, FixedExit
from adapt_llm.runtime.loading import load_river
from adapt_llm.runtime.methods import River as Settings
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.river import River
from adapt_llm.runtime.text import Tokenizer

TEXT = "The history of the bridge begins with a ferry. For two hundred years the only way across the river was a boat. "


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--against", choices=["transformers"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--taus", default="")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    contenders = own(arguments) | (transformers_contender(arguments) if arguments.against else {})
    for run in contenders.values():
        run()  # weights are packed and read for the first time
    times: dict[str, list[float]] = {name: [] for name in contenders}
    depths: dict[str, float] = {}
    for _ in range(arguments.rounds):
        for name, run in contenders.items():
            seconds, depth = run()
            times[name].append(seconds / arguments.tokens)
            depths[name] = depth
    report(times, depths)


def prompt(bundle: Path, length: int) -> torch.Tensor:
    ids = Tokenizer.load(bundle).encode(TEXT * (length // 16 + 1))
    return torch.tensor([ids[:length]])


def own(arguments: argparse.Namespace) -> dict[str, Callable[[], tuple[float, float]]]:
    bundle = Bundle.open(arguments.bundle)
    model = load_river(bundle, SessionOptions(prefill="dense"))
    arch, settings = model.decoder.arch, bundle.manifest.method(Settings)
    ids = prompt(arguments.bundle, arguments.prompt_tokens)
    policies = {"dense": FixedExit(arch.num_layers), f"river tau {settings.tau}": model.policy}
    for tau in filter(None, arguments.taus.split(",")):
        policies[f"river tau {tau}"] = CosineExit.uniform(float(tau), arch.num_layers, settings.entry_layer)
    policies["4-bit floor"] = FixedExit(settings.entry_layer - 1)
    return {
        name: lambda policy=policy: timed(River(model.decoder, model.exits, policy, dense_prefill=True), ids, arguments)
        for name, policy in policies.items()
    }


@torch.inference_mode()
def timed(model: River, ids: torch.Tensor, arguments: argparse.Namespace) -> tuple[float, float]:
    cache = model.new_cache(1, ids.shape[1] + arguments.tokens)
    out = model.prefill(ids, cache)
    depths = []
    started = time.perf_counter()
    for _ in range(arguments.tokens):
        out = model.decode(out.logits.argmax(-1, keepdim=True), cache)
        depths.append(out.depth)
    return time.perf_counter() - started, sum(depths) / len(depths)


def transformers_contender(arguments: argparse.Namespace) -> dict[str, Callable[[], tuple[float, float]]]:
    import transformers  # noqa: PLC0415 - only where asked for

    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.bundle, dtype=torch.bfloat16)
    ids = prompt(arguments.bundle, arguments.prompt_tokens)

    @torch.inference_mode()
    def run() -> tuple[float, float]:
        seconds = []
        for count in (1, arguments.tokens + 1):
            settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
            started = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            seconds.append(time.perf_counter() - started)
        return seconds[1] - seconds[0], float(model.config.num_hidden_layers)

    return {"transformers": run}


def report(times: dict[str, list[float]], depths: dict[str, float]) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {len(times['dense'])} rounds\n")
    print("| | ms a token (median, min–max) | tokens/s | mean depth | speed over dense (median, min–max) |")
    print("|---|--:|--:|--:|--:|")
    for name, values in times.items():
        ratios = [dense / value for dense, value in zip(times["dense"], values, strict=True)]
        middle = statistics.median(values)
        print(
            f"| {name} | {middle * 1e3:.1f} ({min(values) * 1e3:.1f}–{max(values) * 1e3:.1f}) | {1 / middle:.1f} "
            f"| {depths[name]:.1f} | {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
