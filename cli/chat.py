"""`adapt chat`: a conversation in the terminal, or scripted turns from a pipe."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import AdaptError, UsageError
from ..runtime.progress import Reporter
from . import failures, services
from .chat_commands import Chat, execute, is_command
from .chat_input import Lines, open_lines, read_turn
from .console import make_reporter
from .generation import Choices, Raw, Stats, System, check_template, report, sampling
from .groups import Group
from .options import opening

EXAMPLES = """\
  adapt chat qwen-river
  adapt chat qwen-river --system "Answer in Korean." --temperature 0.7
  adapt chat llama-base --chat-template chatml     # a base model has no template of its own
  printf 'Hello\\nAnd in French?\\n' | adapt chat qwen-river
"""


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    system: System = None,
    raw: Raw = False,
    load: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="Continue a conversation saved with /save.")
    ] = None,
    stats: Stats = False,
    choices: Annotated[Choices, Group(sampling)],
    settings: Annotated[dict[str, Any], Group(opening)],
) -> None:
    """Hold a conversation in the terminal.

    /help lists the commands. Ctrl-C stops an answer and keeps what there is of it; at an empty prompt it leaves, as
    Ctrl-D does. Lines that are piped in are turns, answered one after the other.
    """
    reporter = make_reporter(ctx.obj)
    if services.twodee(bundle) is not None:
        hint = "Label texts with `adapt run`, or talk to a bundle of another method"
        raise UsageError(f"{bundle} classifies (2dee); it does not talk", hint)
    check_template(settings["chat_template"], system=system, raw=raw)
    services.generation_options(choices)  # refuse impossible values before the model is loaded
    session = services.open_session(bundle, settings, reporter)
    conversation = session.chat(system, raw=raw)
    chat = Chat(conversation, choices, memory=services.peak_memory)
    if load is not None:
        conversation.load(load)
    lines = open_lines()
    if lines.interactive:
        reporter.note("/help lists the commands; Ctrl-D leaves")
    Loop(chat, lines, reporter, stats=stats).run()


class Loop:
    """Reads turns and answers them until somebody has enough."""

    def __init__(self, chat: Chat, lines: Lines, reporter: Reporter, *, stats: bool) -> None:
        self._chat, self._lines, self._reporter, self._stats = chat, lines, reporter, stats

    def run(self) -> None:
        """Go on to the end of the input, /exit, or Ctrl-C at an empty prompt (KeyboardInterrupt)."""
        while not self._chat.finished:
            try:
                turn = read_turn(self._lines)
            except EOFError:
                return
            try:
                self._take(turn)
            except AdaptError as error:
                if not self._lines.interactive:
                    raise  # a script does not go on after an error
                failure = failures.known(error)
                print(f"adapt: error: {failure.text if failure else error}", file=sys.stderr)

    def _take(self, turn: str) -> None:
        if not turn.strip():
            return
        if not is_command(turn):
            self._answer(turn.strip() if turn.startswith(" ") else turn)
            return
        for line in execute(self._chat, turn):
            print(line, file=sys.stderr)
        if self._chat.again:
            self._chat.again = False
            self._answer(None)

    def _answer(self, text: str | None) -> None:
        """Stream an answer to `text`, or to the last message again."""
        chat = self._chat
        options = services.generation_options(chat.choices)
        before = chat.conversation.dropped
        talk = chat.conversation
        stream = talk.regenerate(options) if text is None else talk.say(text, options)
        if talk.dropped > before:
            self._reporter.warn(f"the oldest {talk.dropped} turns no longer fit in the context and are left out")
        chat.stats = stream.stats
        with closing(stream):
            self._print(stream)
        if self._stats:
            for line in report(stream.stats, chat.memory()):
                print(line, file=sys.stderr)

    def _print(self, stream: Any) -> None:  # noqa: ANN401 - runtime.stream.TokenStream, not imported here
        try:
            for record in stream:
                sys.stdout.write(record.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._lines.interactive:
                raise
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
