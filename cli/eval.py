"""`adapt eval`: what a bundle's answers are worth."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from . import eval_text
from .console import make_reporter
from .groups import Group
from .options import Json, opening

EXAMPLES = eval_text.EXAMPLES


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="A UTF-8 text to predict; - is stdin.")
    ] = None,
    limit_tokens: Annotated[
        int | None, typer.Option("--limit-tokens", min=2, metavar="N", help="Read only so much of it.")
    ] = None,
    settings: Annotated[dict[str, Any], Group(opening)],
    as_json: Json = False,
) -> None:
    """Measure what a bundle's answers are worth.

    On a text: perplexity, how often its best next token is the dense backbone's and how far the predictions are from
    it, the depth at which tokens leave, and perplexity by position. --ctx-size is the length of a sequence.
    """
    if text is None:
        raise UsageError("There is nothing to measure with", "Name a text with --text FILE")
    reporter = make_reporter(ctx.obj)
    eval_text.evaluate_text(bundle, text, settings, limit=limit_tokens, reporter=reporter, as_json=as_json)
