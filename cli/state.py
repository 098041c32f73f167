"""What the whole program knows while one command runs: how loud to be. Lives in `ctx.obj`; there are no globals."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


def _debugging() -> bool:
    return os.environ.get("ADAPT_DEBUG", "") not in {"", "0"}


@dataclass
class State:
    """Set by the output options of a command before the command begins."""

    verbose: bool = field(default_factory=_debugging)
    quiet: bool = False
    progress: bool = True
    log_file: Path | None = None
    args: Sequence[str] = ()
    """The command line, without the program's name."""
