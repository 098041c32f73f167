"""Tuning a River bundle on a text: measure or take what is stored, choose, check the rule chosen, store it.

Knows the order of things; rules are measured in `river_sweep`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..errors import FormatError, UsageError
from ..runtime.block_speed import CONTEXT, TOKENS, measure_blocks, measure_greedy
from ..runtime.bundle import Bundle
from ..runtime.decoder import load_frame
from ..runtime.exit_quality import Files, measure
from ..runtime.exits import HELD, FixedExit
from ..runtime.loading import load_river, resolve_device, resolve_dtype, river_route
from ..runtime.lossless import LosslessRiver
from ..runtime.manifest import Manifest, Quality, SelfCheck
from ..runtime.methods import River
from ..runtime.options import SessionOptions
from ..runtime.progress import Reporter
from ..runtime.self_check import self_check_ids
from ..runtime.text import Tokenizer
from ..runtime.tuned import BlockSpeed, Tuned, TunedPoint
from .river_sweep import DENSE, FLOOR, sweep
from .tune_goal import choose, goal_of
from .tune_record import Outcome, fingerprint, same_file, still_valid, store, with_method
from .tune_request import TuneRequest
from .tune_text import Halves, read_halves

FEATURE = "exit-rule"
"""Required of a reader where the rule is not one threshold."""
MAX_LOSS = 0.1
"""As at conversion, where the bundle does not say."""


def tune_river(bundle: Bundle, river: River, request: TuneRequest, reporter: Reporter) -> Outcome:
    """Measure, choose and store. Raises UsageError as `read_halves` and `choose`, and for a wrong number of blocks."""
    arch, tokenizer = bundle.architecture, Tokenizer.load(bundle.path)
    river = _keeping(river, request.options.resident, arch.num_layers)
    halves = read_halves(request, tokenizer, max_positions=arch.max_positions, vocab_size=arch.vocab_size)
    known = _fingerprint(bundle, river, halves, request)
    before = still_valid(bundle, known, request, reporter)
    if before is None:
        speed = _speed(bundle, river, halves, request.options)
        if speed.river_block_ms >= speed.dense_block_ms:
            reporter.warn("A 4-bit block takes as long as a dense one here: leaving early gains nothing.")
        points: Sequence[TunedPoint] = sweep(_files(bundle, request.options), river, halves, speed, reporter)
    else:
        speed, points = before.speed, before.frontier
    goal, limit = goal_of(request, MAX_LOSS if river.max_loss is None else river.max_loss)
    point = choose(_possible(points, river, arch.num_layers), goal, limit)
    tuned = Tuned(
        method="river",
        data=halves.used,
        fingerprint=known,
        seed=request.seed,
        goal=goal,
        limit=limit,
        chosen=point.name,
        speed=speed,
        frontier=tuple(points),
    )
    _say_lossless(tuned, point, river, arch.num_layers, reporter)
    stored = request.store and _store(bundle, river, tuned, point, reporter)
    return Outcome(tuned, measured=before is None, stored=stored)


def _keeping(river: River, resident: int | None, layers: int) -> River:
    """Return the settings with so many resident blocks, where a number was asked for."""
    if resident is None:
        return river
    if not river.entry_layer - 1 <= resident <= layers:
        hint = f"Give --resident {river.entry_layer - 1} to {layers}"
        raise UsageError(f"{resident} resident blocks are not possible", hint)
    return River.model_validate({**river.model_dump(), "resident": resident})


def _say_lossless(tuned: Tuned, point: TunedPoint, river: River, layers: int, reporter: Reporter) -> None:
    """Say where drafts are as fast as the setting chosen, and cost no quality."""
    drafted = None if tuned.speed is None else tuned.speed.lossless_speedup(layers)
    if drafted is None or (river.resident or layers) < layers:
        return
    if drafted >= max(1.0, point.speedup):
        reporter.note(
            f"--lossless gives the dense model's own text {drafted:.2f} times as fast here; the setting chosen is "
            f"{point.speedup:.2f} times as fast."
        )


def _fingerprint(bundle: Bundle, river: River, halves: Halves, request: TuneRequest) -> str:
    return fingerprint(
        bundle,
        request,
        text=halves.used.sha256,
        tokens=halves.used.tokens,
        entry_layer=river.entry_layer,
        resident=river.resident,
        held=HELD,
    )


def _files(bundle: Bundle, options: SessionOptions) -> Files:
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    frame = load_frame(bundle.architecture, bundle.backbone, (), device=device, dtype=dtype)
    return Files(frame, bundle.backbone, bundle.river)


def _speed(bundle: Bundle, river: River, halves: Halves, options: SessionOptions) -> BlockSpeed:
    """Time all blocks and all exit layers, whatever the bundle's rule is."""
    plain = River.model_validate({**river.model_dump(), "thresholds": None, "dense_layers": (), "resident": None})
    whole = replace(bundle, manifest=with_method(bundle.manifest, plain))
    model = load_river(whole, replace(options, resident=None, tau=None))
    ids = halves.choose.flatten()[None, : CONTEXT + TOKENS]
    speed = measure_blocks(model, river.entry_layer, ids)
    drafts = LosslessRiver(model, entry_layer=river.entry_layer)
    return speed.model_copy(update={"lossless_ms": measure_greedy(drafts, ids)})


