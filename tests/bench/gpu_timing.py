"""Time of work on a GPU without the time to launch it, and of tokens with it."""

import time
from collections.abc import Callable
from statistics import median

import torch

from adapt_llm.runtime.graphs import Graphs


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_seconds(work: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    """Median of replays of a graph of `work`."""
    graphs: Graphs = Graphs(device)
    graphs.run(0, work)
    found = []
    for _ in range(rounds):
        wait(device)
        started = time.perf_counter()
        graphs.run(0, work)
        wait(device)
        found.append(time.perf_counter() - started)
    return median(found)


def race(lanes: dict[str, Callable[[], float]], rounds: int, stop: float) -> dict[str, list[float]]:
    """Every lane once in each round, begun by another each time; ends early after `stop` (perf_counter)."""
    found: dict[str, list[float]] = {name: [] for name in lanes}
    names = list(lanes)
    for number in range(rounds):
        if number and time.perf_counter() > stop:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(lanes[name]())
    return found
