"""What a quantiser is: a pure function of one matrix. Knows no particular quantiser."""

from typing import Protocol

from torch import Tensor

from ..layout import Int4Matrix


class Quantizer(Protocol):
    """Turns one weight matrix into 4-bit codes; the same input gives the same bytes."""

    @property
    def name(self) -> str:
        """As it is called on the command line and in the manifest."""
        ...

    @property
    def calibrated(self) -> bool:
        """Whether it needs a Hessian."""
        ...

    @property
    def float_zeros(self) -> bool:
        """Whether its zeros are real numbers, which other engines' GPTQ readers cannot hold."""
        ...

    def __call__(
        self, weight: Tensor, *, group_size: int, hessian: Tensor | None = None, symmetric: bool = False
    ) -> Int4Matrix:
        """Quantise weight [N, K] with groups of `group_size` inputs (-1: one group per row).

        `hessian` [K, K] is the mean of x xᵀ over calibration tokens. `symmetric` fixes every zero at 8. Raises
        ValueError where K is not a multiple of the group, FormatError where the weight is not finite, UnsupportedError
        for an option that the quantiser does not have.
        """
        ...
