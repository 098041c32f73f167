"""GPTQ: rounding column by column, each column corrected for the errors of those before it.

After Frantar et al. 2022, "GPTQ" (lazy blocks, damping, act-order), in the equivalent form of Chee et al. 2023,
"QuIP" (LDLQ, theorem 6): with H = U D Uᵀ, U unit upper triangular, column k is rounded after adding the errors of
columns before it times U[:k, k]. This needs one Cholesky factor and no inverse of H.

Groups are static: scales and zeros come from the weight before any correction, so columns may be taken in the order of
their activations while groups stay consecutive in the file.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import AdaptError
from ..layout import Int4Matrix, resolve_group_size
from .grid import LEVELS, check_weight, search_grid

_BLOCK = 128
_DAMPS = (0.05, 0.2, 1.0, 5.0)  # of the mean diagonal; the first that factorises


@dataclass(frozen=True)
class Gptq:
    """Needs the Hessian of its input."""

    name: str = "gptq"
    calibrated: bool = True
    float_zeros: bool = False

    def __call__(
        self, weight: Tensor, *, group_size: int, hessian: Tensor | None = None, symmetric: bool = False
    ) -> Int4Matrix:
        """See `Quantizer`; ValueError without a Hessian [K, K]."""
        weight = check_weight(weight)
        K = weight.shape[1]
        if hessian is None or hessian.shape != (K, K):
            found = None if hessian is None else tuple(hessian.shape)
            raise ValueError(f"gptq needs a Hessian of shape {(K, K)}, not {found}")
        size = resolve_group_size(K, group_size)
        hessian = hessian.to(weight.device, torch.float32)
        # The root of the diagonal: halfway between plain errors, which ignore what the inputs do, and the diagonal
        # itself, which ignores that later columns make up for errors. Best of the three on held-out activations.
        importance = hessian.diagonal().clamp(min=0).sqrt()
        scales, zeros = search_grid(weight, size, symmetric=symmetric, importance=importance)
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        grid = _Grid(scales.t().contiguous().unbind(), zeros.t().contiguous().unbind(), (order // size).tolist())
        codes = _round_columns(weight, grid, order, feedback_factor(hessian, order))
        return Int4Matrix(codes, scales, zeros.to(torch.uint8), size)


def feedback_factor(hessian: Tensor, order: Tensor) -> Tensor:
    """Uᵀ, unit lower triangular [K, K], of the damped Hessian with its inputs taken in `order`.

    Inputs that are always 0 get the mean diagonal: they are rounded to nearest and correct nothing. Raises AdaptError
    where no damping makes the matrix positive definite.
    """
    backwards = order.flip(0)  # the upper factor is the Cholesky factor of the reversed matrix, reversed
    matrix = hessian[backwards.unsqueeze(1), backwards]
    diagonal = matrix.diagonal()
    alive = diagonal[diagonal > 0]
    mean = float(alive.mean()) if alive.numel() else 1.0
    diagonal[diagonal <= 0] = mean
    added = 0.0
    for damp in _DAMPS:
        diagonal.add_((damp - added) * mean)
        added = damp
        lower, info = torch.linalg.cholesky_ex(matrix)
        if int(info) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            factor = lower.t().flip(0, 1).contiguous()
            return factor.div_(factor.diagonal().clone().unsqueeze(1))
    raise AdaptError("the calibration statistics cannot be factorised", "Use rtn or hqq, or other calibration text")


@dataclass(frozen=True)
class _Grid:
    """Scales and zeros [N] of each group, and the group of each column in rounding order."""

    scales: Sequence[Tensor]
    zeros: Sequence[Tensor]
    groups: Sequence[int]


@dataclass(frozen=True)
class _Block:
    """Columns `start` to `stop` of the rounding order, as rows of [B, N]; `errors` and `codes` are filled."""

    start: int
    original: Tensor
    target: Tensor
    errors: Tensor
    codes: Tensor


def _round_columns(weight: Tensor, grid: _Grid, order: Tensor, factor: Tensor) -> Tensor:
    """Codes uint8 [N, K]. Columns are rows here ([K, N], contiguous), in the order in which they are rounded."""
    columns = weight.t()[order].contiguous()
    errors = torch.empty_like(columns)
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, columns.shape[0], _BLOCK):
        rows = slice(start, start + _BLOCK)
        target = columns[rows]
        if start:
            target = torch.addmm(target, factor[rows, :start], errors[:start])
        block = _Block(start, columns[rows], target, errors[rows], codes[rows])
        _round_block(block, factor[rows, rows].contiguous(), grid)
    out = torch.empty_like(codes)
    out[order] = codes
    return out.t().contiguous()


def _round_block(block: _Block, factor: Tensor, grid: _Grid) -> None:
    errors = block.errors.t()
    for i in range(factor.shape[0]):
        group = grid.groups[block.start + i]
        scale, zero = grid.scales[group], grid.zeros[group]
        wanted = torch.addmv(block.target[i], errors[:, :i], factor[i, :i]) if i else block.target[i]
        level = (wanted / scale).add_(zero).round_().clamp_(0, LEVELS)
        block.codes[i] = level
        torch.sub(block.original[i], level.sub_(zero).mul_(scale), out=block.errors[i])
