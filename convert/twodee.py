"""The 2D-EE recipe: plan, build, check.

A bundle grows in a work folder: text files and backbone (and exit layers of a River bundle), the pooled states of all
labelled rows, the classifiers, the thresholds found on the rows held back, a self-check through the runtime, and the
manifest last. Every step may be killed and is taken up where it was. Knows the order of things.
"""

import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from ..errors import FormatError
from ..runtime.adapters import Adapters
from ..runtime.bundle import BACKBONE
from ..runtime.classify import Classifier
from ..runtime.classify_loading import check_scores
from ..runtime.decoder import Decoder
from ..runtime.dense import Dense
from ..runtime.documents import DocumentReader
from ..runtime.loading import resolve_dtype
from ..runtime.manifest import Backbone, Base, Manifest, SelfCheck
from ..runtime.method_settings import TextUsed, TrainingRun
from ..runtime.methods import Readout, TwoDee
from ..runtime.operating_point import best_accuracy, cheapest
from ..runtime.progress import Reporter
from ..runtime.self_check import run_dense_check
from ..runtime.store import TensorStore, open_files
from ..runtime.text import Tokenizer
from .adapters import Fitting, fit, probabilities
from .building import begin, libraries
from .features import TOGETHER_BYTES, Encoder, Features, TextDocuments, write_features
from .frontier import READOUTS, Curve, Judged, measure
from .frozen_blocks import frozen_frame
from .river_files import place_exit_layers
from .stream import HashingFile, of_tensor, read_entries, write_safetensors
from .trainable import trained_entries
from .training import train
from .twodee_lora import EPOCHS, TOKENS_A_PASS, Classified, LabelledDocuments, PrefixLoss, keeps_activations
from .twodee_plan import ADAPTERS_FILE, CPU, Plan, plan
from .workspace import Workspace
from .writer import (
    place_backbone,
    place_safetensors,
    place_shards,
    seal,
    write_piece,
)

__all__ = ["Plan", "build", "plan"]

_FITTED, _TUNED, _RUN = "adapters-fitted.safetensors", "tuned.safetensors", "training.json"


def build(plan: Plan, reporter: Reporter) -> Path:
    """Carry out a plan and return the bundle's path. Raises what the parts raise; the work folder then stays.

    The same plan gives the same bytes on the same machine, however often it was interrupted.
    """
    with begin(plan, reporter) as work:
        place_exit_layers(work, plan.opened, reporter, link=plan.request.backbone == "link")
        return _Recipe(plan, work, reporter).finish()


