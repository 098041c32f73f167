"""Which model a bundle's methods make: the one place where generation looks at method names.

Knows the methods and their loaders; computes nothing.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

from ..errors import UsageError
from .bundle import Bundle
from .captured import captured
from .decoder import Decoder
from .dense import Dense
from .exit_layers import LazyBlocks
from .generate import Model
from .loading import UNTRAINED, load_block, load_frame, load_river, refuse_options, resolve_device, resolve_dtype
from .lossless import LosslessRiver
from .methods import Nvium, River, TwoDee
from .nvium import Nvium as MixtureModel
from .options import SessionOptions
from .progress import Reporter, SilentReporter
from .river import River as RiverModel
from .self_check import compare, run_dense_check, run_mixture_check, run_river_check
from .small_head import shrink_head
from .stack import Stack
from .text import Tokenizer


def load_model(bundle: Bundle, options: SessionOptions, reporter: Reporter | None = None) -> Model:
    """Make the model that generates with a bundle.

    Raises UsageError for an option that the bundle's methods do not have, and what `load_river` raises.
    """
    return load_beside_exact(bundle, options, reporter)[0]


def load_beside_exact(
    bundle: Bundle, options: SessionOptions, reporter: Reporter | None = None
) -> tuple[Model, Decoder]:
    """Return the model of `load_model`, and its decoder with the head as the bundle has it, to compare with."""
    reporter = reporter or SilentReporter()
    if not bundle.manifest.trained:
        reporter.warn(UNTRAINED)
    model = _load(bundle, options, reporter)
    exact = copy.copy(model.decoder)
    if options.head_bits == 8:
        shrink_head(model.decoder, reporter)
    return captured(model, wanted=options.cuda_graphs, reporter=reporter), exact


def _load(
    bundle: Bundle, options: SessionOptions, reporter: Reporter
) -> Dense | MixtureModel | RiverModel | LosslessRiver:
    mixture = bundle.manifest.method(Nvium)
    if mixture is not None:
        return _load_mixture(bundle, mixture, options)
    settings = bundle.manifest.method(River)
    if settings is None:
        return load_dense(bundle, options)
    return _load_lossless(bundle, settings, options) if options.lossless else load_river(bundle, options, reporter)


def _load_mixture(bundle: Bundle, settings: Nvium, options: SessionOptions) -> Dense | MixtureModel:
    from .nvium_loading import load_nvium  # noqa: PLC0415 - other methods do without

    return load_nvium(bundle, settings, options)


def _load_lossless(bundle: Bundle, settings: River, options: SessionOptions) -> LosslessRiver:
    river = load_river(bundle, options)
    count = bundle.architecture.num_layers
    if river.deepest < count:
        raise UsageError(
            f"--lossless gives the dense model's text; only {river.deepest} of its {count} blocks are loaded",
            f"Give --resident {count}, or --offload stream on a GPU; or leave out --lossless.",
        )
    return LosslessRiver(river, entry_layer=settings.entry_layer, draft=options.draft)


def load_dense(bundle: Bundle, options: SessionOptions) -> Dense:
    """Make the backbone alone, with R-CLA's map where the bundle has one. Blocks are read as they are first needed."""
    refuse_options(bundle, options)
    arch, store = bundle.architecture, bundle.backbone
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    blocks = LazyBlocks(arch.num_layers, lambda index: load_block(arch, store, index, device=device, dtype=dtype))
    return Dense(load_frame(arch, store, Stack(arch, blocks), device=device, dtype=dtype))


def self_check(bundle: Bundle) -> Sequence[str]:
    """Run the text that conversion ran, on the CPU; return what comes out differently, in words."""
    recorded = bundle.manifest.self_check
    if recorded is None:
        return ()
    tokenizer = Tokenizer.load(bundle.path)
    options = SessionOptions(device="cpu", cache_dir=bundle.cache_dir)
    mixture = bundle.manifest.method(Nvium)
    if mixture is not None:
        model = _load_mixture(bundle, mixture, options)
        found = run_dense_check(model, tokenizer) if isinstance(model, Dense) else run_mixture_check(model, tokenizer)
    elif bundle.manifest.method(River) is None:
        found = run_dense_check(load_dense(bundle, options), tokenizer)
    else:
        everything = bundle.architecture.num_layers  # as at conversion: the check is of the files, not of a placement
        found = run_river_check(load_river(bundle, replace(options, resident=everything)), tokenizer)
    settings = bundle.manifest.method(TwoDee)
    if settings is not None:
        from .classify_loading import check_scores, document_reader, load_classifier  # noqa: PLC0415 - as above

        reader = document_reader(settings, tokenizer)
        scores = check_scores(load_classifier(bundle, options, reader=reader), reader)
        found = found.model_copy(update={"scores": scores})
    return compare(recorded, found)
