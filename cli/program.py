"""The group of commands: listed from a table, imported only when called. And how a help page looks.

A command NAME is the module `cli/NAME.py` (hyphens as underscores) with a function `command` and a text `EXAMPLES`.
Help, completion and errors of usage import nothing but Typer and that one module. Typer's rich help is off: it
takes twice the time of everything else here.
"""

import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import UsageError
from . import failures, options
from .groups import flattened, spelling
from .state import State

NAME = "adapt"
NARROW = 52


def _title(text: str) -> str:
    colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return typer.style(text, bold=True) if colored else text


def _build(function: Callable[..., None], name: str | None = None, epilog: str | None = None) -> Any:  # noqa: ANN401
    """Make the command (of Typer's own click) of a function."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    single.command(name, cls=Command, epilog=epilog)(flattened(function))
    return typer.main.get_command(single)


def _finite(then: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make a callback that refuses `nan` and `inf`, which Python takes for numbers and no range keeps out."""

    def check(ctx: Any, param: Any, value: Any) -> Any:  # noqa: ANN401 - Typer's types moved between versions
        if isinstance(value, float) and not math.isfinite(value):
            what = f"{spelling(param, value)} {value} is not a finite number"
            raise UsageError(what, f"Try '{ctx.command_path} --help'")
        return value if then is None else then(ctx, param, value)

    return check


def _narrowed(ctx: Any) -> Any:  # noqa: ANN401 - as above
    """Let a page be narrower than the 50 columns that are otherwise the least."""
    columns = shutil.get_terminal_size().columns
    if columns < NARROW:
        ctx.terminal_width = max(columns - 1, 20)
    return ctx


class Command(TyperCommand):
    """A command whose help groups its options by panel and ends with examples, written as they stand."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - Typer's types moved between versions
        """Write one section for the arguments and one for each panel of options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for title, records in sections.items():
            if not records:
                continue
            with formatter.section(_title(title)):
                formatter.write_dl(records, col_max=min(30, formatter.width // 2))

    def get_help(self, ctx: Any) -> str:  # noqa: ANN401 - as above
        """Return the help page, as narrow as the terminal."""
        return super().get_help(_narrowed(ctx))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - as above
        """Write the examples line by line."""
        del ctx
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog)


class Program(TyperGroup):
    """The commands of a table, name -> one line of help."""

    table: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - passed through
        super().__init__(**settings)
        for name, text in self.table.items():
            self.add_command(TyperCommand(name, short_help=text, help=text), name)

    def get_params(self, ctx: Any) -> Any:  # noqa: ANN401 - Typer's types moved between versions
        """Return the options; Typer's own switches default to False, because Typer loads pydantic to read a None."""
        params = super().get_params(ctx)
        for param in params:
            if param.name in {"help", "install_completion", "show_completion"}:
                param.default = False
        return params

    def get_help(self, ctx: Any) -> str:  # noqa: ANN401 - as above
        """Return the help page, as narrow as the terminal."""
        return super().get_help(_narrowed(ctx))

    def load(self, name: str) -> Any:  # noqa: ANN401 - a click command of Typer's own
        """Import a command's module and build the command."""
        module = import_module(f".{name.replace('-', '_')}", __package__)
        command = _build(module.command, name=name, epilog=f"Examples:\n{module.EXAMPLES.rstrip()}\n")
        for param in _build(options.shared).params:
            param.expose_value = False  # not an argument of the command's function
            command.params.append(param)
        for param in command.params:
            if param.param_type_name == "option":
                param.callback = _finite(param.callback)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - as above
        """Find the command to run or to complete, in full."""
        name, stub, rest = super().resolve_command(ctx, args)
        return name, self.load(name) if stub is not None and name is not None else None, rest

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - as above
        """Write the commands first."""
        with formatter.section(_title("Commands")):
            formatter.write_dl(list(self.table.items()))
        Command.format_options(self, ctx, formatter)  # pyright: ignore[reportArgumentType]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - as above
        """Write the examples line by line."""
        Command.format_epilog(self, ctx, formatter)  # pyright: ignore[reportArgumentType]

    def main(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        *,
        standalone_mode: bool = True,
        **_: object,
    ) -> int:
        """Run the command line; the one place where exceptions become exit codes."""
        del prog_name  # `python -m adapt_llm` is the same program under the same name
        self._main_shell_completion(ctx_args={}, prog_name=NAME, complete_var=complete_var)
        code = self._run(list(sys.argv[1:] if args is None else args))
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, args: list[str]) -> int:
        state = State(args=tuple(args))
        try:
            with self.make_context(NAME, args, obj=state) as ctx:
                self.invoke(ctx)
            sys.stdout.flush()
        except typer.Exit as end:
            return end.exit_code
        except typer.Abort:
            return failures.INTERRUPTED
        except (Exception, KeyboardInterrupt) as error:
            failure = failures.known(error)
            if failure is None:
                raise
            failures.tell(failure, error, verbose=state.verbose)
            return failure.exit_code
        return 0
