"""Where the turns of a chat come from: a person at a terminal, or lines that are piped in.

Knows no model. prompt_toolkit is imported when a terminal is there.
"""

import sys
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'
PROMPT = ">>> "
CONTINUED = "... "


class Lines(Protocol):
    """A source of lines."""

    interactive: bool

    def read(self, prompt: str) -> str:
        """Return the next line. Raises EOFError at the end, KeyboardInterrupt when a person has enough."""
        ...


def open_lines() -> Lines:
    """Return the source of lines that stdin is."""
    if sys.stdin is not None and sys.stdin.isatty():
        return TerminalLines()
    return PipedLines()


def read_turn(lines: Lines) -> str:
    """Return one turn; three quotes begin and end one of several lines. Raises EOFError."""
    line = lines.read(PROMPT)
    if not line.lstrip().startswith(QUOTES):
        return line
    collected = [line.lstrip().removeprefix(QUOTES)]
    while not collected[-1].rstrip().endswith(QUOTES):
        try:
            collected.append(lines.read(CONTINUED))
        except EOFError:
            break  # a quote that was never closed ends with the input
    text = "\n".join(collected).rstrip()
    return text.removesuffix(QUOTES).strip("\n")


class PipedLines:
    r"""Scripted turns: one a line, no prompt shown. Lines end at `\n` only."""

    interactive = False

    def read(self, prompt: str) -> str:
        """See `Lines.read`."""
        del prompt
        data = sys.stdin.buffer.readline() if sys.stdin is not None else b""
        if not data:
            raise EOFError
        try:
            return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise FormatError(f"stdin is not UTF-8 text (byte {error.start} of a line)") from error


class TerminalLines:
    """A line editor with history. Alt-Enter puts in a line break; Ctrl-C clears a line that has text."""

    interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession  # noqa: PLC0415 - only for a terminal
        from prompt_toolkit.output import create_output  # noqa: PLC0415

        # What is typed is not the result: it stays on the terminal when stdout goes elsewhere.
        stream = sys.stdout if sys.stdout.isatty() else sys.stderr
        self._session: PromptSession[str] = PromptSession(
            key_bindings=_bindings(), output=create_output(stdout=stream), prompt_continuation=CONTINUED
        )

    def read(self, prompt: str) -> str:
        """See `Lines.read`."""
        return self._session.prompt(prompt)


def _bindings() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415

    bindings = KeyBindings()
    keys: list[tuple[tuple[str, ...], Callable[[Any], None]]] = [
        (("escape", "enter"), lambda event: event.current_buffer.insert_text("\n")),
        (("c-c",), _interrupt),
    ]
    for names, handler in keys:
        bindings.add(*names)(handler)
    return bindings


def _interrupt(event: Any) -> None:  # noqa: ANN401 - prompt_toolkit's KeyPressEvent, which is not imported here
    if event.current_buffer.text:
        event.current_buffer.reset()
    else:
        event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
