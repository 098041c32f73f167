"""The options of `adapt eval` in groups, and which of them belong to which way of measuring. Knows no figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .classification import refuse
from .eval_labels import LabelsRequest
from .eval_prompts import PromptsRequest
from .eval_tasks import TasksRequest
from .eval_text import TextRequest
from .groups import Group
from .options import Force, Json
from .outputs import Outputs

TEXT, LABELS, TASKS, PROMPTS = "Text", "Labelled rows", "Tasks (lm-evaluation-harness)", "Prompts"
_GENERATING = ("--text", "--tasks", "--prompts")
_SAMPLING = (
    *("max_tokens", "temperature", "greedy", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("stop", "stop_token_id", "ignore_eos"),
)
USES: Mapping[str, tuple[str, ...]] = {
    "limit_tokens": ("--text",),
    **dict.fromkeys(("label_field", "threshold", "max_drop"), ("--labels",)),
    **dict.fromkeys(("num_fewshot", "include_path", "full_depth"), ("--tasks",)),
    **dict.fromkeys(("output", "resume", "samples", "code", *_SAMPLING), ("--prompts",)),
    "field": ("--labels", "--prompts"),
    "limit": ("--labels", "--tasks", "--prompts"),
    "batch_size": ("--labels", "--tasks", "--prompts"),
    "report": ("--text", "--labels", "--tasks"),
    "plot": ("--text", "--labels"),
    "as_json": ("--text", "--labels", "--tasks"),
    **dict.fromkeys(("lossless", "draft", "per_exit_truncation", "piggyback", "max_deferred"), ("--prompts",)),
    **dict.fromkeys(("seed", "system", "chat", "chat_template", "prefill", "cuda_graphs"), ("--tasks", "--prompts")),
    **dict.fromkeys(("ctx_size", "gpu_memory", "resident", "offload", "tau", "head_bits"), _GENERATING),
}
"""Parameter -> the ways of measuring that it means something to."""


def refuse_others(ctx: typer.Context, way: str) -> None:
    """Raise UsageError for an option that would change nothing."""
    for name, ways in USES.items():
        if way not in ways:
            refuse(ctx, (name,), f"is for {_listed(ways)}")


def _listed(ways: Sequence[str]) -> str:
    *first, last = ways
    return f"{', '.join(first)} and {last}" if first else last


def text_request(
    *,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", rich_help_panel=TEXT, help="A UTF-8 text to predict; - is stdin."),
    ] = None,
    limit_tokens: Annotated[
        int | None,
        typer.Option("--limit-tokens", min=2, metavar="N", rich_help_panel=TEXT, help="Read only so much of it."),
    ] = None,
) -> TextRequest | None:
    """Read the options of a text; None without one."""
    return None if text is None else TextRequest(text, limit_tokens)


def labels_request(
    *,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", rich_help_panel=LABELS, help="Labelled rows: jsonl, csv, tsv, .gz."),
    ] = None,
    label_field: Annotated[
        str, typer.Option("--label-field", metavar="NAME", rich_help_panel=LABELS, help="Key or column of the label.")
    ] = "label",
) -> LabelsRequest | None:
    """Read the options of labelled rows; None without any rows."""
    return None if labels is None else LabelsRequest(labels, None, label_field)


def tasks_request(
    *,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks", metavar="NAMES", rich_help_panel=TASKS, help="Names of tasks or files, commas between."
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option("--include-path", metavar="DIR", rich_help_panel=TASKS, help="A folder with tasks of your own."),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot",
            min=0,
            metavar="N",
            rich_help_panel=TASKS,
            help="Examples before a question (default: the task's).",
        ),
    ] = None,
    full_depth: Annotated[
        bool,
        typer.Option(
            "--full-depth/--no-full-depth", rich_help_panel=TASKS, help="Run the tasks at full depth as well."
        ),
    ] = False,
) -> TasksRequest | None:
    """Read the options of tasks; None without any."""
    if tasks is None:
        return None
    names = tuple(name for part in tasks.split(",") if (name := part.strip()))
    if not names:
        raise UsageError("--tasks names no task", "For example --tasks arc_easy,hellaswag")
    return TasksRequest(names, include_path, num_fewshot, full_depth=full_depth)


def prompts_request(
    *,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            rich_help_panel=PROMPTS,
            help="Prompts to complete (jsonl, csv, tsv, txt, .gz; -).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.jsonl", rich_help_panel=PROMPTS, help="Where completions go."),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, metavar="N", rich_help_panel=PROMPTS, help="Completions of each prompt.")
    ] = 1,
    code: Annotated[
        bool,
        typer.Option("--code", rich_help_panel=PROMPTS, help="End before the next definition, as HumanEval does."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=PROMPTS, help="Continue an output that was cut short.")
    ] = False,
) -> PromptsRequest | None:
    """Read the options of prompts; None without any."""
    return None if prompts is None else PromptsRequest.of(prompts, output, samples=samples, code=code, resume=resume)


def outputs(
    *,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.md", help="Write a Markdown page as well.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw perplexity by position, or where documents stopped."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> Outputs:
    """Read where results go."""
    return Outputs(plot, report, force, as_json)


Text = Annotated[TextRequest | None, Group(text_request)]
Labels = Annotated[LabelsRequest | None, Group(labels_request)]
Tasks = Annotated[TasksRequest | None, Group(tasks_request)]
Prompts = Annotated[PromptsRequest | None, Group(prompts_request)]
Field = Annotated[
    str | None,
    typer.Option("--field", metavar="NAME", help="Key or column of the text or prompt (default: text; prompt)."),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, metavar="N", help="Only N rows: labelled ones evenly over the file.")
]
Chat = Annotated[bool, typer.Option("--apply-chat-template", help="Put contexts and prompts into the chat template.")]
