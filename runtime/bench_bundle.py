"""Who races for a bundle: its method, its own dense backbone, its 4-bit floor, transformers on the same files.

Opens bundles and loads models; times nothing itself.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from ..errors import UsageError
from ..quant.int8 import Int8Linear
from .architecture import architecture_of
from .bench import Contender
from .bench_lanes import PASSAGE, Prompt, check_room, lane, make_rows
from .bundle import Bundle
from .captured import captured
from .decoder import Decoder, load_decoder
from .dense import Dense
from .exits import FixedExit
from .generate import Model
from .loading import resolve_device, resolve_dtype
from .manifest import MANIFEST_NAME
from .methods import Nvium as NviumSettings
from .methods import Rcla
from .methods import River as RiverSettings
from .models import load_dense, load_model
from .options import Sampling, SessionOptions
from .progress import Reporter, SilentReporter
from .river import River
from .store import open_safetensors
from .text import Tokenizer, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Name = Literal["dense", "method", "floor", "transformers"]

NO_TWIN = (
    "An R-CLA bundle has no dense twin: the keys and values that its followers do without are not in it. "
    "Give the model it came from, or one fine-tuned alike, with --dense PATH to compare."
)


@dataclass(frozen=True)
class BenchOptions:
    """What to race with. Raises UsageError for what cannot be."""

    session: SessionOptions = field(default_factory=SessionOptions)
    contexts: tuple[int, ...] = (128,)
    rows: tuple[int, ...] = (1,)
    """How many texts at once; every number of them at every context."""
    tokens: int = 32
    rounds: int = 5
    sampling: Sampling = field(default_factory=lambda: Sampling(seed=0))
    dense: Path | None = None
    """Another model as the dense one: a bundle, or a folder with config.json and safetensors."""
    floor: bool = False
    transformers: bool = False
    text: str = PASSAGE

    def __post_init__(self) -> None:
        for name in ("contexts", "rows"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise UsageError(f"{name} are {list(getattr(self, name))}", "Each must be 1 or more.")
        if self.tokens < 1 or self.rounds < 1:
            raise UsageError("There is nothing to measure", "Tokens and rounds must be 1 or more.")
        if self.transformers and not self.sampling.greedy:
            raise UsageError("transformers is measured greedy", "Leave --temperature out.")


class Field:
    """The models of a bundle, each loaded when it is first asked for.

    Raises what opening and loading a bundle raises; UsageError for contexts that the model's positions do not reach.
    """

    def __init__(self, path: Path, options: BenchOptions, reporter: Reporter | None = None) -> None:
        self.options = options
        self._reporter = reporter or SilentReporter()
        self.bundle = Bundle.open(path, cache_dir=options.session.cache_dir, reporter=self._reporter)
        self.tokenizer = Tokenizer.load(path)
        self._models: dict[Name, Model] = {}
        longest, most = max(options.contexts) + options.tokens + 1, self.bundle.architecture.max_positions
        if longest > most:
            raise UsageError(f"{longest} tokens are asked for; the model's positions reach {most}", "Lower --context.")
        if options.floor and self.bundle.manifest.method(RiverSettings) is None:
            raise UsageError("--floor is for River bundles", "Leave it out.")

    @property
    def names(self) -> tuple[Name, ...]:
        """Who takes part."""
        asked: dict[Name, bool] = {
            "dense": self.options.dense is not None or self._has_twin,
            "method": True,
            "floor": self.options.floor,
            "transformers": self.options.transformers,
        }
        return tuple(name for name, wanted in asked.items() if wanted)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about the comparison."""
        return () if "dense" in self.names else (NO_TWIN,)

    @property
    def head_bits(self) -> dict[str, int]:
        """The bits of the method's head where 8 were asked for: a head that cannot be rounded stays in 16."""
        if self.options.session.head_bits == 16:
            return {}
        decoder = getattr(self.model("method"), "decoder", None)
        return {"head_bits": 8 if isinstance(decoder, Decoder) and isinstance(decoder.head, Int8Linear) else 16}

    @property
    def _has_twin(self) -> bool:
        manifest = self.bundle.manifest
        return manifest.method(Rcla) is None or manifest.method(RiverSettings) is not None

    def check_room(self) -> None:
        """Raise ResourceError where the largest trial has no room, before a smaller one is measured for nothing."""
        most = max(self.options.contexts) + self.options.tokens + 1
        check_room(self.model("method"), max(self.options.rows), most)

    def contender(self, name: Name, context: int, rows: int) -> Contender:
        """Make one contender for one prompt."""
        options = self.options
        ids = make_rows(self.tokenizer, options.text, context, rows)
        prompt = Prompt(ids, options.tokens, options.sampling)
        if name == "transformers":
            return self._transformers(prompt)
        return lane(name, self.model(name), self.tokenizer, prompt)

    def model(self, name: Name) -> Model:
        """Return a model of this package."""
        if name not in self._models:
            makers: Mapping[Name, Callable[[], Model]] = {
                "method": lambda: load_model(self.bundle, self.options.session, self._reporter),
                "dense": self._dense,
                "floor": self._floor,
            }
            self._models[name] = captured(makers[name](), wanted=self.options.session.cuda_graphs)
        return self._models[name]

    def _dense(self) -> Model:
        if self.options.dense is not None:
            return open_dense(self.options.dense, self.options.session, vocabulary=self.bundle.architecture.vocab_size)
        shared = getattr(self._models.get("method"), "decoder", None)
        mixture = self.bundle.manifest.method(NviumSettings)
        sixteen_bit = self.options.session.head_bits == 16 and (mixture is None or mixture.blocks == "dense")
        if sixteen_bit and isinstance(shared, Decoder) and len(shared.blocks) == self.bundle.architecture.num_layers:
            return Dense(shared)  # the same weights: on a GPU there may be no room for two copies
        return load_dense(self.bundle, _plain(self.options.session))

    def _floor(self) -> Model:
        """River whose tokens leave as early as any may."""
        river = self._models.get("method")
        if not isinstance(river, River):
            river = load_model(self.bundle, replace(_plain(self.options.session), tau=self.options.session.tau))
        settings = self.bundle.manifest.method(RiverSettings)
        if settings is None or not isinstance(river, River):
            raise UsageError("--floor is for River bundles", "Leave it out.")
        return River(river.decoder, river.exits, FixedExit(settings.entry_layer - 1))

    def _transformers(self, prompt: Prompt) -> Contender:
        from .bench_transformers import open_transformers  # noqa: PLC0415 - only where asked for

        dense, session = self.options.dense, self.options.session
        if dense is not None and not (dense / MANIFEST_NAME).is_file():
            return open_transformers(dense, prompt, session)
        bundle = self.bundle if dense is None else Bundle.open(dense, cache_dir=session.cache_dir)
        return open_transformers(bundle.backbone_folder, prompt, session)


