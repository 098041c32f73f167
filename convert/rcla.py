"""The R-CLA recipe: plan, build, check.

A bundle grows in a work folder: text files, tokens to train on, the trained weights, a map searched where one was asked
for, quality on held-out text, the weights without the followers' keys and values, a self-check through the runtime, and
the manifest last. Every step may be killed and is taken up where it was. Knows the order of things.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import FormatError
from ..runtime.architecture import Architecture
from ..runtime.decoder import load_block, load_decoder, load_frame
from ..runtime.dense import Dense
from ..runtime.exit_layers import LazyBlocks
from ..runtime.manifest import Backbone, Base, Manifest
from ..runtime.manifest import Quality as QualityRecord
from ..runtime.manifest import SelfCheck as SelfCheckRecord
from ..runtime.method_settings import TrainingRun
from ..runtime.methods import Rcla
from ..runtime.progress import Reporter
from ..runtime.self_check import compare, run_dense_check, self_check_ids
from ..runtime.store import TensorStore, open_files, open_safetensors
from ..runtime.text import Tokenizer
from .building import begin, libraries
from .data import TrainingData
from .kv_map import KVMap, keepers_of, search
from .loop_training import prepare
from .map_loss import Weights, losses
from .preflight import RUN_WHOLE
from .processes import Processes, join
from .rcla_judge import Measured, Texts, judge, retention, shipped_texts, texts_of
from .rcla_plan import DEFAULT_GROUP, Plan, plan
from .rcla_training import TRAINED, Trainer
from .sequences import Batch
from .stream import HashingFile, lazy, write_safetensors
from .trainable import trained_entries
from .workspace import Workspace, work_folder
from .writer import place_shards, seal

__all__ = ["Plan", "build", "plan"]

_RUN, _MAP, _QUALITY = "training.json", "map.json", "quality.json"


def build(plan: Plan, reporter: Reporter) -> Path:
    """Carry out a plan and return the bundle's path. Raises what the parts raise; the work folder then stays.

    Among several processes (torchrun) one writes; the others train with it and return before the bundle is there.
    """
    request = plan.request
    processes = join(plan.device) if plan.trains else None
    if processes is not None and not processes.leads:
        Trainer(plan.training, work_folder(request.output), processes).follow()
        return request.output
    with begin(plan, reporter) as work:
        return _Recipe(plan, work, reporter, processes).finish()


class _Told:
    """Says how a search goes: what was measured so far, and the best map with as many keepers as are wanted."""

    def __init__(self, keepers: int, reporter: Reporter) -> None:
        self._keepers, self._reporter = keepers, reporter
        self._measured, self._lowest = 0, math.inf

    def pass_on(self, maps: Sequence[KVMap], found: list[float]) -> list[float]:
        """Look at what was measured and give it back."""
        self._measured += len(maps)
        whole = [
            (loss, kept)
            for loss, each in zip(found, maps, strict=True)
            if len(kept := keepers_of(each)) == self._keepers
        ]
        loss, kept = min(whole, default=(math.inf, ()))
        if loss < self._lowest:
            self._lowest, named = loss, " ".join(str(layer + 1) for layer in kept)
            self._reporter.note(f"Loss {loss:.4f} where layers {named} keep a cache ({self._measured} maps measured)")
        return found


class _Recipe:
    """One conversion under way, in the process that writes."""

    def __init__(self, plan: Plan, work: Workspace, reporter: Reporter, processes: Processes | None) -> None:
        self._plan, self._work, self._reporter, self._processes = plan, work, reporter, processes

    def finish(self) -> Path:
        texts = self._texts
        store = self._trained()
        sources = self._map(store, texts)
        measured = self._judge(store, sources, texts)
        self._place(store, sources)
        check = self._self_check(sources)
        manifest = self._manifest(sources, measured, texts, check)
        return seal(self._work, manifest)

    @cached_property
    def _data(self) -> TrainingData | None:
        return prepare(self._plan.training, self._work.folder, self._reporter) if self._plan.settings.data else None

    @cached_property
    def _texts(self) -> Texts:
        if self._data is not None:
            return texts_of(self._data)
        return shipped_texts(Tokenizer.load(self._work.bundle), self._plan.arch.max_positions)

    def _trained(self) -> TensorStore:
        """The weights of all layers, as they will be written; without training the source's own."""
        plan, work, processes, data = self._plan, self._work, self._processes, self._data
        if processes is None or data is None:
            return plan.source.store
        processes.wait()
        if not work.has(TRAINED):
            model, tokens = Trainer(plan.training, work.folder, processes).run(data, self._reporter)
            work.write_note(_RUN, {"tokens": tokens})
            with work.new_piece(TRAINED) as file:
                write_safetensors(HashingFile(file), trained_entries(model, plan.source.store))
        shutil.rmtree(work.folder / "training", ignore_errors=True)
        return open_files([work.piece(TRAINED)])

    def _weights(self, store: TensorStore, arch: Architecture | None = None, *, keep: bool = False) -> Weights:
        """The model of a store; with `keep` its blocks stay in memory."""
        plan = self._plan
        arch = arch or plan.arch
        place: dict[str, Any] = {"device": plan.device, "dtype": plan.dtype}
        blocks = LazyBlocks(arch.num_layers, lambda index: load_block(arch, store, index, **place))
        frame = load_frame(arch, store, (), **place)
        if keep:
            return Weights(frame, blocks.__getitem__)
        return Weights(frame, lambda index: load_block(arch, store, index, **place))

    def _map(self, store: TensorStore, texts: Texts) -> KVMap:
        plan, work = self._plan, self._work
        if plan.sources is not None:
            return plan.sources
        if not work.has(_MAP):
            weights = self._weights(store, keep=plan.whole_bytes <= RUN_WHOLE)
            told = _Told(plan.keepers, self._reporter)

            def measure(maps: Sequence[KVMap]) -> list[float]:
                return told.pass_on(maps, losses(weights, texts.search, maps))

            work.write_note(_MAP, search(plan.arch, measure, plan.keepers))
        return tuple(work.read_note(_MAP))

    def _judge(self, store: TensorStore, sources: KVMap, texts: Texts) -> Measured:
        plan, work = self._plan, self._work
        if not work.has(_QUALITY):
            maps = list(dict.fromkeys((*plan.maps, sources)))
            source = self._weights(plan.source.store)
            trained = self._weights(store) if plan.trains else source
            measured = judge(source, trained, texts.judged, maps=maps, own=sources, reporter=self._reporter)
            work.write_note(_QUALITY, asdict(measured))
        return Measured.from_json(work.read_note(_QUALITY))

    def _place(self, store: TensorStore, sources: KVMap) -> None:
        """The weights without what no layer reads. Of a fused matrix the query's rows come first, and stay."""
        arch = self._plan.arch.share(sources)
        entries = [
            lazy(name, store.info(name).dtype, shape, lambda name=name, rows=shape[0]: store.read(name)[:rows])
            for name, shape in arch.tensors().items()
        ]
        with self._reporter.task("Write the backbone", sum(entry.nbytes for entry in entries)) as task:
            place_shards(self._work, "model", entries, task.advance)

    def _self_check(self, sources: KVMap) -> SelfCheckRecord:
        """Run the self-check's text block by block; a small model also as `run` would, through the cache."""
        plan = self._plan
        arch, store = plan.arch.share(sources), open_safetensors(self._work.bundle)
        tokenizer = Tokenizer.load(self._work.bundle)
        ids = self_check_ids(tokenizer, arch.max_positions)
        batch = Batch(ids[:, :-1], ids[:, 1:], (ids.shape[1] - 1,))
        (loss,) = losses(self._weights(store, arch), [batch], [sources])
        found = SelfCheckRecord(tokens=ids.shape[1], dense_nll=loss)
        if plan.bundle_bytes <= RUN_WHOLE:
            model = Dense(load_decoder(arch, store, device=plan.device, dtype=plan.dtype))
            if differing := compare(found, run_dense_check(model, tokenizer)):
                raise FormatError(f"the self-check fails: {'; '.join(differing)}", "This is a bug; please report it.")
        return found

    def _manifest(self, sources: KVMap, measured: Measured, texts: Texts, check: SelfCheckRecord) -> Manifest:
        plan, settings = self._plan, self._plan.settings
        named = settings.keep_layers is not None or settings.keep_ratio is not None
        rcla = Rcla(
            kv_sources=tuple(source + 1 for source in sources),
            share_every=None if named else settings.share_every or DEFAULT_GROUP,
            keep_ratio=settings.keep_ratio,
            cross_prob=settings.cross_prob if plan.trains else None,
            plain_passes=settings.plain_passes if plan.trains else None,
            cross_draw=settings.cross_draw if plan.trains else None,
            distill=settings.distill if plan.trains else None,
            training=self._training_run(texts),
            retention=retention(measured, trained=plan.trains),
        )
        return Manifest(
            required=("rcla",),
            base=Base(**asdict(plan.source.identity)),
            methods=(rcla,),
            trained=plan.trains,
            backbone=Backbone(mode="copy"),
            quality=self._quality(sources, measured, texts),
            self_check=check,
            libraries=libraries(),
        )

    def _training_run(self, texts: Texts) -> TrainingRun | None:
        plan, settings = self._plan, self._plan.settings
        if not plan.trains:
            return None
        return TrainingRun(
            data=texts.used,
            steps=settings.steps,
            tokens=self._work.read_note(_RUN)["tokens"],
            sequence_length=settings.sequence_length,
            sequences_per_step=settings.batch_size,
            learning_rate=settings.rate,
            lora_rank=settings.lora,
            loss_on=settings.loss_on,
            seed=settings.seed,
        )

    def _quality(self, sources: KVMap, measured: Measured, texts: Texts) -> QualityRecord:
        count = self._plan.arch.num_layers
        dense = tuple(range(count))
        return QualityRecord(
            tokens=texts.tokens,
            text=texts.name,
            dense_perplexity=measured.perplexity("source", dense),
            perplexity=measured.perplexity("trained", sources),
            kl=measured.kl,
            agreement=measured.agreement,
            mean_depth=count,
        )