class _Recipe:
    """One conversion under way."""

    def __init__(self, plan: Plan, work: Workspace, reporter: Reporter) -> None:
        self._plan, self._work, self._reporter = plan, work, reporter
        self._tokenizer = Tokenizer.load(work.bundle)
        self._store: TensorStore = plan.source.store
        settings = plan.settings
        reader = DocumentReader(self._tokenizer, max_tokens=plan.max_tokens, language=settings.language)
        self._prefix = reader.prefix(plan.prompt)
        room = plan.arch.max_positions - len(self._prefix)
        if room < 1:
            raise FormatError(f"the prompt has {len(self._prefix)} tokens, the model {plan.arch.max_positions}")
        reader.max_tokens = min(reader.max_tokens, room)
        self._reader = reader

    def finish(self) -> Path:
        backbone = self._backbone()
        features = self._features()
        adapters = self._adapters(features)
        curve = self._judge(adapters, features)
        entries = [of_tensor(name, tensor) for name, tensor in adapters.tensors().items()]
        place_safetensors(self._work, ADAPTERS_FILE, entries, lambda _: None)
        check = self._self_check(adapters, curve.readout)
        return seal(self._work, self._manifest(backbone, curve, check))

    def _backbone(self) -> Backbone:
        """Put the backbone into the bundle: as it came, or fine-tuned."""
        plan, work = self._plan, self._work
        if plan.settings.lora is None:
            return place_backbone(work, plan.backbone, self._reporter)
        if not work.has(_TUNED):
            model, tokens = self._tune()
            work.write_note(_RUN, {"tokens": tokens})
            with work.new_piece(_TUNED) as file:
                write_safetensors(HashingFile(file), trained_entries(model, self._plan.source.store))
        shutil.rmtree(work.folder / "training", ignore_errors=True)
        self._store = open_files([work.piece(_TUNED)])
        entries = read_entries(work.piece(_TUNED))
        with self._reporter.task("Write the backbone", sum(entry.nbytes for entry in entries)) as task:
            place_shards(work, BACKBONE, entries, task.advance)
        return Backbone(mode="copy")

    def _tune(self) -> tuple[Classified, int]:
        """Fine-tune; return the model and the tokens it saw."""
        plan, settings, rows = self._plan, self._plan.settings, self._plan.split.train
        fitting = Fitting(classes=len(plan.names), hidden=settings.hidden, seed=settings.seed)
        model = Classified(
            plan.arch,
            plan.source.store,
            fitting,
            device=plan.device,
            lora_settings=plan.lora,
            frozen_dtype=plan.frozen_dtype,
            checkpointing=not keeps_activations(plan.arch, TOKENS_A_PASS),
        )
        data = LabelledDocuments(TextDocuments(self._reader, rows.texts), rows.labels, self._prefix)
        key = {"data": rows.sha256, "lora": settings.lora, "prompt": plan.prompt}
        history = train(
            model,
            data,
            plan.tuning,
            PrefixLoss(plan.class_weights),
            self._work.folder / "training",
            reporter=self._reporter,
            key=key,
        )
        return model, history.tokens

    def _features(self) -> Features:
        plan = self._plan
        encoder = Encoder(self._frame(plan.dtype, plan.device), tuple(self._prefix))
        documents = TextDocuments(self._reader, plan.texts)
        together = 0 if plan.keeps_blocks(plan.dtype, plan.device) else TOGETHER_BYTES
        return write_features(self._work, encoder, documents, self._reporter, together=together)

    def _frame(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Return the blocks that documents run through, and the embedding before them."""
        return frozen_frame(self._plan.opened, self._store, dtype, device)

    def _adapters(self, features: Features) -> Adapters:
        plan, settings = self._plan, self._plan.settings
        if not self._work.has(_FITTED):
            fitting = Fitting(
                classes=len(plan.names),
                hidden=settings.hidden,
                epochs=settings.epochs,
                learning_rate=settings.learning_rate or Fitting.learning_rate,
                class_weights=plan.class_weights,
                seed=settings.seed,
            )
            fitted = fit(features, plan.labels, len(plan.split.train), fitting, self._reporter)
            self._reporter.note(f"Training ended after {fitted.epochs} of at most {settings.epochs} epochs.")
            write_piece(self._work, _FITTED, fitted.adapters.tensors())
        return Adapters.read(
            open_files([self._work.piece(_FITTED)]),
            plan.arch.num_layers,
            inputs=plan.arch.hidden_size,
            width=settings.hidden,
            classes=len(plan.names),
        )

    def _judge(self, adapters: Adapters, features: Features) -> Curve:
        """Measure on the rows held back, with each way to read a whole document; keep the better one."""
        plan = self._plan
        train = len(plan.split.train)
        held = plan.split.validation.labels
        asked = list(probabilities(adapters, features, range(train, train + len(held))))
        with self._reporter.task("Look for thresholds", len(READOUTS)) as task:
            curves: list[Curve] = []
            for readout in READOUTS:
                rows = [Judged.of(*answers, label, readout) for answers, label in zip(asked, held, strict=True)]
                curves.append(measure(rows, len(plan.names), readout))
                task.advance(1)
        return max(curves, key=lambda curve: best_accuracy(curve.layers))

    def _self_check(self, adapters: Adapters, readout: Readout) -> SelfCheck:
        """Run the self-check's text as `verify` does: on the CPU, in the default dtype."""
        plan = self._plan
        dtype = resolve_dtype("auto", CPU)
        frame = self._frame(dtype, CPU)
        scores = check_scores(Classifier(frame, adapters, prefix=self._prefix, readout=readout), self._reader)
        bundle = plan.opened.bundle
        below = None if bundle is None or plan.lora is not None else bundle.manifest.self_check
        if below is None:
            below = run_dense_check(Dense(frame), self._tokenizer, cached=plan.keeps_blocks(dtype, CPU))
        return below.model_copy(update={"scores": scores})

    def _manifest(self, backbone: Backbone, curve: Curve, check: SelfCheck) -> Manifest:
        plan, below = self._plan, self._plan.opened.below
        bundle = plan.opened.bundle
        return Manifest(
            required=(*below.required, "2dee"),
            optional=below.optional,
            base=Base(**asdict(plan.source.identity)),
            methods=(*below.methods, self._method(curve)),
            trained=below.trained,
            backbone=backbone,
            quality=None if bundle is None or plan.lora is not None else bundle.manifest.quality,
            self_check=check,
            libraries=libraries(),
        )

    def _method(self, curve: Curve) -> TwoDee:
        plan, settings = self._plan, self._plan.settings
        data, judged = plan.rows_used
        wanted = best_accuracy(curve.layers) - settings.max_drop
        chosen, layer = cheapest(curve.frontier, wanted), cheapest(curve.layers, wanted) or curve.full
        gains = chosen is not None and chosen.work < layer.work
        if not gains:
            self._reporter.note("Two dimensions gain nothing here: the bundle stops at a fixed layer by default.")
        return TwoDee(
            labels=plan.names,
            hidden=settings.hidden,
            blocks=plan.blocks,
            prompt=plan.prompt,
            language=settings.language,
            least=self._reader.least,
            most=self._reader.most,
            max_tokens=self._reader.max_tokens,
            readout=curve.readout,
            depth=curve.depth,
            max_drop=settings.max_drop,
            use="2d" if gains else "1d",
            frontier=curve.frontier,
            one_d=curve.layers,
            full=curve.full,
            chosen=chosen,
            chosen_one_d=layer,
            data=data,
            validation_data=judged,
            class_weights=plan.class_weights,
            training=self._training_run(),
        )

    def _training_run(self) -> TrainingRun | None:
        plan, rows = self._plan, self._plan.split.train
        if plan.lora is None:
            return None
        tokens = self._work.read_note(_RUN)["tokens"]
        return TrainingRun(
            data=TextUsed(name=rows.name, sha256=rows.sha256, tokens=max(1, tokens // EPOCHS)),
            steps=plan.tuning.steps,
            tokens=tokens,
            sequence_length=len(self._prefix) + self._reader.max_tokens,
            sequences_per_step=plan.tuning.batch_size,
            learning_rate=plan.tuning.learning_rate,
            lora_rank=plan.lora.rank,
            seed=plan.settings.seed,
        )
