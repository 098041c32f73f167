"""From an opened 2D-EE bundle to its classifier and to the reader of its documents.

Knows which blocks a document runs through; weights are read when a document first needs them.
"""

from collections.abc import Sequence

import torch

from ..errors import FormatError
from .adapters import Adapters
from .architecture import Architecture
from .block import Block
from .bundle import Bundle
from .classify import Classifier
from .decoder import load_block, load_frame
from .documents import DocumentReader
from .exit_layers import LazyBlocks, load_exit_block
from .loading import UNTRAINED, refuse_options, resolve_device, resolve_dtype
from .methods import River, TwoDee
from .options import SessionOptions
from .progress import Reporter
from .schedule import Full
from .self_check import TEXT
from .store import TensorStore
from .text import Tokenizer


def load_classifier(
    bundle: Bundle, options: SessionOptions, reporter: Reporter | None = None, *, reader: DocumentReader | None = None
) -> Classifier:
    """Make the classifier of a 2D-EE bundle. `reader`: its `document_reader`, where there is one already.

    Raises FormatError for a bundle without one, or with damaged adapters; UsageError for an option that it has not.
    """
    settings = settings_of(bundle)
    refuse_options(bundle, options)
    if not bundle.manifest.trained and reporter is not None:
        reporter.warn(UNTRAINED)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    arch = bundle.architecture
    exits = bundle.manifest.method(River) if settings.blocks == "4bit" else None
    blocks = document_blocks(
        arch, bundle.backbone, None if exits is None else (bundle.river, exits), device=device, dtype=dtype
    )
    adapters = Adapters.read(
        bundle.adapters,
        arch.num_layers,
        inputs=arch.hidden_size,
        width=settings.hidden,
        classes=len(settings.labels),
        device=device,
    )
    decoder = load_frame(arch, bundle.backbone, blocks, device=device, dtype=dtype)
    reader = reader or document_reader(settings, Tokenizer.load(bundle.path))
    return Classifier(decoder, adapters, prefix=reader.prefix(settings.prompt), readout=settings.readout)


def check_scores(classifier: Classifier, reader: DocumentReader) -> tuple[float, ...]:
    """Return what the last layer's classifier gives for the self-check's text."""
    (verdict,) = classifier.classify([reader.read(TEXT)], Full())
    return verdict.scores


def settings_of(bundle: Bundle) -> TwoDee:
    """Return what the manifest says of the method. Raises FormatError for a bundle without it."""
    settings = bundle.manifest.method(TwoDee)
    if settings is None:
        raise FormatError(f"{bundle.path} has no classifiers", "Convert with --method 2dee.")
    return settings


def document_reader(settings: TwoDee, tokenizer: Tokenizer) -> DocumentReader:
    """Return what turns texts into documents as conversion did."""
    return DocumentReader(
        tokenizer,
        max_tokens=settings.max_tokens,
        language=settings.language,
        least=settings.least,
        most=settings.most,
    )


def document_blocks(
    arch: Architecture,
    backbone: TensorStore,
    exits: tuple[TensorStore, River] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    keep: bool = True,
) -> Sequence[Block]:
    """Return the blocks that documents run through, each read when first asked for (`keep`: see LazyBlocks).

    With `exits`, the 4-bit exit layers stand in for the backbone's blocks where there are any.
    """

    def load(index: int) -> Block:
        if exits is not None and index + 1 in exits[1].exit_layers:
            return load_exit_block(arch, backbone, exits[0], index, device=device, dtype=dtype)
        return load_block(arch, backbone, index, device=device, dtype=dtype)

    return LazyBlocks(arch.num_layers, load, keep=keep)
