"""From an opened bundle to the model that generation runs.

Knows which parts of a bundle are needed where; exit layers are read when a token first needs them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ..errors import FormatError, ResourceError, UsageError
from .architecture import Architecture
from .block import Block
from .bundle import Bundle
from .decoder import load_block, load_frame
from .describe import resident_memory
from .exit_layers import LazyBlocks, load_exit_block
from .exits import CosineExit, Route
from .methods import River as RiverSettings
from .offload import TRAVELLING, MemoryPlan, StreamedBlocks, parse_memory, plan_resident
from .options import Offload, SessionOptions
from .progress import Reporter, SilentReporter
from .river import River
from .stack import Stack
from .store import TensorInfo, TensorStore

UNTRAINED = "This bundle was converted without the training that its method needs; its answers will be poor."


@dataclass(frozen=True)
class Placement:
    """Where and how a model runs. `resident`: backbone blocks on the device, None for all.

    `offload` says what becomes of the others: "drop" (a token that would go deeper continues in the river) or "stream"
    (copied from host memory when needed).
    """

    device: torch.device
    dtype: torch.dtype
    resident: int | None = None
    offload: Offload = "drop"


def resolve_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda[:N]". Raises UsageError for anything that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device called {name}", "Use auto, cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name} is not supported", "Use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(f"this machine has no device {name}", "Use --device cpu.")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype for "auto", "bf16", "fp16" or "fp32".

    "auto" is bf16 everywhere: decoding is bound by memory, and half the bytes are twice the speed even where the CPU
    has no bf16 arithmetic (docs/benchmarks.md). Raises UsageError for fp16 on a
    CPU, where torch computes it by scalars.
    """
    dtypes = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name not in dtypes:
        raise UsageError(f"dtype {name} is not known", f"Use one of {', '.join(dtypes)}.")
    if name == "fp16" and device.type == "cpu":
        raise UsageError("fp16 is many times slower than bf16 on a CPU", "Use --dtype bf16 or fp32.")
    return dtypes[name]


_OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "tau": ("River", "--tau"),
        "resident": ("River", "--resident"),
        "prefill": ("River", "--prefill exit"),
        "gpu_memory": ("River", "--gpu-memory"),
        "offload": ("River", "--offload stream"),
        "lossless": ("River", "--lossless"),
        "draft": ("River", "--draft"),
        "per_exit_truncation": ("N-vium", "--per-exit-truncation"),
        "piggyback": ("N-vium", "--no-piggyback"),
        "max_deferred": ("N-vium", "--max-deferred"),
    }
)
"""Options that one method has: the method, and how the command line spells what is not the default."""


def refuse_options(bundle: Bundle, options: SessionOptions, method: str | None = None) -> None:
    """Raise UsageError where an option of another method than `method` ("River", "N-vium"; None: of any) is set."""
    plain = SessionOptions()
    for field, (owner, flag) in _OPTIONS.items():
        if owner != method and getattr(options, field) != getattr(plain, field):
            names = ", ".join(settings.name for settings in bundle.manifest.methods)
            what = f"{flag} is for generating with {owner} bundles; {bundle.path} is {names}"
            raise UsageError(what, "Leave it out.")


def load_river(bundle: Bundle, options: SessionOptions, reporter: Reporter | None = None) -> River:
    """Make the model of a River bundle as `options` ask.

    Raises FormatError for a bundle without River, UsageError for what cannot be (device, threshold, resident count),
    ResourceError where `gpu_memory` does not hold the river.
    """
    settings = bundle.manifest.method(RiverSettings)
    if settings is None:
        raise FormatError(f"{bundle.path} is not a River bundle", "Convert with --method river.")
    refuse_options(bundle, options, "River")
    arch = bundle.architecture
    route = river_route(settings, arch.num_layers, tau=options.tau)
    if options.lossless:
        route = replace(route, dense_layers=frozenset())  # drafts are to be fast, and change nothing
    return make_river(
        arch,
        bundle.backbone,
        bundle.river,
        _placement(arch, settings, options, reporter or SilentReporter()),
        route,
        entry_layer=settings.entry_layer,
        dense_prefill=options.prefill == "dense",
    )


def river_route(
    settings: RiverSettings, num_layers: int, *, tau: float | None = None, resident: int | None = None
) -> Route:
    """Return the bundle's rule; `tau` stands in for its thresholds, `resident` ends every climb there."""
    thresholds = settings.thresholds if tau is None else None
    if thresholds is None:
        thresholds = (settings.tau if tau is None else tau,) * (num_layers - 1)
    policy = CosineExit.by_layer(thresholds, settings.entry_layer)
    return Route(policy, frozenset(settings.dense_layers), resident=resident)


def _placement(arch: Architecture, settings: RiverSettings, options: SessionOptions, reporter: Reporter) -> Placement:
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    if options.offload == "stream":
        _check_streaming(device)
    resident = settings.resident if options.resident is None else options.resident
    if options.gpu_memory is not None:
        plan = _planned(arch, settings, options, device, dtype)
        resident = plan.resident
        reporter.note(plan.describe(arch.num_layers, options.offload))
    return Placement(device, dtype, resident, options.offload)


