"""The River recipe: plan, build, check.

A bundle grows in a work folder: text files and backbone, one exit layer after the other, the quality on held-out text,
the threshold chosen by it, a self-check through the runtime, and the manifest last. Every step may be killed and is
taken up where it was. Knows the order of things; how each is done is its neighbours' business.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import FormatError
from ..runtime.config_types import check_known
from ..runtime.decoder import EMBEDDING, load_frame
from ..runtime.exits import CosineExit, FixedExit, Route
from ..runtime.loading import Placement, make_river
from ..runtime.manifest import Backbone, Base, Manifest
from ..runtime.manifest import Quality as QualityRecord
from ..runtime.manifest import SelfCheck as SelfCheckRecord
from ..runtime.method_settings import TextUsed
from ..runtime.methods import River, TauPoint
from ..runtime.progress import Reporter
from ..runtime.quality import Quality
from ..runtime.self_check import compare, run_river_check, self_check_ids
from ..runtime.store import TensorStore, open_files
from ..runtime.text import Tokenizer
from .building import begin, libraries
from .calibration import CalibrationText, load_calibration
from .judge import TAUS, Files, Verdict, choose_tau, judge, loss, measure
from .pace import Paced
from .plan import Plan, plan
from .preflight import RUN_WHOLE
from .quantise import Job, piece_name, quantise_calibrated, quantise_plain
from .ready_made import take_ready_made
from .workspace import Workspace
from .writer import place_backbone, place_river, seal

__all__ = ["Plan", "build", "plan"]

_JUDGED = "quality.json"


def build(plan: Plan, reporter: Reporter) -> Path:
    """Carry out a plan and return the bundle's path. Raises what the parts raise; the work folder then stays.

    The same plan gives the same bytes, however often it was interrupted.
    """
    with begin(plan, reporter) as work:
        backbone = place_backbone(work, plan.backbone, reporter)
        return _Recipe(plan, work, reporter).finish(backbone)


class _Recipe:
    """One conversion under way."""

    def __init__(self, plan: Plan, work: Workspace, reporter: Reporter) -> None:
        self._plan, self._work, self._reporter = plan, work, reporter
        self._store = plan.source.store
        self._tokenizer = Tokenizer.load(work.bundle)
        self._frame = load_frame(plan.arch, self._store, (), device=plan.device, dtype=plan.dtype)
        self._check_embedding()

    def _check_embedding(self) -> None:
        """Look at some rows at a time: the table of a large vocabulary is the largest tensor there is."""
        if not all(bool(torch.isfinite(rows).all()) for rows in self._frame.embedding.split(4096)):
            raise FormatError("the embedding has values that are not numbers", "Download the model again.")
        self._store.release(EMBEDDING)

    def finish(self, backbone: Backbone) -> Path:
        text = self._text()
        self._exit_layers(text)
        place_river(self._work, [piece_name(index) for index in self._plan.exit_indices], self._reporter)
        river = open_files(sorted(self._work.bundle.glob("river-*.safetensors")))
        verdict = self._judge(text, river)
        tau = self._tau(verdict)
        check = self._self_check(river, tau)
        return seal(self._work, self._manifest(backbone, text, verdict, tau, check))

    def _text(self) -> CalibrationText:
        settings, arch = self._plan.request.settings, self._plan.arch
        text = load_calibration(
            settings.calibration, self._tokenizer, tokens=settings.calibration_tokens, max_positions=arch.max_positions
        )
        check_known(int(max(text.quantise.max(), text.judge.max())), arch.vocab_size)
        return text

    def _exit_layers(self, text: CalibrationText) -> None:
        plan, indices = self._plan, self._plan.exit_indices
        job = Job(self._work, self._frame, self._store, plan.recipe)
        with self._reporter.task("Make the exit layers", len(indices)) as bar:
            task = Paced(bar, len(indices), self._reporter)
            if plan.ready_made is not None:
                take_ready_made(job, plan.ready_made, indices, task, float_zeros=plan.float_zeros)
            elif plan.recipe.quantizer.calibrated:
                quantise_calibrated(job, indices, text.quantise, task)
            else:
                quantise_plain(job, indices, task)

    def _judge(self, text: CalibrationText, river: TensorStore) -> Verdict:
        settings = self._plan.request.settings
        taus = TAUS if settings.tau is None else (settings.tau,)
        if not self._work.has(_JUDGED):
            verdict = judge(
                Files(self._frame, self._store, river),
                text.judge,
                entry_layer=settings.entry_layer,
                resident=settings.resident,
                taus=taus,
                reporter=self._reporter,
            )
            self._work.write_note(_JUDGED, _to_json(verdict))
        verdict = _from_json(self._work.read_note(_JUDGED))
        if not math.isfinite(verdict.dense.perplexity):
            what = "the model gives no finite likelihood on the calibration text"
            raise FormatError(what, "Its weights may be damaged: download it again, or try --dtype fp32.")
        return verdict

    def _tau(self, verdict: Verdict) -> float:
        settings = self._plan.request.settings
        if settings.tau is not None:
            return settings.tau
        tau = choose_tau(verdict, settings.max_loss)
        lost = loss(verdict.curve[tau], verdict.dense)
        if lost > settings.max_loss:
            self._reporter.warn(
                f"None of the thresholds tried keeps the perplexity within {settings.max_loss:.1%} of the dense model: "
                f"tau {tau} loses {lost:.1%}. `adapt tune` looks further; --tau 0.99, a smaller --group-size or "
                "another --quantizer may do too."
            )
        return tau

    def _self_check(self, river: TensorStore, tau: float) -> SelfCheckRecord:
        """Run the self-check's text block by block; a small model also as `run` would, through the cache."""
        plan, settings = self._plan, self._plan.request.settings
        count = plan.arch.num_layers
        route = Route(CosineExit.uniform(tau, count, settings.entry_layer), held=0)  # as `run_river_check`
        ids = self_check_ids(self._tokenizer, plan.arch.max_positions)
        files = Files(self._frame, self._store, river)
        dense, left = measure(files, ids, [FixedExit(count), route], self._reporter, title="Record the self-check")
        found = SelfCheckRecord(
            tokens=ids.numel(), dense_nll=math.log(dense.perplexity), river_nll=math.log(left.perplexity)
        )
        if plan.backbone.nbytes + plan.river_bytes <= RUN_WHOLE:
            model = make_river(
                plan.arch,
                self._store,
                river,
                Placement(plan.device, plan.dtype),
                route,
                entry_layer=settings.entry_layer,
            )
            differing = compare(found, run_river_check(model, self._tokenizer))
            if differing:
                raise FormatError(f"the self-check fails: {'; '.join(differing)}", "This is a bug; please report it.")
        return found

    def _manifest(
        self, backbone: Backbone, text: CalibrationText, verdict: Verdict, tau: float, check: SelfCheckRecord
    ) -> Manifest:
        plan = self._plan
        settings, identity, below = plan.request.settings, plan.source.identity, plan.opened.below
        kept = settings.tau is None and loss(verdict.curve[tau], verdict.dense) <= settings.max_loss
        river = River(
            quantizer="ready-made" if plan.ready_made else settings.quantizer,
            group_size=plan.group_size,
            symmetric=plan.symmetric,
            float_zeros=plan.float_zeros,
            entry_layer=settings.entry_layer,
            exit_layers=tuple(index + 1 for index in plan.exit_indices),
            tau=tau,
            tau_curve=tuple(_point(tau, quality) for tau, quality in sorted(verdict.curve.items())),
            max_loss=settings.max_loss if kept else None,
            calibration=TextUsed(name=text.name, sha256=text.sha256, tokens=text.tokens),
            resident=settings.resident,
            river_source=plan.ready_made.name if plan.ready_made else None,
        )
        return Manifest(
            required=(*below.required, "river", *(["float-zeros"] if plan.float_zeros else [])),
            optional=(*below.optional, "tau-curve"),
            base=Base(**asdict(identity)),
            methods=(*below.methods, river),
            trained=below.trained,
            backbone=backbone,
            quality=_quality_record(text, verdict, tau),
            self_check=check,
            libraries=libraries(),
        )


