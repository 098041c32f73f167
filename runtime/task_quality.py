"""How a bundle does on tasks of lm-evaluation-harness: `adapt eval --tasks`. Needs the extra `eval`.

Runs the tasks under the bundle's exit rule and, where asked, at full depth; gathers the harness's figures under stable
keys. Knows no terminal; what a task is the harness knows.
"""

import importlib.metadata
import importlib.util
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import AccessError, AdaptError, UsageError
from .progress import Reporter
from .session import Session

if TYPE_CHECKING:
    from .harness import AdaptLM

SEED = 1234
"""The harness's own, for the choice of examples; bootstraps use it too."""
_HARNESS = "lm_eval"


@dataclass(frozen=True)
class TaskSettings:
    """Which tasks and how. `names` may be files of tasks; `include` is a folder that is searched for more.

    `few_shot` and `limit` None: as each task says, all rows. `chat`: contexts go through the chat template.
    """

    names: Sequence[str]
    include: Path | None = None
    few_shot: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    seed: int = SEED
    chat: bool = False
    system: str | None = None
    full_depth: bool = False


def check_harness() -> None:
    """Raise AdaptError where the harness is not installed."""
    if importlib.util.find_spec(_HARNESS) is None:
        raise AdaptError("--tasks needs lm-evaluation-harness", "Install it: pip install 'adapt-llm[eval]'")


def task_quality(session: Session, settings: TaskSettings, reporter: Reporter) -> dict[str, Any]:
    """Run tasks; return the keys of `eval --tasks --json` but those of the machine.

    Raises UsageError for a task that the harness does not know, AccessError where its data cannot be had.
    """
    check_harness()
    depths = (False, True) if settings.full_depth else (False,)
    with _quiet():
        models = [_model(session, settings, reporter, at_full_depth=full) for full in depths]
        manager = _manager(settings)
        found = [_run(model, settings, manager) for model in models]
    return {
        **found[0],
        "full_depth": found[1] if settings.full_depth else None,
        "few_shot": settings.few_shot,
        "limit": settings.limit,
        "seed": settings.seed,
        "chat_template": settings.chat,
        "harness": importlib.metadata.version(_HARNESS),
    }


def _model(session: Session, settings: TaskSettings, reporter: Reporter, *, at_full_depth: bool) -> "AdaptLM":
    from .harness import AdaptLM  # noqa: PLC0415 - imports the harness

    return AdaptLM.of(
        session,
        batch_size=settings.batch_size,
        at_full_depth=at_full_depth,
        seed=settings.seed,
        reporter=reporter,
    )


def _run(model: "AdaptLM", settings: TaskSettings, manager: Any) -> dict[str, Any]:  # noqa: ANN401 - no types there
    """Not by the harness's `simple_evaluate`, which asks git and every library for its version, aloud."""
    from lm_eval.evaluator import evaluate  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - an extra

    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    np.random.seed(settings.seed)  # the harness draws from all three
    with _refusals(settings.names):
        loaded = manager.load(list(settings.names))
        for task in loaded["tasks"].values():
            _set_shots(task, settings)
        found: Any = evaluate(
            lm=model,
            task_dict=loaded,
            limit=settings.limit,
            log_samples=False,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            system_instruction=settings.system,
        )
    depths = model.scorer.depths.tolist()
    mean = model.scorer.blocks / sum(depths) if any(depths) else None
    return {"tasks": _tasks(found), "layers": len(depths), "mean_depth": mean, "exit_histogram": depths}


def _set_shots(task: Any, settings: TaskSettings) -> None:  # noqa: ANN401 - no types there
    """Examples before a question; a task that says 0 keeps it, as in the harness."""
    own = task.get_config("num_fewshot")
    if own is None or (own and settings.few_shot is not None):
        task.set_config(key="num_fewshot", value=settings.few_shot or 0)
    task.set_fewshot_seed(seed=settings.seed)


def _manager(settings: TaskSettings) -> Any:  # noqa: ANN401 - the harness has no types
    """An index of tasks. The harness's own thousands are read only where they are needed: that takes seconds."""
    from lm_eval.tasks import TaskManager  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - an extra

    include = None if settings.include is None else str(settings.include)
    files = {name for name in settings.names if Path(name).is_file()}
    own = TaskManager(include_path=include, include_defaults=False)
    if set(settings.names) <= files | set(own.all_subtasks):
        return own
    manager = TaskManager(include_path=include)
    unknown = [name for name in settings.names if name not in files and name not in manager.all_tasks]
    if unknown:
        hint = "Give names that `lm_eval ls tasks` lists, a file, or --include-path DIR"
        raise UsageError(f"lm-evaluation-harness knows no task {unknown[0]}", hint)
    return manager


def _tasks(found: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics by task and by group of tasks; their names are the harness's, `acc,none` without its filter `none`."""
    return {
        name: {
            "samples": found.get("n-samples", {}).get(name, {}).get("effective"),
            "few_shot": found.get("n-shot", {}).get(name),
            "version": found.get("versions", {}).get(name),
            "metrics": dict(_metrics(figures, found.get("higher_is_better", {}).get(name) or {})),
        }
        for name, figures in found["results"].items()
    }


def _metrics(figures: Mapping[str, Any], better: Mapping[str, bool | None]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in figures.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = figures.get(f"{metric}_stderr,{kind}")
        yield (
            metric if kind == "none" else key,
            {
                "value": value,
                "stderr": error if isinstance(error, int | float) else None,
                "higher_is_better": better.get(metric),
            },
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """The notices and bars of the harness are for its own program: stderr is the reporter's."""
    import datasets  # noqa: PLC0415 # pyright: ignore[reportMissingImports] - comes with the harness
    from lm_eval.api import task  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    logger = logging.getLogger(_HARNESS)
    level, bar, bars = logger.level, task.tqdm, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    task.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        logger.setLevel(level)
        task.tqdm = bar
        if not bars:
            datasets.enable_progress_bars()


@contextmanager
def _refusals(names: Sequence[str]) -> Iterator[None]:
    """What the harness and the data behind its tasks refuse, in one line."""
    try:
        yield
    except (ConnectionError, FileNotFoundError) as error:
        what = f"the data of {', '.join(names)} cannot be had: {error}"
        raise AccessError(what, "Fetch it once online, or use a task with local files (docs/eval.md).") from error
    except ValueError as error:
        if "unsafe" not in str(error):
            raise
        what = f"{', '.join(names)}: a task runs code that the model wrote"
        raise UsageError(what, "Write completions with --prompts, and check them in a sandbox.") from error
