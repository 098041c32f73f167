"""How a bundle is to be run, and how it is to answer, as data. Imports no tensors: a command line builds it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
                raise UsageError(f"{flag_of(name)} {value} is not possible", "Give 1 or more.")
        if self.gpu_memory is not None and self.resident is not None:
            raise UsageError("--gpu-memory and --resident exclude each other", "The memory decides how many blocks.")
        if self.draft is not None and not self.lossless:
            raise UsageError("--draft is for lossless generation", "Say --lossless too.")
        if self.head_bits != 16 and self.lossless:
            what = f"--lossless gives the dense model's text; --head-bits {self.head_bits} gives another"
            raise UsageError(what, "Leave one out.")
        if self.draft is not None and self.draft > LONGEST_DRAFT:
            raise UsageError(f"--draft {self.draft} is not possible", f"Give {LONGEST_DRAFT} or less.")
        if self.tau is not None and self.lossless:
            raise UsageError("--tau says when tokens leave; with --lossless none does", "Leave one out.")
        if self.tau is not None and not -1 <= self.tau <= 1:
            raise UsageError(f"--tau {self.tau} is not possible", "It is a cosine, between -1 and 1.")


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. The defaults are greedy.

    Raises:
        UsageError: a value outside its range.

    """

    temperature: float = 0.0
    """0 = argmax; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches this; 1 = all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one; 0 = all."""
    seed: int | None = None
    """None (or a negative number) = another one each time."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already in the context; 1 = off."""

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, "0 or more", low=0.0)
        _require("top_k", self.top_k, "0 (off) or more", low=0)
        _require("top_p", self.top_p, "above 0 and at most 1", low=0.0, high=1.0, open_low=True)
        _require("min_p", self.min_p, "between 0 and 1", low=0.0, high=1.0)
        # Beyond, what it makes of a logit is no number in float32: the model would be blamed for it.
        _require("repetition_penalty", self.repetition_penalty, "between 0.000001 and 1000000", low=1e-6, high=1e6)

    @property
    def greedy(self) -> bool:
        """Whether no randomness is used."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be cut off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class GenerationOptions:
    """How to answer; see `generate.generate`."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    """None = as many as the context holds."""
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    row: int = 0
    """Number of the text among those of one seed; a conversation counts its own turns."""
    template_variables: tuple[tuple[str, Any], ...] = ()
    """Further variables of the chat template, such as ("enable_thinking", False)."""


def _require(
    name: str, value: float, wanted: str, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    if not math.isfinite(value):
        raise UsageError(f"{flag_of(name)} {value} is not a finite number", f"Give one that is {wanted}.")
    if not low <= value <= high or (open_low and value == low):
        raise UsageError(f"{flag_of(name)} {value} is not possible", f"Give a number that is {wanted}.")


def flag_of(name: str) -> str:
    """How the command line spells a field."""
    return f"--{name.replace('_', '-')}"
