"""The slash commands of a chat. Knows the conversation by its methods, and nothing of terminals or models."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from . import services
from .generation import Choices, report

if TYPE_CHECKING:
    from ..runtime.conversation import Conversation
    from ..runtime.stream import GenerationStats

HELP = '''\
/help            this list
/exit            leave (also /quit, /bye, Ctrl-D)
/clear           forget the conversation
/regen           answer again
/save FILE       write the conversation (JSON)
/load FILE       continue a saved conversation
/system [TEXT]   show or set the system message
/set [NAME=VALUE]  show or set how tokens are chosen
/stats           figures of the last answer
"""text"""       several lines
A line that begins with a space is never a command. Ctrl-C stops an answer.'''

_COMMAND = re.compile(r"/([A-Za-z?][\w-]*)(?:\s+(.*))?", re.DOTALL)


@dataclass
class Chat:
    """What the commands work on."""

    conversation: "Conversation"
    choices: Choices = field(default_factory=Choices)
    stats: "GenerationStats | None" = None
    memory: Callable[[], int | None] = lambda: None
    finished: bool = False
    again: bool = False
    """Set by /regen: the last message is to be answered anew."""


def is_command(line: str) -> bool:
    """Tell whether a line is a command, or looks like one."""
    return line.startswith("/") and len(line) > 1 and not line[1].isspace()


def execute(chat: Chat, line: str) -> Iterator[str]:
    """Carry out a command; yield what it has to say. Raises UsageError, and what the conversation raises."""
    found = _COMMAND.fullmatch(line.strip())
    action = _ACTIONS.get(found[1].lower()) if found else None
    if found is None or action is None:
        word = line.split(maxsplit=1)[0]
        raise UsageError(f"there is no command {word}", "See /help; begin with a space to say it to the model")
    yield from action(chat, (found[2] or "").strip())


def _help(_chat: Chat, _argument: str) -> Iterator[str]:
    yield from HELP.split("\n")


def _exit(chat: Chat, _argument: str) -> Iterator[str]:
    chat.finished = True
    yield from ()


def _clear(chat: Chat, _argument: str) -> Iterator[str]:
    chat.conversation.clear()
    yield "forgotten"


def _regen(chat: Chat, _argument: str) -> Iterator[str]:
    chat.again = True
    yield from ()


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise UsageError(f"/{name} needs a file name")
    return Path(argument).expanduser()


def _save(chat: Chat, argument: str) -> Iterator[str]:
    path = _path(argument, "save")
    chat.conversation.save(path)
    yield f"saved to {path}"


def _load(chat: Chat, argument: str) -> Iterator[str]:
    path = _path(argument, "load")
    chat.conversation.load(path)
    turns = chat.conversation.turns
    yield f"{turns} turn{'' if turns == 1 else 's'} from {path}"


def _system(chat: Chat, argument: str) -> Iterator[str]:
    if argument:
        chat.conversation.system = argument
        yield "the system message holds from the next turn on"
    else:
        yield chat.conversation.system or "no system message"


def _set(chat: Chat, argument: str) -> Iterator[str]:
    if argument:
        choices = chat.choices.set(argument)
        services.generation_options(choices)  # refuse impossible values here, not at the next turn, if there is one
        chat.choices = choices
    else:
        yield from chat.choices.lines()


def _stats(chat: Chat, _argument: str) -> Iterator[str]:
    if chat.stats is None:
        raise UsageError("nothing was answered yet")
    yield from report(chat.stats, chat.memory())


_ACTIONS: dict[str, Callable[[Chat, str], Iterator[str]]] = {
    "help": _help,
    "?": _help,
    "exit": _exit,
    "quit": _exit,
    "bye": _exit,
    "clear": _clear,
    "regen": _regen,
    "save": _save,
    "load": _load,
    "system": _system,
    "set": _set,
    "stats": _stats,
}
