"""Tuning an N-vium bundle on a text: a bias on its routers moves the depth, without training.

One pass over a half serves all biases: the mixture's weights follow from the routers' scores. Source: N-vium
(arXiv 2605.13190). Knows the order of things; what a mixture is worth is measured in `nvium_judge`.
"""

from dataclasses import replace

from torch import Tensor

from ..errors import UnsupportedError
from ..runtime.bundle import Bundle
from ..runtime.manifest import Quality
from ..runtime.methods import Nvium as NviumSettings
from ..runtime.nvium import Nvium
from ..runtime.nvium_loading import load_nvium
from ..runtime.options import SessionOptions
from ..runtime.progress import Reporter
from ..runtime.self_check import run_mixture_check
from ..runtime.text import Tokenizer
from ..runtime.tuned import Figures, Tuned, TunedPoint
from .nvium_judge import Measured, judge
from .sequences import Batch
from .tune_goal import choose, goal_of
from .tune_record import Outcome, fingerprint, same_file, still_valid, store, with_method
from .tune_request import TuneRequest
from .tune_text import Halves, read_halves

MAX_LOSS = 0.02
"""Where nothing is said; a share of the perplexity of the better one of last exit and mixture (`_figures`)."""


def tune_nvium(bundle: Bundle, settings: NviumSettings, request: TuneRequest, reporter: Reporter) -> Outcome:
    """Measure, choose and store.

    Raises UsageError as `read_halves` and `choose` do, UnsupportedError for a bundle without junctions.
    """
    if not settings.junctions:
        raise UnsupportedError(
            f"{bundle.path} has no junctions: every token runs all blocks", "Convert with --exits 4."
        )
    arch, tokenizer = bundle.architecture, Tokenizer.load(bundle.path)
    halves = read_halves(request, tokenizer, max_positions=arch.max_positions, vocab_size=arch.vocab_size)
    known = _fingerprint(bundle, halves, request)
    before = still_valid(bundle, known, request, reporter)
    if before is None:
        points = tuple(_sweep(_model(bundle, settings, request.options), halves, reporter))
    else:
        points = before.frontier
    goal, limit = goal_of(request, MAX_LOSS)
    point = choose(points, goal, limit)
    tuned = Tuned(
        method="nvium",
        data=halves.used,
        fingerprint=known,
        seed=request.seed,
        goal=goal,
        limit=limit,
        chosen=point.name,
        frontier=points,
    )
    chosen = NviumSettings.model_validate({**settings.model_dump(), **point.settings})
    unchanged = same_file(bundle.manifest, with_method(bundle.manifest, chosen, tuned=tuned))
    stored = request.store and not unchanged
    if stored:
        model = _model(bundle, chosen, request.options)
        _store(bundle, chosen, tuned, _judged(model, chosen.router_bias, halves.report, reporter))
    return Outcome(tuned, measured=before is None, stored=stored)


def _fingerprint(bundle: Bundle, halves: Halves, request: TuneRequest) -> str:
    return fingerprint(
        bundle,
        request,
        text=halves.used.sha256,
        tokens=halves.used.tokens,
        loss_from="the better one",
    )


def _model(bundle: Bundle, settings: NviumSettings, options: SessionOptions) -> Nvium:
    """The mixture without a bias."""
    plain = NviumSettings.model_validate({**settings.model_dump(), "router_bias": 0.0})
    model = load_nvium(replace(bundle, manifest=with_method(bundle.manifest, plain)), plain, options)
    if not isinstance(model, Nvium):
        raise UnsupportedError(f"{bundle.path} has no junctions")
    return model


def _batches(ids: Tensor) -> list[Batch]:
    """One sequence at a time: every token but the first is predicted."""
    return [Batch(row[None, :-1], row[None, 1:], (len(row) - 1,)) for row in ids]


def _judged(model: Nvium, bias: float, ids: Tensor, reporter: Reporter) -> Measured:
    junctions = model.junctions.shifted(bias)
    return judge(model.decoder, junctions, _batches(ids), source=None, reporter=reporter)


def _sweep(model: Nvium, halves: Halves, reporter: Reporter) -> list[TunedPoint]:
    """One point a bias, by rising speed."""
    layers = model.decoder.arch.num_layers
    choose_on, report = (_judged(model, 0.0, ids, reporter) for ids in (halves.choose, halves.report))
    points = [
        TunedPoint(
            name=f"router bias {ours[0]:+g}",
            settings={"router_bias": ours[0]},
            dense_blocks=ours[1] * layers,
            speedup=1 / ours[1],
            chosen_on=_figures(ours, choose_on, layers),
            held_out=_figures(other, report, layers),
        )
        for ours, other in zip(choose_on.trade_off, report.trade_off, strict=True)
    ]
    return sorted(points, key=lambda point: point.speedup)


def _figures(point: tuple[float, float, float], half: Measured, layers: int) -> Figures:
    """Loss is measured from the better one of the last exit and the mixture as it was trained.

    Of a frozen model that is the dense model. A mixture trained from scratch is far better than its last exit, and
    measured from that, none of its depths would lose anything.
    """
    _, depth, perplexity = point
    best = min(half.dense_perplexity, half.perplexity)
    return Figures(perplexity=perplexity, loss=perplexity / best - 1, mean_depth=depth * layers)


def _store(bundle: Bundle, settings: NviumSettings, tuned: Tuned, found: Measured) -> None:
    """Check the bundle with its bias, and write the manifest; `found`: the other half's figures."""
    layers = bundle.architecture.num_layers
    exits = found.exits((*settings.junctions, layers))
    changed = NviumSettings.model_validate(
        {**settings.model_dump(), "exits": exits, "expected_depth": found.expected_depth}
    )
    quality = Quality(
        tokens=found.tokens,
        text=f"the part of {tuned.data.name} that no setting was chosen on",
        dense_perplexity=found.dense_perplexity,
        perplexity=found.perplexity,
        kl=found.kl,
        agreement=found.agreement,
        mean_depth=found.expected_depth * layers,
    )
    manifest = with_method(bundle.manifest, changed, quality=quality, tuned=tuned)
    options = SessionOptions(device="cpu", cache_dir=bundle.cache_dir)
    model = load_nvium(replace(bundle, manifest=manifest), changed, options)
    if isinstance(model, Nvium):
        manifest = manifest.model_copy(update={"self_check": run_mixture_check(model, Tokenizer.load(bundle.path))})
    store(bundle, manifest)
