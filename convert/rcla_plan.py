"""What an R-CLA conversion will do, before it does anything: inputs opened and checked, sizes added up.

Knows the request and the source; writes nothing.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from .. import __version__
from ..errors import ResourceError, UsageError
from ..runtime.architecture import Architecture
from ..runtime.progress import Reporter
from ..runtime.quality import LOGIT_BYTES
from .data import DataSettings
from .kv_map import KVMap, count_of, every, from_keepers, keepers_of, spread
from .lora import LoraSettings
from .opening import Opened, open_request
from .preflight import PROGRAM_BYTES, check_disk, check_memory, human
from .rcla_request import RclaSettings
from .request import ConvertRequest
from .source import Source
from .training_memory import plan_memory, trained_numbers
from .training_settings import Precision, TrainingSettings
from .workspace import work_folder
from .writer import hash_file

DEFAULT_GROUP = 4
RETENTION = (1, 2, 4)
"""Groups under which every bundle is measured (papers: R-CLA tables 2 and 3: 100, 50 and 25 % of the cache)."""
TOKENS_A_PASS = 4096
"""Tokens of one pass unless `--micro-batch` says otherwise; not chosen by the memory there is, so that a run goes on
elsewhere."""
RUN_WHOLE = 2 << 30
"""Bytes of weights up to which a model is held in memory whole, for the search and for the self-check."""
MEASURED_TOKENS = 16384
"""Tokens of held-out text at most under which maps are measured."""


@dataclass(frozen=True)
class Plan:
    """A conversion that may start. `sources` is the map; None where it is searched once the weights are there."""

    request: ConvertRequest[RclaSettings]
    opened: Opened
    sources: KVMap | None
    keepers: int

    @property
    def settings(self) -> RclaSettings:
        """What was asked for."""
        return self.request.settings

    @property
    def source(self) -> Source:
        """What is converted."""
        return self.opened.source

    @property
    def arch(self) -> Architecture:
        """Its geometry; every layer keeps its own cache."""
        return self.opened.arch

    @property
    def trains(self) -> bool:
        """Whether the weights are trained at all."""
        return not self.request.untrained

    @property
    def maps(self) -> tuple[KVMap, ...]:
        """The maps under which quality is measured, but for one that is searched."""
        own = spread(self.arch, self.keepers) if self.sources is None else self.sources
        return tuple(dict.fromkeys((*(every(self.arch, size) for size in RETENTION), own)))

    @property
    def data(self) -> DataSettings:
        """What is read. Raises UsageError where there is none."""
        settings = self.settings
        return DataSettings(
            files=settings.data,
            evaluation=() if settings.validation is None else (settings.validation,),
            length=settings.sequence_length,
            packed=settings.packed,
            loss_on=settings.loss_on,
            seed=settings.seed,
        )

    @property
    def precision(self) -> Precision:
        """Of the products in training: bf16 where it was asked for, or on a GPU; weights are float32 in any case."""
        asked = self.request.dtype
        return "bf16" if asked == "bf16" or (asked == "auto" and self.opened.device.type != "cpu") else "fp32"

    @property
    def micro_batch(self) -> int:
        """Sequences of one pass."""
        settings = self.settings
        share = -(-settings.batch_size // int(os.environ.get("WORLD_SIZE", "1")))  # torchrun's processes
        return settings.micro_batch or min(share, max(1, TOKENS_A_PASS // settings.sequence_length))

    @property
    def training(self) -> TrainingSettings:
        """How the weights are trained."""
        settings = self.settings
        return TrainingSettings(
            steps=settings.steps,
            learning_rate=settings.rate,
            batch_size=settings.batch_size,
            micro_batch=self.micro_batch,
            warmup=settings.warmup,
            weight_decay=settings.weight_decay,
            precision=self.precision,
            seed=settings.seed,
            checkpoint_steps=settings.checkpoint_every,
        )

    @property
    def lora(self) -> LoraSettings | None:
        """Low-rank training, or None where all weights are trained."""
        rank = self.settings.lora
        return None if rank is None else LoraSettings(rank=rank, seed=self.settings.seed)

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Of the weights that LoRA leaves alone, in memory."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @cached_property
    def whole_bytes(self) -> int:
        """Bytes of all weights as they are written, followers' keys and values included."""
        return self._bytes(self.arch)

    @cached_property
    def bundle_bytes(self) -> int:
        """Bytes of the weights in the bundle; of a searched map, as of an even one."""
        return self._bytes(self.arch.share(self.sources or spread(self.arch, self.keepers)))

    @property
    def disk(self) -> int:
        """Bytes of disk needed: the bundle, the trained weights before it, and two checkpoints while one is written."""
        if not self.trains:
            return self.bundle_bytes
        return self.bundle_bytes + self.whole_bytes + 2 * 12 * trained_numbers(self.arch, self.lora)

    def fingerprint(self) -> dict[str, Any]:
        """What the result's bytes depend on, as JSON."""
        given = self.settings.validation is not None
        return {
            **self.request.fingerprint(),
            "source": self.source.fingerprint(),
            "data": [hash_file(path).sha256 for path in self.settings.files],
            **({"last_of_data": "validation"} if given else {}),  # the same files can all be trained on
            "programs": {"adapt-llm": __version__, "torch": torch.__version__},
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan for scripts."""
        settings = self.settings
        return {
            "source": {"id": self.source.identity.id, "revision": self.source.identity.revision},
            "output": str(self.request.output),
            "method": self.request.method,
            "family": self.arch.family,
            "num_layers": self.arch.num_layers,
            "keepers": self.keepers,
            "kv_sources": None if self.sources is None else [source + 1 for source in self.sources],
            "trained": self.trains,
            "steps": settings.steps if self.trains else 0,
            "tokens_per_step": settings.batch_size * settings.sequence_length,
            "micro_batch": self.micro_batch,
            "bytes": {"backbone": self.bundle_bytes, **self._kv_bytes()},
            "disk_bytes": self.disk,
            "memory_bytes": self.memory,
            "device": str(self.opened.device),
        }

    def lines(self) -> list[str]:
        """The plan for people."""
        arch, kv = self.arch, self._kv_bytes()
        which = "chosen by the loss of a text"
        if self.sources is not None:
            which = " ".join(str(layer + 1) for layer in keepers_of(self.sources))
        share = f"{human(kv['kv_per_token'])} a token"
        if self.keepers < arch.num_layers:
            share += f" instead of {human(kv['dense_kv_per_token'])}"
        return [
            f"Source    {self.source.identity.id} ({arch.family}, {arch.num_layers} blocks)",
            f"Output    {self.request.output}",
            f"Cache     {self.keepers} of {arch.num_layers} layers keep one ({which}): {share}",
            f"Training  {self._training_line()}",
            f"Backbone  {human(self.bundle_bytes)}, written anew without the others' keys and values",
            f"Needs     {human(self.disk)} of disk, about {human(self.memory)} of memory, on {self.opened.device}",
        ]

    def _training_line(self) -> str:
        settings = self.settings
        if not self.trains:
            return "none (--untrained): the bundle's answers will be poor"
        tokens = settings.steps * settings.batch_size * settings.sequence_length
        what = "all weights" if settings.lora is None else f"LoRA of rank {settings.lora}"
        names = ", ".join(path.name for path in settings.data)
        return (
            f"{settings.steps} steps of {settings.batch_size} x {settings.sequence_length} tokens "
            f"({tokens / 1e6:.3g} million) from {names}; {what} at {settings.rate:g}, in {self.precision}, "
            f"layers cross with probability {settings.cross_prob:g}"
        )

    @cached_property
    def memory(self) -> int:
        """Bytes of memory at the peak, estimated; on a CPU those of all processes of this machine."""
        needed = PROGRAM_BYTES + self._measuring_memory()
        if not self.trains:
            return needed
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.opened.device.type == "cpu" else 1
        return max(needed, sharing * (PROGRAM_BYTES + self._training_memory()))

    def _training_memory(self) -> int:
        return plan_memory(
            self.arch,
            tokens=self.micro_batch * self.settings.sequence_length,
            length=self.settings.sequence_length,
            lora=self.lora,
            frozen_dtype=self.frozen_dtype,
            precision=self.precision,
            checkpointing=self.settings.gradient_checkpointing,
        )

    def _measuring_memory(self) -> int:
        """A block and the head, or a small model whole, and the states of the text under all maps."""
        arch, item = self.arch, self.opened.dtype.itemsize
        weights = trained_numbers(arch)
        if self.whole_bytes > RUN_WHOLE:
            block = sum(prod(shape) for shape in arch.block_tensors(0).values())
            weights = block + arch.vocab_size * arch.hidden_size * (1 if arch.tied else 2)
        states = MEASURED_TOKENS * (arch.hidden_size + 2 * arch.num_kv_heads * arch.head_dim) * (len(self.maps) + 1)
        return item * (weights + 2 * states) + 2 * LOGIT_BYTES

    def _kv_bytes(self) -> dict[str, int]:
        layer = 2 * self.arch.num_kv_heads * self.arch.head_dim * self.opened.dtype.itemsize
        return {"kv_per_token": self.keepers * layer, "dense_kv_per_token": self.arch.num_layers * layer}

    def _bytes(self, arch: Architecture) -> int:
        store = self.source.store
        return sum(store.info(name).dtype.itemsize * prod(shape) for name, shape in arch.tensors().items())


def plan(request: ConvertRequest[RclaSettings], reporter: Reporter) -> Plan:
    """Open the inputs and check that the conversion can be done. Raises AdaptError of every kind; writes nothing."""
    _check_request(request)
    opened = open_request(request, reporter)
    settings, arch = request.settings, opened.arch
    if settings.data and settings.sequence_length > arch.max_positions:
        what = f"--sequence-length {settings.sequence_length} is more than the model's {arch.max_positions} positions"
        raise UsageError(what, "Use shorter sequences.")
    sources = _map(settings, arch)
    count = len(keepers_of(sources)) if sources else count_of(arch, settings.keep_ratio or 1.0)
    made = Plan(request, opened, sources, count)
    _check_memory(made)
    if not work_folder(request.output).is_dir():
        check_disk(request.output, made.disk)
    return made


def _check_memory(plan: Plan) -> None:
    """On a GPU the model is there. Raises ResourceError."""
    device = plan.opened.device
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    try:
        check_memory(plan.memory, available=available)
    except ResourceError as error:
        if plan.trains:
            hint = "Use --lora 16, a smaller --micro-batch, or a shorter --sequence-length."
            raise ResourceError(error.message, hint) from error
        raise


def _check_request(request: ConvertRequest[RclaSettings]) -> None:
    if not request.untrained and not request.settings.data:
        what = "sharing a cache without training ruins a model, and there is no text to train on"
        raise UsageError(what, "Name it with --data FILE, or accept the loss with --untrained.")
    if request.backbone != "copy":
        what = f"--backbone {request.backbone} is not possible: R-CLA writes weights of its own"
        raise UsageError(what, "Leave it out.")
    if not request.untrained and request.dtype == "fp16":
        raise UsageError("training in fp16 is not possible", "Use --dtype bf16 or fp32.")


def _map(settings: RclaSettings, arch: Architecture) -> KVMap | None:
    """The map that the settings name; None where it is to be searched."""
    if settings.keep_ratio is not None:
        return None
    if settings.keep_layers is not None:
        return from_keepers(arch, [layer - 1 for layer in settings.keep_layers])
    return every(arch, DEFAULT_GROUP if settings.share_every is None else settings.share_every)
