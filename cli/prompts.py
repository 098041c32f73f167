"""Where a single prompt comes from: the command line, a file, or stdin. Knows no model."""

import sys
from pathlib import Path
from typing import BinaryIO

from ..errors import FormatError, UsageError
from ..runtime.row_content import has_surrogate

STDIN = "-"
MOST_BYTES = 256 << 20  # what never ends, as /dev/zero does, is refused before memory is full


def piped() -> bool:
    """Tell whether stdin is a pipe or a file, so that reading it does not wait for somebody to type."""
    return sys.stdin is not None and not sys.stdin.isatty()


def read_stdin() -> str:
    """Return all of stdin without its last line ending. Raises FormatError."""
    if sys.stdin is None:
        return ""
    return _text(_read(sys.stdin.buffer, "stdin"), "stdin")


def read_file(path: Path) -> str:
    """Return a file's text without its last line ending. Raises FormatError, UsageError."""
    if str(path) == STDIN:
        return read_stdin()
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "-f takes a text file")
    if not path.exists():
        raise UsageError(f"{path}: no such file", "-f takes a text file")
    with path.open("rb") as file:
        return _text(_read(file, str(path)), str(path))


def _read(file: BinaryIO, name: str) -> bytes:
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UsageError(f"{name} has more than {MOST_BYTES >> 20} MiB", "No prompt is so long; rows go in with -i")
    return data


def _text(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{name} is not UTF-8 text (byte {error.start})", "Convert it, for example with iconv"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def single_prompt(argument: str | None, option: str | None, file: Path | None, *, joined: bool = True) -> str:
    """Return the one prompt. With `joined`, text that is piped in comes before a prompt from the command line.

    Raises UsageError when there is none, or more than one.
    """
    given = [text for text in (argument, option) if text is not None]
    if len(given) + (file is not None) > 1:
        raise UsageError("more than one prompt", "Give it after BUNDLE, or with -p, or with -f")
    if file is not None:
        given = [read_file(file)]
    if not given or given == [STDIN]:
        prompt = read_stdin() if given or piped() else ""
    else:
        prompt = _joined(read_stdin() if joined and piped() and not _is_stdin(file) else "", given[0])
    if has_surrogate(prompt):  # how Python hands over bytes of an argument
        raise UsageError("the prompt is not UTF-8 text", "Convert it, for example with iconv")
    if not prompt.strip():
        raise UsageError("no prompt", "Give one after BUNDLE, with -p or -f FILE, or pipe it in")
    return prompt


def _is_stdin(file: Path | None) -> bool:
    return file is not None and str(file) == STDIN


def _joined(before: str, prompt: str) -> str:
    return f"{before}\n\n{prompt}" if before.strip() else prompt
