"""Torch's largest library is mapped by a thread while a tokenizer is read, which needs no torch.

`import torch` maps and relocates libtorch_cpu with the interpreter's lock held, and runs its C++ initialisers: a
quarter of a second in which no Python runs, though nothing there needs Python. Done before, by the same calls to the
system's loader in the same order, the import finds the library in place. Reading a tokenizer takes as long, with the
lock held. Knows torch's folder and its file names; imports no torch, and knows no commands.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.text import Tokenizer


def tokenizer_beside_torch(folder: Path) -> "Tokenizer":
    """Read a bundle's tokenizer while torch's library is mapped. Raises FormatError, as `Tokenizer.load` does."""
    from ..runtime.text import Tokenizer, resolve_symbols  # noqa: PLC0415 - whoever needs no model does without

    resolve_symbols()
    with torch_preloading():
        return Tokenizer.load(folder)


@contextmanager
def torch_preloading() -> Iterator[None]:
    """Map libtorch_cpu meanwhile; it is there, or will never be, when the block is left, by an error or not.

    The block should load no compiled module and look up no symbol: the loader has a lock of its own, and whoever
    waits for it waits with the interpreter's. Where there is nothing to map nothing happens, and what is
    wrong with torch is told by its import.
    """
    folder = torch_libraries()
    thread = None if folder is None else _mapping(folder)
    try:
        yield
    finally:
        if thread is not None:
            thread.join()  # the interpreter must not end, and no process fork, while C++ is being initialised


def torch_libraries() -> Path | None:
    """Return torch's folder of libraries, where torch would load libtorch_cpu first and by itself.

    None where torch is already imported or is not there, on systems other than Linux, for builds with an accelerator
    (torch looks for that one's libraries first), and where the environment has torch load everything globally.
    """
    if sys.platform != "linux" or "torch" in sys.modules or os.environ.get("TORCH_USE_RTLD_GLOBAL"):
        return None
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "lib"
    accelerated = any(folder.glob("libc10_*.so"))  # libc10_cuda, libc10_hip, libc10_xpu
    return None if accelerated or not (folder / "libtorch_cpu.so").exists() else folder


def _mapping(folder: Path) -> threading.Thread | None:
    """Start to map libtorch_cpu, with the flags of torch's own import. None where the loader refuses what it needs."""
    try:
        ctypes.CDLL(str(folder / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
        load = ctypes.CDLL(None).dlopen  # as a foreign function: `ctypes.CDLL(path)` keeps the interpreter's lock
    except (OSError, AttributeError):
        return None
    load.argtypes = (ctypes.c_char_p, ctypes.c_int)
    load.restype = ctypes.c_void_p
    library = os.fsencode(folder / "libtorch_cpu.so")
    thread = threading.Thread(target=load, args=(library, sys.getdlopenflags()), name="preload-torch")
    thread.start()
    return thread
