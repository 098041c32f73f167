"""Blocks that a conversion reads texts through and does not change: in which dtype, and whether they stay in memory.

Knows sources and sizes; no method.
"""

from math import prod

import psutil
import torch

from ..runtime.architecture import Architecture
from ..runtime.classify_loading import document_blocks
from ..runtime.decoder import Decoder, load_frame
from ..runtime.methods import River
from ..runtime.store import TensorStore
from .opening import Opened
from .preflight import RUN_WHOLE

ROWS = 2048
"""Tokens that go through a block at once."""


def reading_dtype(opened: Opened) -> torch.dtype:
    """float32 on a CPU that has the memory (the fastest for many rows), else what was asked for."""
    automatic = opened.request.dtype == "auto" and opened.device.type == "cpu"
    weights = torch.float32.itemsize * sum(prod(shape) for shape in opened.arch.tensors().values())
    return torch.float32 if automatic and weights < psutil.virtual_memory().total // 2 else opened.dtype


def keeps_blocks(arch: Architecture, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether blocks stay in memory once they are read; else they are read again for every passage."""
    budget = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else RUN_WHOLE
    return dtype.itemsize * sum(_numbers(arch, index) for index in range(arch.num_layers)) <= budget


def frozen_frame(opened: Opened, store: TensorStore, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model as texts run through it: a River bundle's exit layers stand in for the blocks that have one."""
    bundle, arch = opened.bundle, opened.arch
    river = None if bundle is None else bundle.manifest.method(River)
    exits = None if bundle is None or river is None else (bundle.river, river)
    keep = keeps_blocks(arch, dtype, device)
    blocks = document_blocks(arch, store, exits, device=device, dtype=dtype, keep=keep)
    return load_frame(arch, store, blocks, device=device, dtype=dtype)


def reading_memory(opened: Opened) -> int:
    """Bytes of host memory that reading texts takes, estimated."""
    return running_memory(opened.arch, reading_dtype(opened), opened.device)


def running_memory(arch: Architecture, dtype: torch.dtype, device: torch.device, *, rows: int = ROWS) -> int:
    """Bytes of host memory of a pass of so many rows, estimated: embedding and head, all blocks or two, activations.

    Two, since one is read while another is in use.
    """
    kept = device.type == "cpu" and keeps_blocks(arch, dtype, device)
    blocks = [_numbers(arch, index) for index in range(arch.num_layers)]
    numbers = arch.vocab_size * arch.hidden_size * (1 if arch.tied else 2)
    numbers += sum(blocks) if kept else 2 * max(blocks)
    return dtype.itemsize * (numbers + 8 * rows * arch.intermediate_size)


def _numbers(arch: Architecture, index: int) -> int:
    return sum(prod(shape) for shape in arch.block_tensors(index).values())
