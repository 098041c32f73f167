"""`adapt eval`: what a bundle's answers are worth."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from . import eval_labels, eval_text
from .classification import GENERATION, Asked, comparison, refuse
from .console import make_reporter
from .eval_labels import LabelsRequest
from .groups import Group
from .options import Force, Json, opening

EXAMPLES = eval_text.EXAMPLES + eval_labels.EXAMPLES


TEXT = "Text"
LABELS = "Labelled rows"
_TEXT_ONLY = ("limit_tokens",)
_ANSWERING = ("prefill", "chat_template")
"""Options of opening a bundle that mean nothing to a text which is only read."""
_LABELS_ONLY = ("field", "label_field", "limit", "report", "plot", "threshold", "max_drop", "batch_size", "force")


def labelled(
    *,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", rich_help_panel=LABELS, help="Labelled rows: jsonl, csv, tsv, .gz."),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            "--field", metavar="NAME", rich_help_panel=LABELS, help="Key or column of the text (default: text)."
        ),
    ] = None,
    label_field: Annotated[
        str, typer.Option("--label-field", metavar="NAME", rich_help_panel=LABELS, help="Key or column of the label.")
    ] = "label",
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, metavar="N", rich_help_panel=LABELS, help="Only N rows, evenly over the file."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.md", rich_help_panel=LABELS, help="Write a Markdown page as well."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", rich_help_panel=LABELS, help="Draw where documents stopped."),
    ] = None,
    force: Force = False,
) -> LabelsRequest | None:
    """Read the options of labelled rows; None without any rows."""
    if labels is None:
        return None
    return LabelsRequest(labels, field, label_field, limit, report, plot, force)


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", rich_help_panel=TEXT, help="A UTF-8 text to predict; - is stdin."),
    ] = None,
    limit_tokens: Annotated[
        int | None,
        typer.Option("--limit-tokens", min=2, metavar="N", rich_help_panel=TEXT, help="Read only so much of it."),
    ] = None,
    rows: Annotated[LabelsRequest | None, Group(labelled)],
    asked: Annotated[Asked, Group(comparison)],
    settings: Annotated[dict[str, Any], Group(opening)],
    as_json: Json = False,
) -> None:
    """Measure what a bundle's answers are worth.

    On a text: perplexity, how often its best next token is the dense backbone's and how far the predictions are from
    it, the depth at which tokens leave, and perplexity by position. --ctx-size is the length of a sequence.

    On labelled rows (2dee bundles): accuracy, macro-F1, work and rows a second of full, 1D and 2D side by side, and
    where documents stopped.
    """
    if (text is None) == (rows is None):
        what = "There is nothing to measure with" if text is None else "--text and --labels exclude each other"
        raise UsageError(what, "Give a text with --text FILE, or labelled rows with --labels FILE")
    reporter = make_reporter(ctx.obj)
    if rows is not None:
        refuse(ctx, (*_TEXT_ONLY, *GENERATION), "is for --text")
        rows = replace(rows, command=shlex.join(["adapt", *ctx.obj.args]))
        eval_labels.evaluate_labels(bundle, rows, settings, asked, reporter=reporter, as_json=as_json)
    elif text is not None:
        refuse(ctx, _LABELS_ONLY, "is for --labels")
        refuse(ctx, _ANSWERING, "is for run and chat")
        eval_text.evaluate_text(bundle, text, settings, limit=limit_tokens, reporter=reporter, as_json=as_json)
