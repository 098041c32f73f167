"""Launches of the Triton products: which tile for which size. Importing this imports Triton.

On a CPU the kernels run only in Triton's interpreter, for tests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..planes import Planes
from ..probe import TRITON_ROWS
from .kernels import flagged as _flagged


@dataclass(frozen=True)
class Tile:
    """How a product is cut: outputs per program, words and dense inputs per step, warps, steps in flight."""

    block_n: int
    words: int
    block_k: int
    warps: int
    stages: int


ONE_ROW = Tile(block_n=8, words=128, block_k=512, warps=4, stages=3)
FEW_ROWS = Tile(block_n=16, words=64, block_k=128, warps=4, stages=3)


def int4_product(
    x: Tensor, planes: Planes, *, bias: Tensor | None = None, order: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """From x [M, K] (M up to 16) to [M, N] in the dtype of x. `order` int64 [K]: which input each code belongs to."""
    out = x.new_empty(x.shape[0], planes.words.shape[0])
    _launch(None, x, None, planes, bias=bias, order=order, out=out, tile=tile)
    return out


def flagged_product(
    flag: Tensor,
    x: Tensor,
    weight: Tensor,
    planes: Planes,
    *,
    bias: Tensor | None = None,
    order: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`x @ weight.T + bias` where the int32 scalar `flag` is 0, the 4-bit product otherwise; the host does not wait.

    weight [N, K] contiguous in the dtype of x. `out` [M, N] may be columns of a wider result.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    _launch(flag, x, weight, planes, bias=bias, order=order, out=out, tile=tile)
    return out


def _launch(
    flag: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    planes: Planes,
    *,
    bias: Tensor | None,
    order: Tensor | None,
    out: Tensor,
    tile: Tile | None,
) -> None:
    rows, N = x.shape[0], planes.words.shape[0]
    if rows > TRITON_ROWS:
        raise ValueError(f"{rows} rows; the product is for up to {TRITON_ROWS}")
    tile = tile or (ONE_ROW if rows == 1 else FEW_ROWS)
    x = x.contiguous()
    with torch.cuda.device_of(x):
        _flagged[(-(-N // tile.block_n),)](
            x if flag is None else flag,
            x,
            x if weight is None else weight,
            planes.words,
            planes.scales,
            planes.zeros,
            x if order is None else order,
            x if bias is None else bias,
            out,
            rows,
            N,
            planes.in_features,
            planes.words.shape[1],
            planes.group_size,
            out.stride(0),
            BOTH=flag is not None,
            HAS_ORDER=order is not None,
            HAS_BIAS=bias is not None,
            ROWS=1 if rows == 1 else TRITON_ROWS,
            BLOCK_N=tile.block_n,
            WORDS=tile.words,
            BLOCK_K=tile.block_k,
            RUN=planes.run,
            STAGES=tile.stages,
            num_warps=tile.warps,  # pyright: ignore[reportCallIssue] - taken by every launch, not by the function
        )
