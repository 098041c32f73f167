"""Run by test_writer in a process of its own: one conversion, killed where it is told to be.

SOURCE, OUTPUT, FORCE and DIE_AT (None, or the number of the file operation that must not happen) come as globals.
"""

import importlib.util
import os
import signal
import stat
import sys
from pathlib import Path

_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"})


def die_at(number: int) -> None:
    """Die of SIGKILL just before the n-th file operation from now on; before a sync, half of the file is lost too."""
    seen = [0]
    fsync = os.fsync

    def count() -> bool:
        seen[0] += 1
        return seen[0] == number

    def hook(event: str, _: tuple) -> None:
        if event in _EVENTS and count():
            os.kill(os.getpid(), signal.SIGKILL)

    def torn(handle: int) -> None:
        if count():
            status = os.fstat(handle)
            if stat.S_ISREG(status.st_mode):
                os.ftruncate(handle, status.st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)

    os.fsync = torn
    sys.addaudithook(hook)


def main(source: str, output: str, *, force: bool, number: int | None) -> None:
    path = Path(__file__).parents[1] / "bundle_factory.py"
    spec = importlib.util.spec_from_file_location("bundle_factory", path)
    assert spec is not None
    assert spec.loader is not None
    factory = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(factory)
    if number is not None:
        die_at(number)
    factory.bundle(Path(source), Path(output), force=force)


if __name__ == "<run_path>":
    main(SOURCE, OUTPUT, force=FORCE, number=DIE_AT)  # noqa: F821 - init_globals of runpy.run_path
