"""`adapt eval`: what a bundle's answers are worth."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from . import eval_labels, eval_prompts, eval_tasks, eval_text
from .classification import Asked, comparison
from .console import make_reporter
from .eval_options import Chat, Field, Labels, Limit, Prompts, Tasks, Text, outputs, refuse_others
from .generation import Choices, System, sampling
from .groups import Group
from .options import opening
from .outputs import Outputs

EXAMPLES = eval_text.EXAMPLES + eval_labels.EXAMPLES + eval_tasks.EXAMPLES + eval_prompts.EXAMPLES


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    text: Text,
    labels: Labels,
    tasks: Tasks,
    prompts: Prompts,
    field: Field = None,
    limit: Limit = None,
    chat: Chat = False,
    system: System = None,
    files: Annotated[Outputs, Group(outputs)],
    choices: Annotated[Choices, Group(sampling)],
    asked: Annotated[Asked, Group(comparison)],
    settings: Annotated[dict[str, Any], Group(opening)],
) -> None:
    """Measure what a bundle's answers are worth.

    On a text: perplexity, how often its best next token is the dense backbone's and how far the predictions are from
    it, the depth at which tokens leave, and perplexity by position. --ctx-size is the length of a sequence.

    On labelled rows (2dee bundles): accuracy, macro-F1, work and rows a second of full, 1D and 2D side by side, and
    where documents stopped.

    On tasks: those of lm-evaluation-harness, which must be installed. On prompts: completions, for the checker of
    another program to judge.
    """
    ways = {"--text": text, "--labels": labels, "--tasks": tasks, "--prompts": prompts}
    given = [way for way, asked_for in ways.items() if asked_for is not None]
    if len(given) != 1:
        what = f"{given[0]} and {given[1]} exclude each other" if given else "There is nothing to measure with"
        raise UsageError(what, "Give --text, --labels, --tasks or --prompts")
    refuse_others(ctx, given[0])
    files = replace(files, command=shlex.join(["adapt", *ctx.obj.args]))
    if text is not None:
        eval_text.evaluate_text(bundle, text, settings, outputs=files, reporter=make_reporter(ctx.obj))
    elif labels is not None:
        labels = replace(labels, field=field, limit=limit)
        eval_labels.evaluate_labels(bundle, labels, settings, asked, outputs=files, reporter=make_reporter(ctx.obj))
    elif tasks is not None:
        extra = {"limit": limit, "batch_size": asked.batch_size, "seed": choices.seed}
        tasks = replace(tasks, **extra, chat=chat, system=system)
        eval_tasks.evaluate_tasks(bundle, tasks, settings, outputs=files, reporter=make_reporter(ctx.obj))
    elif prompts is not None:
        prompts = replace(prompts, field_name=field, force=files.force)
        prompts = replace(prompts, limit=limit, chat=chat, batch_size=asked.batch_size)
        eval_prompts.complete_prompts(bundle, prompts, settings, choices, system=system, state=ctx.obj)
