"""From an exception to one line on stderr and an exit code. Unknown errors are not for here: they keep their traceback.

0 done, 1 failed, 2 usage, 3 finished but some rows failed, 4 no access, 5 not enough memory or disk,
130 interrupted, 141 the reader of the output went away.
"""

import contextlib
import errno
import os
import sys
import traceback
from dataclasses import dataclass

from ..errors import AdaptError

SOME_ROWS_FAILED = 3
OUT_OF_RESOURCES = 5
INTERRUPTED = 130
PIPE_CLOSED = 141

_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class Failure:
    """What is said and how the program ends. An empty text says nothing."""

    text: str
    exit_code: int


def known(error: BaseException) -> Failure | None:
    """Return what to say about an error that a user can act on, None for a defect of the program."""
    if isinstance(error, KeyboardInterrupt):
        return Failure("", INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        return Failure("", PIPE_CLOSED)
    if isinstance(error, AdaptError):
        return Failure(_sentences(error.message, error.hint), error.exit_code)
    if callable(getattr(error, "format_message", None)):
        return _usage(error)
    return _system(error)


def _sentences(message: str, hint: str) -> str:
    """Put both on one line, with one mark between them."""
    first = " ".join(message.split())
    if hint and not first.endswith(("?", "!")):
        first = f"{first.rstrip('. ')}."
    return f"{first} {' '.join(hint.split())}".rstrip()


def _usage(error: BaseException) -> Failure:
    """Describe an error of Typer's own parser, which has these attributes in every version."""
    message = str(error.format_message()).replace("Value error, ", "")  # pyright: ignore[reportAttributeAccessIssue]
    context = getattr(error, "ctx", None)
    hint = f"Try '{context.command_path} --help'" if context is not None else ""
    return Failure(_sentences(message, hint), int(getattr(error, "exit_code", 2)))


def _out_of_memory(error: BaseException) -> bool:
    """Tell also torch's errors, without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _system(error: BaseException) -> Failure | None:
    """Describe what the operating system refused."""
    if _out_of_memory(error):
        return Failure("not enough memory. Close other programs, or ask for less with --ctx-size", OUT_OF_RESOURCES)
    if not isinstance(error, OSError):
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno in _FULL:
        return Failure(f"{where}the disk is full. Free some space, or write elsewhere with -o", OUT_OF_RESOURCES)
    if error.errno == errno.EFBIG:
        text = f"{where}a file reached the size that is allowed. See `ulimit -f`, or write to another file system"
        return Failure(text, OUT_OF_RESOURCES)
    return Failure(f"{where}{error.strerror}", AdaptError.exit_code) if where else None


def tell(failure: Failure, error: BaseException, *, verbose: bool) -> None:
    """Write the one line, below the traceback when it is asked for, and leave stdout in a state that can be closed."""
    if failure.exit_code == PIPE_CLOSED:
        _abandon_stdout()
        return
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    if verbose and failure.text:
        traceback.print_exception(error, file=sys.stderr)
    if failure.text:
        print(f"adapt: error: {failure.text}", file=sys.stderr)
    elif sys.stderr.isatty():
        print(file=sys.stderr)  # the shell's prompt begins on its own line, not after ^C


def _abandon_stdout() -> None:
    """Point stdout at nothing, so that the flush at exit does not complain a second time."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.stdout.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
