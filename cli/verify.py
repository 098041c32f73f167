"""`adapt verify`: is a bundle what its manifest says."""

import json
from pathlib import Path
from typing import Annotated

import typer

from . import services
from .console import make_reporter
from .options import CacheDir, Json

EXAMPLES = """\
  adapt verify qwen-river
  adapt verify qwen-river --json | jq .problems
  adapt verify qwen-river -q && adapt run qwen-river "Hello"
"""


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Check that a bundle is whole.

    Compares every file's sha256 and every tensor's presence, shape and type with the manifest, and runs the
    bundle's self-check. The exit code is 1 when anything differs.
    """
    verdict = services.verify(bundle, cache_dir=cache_dir, reporter=make_reporter(ctx.obj))
    if as_json:
        typer.echo(json.dumps(verdict, ensure_ascii=False, indent=2))
    elif verdict["ok"]:
        if not ctx.obj.quiet:
            typer.echo(f"{bundle}: whole ({verdict['files']} files, {verdict['tensors']} tensors)")
    else:
        for problem in verdict["problems"]:
            typer.echo(f"{problem['file']}: {problem['what']}")
        count = len(verdict["problems"])
        what = f"{bundle} differs from its manifest ({count} problem{'s' if count > 1 else ''})"
        typer.echo(f"adapt: error: {what}. Fetch or convert it again", err=True)
    if not verdict["ok"]:
        raise typer.Exit(1)