def _possible(points: Sequence[TunedPoint], river: River, layers: int) -> Sequence[TunedPoint]:
    """The dense model is no setting of a bundle that drops blocks."""
    drops = river.resident is not None and river.resident < layers
    return [point for point in points if not (drops and point.name == DENSE)]


def _store(bundle: Bundle, river: River, tuned: Tuned, point: TunedPoint, reporter: Reporter) -> bool:
    """Write the manifest where it is another one; return whether it was."""
    chosen = River.model_validate(
        {**river.model_dump(), **point.settings, "max_loss": tuned.limit if tuned.goal == "max_loss" else None}
    )
    required = {*bundle.manifest.required} - {FEATURE}
    if chosen.thresholds is not None or chosen.dense_layers:
        required |= {FEATURE}
    manifest = with_method(
        bundle.manifest,
        chosen,
        required=tuple(required),
        quality=_quality(tuned, point),
        tuned=tuned,
    )
    if same_file(bundle.manifest, manifest):
        return False
    check = _self_check(bundle, chosen, reporter)
    store(bundle, Manifest.model_validate({**manifest.model_dump(), "self_check": check}))
    return True


def _quality(tuned: Tuned, point: TunedPoint) -> Quality:
    """The figures of the half that nothing was chosen on."""
    by_name = {each.name: each.held_out for each in tuned.frontier}
    found, dense, floor = point.held_out, by_name[DENSE], by_name[FLOOR]
    names = ("perplexity", "kl", "agreement", "mean_depth")
    return Quality(
        tokens=sum(found.exit_histogram),
        text=f"the part of {tuned.data.name} that no setting was chosen on",
        dense_perplexity=dense.perplexity,
        perplexity=found.perplexity,
        kl=found.distance,
        agreement=found.agreement or 0.0,
        mean_depth=found.mean_depth,
        exit_histogram=found.exit_histogram,
        all_4bit={name: getattr(floor, name) for name in names},
    )


@torch.inference_mode()
def _self_check(bundle: Bundle, river: River, reporter: Reporter) -> SelfCheck:
    """The self-check's text under the rule chosen, block by block, as conversion measures it: on the CPU."""
    arch = bundle.architecture
    ids = self_check_ids(Tokenizer.load(bundle.path), arch.max_positions)
    files = _files(bundle, SessionOptions(device="cpu", cache_dir=bundle.cache_dir))
    ways = [FixedExit(arch.num_layers), replace(river_route(river, arch.num_layers), held=0)]  # as `run_river_check`
    dense, found = measure(files, ids, ways, reporter, title="Check the rule")
    if not math.isfinite(found.perplexity):
        raise FormatError("the self-check gives no finite likelihood", "The bundle may be damaged: run `adapt verify`.")
    return SelfCheck(tokens=ids.numel(), dense_nll=math.log(dense.perplexity), river_nll=math.log(found.perplexity))