def _point(tau: float, quality: Quality) -> TauPoint:
    return TauPoint(
        tau=tau,
        kl=quality.kl,
        agreement=quality.agreement,
        perplexity=quality.perplexity,
        mean_depth=quality.mean_depth,
        exit_histogram=tuple(quality.exit_histogram),
    )


def _quality_record(text: CalibrationText, verdict: Verdict, tau: float) -> QualityRecord:
    chosen, floor = verdict.curve[tau], asdict(verdict.floor)
    return QualityRecord(
        tokens=text.judge.numel(),
        text=f"the end of {text.name}, not seen by the quantiser",
        dense_perplexity=verdict.dense.perplexity,
        perplexity=chosen.perplexity,
        kl=chosen.kl,
        agreement=chosen.agreement,
        mean_depth=chosen.mean_depth,
        exit_histogram=tuple(chosen.exit_histogram),
        all_4bit={name: floor[name] for name in ("perplexity", "kl", "agreement", "mean_depth")},
    )


def _to_json(verdict: Verdict) -> dict[str, Any]:
    curve: list[list[Any]] = [[tau, asdict(quality)] for tau, quality in verdict.curve.items()]
    return {"dense": asdict(verdict.dense), "floor": asdict(verdict.floor), "curve": curve}


def _from_json(data: dict[str, Any]) -> Verdict:
    curve = {tau: Quality(**quality) for tau, quality in data["curve"]}
    return Verdict(Quality(**data["dense"]), Quality(**data["floor"]), curve)
