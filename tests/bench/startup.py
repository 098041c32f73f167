"""From nothing to the first token: each phase of `adapt run` in a process of its own, several times, in turn.

python tests/bench/startup.py BUNDLE [--rounds 5] [--threads N] [--prompt TEXT]

"import torch" is what nothing can be done about; "weights" is the least time in which the bytes of one dense pass are
read, at the bandwidth measured here. Files are in the page cache from the second round on; the first one is not shown.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

PHASES = ("import torch", "import the rest", "open the bundle", "first token", "second token")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompt", default="Hi")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(phases(asked)))
        return
    adapt = str(Path(sys.executable).with_name("adapt"))
    command = [adapt, "run", str(asked.bundle), asked.prompt, "--max-tokens", "1"]
    threads = [] if asked.threads is None else ["--threads", str(asked.threads)]
    found: list[dict[str, float]] = []
    for _ in range(asked.rounds + 1):
        found.append(child(asked) | {"`adapt --help`": whole([adapt, "--help"])})
        found[-1]["`adapt run`, one token"] = whole([*command, *threads])
    print("| | ms (median, min–max) |\n|---|--:|")
    for name in found[0]:
        times = [each[name] * 1e3 for each in found[1:]]
        print(f"| {name} | {statistics.median(times):.0f} ({min(times):.0f}–{max(times):.0f}) |")


def child(asked: argparse.Namespace) -> dict[str, float]:
    """The phases in a fresh interpreter."""
    command = [sys.executable, __file__, str(asked.bundle), "--child", "--prompt", asked.prompt]
    command += [] if asked.threads is None else ["--threads", str(asked.threads)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    return json.loads(done.stdout)


def whole(command: list[str]) -> float:
    """Seconds of a command."""
    began = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - began


def phases(asked: argparse.Namespace) -> dict[str, float]:
    """Seconds of each phase, in this process; it imports nothing of ours before."""
    marks = [time.perf_counter()]
    import torch  # noqa: PLC0415 - that is what is timed

    marks.append(time.perf_counter())
    from adapt_llm.cli import app, run_generate, services  # noqa: F401, PLC0415
    from adapt_llm.runtime.conversation import GenerationOptions  # noqa: PLC0415
    from adapt_llm.runtime.progress import SilentReporter  # noqa: PLC0415
    from adapt_llm.runtime.traffic import traffic_of  # noqa: PLC0415

    marks.append(time.perf_counter())
    if asked.threads:
        torch.set_num_threads(asked.threads)
    session = services.open_session(asked.bundle, {"prefill": "dense"}, SilentReporter())
    marks.append(time.perf_counter())
    answer = iter(session.complete(asked.prompt, GenerationOptions(max_tokens=2)))
    for _ in range(2):
        next(answer)
        marks.append(time.perf_counter())
    seconds = {name: end - start for name, start, end in zip(PHASES, marks, marks[1:], strict=False)}
    from adapt_llm.runtime.bandwidth import MemoryReader  # noqa: PLC0415

    traffic = traffic_of(session.model)
    if traffic is None:
        return seconds
    count = session.model.decoder.arch.num_layers
    return seconds | {"weights": traffic.weights([count]) / MemoryReader(torch.device("cpu")).bytes_per_second()}


if __name__ == "__main__":
    main()
