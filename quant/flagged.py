"""A product that is dense or 4-bit by a flag on the device, and several dense weights as one.

The flag is read where the product runs: on a GPU by the kernel itself, so that one CUDA graph holds both ways and the
host does not wait. Knows no models and no exit rule.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .linear import DenseLinear, Int4Linear
from .probe import TRITON_ROWS, triton_works


def join_dense(linears: Sequence[DenseLinear]) -> DenseLinear:
    """Several dense linears of one input as one, along their outputs; from now on they share its memory.

    Joined again (by another model over the same weights) they still do, and nothing is copied.
    """
    if len(linears) == 1:
        return linears[0]
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    joined = _adjacent(weights)
    weight = torch.cat(weights) if joined is None else joined
    whole = DenseLinear(weight, torch.cat(biases) if biases else None)
    first = 0
    for linear in linears:
        linear.weight = whole.weight[first : first + linear.out_features]
        first += linear.out_features
    return whole


def _adjacent(weights: Sequence[Tensor]) -> Tensor | None:
    """One view of weights [N_i, K] that lie one behind the other in one storage; None where they do not."""
    first = weights[0]
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or weight.untyped_storage().data_ptr() != storage or not weight.is_contiguous():
            return None
        place += weight.nbytes
    return first.as_strided((sum(len(weight) for weight in weights), first.shape[1]), first.stride())


class FlaggedLinear:
    """y = x @ W.T + b with W dense while `flag` (int32, one element) is 0, and 4-bit otherwise.

    `interpreted` lets Triton's interpreter do on the CPU what a GPU would do. Without Triton the host reads the flag,
    which on a GPU makes it wait. Raises ValueError where the two do not fit.
    """

    def __init__(self, dense: DenseLinear, river: Int4Linear, flag: Tensor, *, interpreted: bool = False) -> None:
        self.in_features, self.out_features = dense.in_features, dense.out_features
        if (river.in_features, river.out_features) != (self.in_features, self.out_features):
            raise ValueError("the dense and the 4-bit weight have different shapes")
        self._dense, self._river, self._flag = dense, river, flag
        self.on_device = interpreted or triton_works(dense.weight.device)
        self._parts = river.planes() if self.on_device else []

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self._dense.nbytes + self._river.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., K] to [..., N]."""
        if not self.on_device or not 0 < x.numel() <= TRITON_ROWS * self.in_features:
            return self._river(x) if bool(self._flag) else self._dense(x)
        from .gpu.products import flagged_product  # noqa: PLC0415 - Triton, only where there is a GPU

        flat = x.reshape(-1, self.in_features)
        out = flat.new_empty(flat.shape[0], self.out_features)
        weight, bias, first = self._dense.weight, self._dense.bias, 0
        for planes, order in self._parts:
            rows = slice(first, first + planes.out_features)
            part = None if bias is None else bias[rows]
            flagged_product(self._flag, flat, weight[rows], planes, bias=part, order=order, out=out[:, rows])
            first = rows.stop
        return out.view(*x.shape[:-1], self.out_features)
