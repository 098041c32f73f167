"""Before any work: are disk and memory enough? Knows amounts only, not what they are for."""

import shutil
from pathlib import Path

import psutil

from ..errors import ResourceError

PROGRAM_BYTES = 600 << 20
"""What Python and torch hold before any model."""
RUN_WHOLE = 2 << 30
"""Bytes of weights up to which a model is held in memory whole where its blocks are needed more than once."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def human(count: float) -> str:
    """A number of bytes as people read it: `6.73 GiB`."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.2f} {_UNITS[unit]}"


def check_disk(target: Path, needed: int) -> None:
    """Raise ResourceError unless the file system that will hold `target` has `needed` free bytes."""
    folder = next(parent for parent in (target.absolute(), *target.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"Not enough disk for {target}: {human(needed)} needed, {human(free)} free, {human(needed - free)} short",
            "Free some, or choose another folder with -o.",
        )


def check_memory(needed: int, *, available: int | None = None) -> None:
    """Raise ResourceError unless `needed` bytes of memory are available (what the system says, when not given)."""
    free = psutil.virtual_memory().available if available is None else available
    if free < needed:
        raise ResourceError(
            f"Not enough memory: {human(needed)} needed, {human(free)} available, {human(needed - free)} short",
            "Close other programs, or use a machine with more memory.",
        )
