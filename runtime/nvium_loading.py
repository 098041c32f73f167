"""From an opened N-vium bundle to the model that generation runs.

Knows which blocks the backbone has and where the junctions lie; blocks are read when a token first needs them.
"""

from ..errors import FormatError
from .bundle import Bundle
from .classify_loading import document_blocks
from .decoder import load_frame
from .dense import Dense
from .junctions import load_junctions
from .loading import refuse_options, resolve_device, resolve_dtype
from .methods import Nvium as NviumSettings
from .methods import River
from .nvium import Nvium
from .options import SessionOptions
from .stack import Stack

_DAMAGED = "Convert the model again, or fetch the bundle again."


def load_nvium(bundle: Bundle, settings: NviumSettings, options: SessionOptions) -> Nvium | Dense:
    """Make the model of an N-vium bundle; a bundle whose only exit is the model's own end is a dense one.

    Raises UsageError for options of other methods, FormatError for damaged junctions, or 4-bit blocks that
    are not there.
    """
    refuse_options(bundle, options, "N-vium")
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    arch = bundle.architecture
    river = bundle.manifest.method(River) if settings.blocks == "4bit" else None
    if settings.blocks == "4bit" and river is None:
        raise FormatError(f"{bundle.path} says that 4-bit blocks run, and has none", _DAMAGED)
    exits = None if river is None else (bundle.river, river)
    blocks = document_blocks(arch, bundle.backbone, exits, device=device, dtype=dtype)
    decoder = load_frame(arch, bundle.backbone, Stack(arch, blocks), device=device, dtype=dtype)
    if not settings.has_tensors:
        return Dense(decoder)
    junctions = load_junctions(
        arch,
        bundle.junctions,
        settings.junctions,
        width=settings.router_width,
        final_adapter=settings.final_adapter,
        device=device,
        dtype=dtype,
    )
    return Nvium(
        decoder,
        junctions.shifted(settings.router_bias) if settings.router_bias else junctions,
        per_exit=options.per_exit_truncation,
        piggyback=options.piggyback,
        max_deferred=options.max_deferred,
    )
