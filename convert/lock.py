"""One process at a time in a folder. Knows nothing of what is done there.

The kernel holds the lock for the process (flock), so one that was killed holds nothing.
"""

import fcntl
import os
import shutil
from pathlib import Path

from ..errors import UsageError


class FolderLock:
    """Creates `folder` if needed and holds its lock until `release`. UsageError where another process has it."""

    NAME = "lock"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / self.NAME
        self._handle: int | None = self._acquire()

    def _acquire(self) -> int:
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:  # another process has just finished and removed the folder
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
                os.close(handle)
                who = f"Process {holder}" if holder else "Another process"
                what = f"{who} is at work in {self._folder}"
                raise UsageError(what, "Wait for it, or choose another folder with -o.") from None
            if self._is_current(handle):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
                return handle
            os.close(handle)

    def _is_current(self, handle: int) -> bool:
        """False where the file was removed between opening and locking it: that lock would guard nothing."""
        try:
            return self._path.stat().st_ino == os.fstat(handle).st_ino
        except FileNotFoundError:
            return False

    @property
    def held(self) -> bool:
        """Whether it was not released yet."""
        return self._handle is not None

    def release(self, *, remove_if_empty: bool = False) -> None:
        """Let go; with `remove_if_empty` the folder goes too when nothing but the lock is in it."""
        if self._handle is None:
            return
        if remove_if_empty and {item.name for item in self._folder.iterdir()} <= {self.NAME}:
            shutil.rmtree(self._folder)
        os.close(self._handle)
        self._handle = None
