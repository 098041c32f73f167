"""What a River conversion will do, before it does anything: inputs opened and checked, sizes added up.

Knows the request and the source; writes nothing.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from ..errors import UnsupportedError, UsageError
from ..quant.layout import choose_group_size, packed_shapes
from ..quant.quantizers import QUANTIZERS
from ..runtime.progress import Reporter
from ..runtime.quality import LOGIT_BYTES
from .calibration import read_text
from .opening import OpenedPlan, open_request
from .preflight import PROGRAM_BYTES, check_disk, check_memory, human
from .quantise import Recipe
from .ready_made import needs_float_zeros
from .request import ConvertRequest
from .river_request import RiverSettings
from .source import GptqCheckpoint, open_gptq
from .source_identity import sha256_json
from .workspace import work_folder

DEFAULT_GROUP = 64
"""Inputs per scale; argued from the table in docs/quantization.md."""


@dataclass(frozen=True)
class Plan(OpenedPlan[RiverSettings]):
    """A conversion that may start."""

    recipe: Recipe
    ready_made: GptqCheckpoint | None
    float_zeros: bool

    @property
    def exit_indices(self) -> range:
        """Blocks (from 0) that get an exit layer."""
        return range(self.request.settings.entry_layer - 1, self.arch.num_layers)

    @property
    def group_size(self) -> int:
        """Inputs per scale as wanted; -1 for whole rows."""
        return self.recipe.group_size

    @property
    def symmetric(self) -> bool:
        """Whether all zeros are 8."""
        ready = self.ready_made
        return self.recipe.symmetric if ready is None else bool(ready.settings.symmetric)

    @cached_property
    def river_bytes(self) -> int:
        """Bytes of the exit layers on disk."""
        return sum(self._exit_bytes(index) for index in self.exit_indices)

    @property
    def disk(self) -> int:
        """Bytes of disk needed: the bundle, and one river shard twice."""
        return self.backbone.disk + self.river_bytes + min(self.river_bytes, 1 << 30)

    @cached_property
    def memory(self) -> int:
        """Bytes of memory at the peak, estimated: one block and what is done with it, whatever their number."""
        arch, item = self.arch, self.dtype.itemsize
        block = sum(prod(shape) for shape in arch.block_tensors(0).values())
        largest = max(prod(shape) for shape in arch.block_matrices(0).values())
        head = arch.vocab_size * arch.hidden_size * item * (1 if arch.tied else 2)
        tokens = self.request.settings.calibration_tokens + 8192
        activations = 4 * tokens * arch.hidden_size * item
        hessian = 4 * arch.intermediate_size**2 * 4 if self._calibrated else 0
        return PROGRAM_BYTES + head + block * (item + 1) + 5 * 4 * largest + hessian + activations + LOGIT_BYTES * 2

    def fingerprint(self) -> dict[str, Any]:
        """What the result's bytes depend on, as JSON."""
        _, text = read_text(self.request.settings.calibration)
        return {
            **super().fingerprint(),
            "ready_made": self.ready_made.fingerprint() if self.ready_made else None,
            "calibration": sha256_json(text.decode("utf-8", errors="replace")),
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan for scripts."""
        return {
            **super().to_dict(),
            "exit_layers": [index + 1 for index in self.exit_indices],
            "quantizer": "ready-made" if self.ready_made else self.recipe.quantizer.name,
            "group_size": self.group_size,
            "bytes": {"backbone": self.backbone.nbytes, "river": self.river_bytes},
            "disk_bytes": self.disk,
            "memory_bytes": self.memory,
        }

    def lines(self) -> list[str]:
        """The plan for people."""
        arch, request, river = self.arch, self.request, self.request.settings
        first, last = self.exit_indices[0] + 1, arch.num_layers
        how = f"from {self.ready_made.name}" if self.ready_made else self.recipe.quantizer.name
        group = "one scale per row" if self.group_size == -1 else f"groups of {self.group_size}"
        rule = (
            f"tau {river.tau}"
            if river.tau is not None
            else f"tau chosen for at most {river.max_loss:.1%} more perplexity"
        )
        backbone = {"copy": "copied", "link": "hard-linked", "reference": "left in the Hub cache"}[self.backbone.mode]
        if self.backbone.entries:
            backbone = "rewritten"
        return [
            f"Source    {self.origin}",
            f"Output    {request.output}",
            f"Backbone  {human(self.backbone.nbytes)}, {backbone}",
            f"River     exit layers {first} to {last}, 4 bits, {group}, {how}: {human(self.river_bytes)}; {rule}",
            f"Needs     {human(self.disk)} of disk, about {human(self.memory)} of memory, on {self.device}",
        ]

    @property
    def _calibrated(self) -> bool:
        return self.ready_made is None and self.recipe.quantizer.calibrated

    def _exit_bytes(self, index: int) -> int:
        sizes = 0
        for N, K in self.arch.block_matrices(index).values():
            group = choose_group_size(K, self.group_size)
            shapes = packed_shapes(N, K, group, self.float_zeros)
            sizes += sum(prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
        return sizes


def plan(request: ConvertRequest[RiverSettings], reporter: Reporter) -> Plan:
    """Open the inputs and check that the conversion can be done. Raises AdaptError of every kind; writes nothing."""
    river = request.settings
    opened = open_request(request, reporter, stacks_on=("rcla",), inputs=[river.river_from] if river.river_from else [])
    arch = opened.arch
    ready = _ready_made(request, reporter)
    if not 2 <= river.entry_layer <= arch.num_layers:
        raise UsageError(f"--entry-layer {river.entry_layer} is not one of 2 to {arch.num_layers}")
    if river.resident is not None and river.resident > arch.num_layers:
        raise UsageError(f"--resident {river.resident} is more than the {arch.num_layers} blocks there are")
    indices = range(river.entry_layer - 1, arch.num_layers)
    quantizer = QUANTIZERS[river.quantizer]
    group = ready.settings.group_size if ready else river.group_size or DEFAULT_GROUP
    made = Plan(
        request=request,
        opened=opened,
        recipe=Recipe(quantizer, group, river.symmetric),
        ready_made=ready,
        float_zeros=needs_float_zeros(arch, ready, indices) if ready else quantizer.float_zeros,
    )
    _check_shapes(made)
    check_memory(made.memory)
    if not work_folder(request.output).is_dir():
        check_disk(request.output, made.disk)
    return made


def _ready_made(request: ConvertRequest[RiverSettings], reporter: Reporter) -> GptqCheckpoint | None:
    if request.settings.river_from is None:
        return None
    return open_gptq(
        request.settings.river_from,
        token=request.token,
        cache_dir=request.cache_dir,
        offline=request.offline,
        reporter=reporter,
    )


def _check_shapes(plan: Plan) -> None:
    """Refuse a matrix that the packed layout cannot hold before anything is written."""
    try:
        _ = plan.river_bytes
    except ValueError as error:
        raise UnsupportedError(
            f"the weights cannot be stored in 4 bits: {error}", "Choose another --group-size."
        ) from error
