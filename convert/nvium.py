"""The N-vium recipe: plan, build, check.

A bundle grows in a work folder: text files, tokens, the trained junctions (and with them all weights, where those are
trained), quality on held-out text, the files, a self-check through the runtime, and the manifest last. Every step may
be killed and is taken up where it was. Knows the order of things.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from torch import Tensor

from ..errors import UsageError
from ..runtime.bundle import BACKBONE
from ..runtime.decoder import Decoder, load_decoder
from ..runtime.junctions import load_junctions
from ..runtime.manifest import Backbone, Base, Manifest, SelfCheck
from ..runtime.manifest import Quality as QualityRecord
from ..runtime.method_settings import TrainingRun
from ..runtime.methods import Nvium
from ..runtime.progress import Reporter
from ..runtime.store import TensorStore, open_files
from .building import begin, libraries
from .data import TrainingData
from .frozen_blocks import frozen_frame, reading_dtype
from .loop_training import prepare
from .nvium_check import JUNCTIONS_FILE, self_check
from .nvium_judge import Measured, judge
from .nvium_model import Mixed
from .nvium_plan import Plan, plan
from .nvium_training import TRAINED, Trainer
from .processes import Processes, join
from .rcla_judge import Texts, texts_of
from .river_files import place_exit_layers
from .stream import HashingFile, of_tensor, read_entries, write_safetensors
from .trainable import MemoryStore, trained_entries
from .workspace import Workspace, work_folder
from .writer import place_backbone, place_safetensors, place_shards, read_piece, seal, write_piece

__all__ = ["Plan", "build", "plan"]

_RUN, _QUALITY, _JUNCTIONS = "training.json", "quality.json", "trained-junctions.safetensors"


def build(plan: Plan, reporter: Reporter) -> Path:
    """Carry out a plan and return the bundle's path. Raises what the parts raise; the work folder then stays.

    Among several processes (torchrun) one writes; where all weights are trained the others train with it.
    """
    request = plan.request
    processes = join(plan.device)
    if processes.count > 1 and not plan.trains_backbone:
        raise UsageError("--train routers runs in one process", "Leave torchrun out, or use --train all.")
    if not processes.leads:
        Trainer(plan, work_folder(request.output), processes).follow()
        return request.output
    with begin(plan, reporter) as work:
        return _Recipe(plan, work, reporter, processes).finish()


class _Recipe:
    """One conversion under way, in the process that writes."""

    def __init__(self, plan: Plan, work: Workspace, reporter: Reporter, processes: Processes) -> None:
        self._plan, self._work, self._reporter, self._processes = plan, work, reporter, processes

    def finish(self) -> Path:
        self._train()
        measured = self._judged()
        backbone = self._place()
        check = self_check(self._plan, self._work.bundle)
        return seal(self._work, self._manifest(backbone, measured, check))

    @cached_property
    def _data(self) -> TrainingData:
        return prepare(self._plan, self._work.folder, self._reporter)

    @cached_property
    def _texts(self) -> Texts:
        return texts_of(self._data)

    def _train(self) -> None:
        """Trained weights as pieces of the work folder, and what the training came to as a note."""
        _ = self._texts  # refused before the training, if nothing judges
        trainer = Trainer(self._plan, self._work.folder, self._processes)
        if self._plan.trains_backbone:
            self._train_all(trainer)
        elif not self._work.has(_JUNCTIONS):
            tensors, run = trainer.run_junctions(self._data, self._work, self._reporter)
            self._work.write_note(_RUN, asdict(run))
            write_piece(self._work, _JUNCTIONS, tensors)
        shutil.rmtree(self._work.folder / "training", ignore_errors=True)

    def _train_all(self, trainer: Trainer) -> None:
        """With the processes that follow, which look for the piece that is written last."""
        work = self._work
        self._processes.wait()
        if work.has(TRAINED):
            return
        model, run = trainer.run(self._data, self._reporter)
        work.write_note(_RUN, asdict(run))
        write_piece(work, _JUNCTIONS, model.junction_tensors() if isinstance(model, Mixed) else {})
        with work.new_piece(TRAINED) as file:
            write_safetensors(HashingFile(file), trained_entries(model, self._plan.source.store))

    @property
    def _store(self) -> TensorStore:
        """The backbone's weights as they will be written."""
        plan = self._plan
        return open_files([self._work.piece(TRAINED)]) if plan.trains_backbone else plan.source.store

    @cached_property
    def _junctions(self) -> Mapping[str, Tensor]:
        return read_piece(self._work, _JUNCTIONS)

    def _judged(self) -> Measured:
        plan, work = self._plan, self._work
        if not work.has(_QUALITY):
            frame, source = self._frames()
            junctions = load_junctions(
                plan.arch,
                MemoryStore(self._junctions),
                plan.points,
                width=plan.width,
                final_adapter=plan.final_adapter,
                device=plan.device,
                dtype=frame.dtype,
            )
            found = judge(frame, junctions, self._texts.judged, source=source, reporter=self._reporter)
            for line in found.lines(self._layers):
                self._reporter.note(line)
            if missed := found.missed(plan.settings.target_depth):
                self._reporter.warn(missed)
            work.write_note(_QUALITY, found.to_json())
        return Measured.from_json(work.read_note(_QUALITY))

    def _frames(self) -> tuple[Decoder, Decoder | None]:
        """The model as it is now and, where its weights were others before, as it came."""
        plan = self._plan
        dtype = reading_dtype(plan.opened)
        if not plan.trains_backbone:
            return frozen_frame(plan.opened, plan.source.store, dtype, plan.device), None
        now = load_decoder(plan.arch, self._store, device=plan.device, dtype=dtype)
        if plan.settings.from_scratch:
            return now, None
        return now, load_decoder(plan.arch, plan.source.store, device=plan.device, dtype=dtype)

    @property
    def _layers(self) -> tuple[int, ...]:
        """Blocks before each exit."""
        return (*self._plan.points, self._plan.arch.num_layers)

    def _place(self) -> Backbone:
        """The files of weights."""
        plan, work, reporter = self._plan, self._work, self._reporter
        if self._junctions:
            entries = [of_tensor(name, tensor) for name, tensor in self._junctions.items()]
            place_safetensors(work, JUNCTIONS_FILE, entries, lambda _: None)
        if not plan.trains_backbone:
            place_exit_layers(work, plan.opened, reporter, link=plan.request.backbone == "link")
            return place_backbone(work, plan.backbone, reporter)
        entries = read_entries(work.piece(TRAINED))
        with reporter.task("Write the backbone", sum(entry.nbytes for entry in entries)) as task:
            place_shards(work, BACKBONE, entries, task.advance)
        return Backbone(mode="copy")

    def _manifest(self, backbone: Backbone, measured: Measured, check: SelfCheck) -> Manifest:
        plan, below = self._plan, self._plan.opened.below
        return Manifest(
            required=(*below.required, "nvium"),
            optional=below.optional,
            base=Base(**asdict(plan.source.identity)),
            methods=(*below.methods, self._method(measured)),
            trained=below.trained,
            backbone=backbone,
            quality=self._quality(measured),
            self_check=check,
            libraries=libraries(),
        )

    def _method(self, measured: Measured) -> Nvium:
        plan, settings = self._plan, self._plan.settings
        return Nvium(
            junctions=plan.points,
            final_adapter=plan.final_adapter,
            router_width=plan.width,
            trained=settings.trained,
            blocks=plan.blocks,
            beta=self._work.read_note(_RUN)["beta"],
            target_depth=settings.target_depth,
            exits=measured.exits(self._layers),
            expected_depth=measured.expected_depth,
            trade_off=measured.points(),
            training=self._training_run(),
        )

    def _training_run(self) -> TrainingRun:
        settings = self._plan.settings
        return TrainingRun(
            data=self._texts.used,
            steps=settings.steps,
            tokens=self._work.read_note(_RUN)["tokens"],
            sequence_length=settings.sequence_length,
            sequences_per_step=settings.batch_size,
            learning_rate=settings.rate,
            loss_on=settings.loss_on,
            seed=settings.seed,
        )

    def _quality(self, measured: Measured) -> QualityRecord:
        return QualityRecord(
            tokens=measured.tokens,
            text=self._texts.name,
            dense_perplexity=measured.dense_perplexity,
            perplexity=measured.perplexity,
            kl=measured.kl,
            agreement=measured.agreement,
            mean_depth=measured.expected_depth * self._plan.arch.num_layers,
        )
