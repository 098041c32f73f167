"""Products with 4-bit weights: which kernel for which device, dtype and number of rows. Dense ones are in `dense`.

Knows no models and no files. The path is decided when a linear is made or first used, not per call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .dense import DenseGroup, DenseLinear, Linear, Product, chunked_linear
from .forms import ATEN_GROUPS, Compact, Native, aten_scales
from .joining import fusable, fuse, sort_groups
from .kernels import native, packing
from .kernels.chain import Operand
from .layout import Int4Matrix
from .planes import Planes
from .probe import (
    TRITON_ROWS,
    Kernel,
    Kernels,
    aten_product,
    aten_weight,
    inner_k_tiles,
    needs_fp32,
    probe,
    triton_works,
)

__all__ = ["DenseGroup", "DenseLinear", "Int4Linear", "Kernels", "Linear", "needs_fp32", "operand", "probe"]


def operand(linears: Sequence[Linear]) -> Operand | None:
    """What a native chain multiplies x with for these linears side by side; None where it cannot.

    4-bit matrices are packed, as at their first use.
    """
    if not linears:
        return None
    dense = [linear for linear in linears if isinstance(linear, DenseLinear) and linear.is_native]
    if len(dense) == len(linears):
        return Operand.dense([linear.weight for linear in dense], [linear.bias for linear in dense])
    (only, *others) = linears
    return only.operand() if isinstance(only, Int4Linear) and not others else None


class Int4Linear:
    """A product with 4-bit matrices stacked along their outputs, in the order given.

    x must be of `dtype` on `device`. Matrices are repacked for the kernel at first use, or by `prepare`, and then let
    go. Raises ValueError where they do not have the same inputs, UnsupportedError for act-order groups of unequal size.
    """

    def __init__(
        self, matrices: Sequence[Int4Matrix], bias: Tensor | None, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shapes = [matrix.shape for matrix in matrices]
        if len({K for _, K in shapes}) != 1:
            raise ValueError(f"matrices of shapes {shapes} cannot share one input")
        self.in_features = shapes[0][1]
        self.out_features = sum(N for N, _ in shapes)
        self._device, self._dtype = torch.device(device), dtype
        self._bias = None if bias is None else bias.to(self._device, dtype).contiguous()
        self._matrices: Sequence[Int4Matrix] = tuple(matrices)
        self._kept: list[Tensor | Compact | Native | Planes | Int4Linear] = []
        self._order: Tensor | None = None
        self._product: Product = self._first

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        sources = [t for m in self._matrices for t in (m.codes, m.scales, m.zeros)]
        bias = [] if self._bias is None else [self._bias]
        return sum(item.nbytes for item in (*sources, *self._kept, *bias))

    def __call__(self, x: Tensor) -> Tensor:
        """From x [..., K] to [..., N]."""
        return self._product(x)

    def prepare(self) -> None:
        """Pack for the kernel now; the source matrices are let go."""
        if self._matrices:
            self._product = self._plan()
            self._matrices = ()

    def operand(self) -> Operand | None:
        """The matrices for a native chain; None where they, or their inputs, are kept otherwise than it reads them."""
        self.prepare()
        forms = [kept for kept in self._kept if isinstance(kept, Native)]
        return Operand.int4(forms[0].packed, self._bias) if len(forms) == 1 and self._order is None else None

    def planes(self) -> "list[tuple[Planes, Tensor | None]]":
        """The matrices as planes in the order of their outputs, each with the order of its inputs where it is another.

        From now on they are kept so and in no other form, and this linear's own products are the Triton ones.
        """
        if not (self._matrices and fusable(self._matrices)):
            self.prepare()
        parts = [kept for kept in self._kept if isinstance(kept, Int4Linear)]
        if parts:
            return [pair for part in parts for pair in part.planes()]
        if not any(isinstance(kept, Planes) for kept in self._kept):
            compact = [kept for kept in self._kept if isinstance(kept, Compact)]
            matrix = compact[0].matrix() if compact else self._sorted()
            self._kept, self._matrices = [] if self._order is None else [self._order], ()
            self._product = self._by_planes(matrix)
        return [(kept, self._order) for kept in self._kept if isinstance(kept, Planes)]

    def _first(self, x: Tensor) -> Tensor:
        self.prepare()
        return self._product(x)

    def _plan(self) -> Product:
        if not fusable(self._matrices):
            return self._side_by_side()
        return self._plan_matrix(self._sorted())

    def _sorted(self) -> Int4Matrix:
        """All matrices as one whose groups are consecutive; `_order` is the order of its inputs, if another."""
        matrix = fuse(self._matrices)
        if matrix.g_idx is not None:
            matrix, order = sort_groups(matrix)
            self._order = order.to(self._device)
            self._kept.append(self._order)
        return matrix

    def _side_by_side(self) -> Product:
        """One product per matrix, where they group their inputs differently."""
        bias = self._bias
        parts = [Int4Linear([matrix], None, self._device, self._dtype) for matrix in self._matrices]
        for part in parts:
            part.prepare()
        self._kept += parts

        def product(x: Tensor) -> Tensor:
            out = torch.cat([part(x) for part in parts], dim=-1)
            return out if bias is None else out.add_(bias)

        return product

    def _plan_matrix(self, matrix: Int4Matrix) -> Product:
        """The product for few rows, where the matrix fits its kernel, and for many."""
        kernels = probe(self._device)
        kernel = kernels.few
        fit = kernel is not None and self._dtype is torch.bfloat16 and fits(kernel, matrix)
        if kernel == "triton" or (not fit and triton_works(self._device)):
            return self._by_planes(matrix)
        form = Native.of(matrix) if fit and kernel == "native" else Compact.of(matrix, self._device)
        self._kept.append(form)
        many = self._in_order(self._many(form))
        if kernel is None or not fit:
            return many
        few = self._in_order(self._native(form) if isinstance(form, Native) else self._aten(kernel, matrix))
        elements = kernels.max_rows * self.in_features
        return lambda x: few(x) if 0 < x.numel() <= elements and not x.requires_grad else many(x)

    def _by_planes(self, matrix: Int4Matrix) -> Product:
        from .gpu.products import int4_product  # noqa: PLC0415 - Triton, only where there is a GPU

        form, order, bias, K = Planes.of(matrix, self._device), self._order, self._bias, self.in_features
        self._kept.append(form)
        many, elements = self._in_order(self._many(form)), TRITON_ROWS * K

        def product(x: Tensor) -> Tensor:
            if not 0 < x.numel() <= elements:
                return many(x)
            return int4_product(x.reshape(-1, K), form, bias=bias, order=order).view(*x.shape[:-1], -1)

        return product

    def _in_order(self, product: Product) -> Product:
        """The product of a matrix whose inputs were sorted."""
        order = self._order
        return product if order is None else lambda x: product(x.index_select(-1, order))

    def _native(self, form: Native) -> Product:
        packed, bias, K, N = form.packed, self._bias, self.in_features, self.out_features

        def product(x: Tensor) -> Tensor:
            return native.int4_matmul(x.reshape(-1, K).contiguous(), packed, bias).view(*x.shape[:-1], N)

        return product

    def _aten(self, kernel: Kernel, matrix: Int4Matrix) -> Product:
        weight, scales = aten_weight(kernel, matrix.codes, self._device), aten_scales(matrix).to(self._device)
        self._kept += [weight, scales]
        bias, K, N, group_size = self._bias, self.in_features, matrix.shape[0], matrix.group_size
        multiply = aten_product(kernel)

        def product(x: Tensor) -> Tensor:
            out = multiply(x.reshape(-1, K), weight, group_size, scales)
            return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], N)

        return product

    def _many(self, form: Compact | Native | Planes) -> Product:
        N, bias = form.out_features, self._bias
        compute = torch.float32 if needs_fp32(self._device, self._dtype) else self._dtype
        return lambda x: chunked_linear(x, form, N, bias, compute)


def fits(kernel: Kernel, matrix: Int4Matrix) -> bool:
    """Whether `kernel` can hold the matrix."""
    N, K = matrix.shape
    if kernel == "native":
        return packing.can_pack(K, matrix.group_size)
    return matrix.group_size in ATEN_GROUPS and N % 16 == 0 and (kernel == "aten_cpu" or inner_k_tiles(K) > 0)
