"""Half-quadratic quantisation: float zeros that are robust to outlying weights.

After Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models": the scale is that of the
range; the zero minimises the l_p norm (p = 0.7) of the error by alternating a shrinkage step and a mean.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..layout import Int4Matrix, resolve_group_size, round_scale, round_zero
from .grid import LEVELS, by_rows, check_weight, encode

_NORM = 0.7
_BETA = 10.0
_KAPPA = 1.01
_STEPS = 20
_LARGEST_ZERO = 128


@dataclass(frozen=True)
class HalfQuadratic:
    """Needs no calibration; the zeros are real numbers and stored as `zeros` instead of `qzeros`."""

    name: str = "hqq"
    calibrated: bool = False
    float_zeros: bool = True

    def __call__(
        self, weight: Tensor, *, group_size: int, hessian: Tensor | None = None, symmetric: bool = False
    ) -> Int4Matrix:
        """See `Quantizer`; `hessian` is not used, `symmetric` is refused."""
        del hessian
        if symmetric:
            raise UnsupportedError("hqq has float zeros and no symmetric form", "Use rtn or gptq for symmetric files")
        weight = check_weight(weight)
        size = resolve_group_size(weight.shape[1], group_size)
        scales, zeros = by_rows(weight, size, _optimise)
        return Int4Matrix(encode(weight, scales, zeros, size), scales, zeros, size)


def _optimise(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros [rows, G] of weights [rows, G, group]; of the steps, each group keeps its best."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # A group far from 0 with a small range would need a zero that bf16 cannot hold to a fraction of a step.
    scale = round_scale(torch.maximum((high - low) / LEVELS, torch.maximum(high.abs(), low.abs()) / _LARGEST_ZERO))
    exact = groups / scale
    zero = round_zero(-low / scale)
    best_zero, best_error = zero, torch.full_like(zero, torch.inf)
    beta = _BETA
    for _ in range(_STEPS):
        level = (exact + zero).round_().clamp_(0, LEVELS)
        error = (exact - level).add_(zero)  # in units of the scale
        total = error.abs().sum(-1, keepdim=True)
        better = total < best_error
        best_zero, best_error = torch.where(better, zero, best_zero), torch.where(better, total, best_error)
        if not bool(better.any()):
            break
        level.sub_(exact).add_(_shrink(error.mul_(scale), beta).div_(scale))
        zero = round_zero(level.mean(-1, keepdim=True))
        beta *= _KAPPA
    return scale.squeeze(-1), best_zero.squeeze(-1)


def _shrink(error: Tensor, beta: float) -> Tensor:
    """The generalised soft threshold of the l_p norm (equation 6 of the source)."""
    size = error.abs()
    kept = size.sub(size.clamp_min(1e-12).pow_(_NORM - 1).div_(beta)).relu_()
    return kept.copysign_(error)
