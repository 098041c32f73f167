"""4-bit matrices as the native products read them: one ascending stream of tiles; docs/kernels.md shows one.

Knows no products and no layers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 16  # rows of a packed tile
LINE_BYTES = 64
LINE_INPUTS = 8  # inputs of a packed line, for the 16 rows of its tile
LONGEST_GROUP = 128  # longer groups are packed in parts: x shares a unit, and the C code keeps room, for so many


@dataclass(frozen=True)
class PackedInt4:
    """A 4-bit matrix in tiles of 16 rows; see docs/kernels.md."""

    data: Tensor  # uint8, one dimension
    out_features: int
    in_features: int
    groups: int  # as packed: groups longer than 128 are split
    wide: bool  # scales and zeros in fp32, because bf16 would round them

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.data.nbytes


def can_pack(K: int, group_size: int) -> bool:
    """Whether a matrix with K inputs in such groups can be packed: both multiples of 8."""
    return group_size > 0 and group_size % LINE_INPUTS == 0 and K % group_size == 0


WriteLines = Callable[[Tensor, Tensor, int], None]
"""Codes uint8 [N, K] into data uint8 [tiles, groups, bytes], in each group behind its first `head` bytes."""


def pack_int4(
    codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int, *, write: WriteLines | None = None
) -> PackedInt4:
    """Pack codes [N, K] (uint8, 0..15), scales and zeros [N, K / group_size]: W = (codes - zeros) * scales, unrounded.

    A group size of -1 is one group per row. `write` lays the codes out in place of torch: see `native.pack`. Raises
    ValueError where `can_pack` is False or the shapes do not fit.
    """
    N, K = codes.shape
    group_size = K if group_size == -1 else group_size
    if not can_pack(K, group_size):
        raise ValueError(f"{K} inputs in groups of {group_size} cannot be packed: multiples of {LINE_INPUTS} only")
    if scales.shape != (N, K // group_size) or zeros.shape != scales.shape:
        raise ValueError("scales and zeros must be [N, K / group_size]")
    part = max(size for size in range(LINE_INPUTS, LONGEST_GROUP + 1, LINE_INPUTS) if group_size % size == 0)
    tiles, groups = -(-N // TILE), K // part
    wide = not (_exact_in_bf16(scales) and _exact_in_bf16(zeros))
    heads = torch.cat([_head(values, group_size // part, tiles, wide=wide) for values in (scales, zeros)], dim=2)
    head, lines = heads.shape[2], part // LINE_INPUTS * LINE_BYTES
    data = torch.empty(tiles, groups, head + lines, dtype=torch.uint8)
    data[:, :, :head] = heads
    if write is None:
        data[:, :, head:] = _lines(codes, tiles, groups)
    else:
        write(codes.contiguous(), data, head)
    return PackedInt4(data.flatten(), N, K, groups, wide)


def _lines(codes: Tensor, tiles: int, groups: int) -> Tensor:
    """Codes as bytes [tiles, groups, lines * 64]: see the picture in docs/kernels.md."""
    N, K = codes.shape
    padded = torch.zeros(tiles * TILE, K, dtype=torch.uint8)
    padded[:N] = codes
    # A row's eight codes are one int64. Codes 2 and 3 move beside 0 and 1, and 6 and 7 beside 4 and 5, as high nibbles:
    # its bytes 0, 4, 1 and 5 are then the word in which even inputs are the low half and odd ones the high half.
    codes8 = padded.view(torch.int64)
    codes8 |= codes8 >> 12
    words = (codes8 & 0xFF) | (codes8 >> 24 & 0xFF00) | (codes8 << 8 & 0xFF0000) | (codes8 >> 16 & 0xFF000000)
    lines = words.view(torch.int32)[:, ::2].view(tiles, TILE, K // LINE_INPUTS)
    return lines.transpose(1, 2).contiguous().view(torch.uint8).view(tiles, groups, -1)


def _head(values: Tensor, parts: int, tiles: int, *, wide: bool) -> Tensor:
    """One parameter [N, G] as bytes [tiles, G * parts, 16 * 2 or 4]; the rows of padding get zeros."""
    padded = torch.zeros(tiles * TILE, values.shape[1], dtype=torch.float32 if wide else torch.bfloat16)
    padded[: values.shape[0]] = values
    by_group = padded.repeat_interleave(parts, dim=1).view(tiles, TILE, -1).transpose(1, 2).contiguous()
    return by_group.view(torch.uint8)


def _exact_in_bf16(values: Tensor) -> bool:
    return torch.equal(values.float(), values.bfloat16().float())
