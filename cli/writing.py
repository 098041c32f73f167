"""Where one result goes: stdout, or a new file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import UsageError


def check_new(output: Path | None, *, force: bool) -> None:
    """Refuse to write over a file that is not empty. Raises UsageError."""
    if output is not None and output.exists() and output.stat().st_size and not force:
        raise UsageError(f"{output} is there already", "Replace it with --force")


@contextmanager
def destination(output: Path | None) -> Iterator[TextIO]:
    """Open `output`, or give stdout for None."""
    if output is None:
        yield sys.stdout
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8", newline="\n") as stream:
        yield stream


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    beside.replace(path)
