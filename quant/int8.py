"""A product with 8-bit weights, a scale for each output: for the head, on the CPU. Knows no models and no files."""

import torch
from torch import Tensor

from .dense import chunked_linear
from .kernels import native, native8


class Int8Linear:
    """y = x @ W.T with W [N, K] rounded to 8 bits row by row. Raises ValueError where `why_not` has a reason."""

    def __init__(self, weight: Tensor) -> None:
        if reason := self.why_not(weight):
            raise ValueError(reason)
        self.out_features, self.in_features = weight.shape
        self._matrix = native8.Int8Matrix.of(weight)
        self._few_elements = native.FEW_ROWS * self.in_features

    @staticmethod
    def why_not(weight: Tensor) -> str:
        """Say why a weight [N, K] cannot be kept so; empty where it can."""
        if not weight.is_cpu or weight.dtype is not torch.bfloat16:
            return "only 16-bit weights (bf16) on the CPU have an 8-bit product"
        if weight.shape[1] % native8.STEP:
            return f"{weight.shape[1]} inputs are not a multiple of {native8.STEP}"
        return "" if native8.available() else native.why_not() or "the 8-bit product fails its check on this processor"

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self._matrix.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., K] to [..., N], bf16."""
        if not 0 < x.numel() <= self._few_elements:
            return chunked_linear(x, self._matrix, self.out_features, None)
        flat = x.reshape(-1, self.in_features).contiguous()
        return native8.int8_matmul(flat, self._matrix).view(*x.shape[:-1], self.out_features)
