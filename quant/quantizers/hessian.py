"""The second moment of a linear's input, summed as calibration tokens stream by."""

import torch
from torch import Tensor

from ...errors import AdaptError


class Hessian:
    """Streaming mean of x xᵀ for one input of K features; memory is one float32 [K, K]."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sum: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Add tokens x [..., K] of any floating dtype."""
        flat = x.detach().reshape(-1, x.shape[-1]).float()
        if self._sum is None:
            self._sum = torch.zeros(flat.shape[1], flat.shape[1], device=flat.device)
        self._sum.addmm_(flat.t(), flat)
        self.tokens += flat.shape[0]

    def finish(self) -> Tensor:
        """The mean [K, K] float32. Raises AdaptError where no token was added or activations were not finite."""
        if self._sum is None or self.tokens == 0:
            raise AdaptError("no calibration token reached this matrix", "Give more calibration text")
        if not bool(torch.isfinite(self._sum).all()):
            raise AdaptError("the calibration activations are not finite", "Use rtn or hqq, which need no calibration")
        return self._sum / self.tokens
