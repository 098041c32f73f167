"""`adapt eval --tasks`: tasks of lm-evaluation-harness under the bundle's exit rule, and at full depth beside it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..runtime.progress import Reporter
from . import services
from .charts import histogram
from .eval_prompts import check_chat
from .outputs import Outputs, head
from .tables import aligned, markdown

EXAMPLES = """\
  adapt eval qwen-river --tasks arc_easy,hellaswag --limit 200 --full-depth --report tasks.md
  adapt eval qwen-river --tasks my_task --include-path ./tasks --num-fewshot 5 --json
"""

MOST_SEED = 2**32 - 1
"""The harness seeds NumPy too, which takes no larger one."""


@dataclass(frozen=True)
class TasksRequest:
    """Which tasks: names that the harness knows, or files; and how."""

    names: tuple[str, ...]
    include: Path | None = None
    few_shot: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    chat: bool = False
    system: str | None = None
    full_depth: bool = False

    def check(self) -> None:
        """Raise UsageError for what can be known to fail before a model is loaded."""
        if self.include is not None and not self.include.is_dir():
            raise UsageError(f"{self.include} is no folder", "--include-path takes the folder of your tasks")
        if self.seed is not None and not 0 <= self.seed <= MOST_SEED:
            raise UsageError(f"--seed {self.seed} is not a seed of tasks", f"Give a number from 0 to {MOST_SEED}")


def evaluate_tasks(
    bundle: Path,
    request: TasksRequest,
    settings: Mapping[str, Any],
    *,
    outputs: Outputs,
    reporter: Reporter,
) -> None:
    """Measure and print. `settings` are the fields of SessionOptions. Raises UsageError, AdaptError, AccessError."""
    if services.twodee(bundle) is not None:
        raise UsageError(f"{bundle} classifies; tasks need a bundle that generates", "Measure it with --labels FILE")
    request.check()
    check_chat(settings["chat_template"], system=request.system, chat=request.chat)
    outputs.check()
    found = services.task_quality(bundle, request, settings, reporter)
    result = {"bundle": bundle.name, **found, "machine": services.machine()}
    outputs.publish(result, page(result), report(outputs.command, result))


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what people read."""
    yield from aligned(table(result))
    yield ""
    yield from _depth(result)


def _depth(result: Mapping[str, Any]) -> Iterator[str]:
    if result["mean_depth"] is None:
        return
    yield f"mean depth {result['mean_depth']:.1f} of {result['layers']}, of the tokens that were scored"
    if sum(1 for count in result["exit_histogram"] if count) > 1:
        yield from histogram(result["exit_histogram"])


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows: a task's metrics, under the exit rule and at full depth."""
    full = result["full_depth"]
    rows = [["task", "metric", "rows", "exit rule" if full else "value", *(["full depth"] if full else [])]]
    for name, task in result["tasks"].items():
        for metric, figure in task["metrics"].items():
            beside = [_figure(full["tasks"][name]["metrics"][metric])] if full else []
            rows.append([name, metric, str(task["samples"] or ""), _figure(figure), *beside])
    return rows


def _figure(figure: Mapping[str, Any]) -> str:
    error = "" if figure["stderr"] is None else f" ± {figure['stderr']:.4f}"
    return f"{figure['value']:.4f}{error}"


def report(command: str, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a Markdown page: the command, seeds and versions, the machine, the figures."""
    shots = "" if result["few_shot"] is None else f", {result['few_shot']} examples before a question"
    limit = "all rows" if result["limit"] is None else f"the first {result['limit']} rows of each task"
    about = [
        f"lm-evaluation-harness {result['harness']}, {limit}{shots}. Every seed is {result['seed']}.",
        "Continuations are scored token by token, each token leaving where the bundle's rule says so for it alone;",
        "texts are generated as `adapt run` does. Behind ± is the standard error.",
    ]
    yield from head(f"{result['bundle']}: {', '.join(result['tasks'])}", command, about, result["machine"])
    yield from markdown(table(result))
    yield ""
    known = {name: task["version"] for name, task in result["tasks"].items()}
    versions = (f"{name} {version}" for name, version in known.items() if isinstance(version, int | float))
    yield f"Versions of the tasks: {', '.join(versions) or 'none'}."
    yield ""
    yield "```"
    yield from _depth(result)
    yield "```"
