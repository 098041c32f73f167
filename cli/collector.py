"""When Python looks for garbage cycles: not while torch is imported, nor as the program ends.

Importing torch takes longer than everything else before the first token, and makes some 200,000 objects that stay.
Meanwhile the collector looks through them again and again, later in each of its full passes, and several times as
the interpreter ends. It finds nothing there.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext


def import_torch(threads: int | None = None) -> None:
    """Import torch, and set how many threads it computes with."""
    with nullcontext() if "torch" in sys.modules else uncollected():
        import torch  # noqa: PLC0415
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage cycles meanwhile; what is there at the end is left out of all later searches."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def retire_collector() -> None:
    """Leave everything out of the interpreter's last searches: the program ends, and its memory goes as a whole.

    Objects are finalised as ever when their last reference goes; only cycles that nobody reaches are not looked for.
    """
    gc.freeze()
