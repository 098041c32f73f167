"""`adapt tune`: measure what a bundle's method can do, choose a point of it, and store that in the manifest.

What was measured is stored with it, so that another goal is answered without measuring again, and the same one without
anything at all. Knows which method is tuned with what, not how.
"""

import os

import torch

from ..errors import UnsupportedError, UsageError
from ..runtime.bundle import Bundle
from ..runtime.methods import Nvium, River, TwoDee
from ..runtime.progress import Reporter
from .tune_nvium import tune_nvium
from .tune_record import Outcome
from .tune_request import TuneRequest
from .tune_river import tune_river
from .tune_twodee import tune_twodee


def tune(request: TuneRequest, reporter: Reporter) -> Outcome:
    """Measure, choose and store.

    Raises UsageError for the wrong kind of data, a goal that no setting reaches, or a bundle that cannot be written;
    UnsupportedError for a method of which nothing can be set after conversion.
    """
    bundle = Bundle.open(request.bundle, cache_dir=request.options.cache_dir, reporter=reporter)
    if request.store and not os.access(bundle.path, os.W_OK):
        raise UsageError(f"{bundle.path} cannot be written", "Look at the frontier only, with --dry-run")
    if request.options.threads is not None:
        torch.set_num_threads(request.options.threads)
    manifest = bundle.manifest
    classifiers, river = manifest.method(TwoDee), manifest.method(River)
    _check_data(bundle, request, classifies=classifiers is not None)
    if classifiers is not None:
        return tune_twodee(bundle, classifiers, request, reporter)
    if (mixture := manifest.method(Nvium)) is not None:
        return tune_nvium(bundle, mixture, request, reporter)
    if river is not None:
        return tune_river(bundle, river, request, reporter)
    names = ", ".join(method.name for method in manifest.methods)
    raise UnsupportedError(
        f"Nothing of {bundle.path} ({names}) can be set after conversion: followers have no keys and values of their "
        "own, so the map cannot be finer, and a coarser one changes the weights",
        "Convert the model again with another --share-every or --keep-ratio.",
    )


def _check_data(bundle: Bundle, request: TuneRequest, *, classifies: bool) -> None:
    if classifies and request.text is not None:
        raise UsageError(f"{bundle.path} classifies", "Tune it on labelled rows with --labels FILE")
    if not classifies and request.labels is not None:
        raise UsageError(f"{bundle.path} generates; it has no labels", "Tune it on a text with --text FILE")
