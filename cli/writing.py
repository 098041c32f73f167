"""Where one result goes: stdout, or a new file."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import UsageError


def check_new(output: Path | None, *, force: bool) -> None:
    """Refuse, before the work, a file that is not empty, and a place where none can be made. Raises UsageError."""
    if output is None:
        return
    if output.is_file() and output.stat().st_size and not force:
        raise UsageError(f"{output} is there already", "Replace it with --force")
    check_place(output)


def check_place(output: Path) -> None:
    """Refuse a place where no file can be made; a folder that is missing is a mistyped one. Raises UsageError."""
    if output.is_dir():
        raise UsageError(f"{output} is a folder", "Give the name of a file")
    if output.exists() and not os.access(output, os.W_OK):
        raise UsageError(f"{output} cannot be written", "Choose another name, or change its permissions")
    folder = output.absolute().parent
    if not folder.exists():
        raise UsageError(
            f"There is no folder {output.parent}", f"Make it first, or choose another place for {output.name}"
        )
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", f"Choose another place for {output.name}")
    if not output.exists() and not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder} cannot be written", f"Choose another place for {output.name}")


@contextmanager
def destination(output: Path | None) -> Iterator[TextIO]:
    """Open `output`, or give stdout for None."""
    if output is None:
        yield sys.stdout
        return
    with output.open("w", encoding="utf-8", newline="\n") as stream:
        yield stream


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file, whole or not at all; into a pipe or a device, which must not be replaced, as it is."""
    data = content if isinstance(content, bytes) else content.encode("utf-8")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        path.write_bytes(data)
        return
    target = path.resolve()  # a link stays one
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")  # nobody's own file
    try:
        beside.write_bytes(data)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
