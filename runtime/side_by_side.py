"""Tensors of several sequences taken apart and put together. One sequence alone is the case that has to be cheap."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rows_of(x: Tensor, count: int) -> Sequence[Tensor]:
    """From x [count, ...] to `count` tensors [1, ...]."""
    return (x,) if count == 1 else x.split(1)


def together(parts: Sequence[Tensor]) -> Tensor:
    """From tensors [n, ...] to one, in their order."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
