"""The head of a loaded model in 8 bits, where that is asked for: half of its bytes, which every token reads.

Beyond the papers. Knows no methods; the embedding stays as it is, also where the head is the same tensor.
"""

from ..quant.int8 import Int8Linear
from ..quant.linear import DenseLinear
from .decoder import Decoder
from .progress import Reporter


def shrink_head(decoder: Decoder, reporter: Reporter) -> bool:
    """Round the head to 8 bits; where this machine has no product for it, leave it and say why. Returns whether."""
    head = decoder.head
    reason = Int8Linear.why_not(head.weight) if isinstance(head, DenseLinear) else "it is no 16-bit matrix"
    if not isinstance(head, DenseLinear) or reason:
        reporter.warn(f"The head stays in 16 bits: {reason}.")
        return False
    decoder.head = Int8Linear(head.weight)
    return True