def open_dense(path: Path, options: SessionOptions, *, vocabulary: int) -> Dense:
    """Load a dense model from a bundle, or from a folder of config.json and safetensors.

    Raises UsageError where it is neither, or has another vocabulary than the bundle that it is compared with.
    """
    if (path / MANIFEST_NAME).is_file():
        dense = load_dense(Bundle.open(path, cache_dir=options.cache_dir), _plain(options))
    elif (path / "config.json").is_file():
        store = open_safetensors(path)
        device = resolve_device(options.device)
        arch = architecture_of(read_json(path / "config.json"), store)
        dense = Dense(load_decoder(arch, store, device=device, dtype=resolve_dtype(options.dtype, device)))
    else:
        raise UsageError(f"{path} is neither a bundle nor a folder with config.json", "Give --dense such a folder.")
    if dense.decoder.arch.vocab_size != vocabulary:
        raise UsageError(f"{path} has another vocabulary than the bundle", "Compare models with the same tokenizer.")
    return dense


def _plain(options: SessionOptions) -> SessionOptions:
    """Return what a dense model can be opened with."""
    return SessionOptions(
        device=options.device, dtype=options.dtype, threads=options.threads, cache_dir=options.cache_dir
    )


def set_threads(threads: int | None) -> int:
    """Set torch's threads where that is asked for; return how many there are."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()
