"""Exit histogram and quality of a bundle at several thresholds, on a text. Makes a table of docs/benchmarks.md.

python tests/bench/exits.py BUNDLE --text wiki.utf8 [--sequences 8] [--length 512] [--taus 0.5,0.8,0.9,0.95,0.98]
    [--held 1]

--held N: so many tokens at the beginning of a sequence never leave; 0 is the paper's rule.
"""

import argparse
from pathlib import Path

import torch

from adapt_llm.convert.calibration import SEQUENCE
from adapt_llm.convert.judge import Files, judge
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.decoder import load_frame
from adapt_llm.runtime.exits import HELD
from adapt_llm.runtime.methods import River
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.quality import Quality
from adapt_llm.runtime.text import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=SEQUENCE)
    parser.add_argument("--taus", default="0.5,0.8,0.9,0.95,0.98")
    parser.add_argument("--held", type=int, default=HELD)
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    ids = Tokenizer.load(arguments.bundle).encode(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False)
    ids = torch.tensor(ids)[: arguments.sequences * arguments.length].view(-1, arguments.length)
    frame = load_frame(bundle.architecture, bundle.backbone, (), device="cpu", dtype=torch.bfloat16)
    settings = bundle.manifest.method(River)
    verdict = judge(
        Files(frame, bundle.backbone, bundle.river),
        ids,
        entry_layer=settings.entry_layer,
        resident=None,
        taus=[float(tau) for tau in arguments.taus.split(",")],
        reporter=SilentReporter(),
        held=arguments.held,
    )
    print(f"{arguments.bundle.name}: {ids.numel()} tokens of {arguments.text.name}, {arguments.held} of each held\n")
    print("| τ | perplexity | KL | same next token | mean depth | tokens leaving after block: share |")
    print("|---|--:|--:|--:|--:|---|")
    print(row("dense", verdict.dense))
    for tau, quality in sorted(verdict.curve.items(), reverse=True):
        print(row(str(tau), quality))
    print(row("all 4-bit", verdict.floor))


def row(name: str, quality: Quality) -> str:
    total = sum(quality.exit_histogram)
    shares = [(depth, count / total) for depth, count in enumerate(quality.exit_histogram, start=1) if count]
    largest = sorted(sorted(shares, key=lambda item: -item[1])[:5])
    exits = ", ".join(f"{depth}: {share:.0%}" for depth, share in largest)
    cells = [f"{quality.perplexity:.2f}", f"{quality.kl:.4f}", f"{quality.agreement:.1%}", f"{quality.mean_depth:.1f}"]
    return f"| {name} | {' | '.join(cells)} | {exits} |"


if __name__ == "__main__":
    main()
