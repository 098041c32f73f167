"""4-bit matrices put together or in order, so that one kernel call does for them. Knows no kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UnsupportedError
from .layout import Int4Matrix


def fusable(matrices: Sequence[Int4Matrix]) -> bool:
    """Whether matrices of one input can be one matrix: the same groups, and inputs in the same order."""
    first = matrices[0]
    return all(
        matrix.group_size == first.group_size
        and (matrix.g_idx is None) == (first.g_idx is None)
        and (matrix.g_idx is None or first.g_idx is None or torch.equal(matrix.g_idx, first.g_idx))
        for matrix in matrices
    )


def fuse(matrices: Sequence[Int4Matrix]) -> Int4Matrix:
    """Several matrices of one input as one, along their outputs."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    zeros = [matrix.zeros for matrix in matrices]
    if len({zero.dtype for zero in zeros}) > 1:
        zeros = [zero.float() for zero in zeros]
    codes, scales = torch.cat([m.codes for m in matrices]), torch.cat([m.scales for m in matrices])
    return Int4Matrix(codes, scales, torch.cat(zeros), first.group_size, first.g_idx)


def sort_groups(matrix: Int4Matrix) -> tuple[Int4Matrix, Tensor]:
    """The matrix with its inputs sorted by group, and the order in which to take the input.

    Raises UnsupportedError for groups of unequal size.
    """
    groups = torch.arange(matrix.shape[1] // matrix.group_size) if matrix.g_idx is None else matrix.g_idx.cpu()
    order = torch.argsort(groups, stable=True)
    expected = torch.arange(matrix.shape[1]) // matrix.group_size
    if not torch.equal(groups[order].long(), expected):
        raise UnsupportedError("a 4-bit matrix has groups of unequal size")
    codes = matrix.codes[:, order.to(matrix.codes.device)]
    return Int4Matrix(codes, matrix.scales, matrix.zeros, matrix.group_size), order
