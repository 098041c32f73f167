"""Quantisers side by side: every block 4-bit, judged on text they never saw. Makes the table of docs/quantization.md.

python tests/bench/quantisers.py MODEL_DIR --text wiki.utf8 [--calibration c4.utf8] [--configs gptq:64,hqq:64]
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from adapt_llm.convert.calibration import SEQUENCE, load_calibration
from adapt_llm.convert.judge import Files
from adapt_llm.convert.quantise import Job, Recipe, piece_name, quantise_calibrated, quantise_plain, release
from adapt_llm.convert.source import open_source
from adapt_llm.convert.workspace import Workspace
from adapt_llm.quant.layout import choose_group_size
from adapt_llm.quant.quantizers import QUANTIZERS
from adapt_llm.runtime.architecture import architecture_of
from adapt_llm.runtime.decoder import load_frame
from adapt_llm.runtime.exits import FixedExit
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.quality import Track, push, score
from adapt_llm.runtime.store import open_files
from adapt_llm.runtime.text import Tokenizer

CONFIGS = [f"{name}:{group}" for group in (128, 64, 32) for name in ("rtn", "hqq", "gptq")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--configs", default=",".join(CONFIGS))
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--out", type=Path, help="work folder that keeps the quantised blocks")
    parser.add_argument("--quantise", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quantise:
        quantise(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.out = arguments.out or Path(folder)
        compare(arguments)


def quantise(arguments: argparse.Namespace) -> None:
    """One configuration, in a process of its own so that its memory is its own."""
    name, group = arguments.quantise.split(":")
    source = open_source(str(arguments.model))
    arch = architecture_of(source.config, source.store)
    frame = load_frame(arch, source.store, (), device="cpu", dtype=torch.bfloat16)
    text = load_calibration(
        arguments.calibration, Tokenizer.load(arguments.model), tokens=8192, max_positions=arch.max_positions
    )
    started = time.perf_counter()
    with Workspace(arguments.out / arguments.quantise.replace(":", "-"), {"config": arguments.quantise}) as work:
        job = Job(work, frame, source.store, Recipe(QUANTIZERS[name], int(group), symmetric=False))
        indices = range(arch.num_layers)
        with SilentReporter().task("", 0) as task:
            if QUANTIZERS[name].calibrated:
                quantise_calibrated(job, indices, text.quantise, task)
            else:
                quantise_plain(job, indices, task)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{time.perf_counter() - started:.0f} {peak:.2f}")


@torch.inference_mode()
def compare(arguments: argparse.Namespace) -> None:
    configs = arguments.configs.split(",")
    costs = {config: run(arguments, config) for config in configs}
    source = open_source(str(arguments.model))
    arch = architecture_of(source.config, source.store)
    frame = load_frame(arch, source.store, (), device="cpu", dtype=torch.bfloat16)
    ids = Tokenizer.load(arguments.model).encode(arguments.text.read_text(encoding="utf-8"), add_special_tokens=False)
    ids = torch.tensor(ids)[: arguments.sequences * SEQUENCE].view(-1, SEQUENCE)
    start, step = frame.embed(ids), frame.step(None, ids[:1])
    dense = Track.start(FixedExit(arch.num_layers), start)
    tracks = {config: Track.start(FixedExit(1), start) for config in configs}
    for track in tracks.values():
        track.left[:] = True
    for layer in range(1, arch.num_layers + 1):
        for config, track in tracks.items():
            pieces = arguments.out / f".{config.replace(':', '-')}.adapt-work" / "pieces"
            river = open_files([pieces / piece_name(layer - 1)])
            push([track], step, Files(frame, source.store, river).rung(), layer)
            track.depth[:] = 1
        push([dense], step, Files(frame, source.store, river).rung(), layer)
        release(source.store, arch, layer - 1)
        print(f"layer {layer} of {arch.num_layers}", file=sys.stderr, end="\r")
    results = score([dense, *tracks.values()], ids, frame.logits, arch.num_layers)
    print(f"{ids.numel()} tokens of {arguments.text.name}; dense perplexity {results[0].perplexity:.2f}\n")
    print("| quantiser | group | bits per weight | perplexity | KL | same next token | seconds | peak GiB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for config, quality in zip(configs, results[1:], strict=True):
        name, group = config.split(":")
        cells = [f"{quality.perplexity:.2f}", f"{quality.kl:.4f}", f"{quality.agreement:.1%}", *costs[config]]
        print(f"| {name} | {group} | {bits(arch, name, int(group)):.3f} | {' | '.join(cells)} |")


def run(arguments: argparse.Namespace, config: str) -> tuple[str, str]:
    command = [
        sys.executable,
        __file__,
        str(arguments.model),
        "--text",
        str(arguments.text),
        "--out",
        str(arguments.out),
    ]
    command += ["--calibration", str(arguments.calibration)] if arguments.calibration else []
    answer = subprocess.run([*command, "--quantise", config], check=True, stdout=subprocess.PIPE, text=True)
    seconds, peak = answer.stdout.split()
    print(f"{config}: {seconds} s, {peak} GiB", file=sys.stderr)
    return seconds, peak


def bits(arch, name: str, group: int) -> float:
    """Mean over a block's weights; codes, scales and zeros as stored."""
    extra = 32 if QUANTIZERS[name].float_zeros else 20
    shapes = arch.block_matrices(0).values()
    total = sum(N * K * (4 + extra / choose_group_size(K, group)) for N, K in shapes)
    return total / sum(N * K for N, K in shapes)


if __name__ == "__main__":
    main()
