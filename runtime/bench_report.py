"""A whole measurement of a bundle that generates, as data by stable keys: `adapt bench --json`.

Brings contenders, rounds, bandwidth and memory together; prints nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import AdaptError
from . import bench_memory
from .bandwidth import MemoryReader
from .bench import Reader, Trial, race
from .bench_bundle import BenchOptions, Field, Name, set_threads
from .loading import resolve_device, resolve_dtype
from .progress import Reporter, SilentReporter

MeasureMemory = Callable[[Path, BenchOptions, Name], int]


def bench(
    path: Path,
    options: BenchOptions,
    *,
    memory: bool = True,
    reporter: Reporter | None = None,
    reader: Reader | None = None,
    measure: MeasureMemory = bench_memory.measure,
) -> dict[str, Any]:
    """Measure everything that `options` ask for. `memory`: also the peak of each contender, in a process of its own.

    Figures at the top are those of the first context and the first number of rows. A process for memory that fails
    costs that figure only, with a warning. Raises what `Field` raises.
    """
    reporter = reporter or SilentReporter()
    threads = set_threads(options.session.threads)
    field = Field(path, options, reporter)
    field.model("method")  # first: the dense twin may share its weights
    field.check_room()
    reader = reader or MemoryReader(resolve_device(options.session.device))
    trials = [_trial(field, context, rows, reader, reporter) for context in options.contexts for rows in options.rows]
    first = trials[0]["contenders"]
    for name, size in _peaks(path, field, measure, reporter).items() if memory else ():
        first[name]["peak_memory_bytes"] = size
    return {
        "bundle": path.resolve().name,
        "base": field.bundle.manifest.base.id,
        "methods": [method.name for method in field.bundle.manifest.methods],
        "layers": field.bundle.architecture.num_layers,
        "settings": {**_settings(options, threads), **field.head_bits},
        **_top(trials[0]),
        "trials": trials,
        "notes": list(field.notes),
    }


def _trial(field: Field, context: int, rows: int, reader: Reader, reporter: Reporter) -> dict[str, Any]:
    contenders = [field.contender(name, context, rows) for name in field.names]
    trial = race(contenders, context, rows, rounds=field.options.rounds, reader=reader, reporter=reporter)
    return {
        "context": context,
        "batch_size": rows,
        "prefill_rounds": trial.prefill_rounds,
        "measured_gb_per_s": trial.gb_per_s,
        "contenders": {name: _figures(trial, name) for name in field.names},
    }


def _figures(trial: Trial, name: Name) -> dict[str, Any]:
    depths = trial.depths(name)
    return {
        **trial.figures(name),
        "peak_memory_bytes": None,
        "mean_depth": _mean(depths),
        "exit_histogram": {str(depth): count for depth, count in sorted(depths.items())},
        "speedup": trial.speedup(name, "dense") if "dense" in trial.laps else None,
        **({"counts": counts} if (counts := trial.counts(name)) else {}),
    }


def _mean(depths: Counter[int]) -> float | None:
    total = depths.total()
    return round(sum(depth * count for depth, count in depths.items()) / total, 2) if total else None


def _peaks(path: Path, field: Field, measure: MeasureMemory, reporter: Reporter) -> Mapping[Name, int]:
    found: dict[Name, int] = {}
    with reporter.task("Memory", len(field.names)) as task:
        for name in field.names:
            try:
                found[name] = measure(path, field.options, name)
            except AdaptError as error:  # the race is over: its figures are not to be lost
                reporter.warn(str(error))
            task.advance()
    return found


def _top(trial: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of which scripts know but one value."""
    contenders: Mapping[str, Mapping[str, Any]] = trial["contenders"]
    method = contenders["method"]
    return {
        "dense": contenders.get("dense"),
        "method": method,
        "speedup": method["speedup"],
        "mean_depth": method["mean_depth"],
        "exit_histogram": method["exit_histogram"],
        "bandwidth": {"measured_gb_per_s": trial["measured_gb_per_s"], "used_fraction": method["used_fraction"]},
    }


def _settings(options: BenchOptions, threads: int) -> dict[str, Any]:
    """What was asked for; options of opening that were left as they are do not appear."""
    plain = asdict(type(options.session)())
    session = {key: value for key, value in asdict(options.session).items() if value != plain[key]}
    device = resolve_device(options.session.device)
    return {
        **{key: str(value) if isinstance(value, Path) else value for key, value in session.items()},
        "device": str(device),
        "dtype": str(resolve_dtype(options.session.dtype, device)).removeprefix("torch."),
        "threads": threads,
        "contexts": list(options.contexts),
        "batch_sizes": list(options.rows),
        "tokens": options.tokens,
        "rounds": options.rounds,
        "temperature": options.sampling.temperature,
        "seed": options.sampling.seed,
        "dense_model": None if options.dense is None else options.dense.resolve().name,
    }
