"""One process at a time in a folder. Knows nothing of what is done there."""

import os
import shutil
from pathlib import Path

from ..errors import UsageError
from ..runtime.file_lock import lock_file


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
                handle = lock_file(self._path)
            except FileNotFoundError:  # another process has just finished and removed the folder
                continue
            except BlockingIOError:
                what = f"{self._holder()} is at work in {self._folder}"
                raise UsageError(what, "Wait for it, or choose another folder with -o.") from None
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode("ascii"), 0)
            return handle

    def _holder(self) -> str:
        try:
            number = self._path.read_bytes()[:32].decode("ascii", "replace").strip()
        except FileNotFoundError:  # it has just finished
            number = ""
        return f"Process {number}" if number else "Another process"

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
