"""What an N-vium conversion will do, before it does anything: inputs opened and checked, sizes added up.

Knows the request and the source; writes nothing.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any, Literal

from ..errors import UnsupportedError, UsageError
from ..runtime.architecture import Architecture
from ..runtime.bundle import RIVER
from ..runtime.junctions import equal_points, junction_tensors, router_width
from ..runtime.methods import River
from ..runtime.piggyback import segments
from ..runtime.progress import Reporter
from ..runtime.quality import LOGIT_BYTES
from .exit_fit import fit_tokens
from .frozen_blocks import reading_memory
from .loop_training import LoopTraining
from .nvium_model import depths_of
from .nvium_request import EXITS, NviumSettings
from .opening import open_request
from .preflight import PROGRAM_BYTES, RUN_WHOLE, check_disk, check_memory, human
from .request import ConvertRequest
from .training_memory import plan_memory, trained_numbers
from .workspace import work_folder
from .writer import hash_file

_FLOAT, _MOMENTS = 4, 4  # bytes; a trained number, its gradient and two moments
_READINGS = 8
"""Rows of the hidden width that an exit's adapter, router and head input leave for the backward pass, about."""
_TOKEN_CHARACTERS = 4
_STATE = 2
"""Bytes of a number in a stored state (bf16)."""
_FIT = 8
"""Bytes of a number in the fit of the exits; beside its moments some ten matrices are in memory."""


@dataclass(frozen=True)
class Plan(LoopTraining[NviumSettings]):
    """A conversion that may start. `points`: blocks before each junction; none for the dense twin of a scratch run."""

    points: tuple[int, ...]

    @property
    def trains_backbone(self) -> bool:
        """Whether the backbone's weights change, and are written anew."""
        return self.settings.trained != "routers"

    @property
    def blocks(self) -> Literal["dense", "4bit"]:
        """Which blocks run: a River bundle's exit layers where there are any."""
        return "4bit" if any(isinstance(method, River) for method in self.opened.below.methods) else "dense"

    @property
    def depths(self) -> tuple[float, ...]:
        """The share of the blocks that have run at each exit."""
        return depths_of(self.arch, self.points)

    @property
    def final_adapter(self) -> bool:
        """Whether the last exit has an adapter; beside a frozen backbone it stays the dense model."""
        return self.trains_backbone and bool(self.points)

    @property
    def has_tensors(self) -> bool:
        """Whether the bundle has junctions at all."""
        return bool(self.points)

    @property
    def width(self) -> int:
        """Inside a router."""
        return router_width(self.arch.hidden_size)

    @cached_property
    def junction_numbers(self) -> int:
        """Numbers in all junctions."""
        shapes = junction_tensors(self.arch, len(self.points), width=self.width, final_adapter=self.final_adapter)
        return sum(map(prod, shapes.values()))

    @property
    def backbone_bytes(self) -> int:
        """Bytes of the backbone in the bundle."""
        if not self.trains_backbone:
            return self.backbone.nbytes
        store = self.source.store
        return sum(store.info(name).dtype.itemsize * prod(shape) for name, shape in self.arch.tensors().items())

    @property
    def river_bytes(self) -> int:
        """Bytes of exit layers taken over."""
        return 0 if self.opened.bundle is None else self.opened.bundle.weight_bytes(RIVER)

    @cached_property
    def feature_tokens(self) -> int:
        """Tokens whose states are stored, estimated: those that the steps take, or all that there are."""
        settings = self.settings
        characters = sum(path.stat().st_size for path in settings.data)
        taken = settings.steps * settings.batch_size * settings.sequence_length
        return 0 if self.trains_backbone else min(taken, ceil(characters / _TOKEN_CHARACTERS))

    @property
    def feature_bytes(self) -> int:
        """Bytes of the stored states, estimated."""
        hidden = self.arch.hidden_size
        fitted = min(self.feature_tokens, fit_tokens(hidden)) * hidden * _STATE
        return self.feature_tokens * (len(self.points) * hidden * _STATE + 2 * _FLOAT) + fitted

    @property
    def disk(self) -> int:
        """Bytes of disk needed: the bundle, what trains before it, and two checkpoints while one is written."""
        junctions = _FLOAT * self.junction_numbers
        if not self.trains_backbone:
            return self.backbone.disk + self.river_bytes + self.feature_bytes + 8 * junctions
        checkpoints = 2 * 3 * _FLOAT * (trained_numbers(self.arch) + self.junction_numbers)
        return 2 * (self.backbone_bytes + junctions) + checkpoints

    @cached_property
    def memory(self) -> int:
        """Bytes of memory at the peak, estimated."""
        arch, junctions = self.arch, _FLOAT * _MOMENTS * self.junction_numbers
        head = _FLOAT * arch.vocab_size * arch.hidden_size
        if not self.trains_backbone:
            training = junctions + 2 * head + 3 * LOGIT_BYTES
            fit = junctions + head + _FIT * (2 * len(self.points) + 10) * arch.hidden_size**2
            return PROGRAM_BYTES + max(reading_memory(self.opened), training, fit)
        length = self.settings.sequence_length
        backbone = plan_memory(
            arch,
            tokens=self.micro_batch * length,
            length=length,
            precision=self.precision,
            checkpointing=self.checkpointing,
        )
        exits = _FLOAT * _READINGS * len(self.depths) * self.micro_batch * length * arch.hidden_size
        return self.sharing * (PROGRAM_BYTES + backbone + junctions + exits)

    @property
    def small(self) -> bool:
        """Whether the bundle is run whole at its self-check."""
        return self.backbone_bytes <= RUN_WHOLE

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
            "junctions": list(self.points),
            "trained": settings.trained,
            "blocks": self.blocks,
            "beta": settings.price,
            "target_depth": settings.target_depth,
            "steps": settings.steps,
            "tokens_per_step": settings.batch_size * settings.sequence_length,
            "micro_batch": self.micro_batch,
            "parameters": {"backbone": trained_numbers(self.arch), "junctions": self.junction_numbers},
            "bytes": {
                "backbone": self.backbone_bytes,
                "river": self.river_bytes,
                "junctions": _FLOAT * self.junction_numbers,
                "features": self.feature_bytes,
            },
            "disk_bytes": self.disk,
            "memory_bytes": self.memory,
        }

    def lines(self) -> list[str]:
        """The plan for people."""
        numbers, added = (count / 1e6 for count in (trained_numbers(self.arch), self.junction_numbers))
        return [
            f"Source     {self.origin}",
            f"Output     {self.request.output}",
            f"Exits      {self._exits()}",
            f"Weights    {numbers:.4g} million ({human(self.backbone_bytes)}), and {added:.4g} million in junctions",
            f"Training   {self._training()}",
            f"Needs      {human(self.disk)} of disk, about {human(self.memory)} of memory, on {self.device}",
        ]

    def _exits(self) -> str:
        if not self.points:
            return "one, at the end: a plain language model"
        where = ", ".join(map(str, self.points))
        price = self.settings.price
        target = self.settings.target_depth
        cost = f"beta {price:g}" if target is None else f"beta steered towards {target:.0%} of the blocks"
        blocks = "4-bit blocks" if self.blocks == "4bit" else "blocks"
        return f"{len(self.depths)}, after {where} and all {self.arch.num_layers} {blocks}; {cost}"

    def _training(self) -> str:
        settings = self.settings
        what = {"scratch": "all weights, from random ones", "all": "all weights", "routers": "the junctions alone"}
        line = f"{self.amount}; {what[settings.trained]}, at {settings.rate:g}, in {self.precision}"
        return line if self.trains_backbone else f"{line}, on {human(self.feature_bytes)} of states read once"


