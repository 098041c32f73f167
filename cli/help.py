"""`adapt help`: the help page of a command, or a topic."""

from typing import Annotated

import typer

from ..errors import UsageError

EXIT_CODES = """\
Exit codes:
    0  done
    1  failed
    2  the command line is wrong
    3  finished, but some rows failed
    4  no access: a gated model, a token that is missing or not valid, or offline and not in the cache
    5  not enough memory or disk
  130  stopped with Ctrl-C
  141  whoever read the output closed it (`adapt run … | head`)
  143  stopped with SIGTERM (`kill`): what was begun goes on as after Ctrl-C
"""

ENVIRONMENT = """\
Environment variables:
  HF_TOKEN         access token for the Hugging Face Hub (as --token)
  HF_HOME          where the Hub's cache is (as --cache-dir)
  HF_HUB_OFFLINE   1: never use the network (as --offline)
  NO_COLOR         set: no colours
  ADAPT_DEBUG      1: show tracebacks (as --verbose)
"""

TOPICS = {"exit-codes": EXIT_CODES, "environment": ENVIRONMENT}

EXAMPLES = """\
  adapt help run
  adapt help exit-codes
"""


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    commands = getattr(getattr(ctx.parent, "command", None), "table", {})
    return [name for name in (*commands, *TOPICS) if name.startswith(incomplete)]


def command(
    ctx: typer.Context,
    topic: Annotated[str, typer.Argument(help="A command, or a topic.", autocompletion=_names)] = "",
) -> None:
    """Help on a command, or on a topic: exit-codes, environment."""
    parent = ctx.parent
    if parent is None:
        raise RuntimeError("help is a command of a program")
    if topic in TOPICS:
        typer.echo(TOPICS[topic], nl=False)
        return
    if not topic:
        typer.echo(parent.get_help())
        return
    program = parent.command
    if topic not in getattr(program, "table", {}):
        raise UsageError(f"no command or topic '{topic}'", f"Topics are {', '.join(TOPICS)}")
    found = program.load(topic)  # pyright: ignore[reportAttributeAccessIssue]
    with found.make_context(topic, [], parent=parent, resilient_parsing=True) as page:
        typer.echo(page.get_help())
