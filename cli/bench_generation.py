"""`adapt bench` of a bundle that generates: what is asked of it, and the page that people read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FormatError, UsageError
from ..runtime.progress import Reporter
from . import plots, services
from .charts import histogram, human_bytes
from .outputs import Outputs, machine_line
from .tables import aligned, markdown

Trial = Mapping[str, Any]


@dataclass(frozen=True)
class Racing:
    """Who races over what; `sampling` are fields of `runtime.sampling.Sampling`."""

    contexts: tuple[int, ...] = (128,)
    tokens: int = 32
    rounds: int = 5
    dense: Path | None = None
    transformers: bool = False
    floor: bool = False
    text: Path | None = None
    memory: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)


def measure(
    bundle: Path, asked: Racing, settings: Mapping[str, Any], rows: Sequence[int], *, reporter: Reporter
) -> dict[str, Any]:
    """Return the keys of `bench --json`. Raises UsageError, FormatError for a text that cannot be read."""
    values = {name: getattr(asked, name) for name in ("contexts", "tokens", "rounds", "dense", "floor", "transformers")}
    if asked.text is not None:
        values["text"] = _read(asked.text)
    return services.bench(
        bundle, {**values, "rows": tuple(rows)}, settings, asked.sampling, memory=asked.memory, reporter=reporter
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text", "Save it as UTF-8.") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def publish(where: Outputs, result: Mapping[str, Any], command: str) -> None:
    """Print the page or JSON; write the report and the picture where asked for."""
    where.publish(
        result,
        page(result),
        report(result, command),
        lambda path: plots.save_speeds(path, bars(result), title=result["bundle"]),
    )


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what people read: the table, depths, what to know."""
    yield from _about(result)
    yield ""
    yield from aligned(table(result))
    yield ""
    yield from _remarks(result)
    yield from _depths(result)


def report(result: Mapping[str, Any], command: str) -> Iterator[str]:
    """Yield a Markdown page: the command, the machine, the table."""
    yield f"## {result['bundle']}"
    yield ""
    yield f"`{command}`"
    yield ""
    yield from _about(result)
    yield ""
    yield from markdown(table(result))
    yield ""
    yield from _remarks(result)
    if depths := list(_depths(result)):
        yield from ("", "```", *depths, "```")


def _about(result: Mapping[str, Any]) -> Iterator[str]:
    machine, settings = result["machine"], result["settings"]
    who = f"{result['base']} as {' + '.join(result['methods'])}, {settings['dtype']}"
    yield f"{who}; {machine_line(machine)}"
    rates = sorted({trial["measured_gb_per_s"] for trial in result["trials"]})
    read = f"{rates[0]:g}" if rates[0] == rates[-1] else f"{rates[0]:g} to {rates[-1]:g}"
    rounds = f"{settings['rounds']} rounds of {settings['tokens']} tokens, all in turn in one process"
    yield f"{rounds}; memory gives {read} GB/s; median (least to largest)"


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the table: a line for each contender of each trial."""
    head = ["", "prompt x texts", "tokens/s", "ms a pass", "speed", "depth", "MB read", "of limit"]
    lines = [[*head, "prompt tokens/s", "first token ms", "prompt speed", "memory"]]
    for trial in result["trials"]:
        place = f"{trial['context']} x {trial['batch_size']}"
        for name, figures in trial["contenders"].items():
            lines.append([display_name(name, result), place, *_cells(figures)])
    return lines


def display_name(name: str, result: Mapping[str, Any]) -> str:
    """What a contender is called in tables."""
    settings = result["settings"]
    if name == "dense":
        return f"dense ({settings['dense_model']})" if settings["dense_model"] else "dense"
    if name == "floor":
        return "all 4-bit"
    if name != "method":
        return name
    asked = [f"tau {settings['tau']:g}"] if "tau" in settings else []
    asked += [f"{settings['head_bits']}-bit head"] if "head_bits" in settings else []
    asked += ["lossless"] if settings.get("lossless") else []
    return " ".join(["+".join(result["methods"]), *asked])


def _cells(figures: Mapping[str, Any]) -> Iterator[str]:
    ms, speedup = figures["decode_ms"], figures["speedup"] or {}
    yield f"{figures['decode_tokens_per_s']:.1f}"
    yield _spread(ms, ".1f")
    yield _spread(speedup.get("decode"), ".2f")
    yield "" if figures["mean_depth"] is None else f"{figures['mean_depth']:.1f}"
    yield "" if figures["bytes_per_pass"] is None else f"{figures['bytes_per_pass'] / 1e6:.0f}"
    yield "" if figures["used_fraction"] is None else f"{figures['used_fraction']:.0%}"
    yield f"{figures['prefill_tokens_per_s']:.0f}"
    yield f"{figures['first_token_ms']:.0f}"
    yield _spread(speedup.get("prefill"), ".2f")
    yield "" if figures["peak_memory_bytes"] is None else human_bytes(figures["peak_memory_bytes"])


def _spread(values: Mapping[str, float] | None, form: str) -> str:
    if values is None:
        return ""
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"


def _remarks(result: Mapping[str, Any]) -> Iterator[str]:
    yield "'of limit': the least time that reading these bytes takes, as a share of the time taken"
    rounds = result["settings"]["rounds"]
    for trial in result["trials"]:
        if trial["prefill_rounds"] < rounds:
            yield f"prompts of {trial['context']} tokens were timed in {trial['prefill_rounds']} of {rounds} rounds"
        yield from _counts(trial)
    yield from result["notes"]


def _counts(trial: Trial) -> Iterator[str]:
    """Say what a method counts besides depth."""
    counts = trial["contenders"]["method"].get("counts", {})
    if counts.get("drafted"):
        share = counts.get("accepted", 0) / counts["drafted"]
        drafted = f"{share:.0%} of {counts['drafted']:.0f} drafted tokens"
        yield f"{drafted} were accepted, prompts of {trial['context']} tokens"
    if counts.get("passes"):
        waiting = counts["pass_rows"] / counts["passes"] - 1  # its own token is no passenger
        what = f"passes above an exit took along {waiting:.1f} waiting tokens on average"
        yield f"{what}, prompts of {trial['context']} tokens"


def _depths(result: Mapping[str, Any]) -> Iterator[str]:
    for trial in result["trials"]:
        found = trial["contenders"]["method"]["exit_histogram"]
        if len(found) < 2:
            continue
        yield ""
        yield f"depth at which tokens left, {trial['context']} x {trial['batch_size']}"
        yield from histogram([found.get(str(depth), 0) for depth in range(1, result["layers"] + 1)])


def bars(result: Mapping[str, Any]) -> dict[str, list[tuple[str, float, float, float]]]:
    """Return name -> (trial, median, least, largest tokens a second), for a picture."""
    found: dict[str, list[tuple[str, float, float, float]]] = {}
    for trial in result["trials"]:
        place = f"{trial['context']} tokens" + (f" x {trial['batch_size']}" if trial["batch_size"] > 1 else "")
        for name, figures in trial["contenders"].items():
            rates = (trial["batch_size"] * 1000 / figures["decode_ms"][key] for key in ("median", "max", "min"))
            found.setdefault(display_name(name, result), []).append((place, *rates))
    return found