def plan(request: ConvertRequest[NviumSettings], reporter: Reporter) -> Plan:
    """Open the inputs and check that the conversion can be done. Raises AdaptError of every kind; writes nothing."""
    settings = request.settings
    _check_request(request)
    drawn = settings.seed if settings.from_scratch else None
    opened = open_request(request, reporter, stacks_on=("river", "rcla"), drawn=drawn)
    arch = opened.arch
    if settings.sequence_length > arch.max_positions:
        what = f"--sequence-length {settings.sequence_length} is more than the model's {arch.max_positions} positions"
        raise UsageError(what, "Use shorter sequences.")
    made = Plan(request, opened, _points(settings, arch))
    if made.trains_backbone and made.blocks == "4bit":
        what = "--train all changes the backbone, and a River bundle's tokens run through its 4-bit exit layers"
        raise UnsupportedError(what, "Train the plain model, or leave --train out.")
    segments(arch, made.points)  # refuses an R-CLA group that reaches over a junction
    _check_target(settings, made)
    check_memory(made.memory)
    if not work_folder(request.output).is_dir():
        check_disk(request.output, made.disk)
    return made


def _check_request(request: ConvertRequest[NviumSettings]) -> None:
    if request.untrained:
        raise UsageError("--untrained is not for nvium: its junctions are what it is", "Leave it out.")
    if request.backbone != "copy" and request.settings.trained != "routers":
        what = f"--backbone {request.backbone} is not possible: the backbone's weights are trained"
        raise UsageError(what, "Leave it out.")
    if request.dtype == "fp16":
        raise UsageError("training in fp16 is not possible", "Use --dtype bf16 or fp32.")


def _points(settings: NviumSettings, arch: Architecture) -> tuple[int, ...]:
    """Blocks before each junction."""
    if settings.junctions is not None:
        last = settings.junctions[-1]
        if last >= arch.num_layers:
            what = f"a junction after block {last} is not before the end: the model has {arch.num_layers} blocks"
            raise UsageError(what, "The last exit is there in any case.")
        return settings.junctions
    exits = EXITS if settings.exits is None else settings.exits
    if exits > arch.num_layers:
        raise UsageError(f"--exits {exits} are more than the model's {arch.num_layers} blocks")
    return equal_points(arch.num_layers, exits)


def _check_target(settings: NviumSettings, made: Plan) -> None:
    """Refuse a depth that no choice of exits has."""
    target, least = settings.target_depth, made.depths[0]
    if target is not None and target < least:
        what = f"--target-depth {target:g} is less than the first exit's {least:.3g} of the blocks"
        raise UsageError(what, "Ask for more, or put the first junction lower.")
