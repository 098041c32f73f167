"""One process at a time at a file. Knows nothing of what is done there.

The kernel holds the lock for the process (flock), so one that was killed holds nothing.
"""

import fcntl
import os
from pathlib import Path


def lock_file(path: Path) -> int:
    """Open `path` for writing, made empty where it is missing, and lock it; closing the descriptor lets go.

    Raises BlockingIOError where another process has it, FileNotFoundError where its folder is gone.
    """
    while True:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _is_current(path: Path, handle: int) -> bool:
    """False where the file was removed between opening and locking it: that lock would guard nothing."""
    try:
        return path.stat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False
