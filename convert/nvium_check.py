"""The self-check of an N-vium bundle: its text through the files as they were written. Knows the runtime."""

from pathlib import Path

import torch

from ..runtime.bundle import JUNCTIONS
from ..runtime.dense import Dense
from ..runtime.junctions import load_junctions
from ..runtime.loading import resolve_dtype
from ..runtime.manifest import SelfCheck
from ..runtime.nvium import Nvium
from ..runtime.self_check import run_dense_check, run_mixture_check
from ..runtime.store import open_files, open_safetensors
from ..runtime.text import Tokenizer
from .frozen_blocks import frozen_frame
from .nvium_plan import Plan

JUNCTIONS_FILE = f"{JUNCTIONS}.safetensors"
CPU = torch.device("cpu")


def self_check(plan: Plan, bundle: Path) -> SelfCheck:
    """Run the text as `verify` does: on the CPU, in the default dtype; a large model without its cache."""
    dtype, tokenizer = resolve_dtype("auto", CPU), Tokenizer.load(bundle)
    store = open_safetensors(bundle) if plan.trains_backbone else plan.source.store
    frame = frozen_frame(plan.opened, store, dtype, CPU)
    if not plan.has_tensors:
        return run_dense_check(Dense(frame), tokenizer, cached=plan.small)
    junctions = load_junctions(
        plan.arch,
        open_files([bundle / JUNCTIONS_FILE]),
        plan.points,
        width=plan.width,
        final_adapter=plan.final_adapter,
        device=CPU,
        dtype=dtype,
    )
    return run_mixture_check(Nvium(frame, junctions), tokenizer, cached=plan.small)
