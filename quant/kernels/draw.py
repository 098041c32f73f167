"""One token from logits in one call: drawn (softmax in float64, inverted), or the greatest.

Knows no filters and keeps no randomness.
"""

from functools import cache

import torch
from torch import Tensor

from . import native


def fits(logits: Tensor) -> bool:
    """Whether the calls below take these: contiguous float32 [V] on the CPU, and there is a native module."""
    plain = logits.dtype is torch.float32 and logits.is_cpu and logits.dim() == 1 and logits.is_contiguous()
    return plain and logits.shape[0] > 0 and native.available()


def draw(logits: Tensor, temperature: float, uniform: float, *, wide: bool | None = None) -> int:
    """Invert the cumulative softmax(logits / temperature) at `uniform` in [0, 1), ids in order; -1 where there is none.

    There is none where the greatest logit is not finite, or one is NaN. `logits` must fit; `wide` False takes plain C.
    """
    choice = _wide() if wide is None else wide
    return native.library().module.draw(choice, logits.data_ptr(), logits.shape[0], temperature, uniform)


def greatest(logits: Tensor, *, wide: bool | None = None) -> int:
    """Index of the greatest, the lowest one on ties; -1 where it is not finite, or one is NaN. `logits` must fit."""
    choice = _wide() if wide is None else wide
    return native.library().module.greatest(choice, logits.data_ptr(), logits.shape[0])


@cache
def _wide() -> bool:
    """Whether vectors may be used: an instruction set other than plain C has passed its check."""
    return native.instruction_sets()[0] != "scalar"
