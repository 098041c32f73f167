"""Launch of River's exit rule. Importing this imports Triton."""

import torch
from torch import Tensor

from .kernels import exit_rule as _exit_rule

_BLOCK = 1024


def exit_rule(
    before: Tensor,
    after: Tensor,
    thresholds: Tensor,
    position: Tensor,
    *,
    flag: Tensor,
    depth: Tensor,
    layer: int,
    held: int,
) -> None:
    """Raise `flag` where cos(before, after) > thresholds[layer - 1] and position >= held; then depth += 1 - flag.

    before, after [..., D] of one token, contiguous; thresholds float32; position int64 [1]; flag, depth int32 [1].
    """
    with torch.cuda.device_of(before):
        _exit_rule[(1,)](
            before,
            after,
            thresholds,
            position,
            flag,
            depth,
            layer,
            held,
            before.shape[-1],
            _BLOCK,
            num_warps=4,  # pyright: ignore[reportCallIssue] - taken by every launch, not by the function
        )
