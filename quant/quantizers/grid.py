"""Scale and zero of every group: the search over clipped ranges, and rounding to the grid that it finds.

Works on rows, a block that fits the cache at a time; a row's result depends on that row only.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...errors import FormatError
from ..layout import round_scale

LEVELS = 15
_CLIPS = tuple(1.0 - 0.3 * i / 7 for i in range(8))  # of the range; finer steps and smaller ranges gained under 1 %
_BLOCK = 1 << 17  # weights at a time


def check_weight(weight: Tensor) -> Tensor:
    """The weight [N, K] in float32. Raises ValueError for another rank, FormatError for NaN and infinities."""
    if weight.dim() != 2:
        raise ValueError(f"a quantiser takes a matrix, not a tensor of shape {tuple(weight.shape)}")
    if not bool(torch.isfinite(weight).all()):
        raise FormatError("a weight holds NaN or infinities", "The source file may be damaged; fetch it again")
    return weight.detach().float()


def by_rows(weight: Tensor, group_size: int, work: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Run `work` on blocks [rows, G, group_size] of the weight [N, K], and stack what it returns."""
    parts = [work(block) for block in _row_blocks(weight, group_size)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def search_grid(
    weight: Tensor, group_size: int, *, symmetric: bool = False, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scales and integer zeros (both float32 [N, G]) with the least squared rounding error per group.

    Tries eight clipped ranges, then refits the scale once by least squares. `importance` [K] >= 0 weighs the squared
    error of each input. Zeros lie in 1..15 (what the v1 layout holds), and are all 8 where `symmetric`.
    """
    weights = None if importance is None else importance.float().view(1, -1, group_size)
    scales, zeros = by_rows(weight, group_size, lambda block: _search(block, symmetric, weights))
    return scales, zeros


def encode(weight: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """Codes uint8 [N, K]: the nearest level of each weight on its group's grid."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    start = 0
    for block in _row_blocks(weight, group_size):
        rows = slice(start, start + block.shape[0])
        level = _level(block, scales[rows].unsqueeze(-1), zeros[rows].unsqueeze(-1))
        codes[rows] = level.view(block.shape[0], -1).to(torch.uint8)
        start = rows.stop
    return codes


def _row_blocks(weight: Tensor, group_size: int) -> Iterator[Tensor]:
    N, K = weight.shape
    step = max(1, _BLOCK // K)
    for start in range(0, N, step):
        yield weight[start : start + step].reshape(-1, K // group_size, group_size)


def _level(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (groups / scale).add_(zero).round_().clamp_(0, LEVELS)


def _search(groups: Tensor, symmetric: bool, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    low = groups.amin(-1, keepdim=True).clamp_(max=0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    best_error, best_scale, best_zero = _candidate(groups, low, high, symmetric, importance)
    for clip in _CLIPS[1:]:
        found = _candidate(groups, low * clip, high * clip, symmetric, importance)
        best_error, best_scale, best_zero = _better((best_error, best_scale, best_zero), found)
    scale = _refit(groups, best_scale, best_zero, importance)
    refitted = (_error(groups, scale, best_zero, importance), scale, best_zero)
    _, scale, zero = _better((best_error, best_scale, best_zero), refitted)
    return scale.squeeze(-1), zero.squeeze(-1)


_Candidate = tuple[Tensor, Tensor, Tensor]  # error, scale, zero, each [rows, G, 1]


def _candidate(groups: Tensor, low: Tensor, high: Tensor, symmetric: bool, importance: Tensor | None) -> _Candidate:
    scale = round_scale((high - low) / LEVELS)
    zero = torch.full_like(scale, 8.0) if symmetric else (-low / scale).round_().clamp_(1, LEVELS)
    return _error(groups, scale, zero, importance), scale, zero


def _better(old: _Candidate, new: _Candidate) -> _Candidate:
    mask = new[0] < old[0]
    error, scale, zero = (torch.where(mask, b, a) for a, b in zip(old, new, strict=True))
    return error, scale, zero


def _error(groups: Tensor, scale: Tensor, zero: Tensor, importance: Tensor | None) -> Tensor:
    exact = groups / scale
    level = (exact + zero).round_().clamp_(0, LEVELS).sub_(zero)
    squared = level.sub_(exact).square_()
    if importance is not None:
        squared.mul_(importance)
    return squared.sum(-1, keepdim=True) * scale.square()


def _refit(groups: Tensor, scale: Tensor, zero: Tensor, importance: Tensor | None) -> Tensor:
    """The least-squares scale for the levels that `scale` gives."""
    level = _level(groups, scale, zero).sub_(zero)
    weighted = level if importance is None else level * importance
    energy = (weighted * level).sum(-1, keepdim=True)
    fitted = (weighted * groups).sum(-1, keepdim=True) / energy
    return torch.where(energy > 0, round_scale(fitted), scale)
