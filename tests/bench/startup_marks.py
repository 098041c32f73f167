"""`adapt run` with the clock read where one phase ends and the next begins; for startup.py, which starts it.

python startup_marks.py ARGUMENTS OF adapt RUN...

The answer goes to stdout as ever. The last line of stderr holds the times, by the monotonic clock that all processes
share. Nothing is imported here that the program would not import at that point.
"""

import time

MARKS = {"Python": time.monotonic()}

import json  # noqa: E402 - the clock is read first
import sys  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

from adapt_llm.cli import app, services  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable


def marked(owner: object, name: str, before: str, after: str) -> None:
    """Read the clock before and after a function of a module or class."""
    original: Callable[..., Any] = getattr(owner, name)

    def timed(*args: object, **named: object) -> object:
        MARKS[before] = time.monotonic()
        try:
            return original(*args, **named)
        finally:
            MARKS[after] = time.monotonic()

    setattr(owner, name, timed)


def mark_tokenizer(*args: object) -> object:
    from adapt_llm.runtime.text import Tokenizer  # noqa: PLC0415 - the next that is imported anyway

    marked(Tokenizer, "load", "command line, manifest", "tokenizer")
    return opened(*args)


def mark_session(*args: int | None) -> None:
    imported(*args)
    MARKS["import torch"] = time.monotonic()
    from adapt_llm.runtime import models, session  # noqa: F401, PLC0415 - as above

    marked(session, "load_session", "import the rest", "model")


opened, imported = services.open_session, services.import_torch
services.open_session, services.import_torch = mark_tokenizer, mark_session
sys.argv[0] = "adapt"
try:
    app.main()
finally:
    print(json.dumps(MARKS), file=sys.stderr, flush=True)
