"""4-bit matrices as they are kept in memory: one form per kernel, each able to give its rows back in fp32.

Knows no devices' preferences: `linear.py` chooses the form.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .kernels import native
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

    packed: native.PackedInt4

    @property
    def out_features(self) -> int:
        """N."""
        return self.packed.out_features

    @classmethod
    def of(cls, matrix: Int4Matrix) -> "Native":
        """Pack for the native kernel; its groups must be consecutive."""
        codes, scales, zeros = (tensor.cpu() for tensor in (matrix.codes, matrix.scales, matrix.zeros))
        return cls(native.pack_int4(codes, scales, zeros.float(), matrix.group_size))

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self.packed.nbytes

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]; whole tiles are read."""
        packed = self.packed
        first, last = start // native.TILE, -(-stop // native.TILE)
        tiles = packed.data.view(-(-packed.out_features // native.TILE), packed.groups, -1)[first:last]
        head = native.TILE * (4 if packed.wide else 2)
        kind = torch.float32 if packed.wide else torch.bfloat16
        scales, zeros = (
            tiles[..., i * head : (i + 1) * head].contiguous().view(kind).transpose(1, 2).reshape(-1, packed.groups)
            for i in (0, 1)
        )
        weight = _dequantize(_codes(tiles[..., 2 * head :]), scales.float(), zeros.float())
        return weight[start - first * native.TILE : stop - first * native.TILE]


def aten_scales(matrix: Int4Matrix) -> Tensor:
    """What torch's int4 products take: bf16 [G, N, 2] of scale and (8 - zero) * scale."""
    offset = (8.0 - matrix.zeros.float()) * matrix.scales
    return torch.stack([matrix.scales, offset], dim=-1).transpose(0, 1).contiguous().bfloat16()


def _codes(lines: Tensor) -> Tensor:
    """Codes uint8 [tiles * 16, K] of tiles' lines [tiles, groups, lines * 64]."""
    tiles = lines.shape[0]
    # A line holds, as int16, [quad 4, half 2, row in quad 4]: the low nibbles are inputs 2 half + (0, 1) of the row,
    # the high ones inputs 4 more. The two halves of a row make one int32, and int32s are transposed faster than bytes.
    halves = lines.reshape(-1).view(torch.int16).view(tiles, -1, 4, 2, 4).to(torch.int32)
    words = (halves[:, :, :, 0] & 0xFFFF) | (halves[:, :, :, 1] << 16)
    words = words.view(tiles, -1, native.TILE).transpose(1, 2)
    codes = torch.empty(*words.shape, 2, dtype=torch.int32)
    torch.bitwise_and(words, 0x0F0F0F0F, out=codes[..., 0])
    torch.bitwise_and(words >> 4, 0x0F0F0F0F, out=codes[..., 1])
    return codes.view(torch.uint8).view(tiles * native.TILE, -1)


def _dequantize(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    grouped = codes.view(*scales.shape, -1).float()
    return grouped.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).view(codes.shape)


def narrow(values: Tensor) -> Tensor:
    """The values in bf16 where that is exact, else in float32."""
    narrow = values.bfloat16()
    return narrow if torch.equal(narrow.float(), values.float()) else values.float()
