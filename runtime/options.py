"""How a bundle is to be run, as data. Imports no tensors, so that a command line can build it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UsageError

Offload = Literal["drop", "stream"]
LONGEST_DRAFT = 15
"""Verified as 16 rows, which take the same kernels on a CPU as one row."""


@dataclass(frozen=True)
class SessionOptions:
    """What holds for as long as a bundle is open. None = decided from the bundle and the machine.

    Raises:
        UsageError: a value that no machine and no bundle could satisfy.

    """

    device: str = "auto"
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    threads: int | None = None
    head_bits: Literal[16, 8] = 16
    """8: the head rounded to 8 bits when the model is loaded (CPU, bf16)."""
    ctx_size: int | None = None
    """Tokens of prompt and answer together."""
    prefill: Literal["exit", "dense"] = "dense"
    """Prompts run through the whole backbone, or leave at one depth by the exit rule (River)."""
    tau: float | None = None
    """Exit threshold, instead of the bundle's."""
    resident: int | None = None
    """Backbone blocks that are loaded at all."""
    offload: Offload = "drop"
    """What becomes of the other blocks: never run, or streamed from host memory (GPU)."""
    lossless: bool = False
    """The river only drafts, the dense model decides (River)."""
    draft: int | None = None
    """Tokens drafted at a time; None = as many as pay (River, lossless)."""
    per_exit_truncation: bool = False
    """Temperature and filters act on the drawn exit's law, instead of on the mixture of all exits (N-vium)."""
    piggyback: bool = True
    """What a token leaves out is run with later tokens; False: at once, for the same tokens (N-vium)."""
    max_deferred: int = 64
    """Tokens that may wait at a junction; the tokens chosen do not depend on it (N-vium)."""
    gpu_memory: str | None = None
    """Device memory to fill with backbone blocks: "auto", "8GiB", "90%"."""
    cuda_graphs: bool = True
    """Decode single texts as CUDA graphs where that can be (GPU; not lossless River, not streamed blocks)."""
    chat_template: str | None = None
    """A file, or a name; instead of the model's own."""
    cache_dir: Path | None = None
    """Hub cache, for bundles that only refer to their backbone."""

    def __post_init__(self) -> None:
        for name in ("threads", "ctx_size", "resident", "max_deferred", "draft"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", "It must be 1 or more.")
        if self.draft is not None and not self.lossless:
            raise UsageError("draft is for lossless generation", "Say --lossless too.")
        if self.head_bits != 16 and self.lossless:
            raise UsageError("lossless gives the dense model's text; a head in 8 bits gives another", "Leave one out.")
        if self.draft is not None and self.draft > LONGEST_DRAFT:
            raise UsageError(f"draft is {self.draft}", f"It must be {LONGEST_DRAFT} or less.")
        if self.tau is not None and self.lossless:
            raise UsageError("tau says when tokens leave; lossless, none does", "Leave out --tau or --lossless.")
        if self.tau is not None and not -1 <= self.tau <= 1:
            raise UsageError(f"tau is {self.tau}", "It is a cosine, between -1 and 1.")
