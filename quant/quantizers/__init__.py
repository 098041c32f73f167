"""Quantisers by name. Each is a pure function of one matrix and knows nothing of models or files."""

from collections.abc import Mapping
from types import MappingProxyType

from .gptq import Gptq
from .hessian import Hessian
from .hqq import HalfQuadratic
from .protocol import Quantizer
from .rtn import RoundToNearest

QUANTIZERS: Mapping[str, Quantizer] = MappingProxyType(
    {quantizer.name: quantizer for quantizer in (RoundToNearest(), HalfQuadratic(), Gptq())}
)

__all__ = ["QUANTIZERS", "Hessian", "Quantizer"]
