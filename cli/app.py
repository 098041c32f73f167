"""The program `adapt`: its table of commands and its entry point.

Imports no command, and nothing heavier than Typer.
"""

import os
import sys
from typing import Annotated, ClassVar, TextIO

import typer

from .. import __version__
from .collector import retire_collector
from .program import NAME, Program

EXAMPLES = """\
  adapt convert Qwen/Qwen2.5-Coder-0.5B-Instruct --method river -o qwen-river
  adapt run qwen-river "Write a function that reverses a list"
  adapt chat qwen-river
"""


class Adapt(Program):
    """All commands. A new one is its module and a line here."""

    table: ClassVar = {
        "convert": "Build a bundle from a model.",
        "run": "Generate from a prompt or give a text its label; or many rows.",
        "chat": "Hold a conversation in the terminal.",
        "inspect": "Show what is in a bundle.",
        "verify": "Check that a bundle is whole.",
        "bench": "Measure how fast a bundle is.",
        "eval": "Measure what a bundle's answers are worth.",
        "tune": "Choose how fast and how good a bundle is.",
        "export": "Write a bundle in a form that other programs load.",
        "help": "Help on a command, or on a topic: exit-codes, environment.",
    }


app = typer.Typer(
    name=NAME,
    cls=Adapt,
    help="Convert decoder-only language models into adaptive ones, and run them.",
    epilog=f"Examples:\n{EXAMPLES}\n'adapt COMMAND --help' shows more; 'adapt help exit-codes' what a status means.\n",
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Option names only: Typer applies this to names and to the choices of an option, which have no underscore.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - answered by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def _utf8(stream: TextIO | None) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="replace")


def _stand_in() -> None:
    """Open what the program was started without (`>&-`): the next file opened would take its number, and the output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # the lowest free number is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the end
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the end


def main() -> None:
    """Run the program; text is UTF-8 whatever the locale."""
    _stand_in()
    for stream in (sys.stdout, sys.stderr):
        _utf8(stream)
    try:
        app()
    finally:
        retire_collector()


if __name__ == "__main__":
    main()
