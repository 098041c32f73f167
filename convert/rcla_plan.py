"""What an R-CLA conversion will do, before it does anything: inputs opened and checked, sizes added up.

Knows the request and the source; writes nothing.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from ..errors import ResourceError, UsageError
from ..runtime.architecture import Architecture
from ..runtime.progress import Reporter
from ..runtime.quality import LOGIT_BYTES
from .kv_map import KVMap, count_of, every, from_keepers, keepers_of, spread
from .opening import OpenedPlan, open_request
from .preflight import PROGRAM_BYTES, RUN_WHOLE, check_disk, check_memory, human
from .rcla_request import RclaSettings
from .rcla_training import Training
from .request import ConvertRequest
from .training_memory import trained_numbers
from .workspace import work_folder
from .writer import hash_file

DEFAULT_GROUP = 4
RETENTION = (1, 2, 4)
"""Groups under which every bundle is measured (papers: R-CLA tables 2 and 3: 100, 50 and 25 % of the cache)."""
MEASURED_TOKENS = 16384
"""Tokens of held-out text at most under which maps are measured."""
_UNTRAINED = "none (--untrained): the bundle's answers will be poor"


@dataclass(frozen=True)
class Plan(OpenedPlan[RclaSettings]):
    """A conversion that may start. `sources` is the map; None where it is searched once the weights are there."""

    sources: KVMap | None
    keepers: int

    @cached_property
    def training(self) -> Training:
        """How the weights are trained, if they are."""
        return Training(self.request, self.opened)

    @property
    def trains(self) -> bool:
        """Whether the weights are trained at all."""
        return not self.request.untrained

    @property
    def maps(self) -> tuple[KVMap, ...]:
        """The maps under which quality is measured, but for one that is searched."""
        own = spread(self.arch, self.keepers) if self.sources is None else self.sources
        return tuple(dict.fromkeys((*(every(self.arch, size) for size in RETENTION), own)))

    @cached_property
    def whole_bytes(self) -> int:
        """Bytes of all weights as they are written, followers' keys and values included."""
        return self._bytes(self.arch)

    @cached_property
    def bundle_bytes(self) -> int:
        """Bytes of the weights in the bundle."""
        return self._bytes(self._shared)

    @property
    def disk(self) -> int:
        """Bytes of disk needed: the bundle, the trained weights before it, and two checkpoints while one is written."""
        if not self.trains:
            return self.bundle_bytes
        return self.bundle_bytes + self.whole_bytes + 2 * 12 * trained_numbers(self.arch, self.training.lora)

    def fingerprint(self) -> dict[str, Any]:
        """What the result's bytes depend on, as JSON."""
        given = self.settings.validation is not None
        return {
            **super().fingerprint(),
            "data": [hash_file(path).sha256 for path in self.settings.files],
            **({"last_of_data": "validation"} if given else {}),  # the same files can all be trained on
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan for scripts."""
        settings = self.settings
        return {
            **super().to_dict(),
            "keepers": self.keepers,
            "kv_sources": None if self.sources is None else [source + 1 for source in self.sources],
            "trained": self.trains,
            "steps": settings.steps if self.trains else 0,
            "tokens_per_step": settings.batch_size * settings.sequence_length,
            "micro_batch": self.training.micro_batch,
            "bytes": {"backbone": self.bundle_bytes, **self._kv_bytes()},
            "disk_bytes": self.disk,
            "memory_bytes": self.memory,
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
            f"Source    {self.origin}",
            f"Output    {self.request.output}",
            f"Cache     {self.keepers} of {arch.num_layers} layers keep one ({which}): {share}",
            f"Training  {self.training.line() if self.trains else _UNTRAINED}",
            f"Backbone  {human(self.bundle_bytes)}, written anew without the others' keys and values",
            f"Needs     {human(self.disk)} of disk, about {human(self.memory)} of memory, on {self.device}",
        ]

    @cached_property
    def memory(self) -> int:
        """Bytes of memory at the peak, estimated; on a CPU those of all processes of this machine."""
        needed = PROGRAM_BYTES + self._measuring_memory()
        if not self.trains:
            return needed
        return max(needed, self.training.sharing * (PROGRAM_BYTES + self.training.memory))

    def _measuring_memory(self) -> int:
        """A block and the head, or a small model whole, and the states of the text under all maps."""
        arch, item = self.arch, self.dtype.itemsize
        weights = trained_numbers(arch)
        if self.whole_bytes > RUN_WHOLE:
            block = sum(prod(shape) for shape in arch.block_tensors(0).values())
            weights = block + arch.vocab_size * arch.hidden_size * (1 if arch.tied else 2)
        states = MEASURED_TOKENS * (arch.hidden_size + 2 * arch.num_kv_heads * arch.head_dim) * (len(self.maps) + 1)
        return item * (weights + 2 * states) + 2 * LOGIT_BYTES

    @cached_property
    def _shared(self) -> Architecture:
        """The model under its map; of a searched one, under an even one of its size."""
        return self.arch.share(self.sources or spread(self.arch, self.keepers))

    def _kv_bytes(self) -> dict[str, int]:
        """As `inspect` gives them."""
        return {"kv_per_token": self._shared.kv_bytes(), "dense_kv_per_token": self.arch.kv_bytes()}

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
    device = plan.device
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