def _check_streaming(device: torch.device) -> None:
    if device.type != "cuda":
        raise UsageError("--offload stream needs a GPU", "On a CPU the blocks are in memory already.")


def _planned(
    arch: Architecture, settings: RiverSettings, options: SessionOptions, device: torch.device, dtype: torch.dtype
) -> MemoryPlan:
    """Plan which backbone blocks fit in `gpu_memory`."""
    if device.type != "cuda":
        raise UsageError("--gpu-memory needs a GPU", "Use --resident N to leave backbone blocks out on a CPU.")
    free, total = torch.cuda.mem_get_info(device)
    budget = parse_memory(options.gpu_memory or "auto", free=free, total=total)
    least = settings.entry_layer - 1
    small, large = (
        resident_memory(arch, settings, count, itemsize=dtype.itemsize) for count in (least, arch.num_layers)
    )
    per_block = (large.total - small.total) // (arch.num_layers - least)
    positions = options.ctx_size or min(arch.max_positions, 4096)
    kv = arch.kv_bytes(dtype.itemsize) * positions
    streamed = TRAVELLING * per_block if options.offload == "stream" else 0
    fixed = small.total - least * per_block + kv + streamed
    return plan_resident(budget=budget, fixed=fixed, per_block=per_block, num_layers=arch.num_layers, least=least)


def make_river(
    arch: Architecture,
    backbone: TensorStore,
    exits: TensorStore,
    placement: Placement,
    route: Route,
    *,
    entry_layer: int,
    dense_prefill: bool = False,
) -> River:
    """Make the model from its stores. Dropped blocks are neither read nor counted.

    In the river, the route's `dense_layers` are the backbone's own blocks; they are loaded wherever they lie. Which
    blocks are resident is said by the placement.
    """
    device, dtype, resident = placement.device, placement.dtype, placement.resident
    if resident is not None and not entry_layer - 1 <= resident <= arch.num_layers:
        raise UsageError(f"{resident} resident blocks are not possible", f"Use {entry_layer - 1} to {arch.num_layers}.")
    blocks = _backbone_blocks(arch, backbone, placement)
    decoder = load_frame(arch, backbone, blocks, device=device, dtype=dtype)

    def load_exit(index: int) -> Block:
        if index + 1 < entry_layer:
            raise IndexError(f"block {index + 1} has no exit layer")
        if index + 1 in route.dense_layers:
            near = resident is None or index < resident
            return blocks[index] if near else load_block(arch, backbone, index, device=device, dtype=dtype)
        return load_exit_block(arch, backbone, exits, index, device=device, dtype=dtype)

    deepest = resident if placement.offload == "drop" else None
    return River(
        decoder,
        Stack(arch, LazyBlocks(arch.num_layers, load_exit)),
        route.policy,
        resident=deepest,
        dense_prefill=dense_prefill,
        held=route.held,
    )


def _backbone_blocks(arch: Architecture, store: TensorStore, placement: Placement) -> Sequence[Block]:
    device, dtype = placement.device, placement.dtype
    count = arch.num_layers if placement.resident is None else placement.resident

    def load(index: int) -> Block:
        return load_block(arch, store, index, device=device, dtype=dtype)

    near = Stack(arch, LazyBlocks(count, load))
    if placement.offload == "drop" or count == arch.num_layers:
        return near
    _check_streaming(device)
    return StreamedBlocks(near, arch.num_layers, PinnedLoader(arch, store, placement), device)


class PinnedLoader:
    """Copies of blocks in pinned host memory, sent to the device when called. The first call of a block pins it."""

    def __init__(self, arch: Architecture, store: TensorStore, placement: Placement) -> None:
        self._arch, self._placement = arch, placement
        self._store = _PinnedStore(store, placement)

    def __call__(self, index: int) -> Block:
        """Return block `index` on the device; the copy may still be under way on the current stream."""
        try:
            return load_block(
                self._arch, self._store, index, device=self._placement.device, dtype=self._placement.dtype
            )
        except torch.OutOfMemoryError as error:
            raise ResourceError("the GPU has no room for a streamed block", "Lower --resident.") from error


class _PinnedStore:
    """A store whose tensors lie in pinned memory after their first reading, and are sent without waiting."""

    def __init__(self, store: TensorStore, placement: Placement) -> None:
        self._store, self._placement = store, placement
        self._pinned: dict[str, torch.Tensor] = {}

    def names(self) -> Collection[str]:
        return self._store.names()

    def info(self, name: str) -> TensorInfo:
        return self._store.info(name)

    def release(self, name: str) -> None:
        self._store.release(name)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._pinned.get(name)
        if tensor is None:
            tensor = self._pinned[name] = self._store.read(name).to(self._placement.dtype).pin_memory()
        return tensor.to(self._placement.device, non_blocking=True)
