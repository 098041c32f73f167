"""Where one result goes: stdout, or a new file."""

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import UsageError
from ..runtime.file_lock import lock_file

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What a file system without locks says; there nothing guards a file."""


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
    with alone(output), output.open("w", encoding="utf-8", newline="\n") as stream:
        yield stream


@contextmanager
def alone(output: Path | None) -> Iterator[None]:
    """Keep a file that is written bit by bit from other processes. Raises UsageError where one is writing it.

    A file that is missing is made; where an error ends the work before anything is in it, it goes again.
    """
    new = output is not None and not output.exists()
    if output is None or not (new or output.is_file()):  # a pipe or a device: whoever reads it sees to that
        yield
        return
    handle = _locked(output)
    try:
        yield
    except BaseException:
        if new and output.is_file() and not output.stat().st_size:
            output.resolve().unlink()  # still locked: nobody else has begun with it
        raise
    finally:
        if handle is not None:
            os.close(handle)


def _locked(output: Path) -> int | None:
    try:
        return lock_file(output)
    except BlockingIOError:
        what = f"another process is writing {output}"
        raise UsageError(what, "Wait for it, or choose another name with -o") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None


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
