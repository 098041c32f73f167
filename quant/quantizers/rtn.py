"""Rounding to nearest, with the clipping range of each group searched for the least squared error."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Int4Matrix, resolve_group_size
from .grid import check_weight, encode, search_grid


@dataclass(frozen=True)
class RoundToNearest:
    """Needs no calibration; with a Hessian, its diagonal weighs the errors of the inputs."""

    name: str = "rtn"
    calibrated: bool = False
    float_zeros: bool = False

    def __call__(
        self, weight: Tensor, *, group_size: int, hessian: Tensor | None = None, symmetric: bool = False
    ) -> Int4Matrix:
        """See `Quantizer`."""
        weight = check_weight(weight)
        size = resolve_group_size(weight.shape[1], group_size)
        importance = None if hessian is None else hessian.diagonal()
        scales, zeros = search_grid(weight, size, symmetric=symmetric, importance=importance)
        return Int4Matrix(encode(weight, scales, zeros, size), scales, zeros.to(torch.uint8), size)
