"""Lossless River against its own dense backbone: speed, interleaved in one process, and whether the texts are equal.

python tests/bench/lossless.py BUNDLE --prompts FILE [--count 8] [--tokens 64] [--rounds 3] [--drafts auto,2,4]
python tests/bench/lossless.py BUNDLE --prompts FILE --identical [--count 50] [--tokens 128] [--dtype fp32] [--seed 1]

A prompt is a line of FILE, or with --length N a stretch of N tokens of it. Speed: every round decodes each prompt with
each contender once, in turn; medians of a contender's tokens/s, and of the ratios taken round by round. --identical
compares token for token and says, for the first difference of a text, how far apart the two tokens' logits were.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.generate import Model
from adapt_llm.runtime.lossless import LosslessRiver
from adapt_llm.runtime.models import load_model
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.template import Template, has_template
from adapt_llm.runtime.text import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--length", type=int)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", default="auto")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--identical", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    prompts = read(arguments)
    first = load_model(Bundle.open(arguments.bundle), SessionOptions(dtype=arguments.dtype, lossless=True))
    models: dict[str, Model] = {"dense": Dense(first.decoder)}
    for draft in arguments.drafts.split(","):
        models[f"lossless {draft}"] = with_draft(first, None if draft == "auto" else int(draft))
    if arguments.identical:
        identical(models, prompts, arguments)
    else:
        speed(models, prompts, arguments)


def with_draft(model: LosslessRiver, draft: int | None) -> LosslessRiver:
    """The same weights with another draft length."""
    return LosslessRiver(model.river, entry_layer=model.entry_layer, draft=draft)


def read(arguments: argparse.Namespace) -> list[list[int]]:
    tokenizer = Tokenizer.load(arguments.bundle)
    text = arguments.prompts.read_text(encoding="utf-8")
    if arguments.length:
        ids = tokenizer.encode(text)
        starts = range(0, len(ids) - arguments.length, max(arguments.length, len(ids) // arguments.count))
        return [ids[start : start + arguments.length] for start in starts][: arguments.count]
    lines = [line for line in text.splitlines() if line.strip()][: arguments.count]
    if not has_template(arguments.bundle):
        return [tokenizer.encode(line) for line in lines]
    template = Template.from_folder(
        arguments.bundle, None, special_tokens=tokenizer.special_tokens, adds_bos=tokenizer.adds_bos
    )
    rendered = [template.render([{"role": "user", "content": line}]) for line in lines]
    return [tokenizer.encode(one, add_special_tokens=False) for one in rendered]


class Run:
    """One text: its tokens, the seconds of decoding, what was drafted and accepted."""

    @torch.inference_mode()
    def __init__(self, model: Model, ids: Sequence[int], arguments: argparse.Namespace) -> None:
        sampler = Sampler(Sampling(temperature=arguments.temperature, seed=arguments.seed))
        cache = model.new_cache(1, len(ids) + arguments.tokens)
        out = model.prefill(torch.tensor([ids]), cache, sampler)
        self.tokens = [sampler(out.logits[0])]
        self.gaps: list[torch.Tensor] = [out.logits[0]] if arguments.identical else []
        self.drafted = self.accepted = 0
        started = time.perf_counter()
        while len(self.tokens) < arguments.tokens:
            out = model.decode(torch.tensor([self.tokens[-1:]]), cache, sampler)
            self.drafted, self.accepted = self.drafted + out.drafted, self.accepted + out.accepted
            self.tokens.append(sampler(out.logits[0]))
            if arguments.identical:
                self.gaps.append(out.logits[0])
        self.seconds = time.perf_counter() - started


def speed(models: dict[str, Model], prompts: list[list[int]], arguments: argparse.Namespace) -> None:
    for model in models.values():
        Run(model, prompts[0], arguments)  # weights are packed and read for the first time
    runs: dict[str, list[list[Run]]] = {name: [] for name in models}
    for _ in range(arguments.rounds):
        for name in models:
            runs[name].append([])
        for ids in prompts:
            for name, model in models.items():
                runs[name][-1].append(Run(model, ids, arguments))
    steps = arguments.tokens - 1
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} rounds, {arguments.dtype}")
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {steps} steps each\n"
    )
    print("| | tokens/s (median, min–max) | over dense (median, min–max) | accepted | tokens a pass | equal texts |")
    print("|---|--:|--:|--:|--:|--:|")
    seconds = {name: [sum(run.seconds for run in one) for one in rounds] for name, rounds in runs.items()}
    for name, rounds in runs.items():
        rates = [len(prompts) * steps / value for value in seconds[name]]
        ratios = [dense / value for dense, value in zip(seconds["dense"], seconds[name], strict=True)]
        drafted, accepted = (sum(getattr(run, what) for run in rounds[0]) for what in ("drafted", "accepted"))
        passes = len(prompts) * steps - accepted
        same = sum(run.tokens == other.tokens for run, other in zip(rounds[0], runs["dense"][0], strict=True))
        print(
            f"| {name} | {spread(rates)} | {spread(ratios)} | {accepted / drafted if drafted else 0:.3f} "
            f"| {len(prompts) * steps / passes:.2f} | {same} of {len(prompts)} |"
        )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def identical(models: dict[str, Model], prompts: list[list[int]], arguments: argparse.Namespace) -> None:
    name, model = next((name, model) for name, model in models.items() if name != "dense")
    different = 0
    for number, ids in enumerate(prompts):
        dense, other = Run(models["dense"], ids, arguments), Run(model, ids, arguments)
        if dense.tokens == other.tokens:
            continue
        different += 1
        at = next(i for i, (a, b) in enumerate(zip(dense.tokens, other.tokens, strict=True)) if a != b)
        logits, change = dense.gaps[at], (dense.gaps[at] - other.gaps[at]).abs().max()
        gap = logits[dense.tokens[at]] - logits[other.tokens[at]]
        print(f"prompt {number}, token {at}: logits {gap:.6f} apart; the passes differ by up to {change:.6f}")
    print(f"{name}, {arguments.dtype}: {len(prompts) - different} of {len(prompts)} texts of {arguments.tokens} equal")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
