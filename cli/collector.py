"""While torch is imported: no search for garbage cycles, and no Ctrl-C in its midst. Nor a search as the program ends.

Importing torch takes longer than everything else before the first token, and makes some 200,000 objects that stay.
Meanwhile the collector looks through them again and again, later in each of its full passes, and several times as
the interpreter ends. It finds nothing there.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def import_torch(threads: int | None = None) -> None:
    """Import torch, and set how many threads it computes with."""
    if "torch" not in sys.modules:
        with uninterrupted(), uncollected():
            import torch  # noqa: PLC0415
    if threads is not None:
        import torch  # noqa: PLC0415

        torch.set_num_threads(threads)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a Ctrl-C wait for the end: C++ that calls Python meanwhile loses it, or ends the program by abort.

    A second one is not waited for. Outside of the main thread, and where it is ignored, there is nothing to
    hold back.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield
        return
    pressed: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        if pressed:
            os._exit(128 + number)
        pressed.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


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
    Triton's compiler, which torch's optimisers import, prints a page on stderr about its objects in such cycles.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()
