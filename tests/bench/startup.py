"""From nothing to the first token: the phases of `adapt run`, which add up to the whole program.

python tests/bench/startup.py BUNDLE [--rounds 5] [--threads N] [--prompt TEXT] [--other FOLDER]

Each round runs the program as it is, the program with the clock read between its phases (startup_marks.py), `import
torch` alone and `adapt --help`, each in a process of its own; the first round, which fills the page cache and writes
Python's caches, is not shown. `--other`: a folder with another adapt_llm in it (a checkout, its native kernels built),
whose program runs in turn with this one. "first token" ends when its text can be read from the pipe. "weights" is the
least time in which the bytes of one dense pass are read, at the bandwidth measured here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PHASES = ("Python", "command line, manifest", "tokenizer", "import torch", "import the rest", "model")
MARKS = Path(__file__).with_name("startup_marks.py")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt", default="Hi")
    parser.add_argument("--other", type=Path)
    asked = parser.parse_args()
    found = [one_round(asked) for _ in range(asked.rounds + 1)]
    print("| | ms (median, min–max) |\n|---|--:|")
    for name in found[0]:
        times = [each[name] * 1e3 for each in found[1:]]
        print(f"| {name} | {statistics.median(times):.0f} ({min(times):.0f}–{max(times):.0f}) |")
    print(f"| weights, read at memory's speed | {weights(asked.bundle) * 1e3:.0f} |")


def one_round(asked: argparse.Namespace) -> dict[str, float]:
    """Seconds of everything, once, in turn."""
    adapt = [sys.executable, "-m", "adapt_llm"]
    run = ["run", str(asked.bundle), asked.prompt, "--max-tokens", "1"]
    run += [] if asked.threads is None else ["--threads", str(asked.threads)]
    marks, first, end = timed([sys.executable, str(MARKS), *run])
    times = [0.0, *(marks[name] for name in PHASES), first, end]
    names = (*PHASES, "first token", "end of the process")
    found = {name: stop - start for name, start, stop in zip(names, times, times[1:], strict=False)}
    found["sum of the phases"] = end
    _, found["`adapt run`, first token"], found["`adapt run`, whole"] = timed([*adapt, *run])
    if asked.other is not None:
        _, found["the other's first token"], found["the other's whole"] = timed([*adapt, *run], asked.other)
    found["`import torch`, whole"] = timed([sys.executable, "-c", "import torch"])[2]
    found["`adapt --help`, whole"] = timed([*adapt, "--help"])[2]
    return found


def timed(command: list[str], other: Path | None = None) -> tuple[dict[str, float], float, float]:
    """Run a command: marks from the last line of its stderr, and when its first output and its end were there.

    Everything in seconds from its start.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if other is not None:
        environment["PYTHONPATH"] = str(other.resolve())
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.monotonic() - began
        _, said = process.communicate()
    end = time.monotonic() - began
    if process.returncode:
        raise SystemExit(said.decode())
    last = said.decode().splitlines()[-1:]
    marks = json.loads(last[0]) if last and last[0].startswith("{") else {}
    return {name: at - began for name, at in marks.items()}, first, end


def weights(bundle: Path) -> float:
    """Seconds to read what one dense pass reads, at the bandwidth of this machine's memory."""
    import torch  # noqa: PLC0415 - not while others are timed

    from adapt_llm.runtime.bandwidth import MemoryReader  # noqa: PLC0415
    from adapt_llm.runtime.options import SessionOptions  # noqa: PLC0415
    from adapt_llm.runtime.session import open_session  # noqa: PLC0415
    from adapt_llm.runtime.traffic import traffic_of  # noqa: PLC0415

    model = open_session(bundle, SessionOptions()).model
    traffic = traffic_of(model)
    if traffic is None:
        return float("nan")
    return traffic.weights([model.decoder.arch.num_layers]) / MemoryReader(torch.device("cpu")).bytes_per_second()


if __name__ == "__main__":
    main()
