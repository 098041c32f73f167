"""A 4-bit matrix as the Triton kernels like it: eight planes of codes in 32-bit words, scales and zeros by group.

Imports no Triton: the form is made and read back on every device. Knows no models.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .forms import narrow
from .layout import Int4Matrix

LANES, NIBBLES = 16, 8
CHUNK = LANES * NIBBLES
"""Inputs that sixteen words hold."""


@dataclass(frozen=True)
class Planes:
    """Nibble j of word w of a row is its input 128 (w // 16) + 16 j + w % 16; inputs beyond K are 0.

    words int32 [N, 16 ceil(K / 128)]; scales [G, N] bf16 where exact, else float32; zeros likewise or uint8 [G, N].
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int
    in_features: int

    @classmethod
    def of(cls, matrix: Int4Matrix, device: torch.device) -> "Planes":
        """Pack a matrix whose groups are consecutive, and keep it on `device`."""
        N, K = matrix.shape
        codes = pad(matrix.codes.to(device), (0, -K % CHUNK)).view(N, -1, NIBBLES, LANES)
        words = torch.zeros(N, codes.shape[1], LANES, dtype=torch.int32, device=device)
        for plane in range(NIBBLES):
            words |= codes[:, :, plane].to(torch.int32) << 4 * plane
        zeros = matrix.zeros if not matrix.float_zeros else narrow(matrix.zeros)
        scales, zeros = (kept.to(device).t().contiguous() for kept in (narrow(matrix.scales), zeros))
        return cls(words.view(N, -1), scales, zeros, matrix.group_size, K)

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self.words.nbytes + self.scales.nbytes + self.zeros.nbytes

    @property
    def out_features(self) -> int:
        """N."""
        return self.words.shape[0]

    @property
    def run(self) -> int:
        """Planes in a row that share a group, in every word: 1, 2, 4 or 8."""
        return next(run for run in (8, 4, 2, 1) if run == 1 or self.group_size % (LANES * run) == 0)

    def rows(self, start: int, stop: int) -> Tensor:
        """float32 [stop - start, K]."""
        words = self.words[start:stop].view(stop - start, -1, 1, LANES)
        shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=words.device).view(1, 1, -1, 1)
        codes = ((words >> shifts) & 15).view(stop - start, -1)[:, : self.in_features]
        grouped = codes.reshape(stop - start, -1, self.group_size).float()
        scales, zeros = (kept[:, start:stop].t().float().unsqueeze(-1) for kept in (self.scales, self.zeros))
        return grouped.sub_(zeros).mul_(scales).view(stop - start, self.in_features)
