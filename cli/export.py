"""`adapt export`: a bundle in a form that other programs load."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from . import services
from .console import make_reporter
from .options import CacheDir, Force

EXAMPLES = """\
  adapt export qwen-river --format gptq -o qwen-gptq    # the 4-bit weights, for GPTQModel, transformers, vLLM
  adapt export qwen-river --format hf -o qwen-hf        # the dense model, as it was
"""


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    form: Annotated[
        Literal["gptq", "hf"], typer.Option("--format", help="gptq: the river's weights; hf: the dense model.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The folder to write.")],
    force: Force = False,
    cache_dir: CacheDir = None,
) -> None:
    """Write a bundle in a form that other programs load.

    The output is whole or absent. Its path is written on stdout.
    """
    reporter = make_reporter(ctx.obj)
    typer.echo(services.export(bundle, form, output, force=force, cache_dir=cache_dir, reporter=reporter))
