"""4-bit matrices as they are kept in memory: one form per kernel, each able to give its rows back in fp32.

Knows no devices' preferences: `linear.py` chooses the form.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .kernels import native, packing
from .layout import Int4Matrix, pack_pairs, unpack_pairs

ATEN_GROUPS = (32, 64, 128, 256)


class Rows(Protocol):
    """Something that gives rows of a weight in fp32."""

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        ...


@dataclass(frozen=True)
class Compact:
    """Two codes to a byte, scales and zeros beside: what every device can read."""

    data: Tensor  # uint8 [N, K / 2]
    scales: Tensor  # bf16 where exact, else float32 [N, G]
    zeros: Tensor  # uint8 or as the scales [N, G]

    @property
    def out_features(self) -> int:
        """N."""
        return self.data.shape[0]

    @classmethod
    def of(cls, matrix: Int4Matrix, device: torch.device) -> "Compact":
        """Keep the matrix on `device`; its groups must be consecutive."""
        zeros = matrix.zeros if not matrix.float_zeros else narrow(matrix.zeros)
        tensors = (pack_pairs(matrix.codes), narrow(matrix.scales), zeros)
        return cls(*(tensor.to(device) for tensor in tensors))

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self.data.nbytes + self.scales.nbytes + self.zeros.nbytes

    def matrix(self) -> Int4Matrix:
        """The matrix again, to be kept in another form."""
        codes = unpack_pairs(self.data)
        zeros = self.zeros.float() if self.zeros.dtype.is_floating_point else self.zeros
        return Int4Matrix(codes, self.scales.float(), zeros, codes.shape[1] // self.scales.shape[1])

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        codes = unpack_pairs(self.data[start:stop])
        return _dequantize(codes, self.scales[start:stop].float(), self.zeros[start:stop].float())


@dataclass(frozen=True)
class Native:
    """The native kernel's tiles (docs/kernels.md), which can be read back."""

    packed: packing.PackedInt4

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.out_features

    @classmethod
    def of(cls, matrix: Int4Matrix) -> "Native":
        """Pack for the native kernel; its groups must be consecutive."""
        codes, scales, zeros = (tensor.cpu() for tensor in (matrix.codes, matrix.scales, matrix.zeros))
        return cls(native.pack(codes, scales, zeros.float(), matrix.group_size))

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self.packed.nbytes

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        return native.dequantize(self.packed, start, stop)


def aten_scales(matrix: Int4Matrix) -> Tensor:
    """What torch's int4 products take: bf16 [G, N, 2] of scale and (8 - zero) * scale."""
    offset = (8.0 - matrix.zeros.float()) * matrix.scales
    return torch.stack([matrix.scales, offset], dim=-1).transpose(0, 1).contiguous().bfloat16()


def _dequantize(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    grouped = codes.view(*scales.shape, -1).float()
    return grouped.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).view(codes.shape)


def narrow(values: Tensor) -> Tensor:
    """The values in bf16 where that is exact, else in float32."""
    narrow = values.bfloat16()
    return narrow if torch.equal(narrow.float(), values.float()) else values.float()
