"""Everything that is to be known of a GPU in one run of under ten minutes: first what is right, then how fast it is.

python tests/bench/gpu.py --out DIR [--tiny] [--minutes 9] [--shapes Llama-3.2-1B,Llama-3.1-8B] [--device cuda]

Needs nothing but the package: weights are random. Writes DIR/gpu.md and DIR/gpu.json; the exit status is 1 where a
check failed (the speeds are measured all the same). `--tiny` runs all of it in a minute, on a CPU too: that the script
works is tested there, without Triton and without graphs.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from gpu_checks import Check, checks, timed_products
from gpu_models import COMMON, SHAPES, large
from gpu_timing import race, wait

from adapt_llm.quant.probe import triton_works
from adapt_llm.runtime.bandwidth import MemoryReader
from adapt_llm.runtime.captured import CapturedDense, CapturedRiver
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.exits import CosineExit, FixedExit
from adapt_llm.runtime.generate import Model
from adapt_llm.runtime.river import River
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.traffic import Traffic

GROUP = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    stop, device = time.perf_counter() + 60 * arguments.minutes, torch.device(arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {"command": " ".join(["python", *sys.argv]), "machine": machine(device)}
    save(arguments.out, result)
    found = []
    for check in checks(device, 8 if arguments.tiny else 300):
        say(f"{mark(check)} {check.name}: {check.detail}")
        found.append(check)
    result["checks"] = [asdict(check) for check in found]
    save(arguments.out, result)
    result["bandwidth_gb_per_s"] = bandwidth(device, arguments.tiny)
    shapes = [(256, 128)] if arguments.tiny else [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    with torch.inference_mode():
        result["products"] = list(timed_products(device, shapes))
    save(arguments.out, result)
    result["models"] = []
    configs = {"tiny": {**COMMON, "model_type": "llama", "hidden_size": 128}} if arguments.tiny else SHAPES
    for name in ["tiny"] if arguments.tiny else arguments.shapes.split(","):
        if time.perf_counter() > stop:
            say(f"no time left for {name}")
            break
        steps, contexts = (4, (16,)) if arguments.tiny else (64, (128, 2048))
        result["models"] += measure(name, configs[name], device, steps, contexts, arguments.rounds, stop)
        save(arguments.out, result)
    say((arguments.out / "gpu.md").read_text(encoding="utf-8"))
    return int(any(check.ok is False for check in found))


def say(text: str) -> None:
    print(text, flush=True)


def mark(check: Check) -> str:
    return {True: "ok     ", False: "FAILED ", None: "skipped"}[check.ok]


def machine(device: torch.device) -> dict:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version() if triton_works(device) else None,
    }


def triton_version() -> str:
    import triton  # noqa: PLC0415 - only where it works

    return triton.__version__


def bandwidth(device: torch.device, tiny: bool) -> float:
    """The best of three readings, of 8 GiB."""
    return MemoryReader(device, 1 << 20 if tiny else 8 << 30).bytes_per_second() / 1e9


def measure(name, config, device, steps, contexts, rounds, stop) -> list[dict]:
    """Tokens per second of each way to run one shape, interleaved."""
    say(f"making {name}")
    decoder, exits = large(config, device, 32 if name == "tiny" else GROUP)
    layers = decoder.arch.num_layers
    half = layers // 2
    # Below half of the stack the rule is asked and says no, from there on yes: the flag works in every block.
    leaves_half_way = CosineExit.by_layer((0.9999999,) * (half - 1) + (-1.0,) * (layers - half))
    river, floor = River(decoder, exits, leaves_half_way), River(decoder, exits, FixedExit(1))
    models: dict[str, tuple[Model, int]] = {
        "dense, kernel by kernel": (Dense(decoder), layers),
        "dense, graph": (CapturedDense(Dense(decoder)), layers),
        "River at half depth, kernel by kernel": (river, half),
    }
    if device.type != "cuda" or triton_works(device):
        models["River at half depth, graph"] = (CapturedRiver(river), half)
        models["all 4-bit, graph"] = (CapturedRiver(floor), 1)
    rows = []
    for context in contexts:
        if time.perf_counter() > stop:
            break
        runs = {title: Run(model, context, steps, device) for title, (model, _) in models.items()}
        laps = race(runs, rounds, stop)
        traffic = Traffic(decoder, exits)
        for title, (_, depth) in models.items():
            seconds, read = laps[title], traffic.of_pass([depth], context + steps // 2)
            rows.append(
                {
                    "model": name,
                    "context": context,
                    "way": title,
                    "ms": 1000 * median(seconds),
                    "least_ms": 1000 * min(seconds),
                    "most_ms": 1000 * max(seconds),
                    "bytes": read,
                    "depths": runs[title].depths,
                    "rounds": len(seconds),
                }
            )
            say(f"{name}, {context}, {title}: {rows[-1]['ms']:.3f} ms a token, depths {runs[title].depths}")
    return rows


class Run:
    """Greedy tokens behind one prompt, as `run` makes them: one wait for the device per token."""

    def __init__(self, model: Model, context: int, steps: int, device: torch.device) -> None:
        self._model, self._context, self._steps, self._device = model, context, steps, device
        self._cache = model.new_cache(1, context + steps + 1)
        self._sampler, self.depths = Sampler(Sampling()), []
        with torch.inference_mode():
            ids = torch.randint(3, 100, (1, context), generator=torch.Generator().manual_seed(2))
            model.prefill(ids, self._cache, self._sampler)
            self()  # compiles and captures

    @torch.inference_mode()
    def __call__(self) -> float:
        """Seconds a token."""
        self._cache.truncate(self._context)
        token, depths = 5, set()
        wait(self._device)
        started = time.perf_counter()
        for _ in range(self._steps):
            output = self._model.decode(torch.tensor([[token]]), self._cache, self._sampler)
            token = self._sampler(output.logits[0]) if output.token is None else output.token
            depths.add(output.depth)
        wait(self._device)
        self.depths = sorted(depth for depth in depths if depth is not None)
        return (time.perf_counter() - started) / self._steps


def save(folder: Path, result: dict) -> None:
    """Both files, after each part: a run that is cut short leaves what it has."""
    (folder / "gpu.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (folder / "gpu.md").write_text(page(result), encoding="utf-8")


def page(result: dict) -> str:
    machine_, lines = result["machine"], []
    lines += [f"`{result['command']}`", "", ", ".join(f"{key} {value}" for key, value in machine_.items()), ""]
    found = result.get("checks", [])
    failed = [check for check in found if check["ok"] is False]
    skipped = [check for check in found if check["ok"] is None]
    lines += [f"Checks: {len(found)}, of which {len(failed)} failed and {len(skipped)} did not run here.", ""]
    lines += [f"* FAILED {check['name']}: {check['detail']}" for check in failed]
    limit = result.get("bandwidth_gb_per_s")
    if limit is None:
        return "\n".join(lines) + "\n"
    lines += [
        f"Memory reads {limit:,.0f} GB/s.",
        "",
        "| product, one row | N x K | µs | GB/s | of memory |",
        "|---|---|--:|--:|--:|",
    ]
    for row in result.get("products", []):
        share = row["gb_per_s"] / limit
        lines.append(
            f"| {row['product']} | {row['N']} x {row['K']} | {row['us']:.1f} | {row['gb_per_s']:,.0f} | {share:.0%} |"
        )
    lines += [
        "",
        "| model | context | way | tokens/s | ms (least, most) | MB read | of memory |",
        "|---|--:|---|--:|---|--:|--:|",
    ]
    for row in result.get("models", []):
        share = row["bytes"] / row["ms"] * 1000 / 1e9 / limit
        times = f"{row['ms']:.2f} ({row['least_ms']:.2f}, {row['most_ms']:.2f})"
        lines.append(
            f"| {row['model']} | {row['context']} | {row['way']} | {1000 / row['ms']:.1f} | {times} "
            f"| {row['bytes'] / 1e6:,.0f} | {share:.0%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
