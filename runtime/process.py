"""What the operating system says of this process. Imports no tensors."""

import sys
from pathlib import Path


def peak_memory() -> int:
    """Return the most memory this process has had so far, in bytes; that of the GPU where one was used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    if sys.platform == "win32":
        import psutil  # noqa: PLC0415

        return int(psutil.Process().memory_info().peak_wset)
    import resource  # noqa: PLC0415 - not on Windows

    if (linux := _high_water_mark()) is not None:
        return linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _high_water_mark() -> int | None:
    """Return the peak of this program alone, on Linux; None elsewhere.

    `ru_maxrss` outlives execve: the child of a large process begins with its parent's peak.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    lines = (line.split() for line in status.splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[:1] == ["VmHWM:"]), None)
