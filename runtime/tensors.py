"""Which tensors a bundle's weight files must hold, and what is different: names, shapes and types.

Looks at headers alone: no weights are read. Knows no manifest beyond the methods' settings.
"""

import functools
from collections.abc import Iterator, Mapping

import torch

from ..errors import FormatError
from ..quant.layout import choose_group_size, packed_shapes
from .adapters import adapter_shapes
from .architecture import Architecture
from .junctions import junction_tensors
from .manifest import MANIFEST_NAME, REPAIR
from .methods import Nvium, River, TwoDee
from .store import ShardedStore, TensorStore

Expected = Mapping[str, tuple[frozenset[torch.dtype], tuple[int, ...]]]
"""Name -> (types allowed, shape)."""

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def backbone_tensors(architecture: Architecture) -> Expected:
    """Return what the backbone must hold."""
    return {name: (_FLOATS, shape) for name, shape in architecture.tensors().items()}


def river_tensors(architecture: Architecture, river: River) -> Expected:
    """Return what the exit layers must hold. Raises FormatError for settings that no matrix of the model can have."""
    expected: dict[str, tuple[frozenset[torch.dtype], tuple[int, ...]]] = {}
    packed = functools.cache(lambda N, K: packed_tensors(N, K, river))  # few shapes, many matrices
    for layer in river.exit_layers:
        for name, (N, K) in architecture.block_matrices(layer - 1).items():
            stem = name.removesuffix("weight")
            expected.update({f"{stem}{suffix}": what for suffix, what in packed(N, K).items()})
    return expected


def packed_tensors(N: int, K: int, river: River) -> Expected:
    """Return what a matrix [N, K] of an exit layer is stored as, by suffix. Raises FormatError as `river_tensors`."""
    try:
        shapes = packed_shapes(N, K, choose_group_size(K, river.group_size), river.float_zeros)
    except ValueError as error:
        raise FormatError(f"{MANIFEST_NAME} does not fit config.json: {error}", REPAIR) from error
    return {suffix: (frozenset({dtype}), shape) for suffix, (dtype, shape) in shapes.items()}


def adapter_tensors(architecture: Architecture, settings: TwoDee) -> Expected:
    """Return what the classifiers must hold."""
    shapes = adapter_shapes(
        architecture.num_layers,
        inputs=architecture.hidden_size,
        width=settings.hidden,
        classes=len(settings.labels),
    )
    return {name: (frozenset({torch.float32}), shape) for name, shape in shapes.items()}


def junctions_expected(architecture: Architecture, settings: Nvium) -> Expected:
    """Return what the junctions must hold."""
    shapes = junction_tensors(
        architecture,
        len(settings.junctions),
        width=settings.router_width,
        final_adapter=settings.final_adapter,
    )
    return {name: (frozenset({torch.float32}), shape) for name, shape in shapes.items()}


def check_present(store: ShardedStore, expected: Expected, part: str) -> None:
    """Raise FormatError, naming file and tensor, where one is missing, misshapen or of another type.

    Tensors that nothing here asks for are `verify`'s matter: they change no answer. `part` is what
    a tensor is missing from where there are several files.
    """
    wrong = list(differences(store, expected))
    if wrong:
        name, what = wrong[0]
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        files = store.files()
        place = store.file_of(name) or (files[0] if len(files) == 1 else part)
        raise FormatError(f"{place}: {name} {what}{more}", REPAIR)


def differences(store: TensorStore, expected: Expected) -> Iterator[tuple[str, str]]:
    """Yield each tensor that is missing, misshapen or of another type, and what is wrong with it, by name."""
    names = store.names()
    for name in sorted(expected.keys() - names):
        yield name, "is missing"
    for name, (dtypes, shape) in sorted((name, what) for name, what in expected.items() if name in names):
        info = store.info(name)
        if info.shape != shape:
            yield name, f"has shape {info.shape}, not {shape}"
        elif info.dtype not in dtypes:
            allowed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            yield name, f"is {str(info.dtype).removeprefix('torch.')}, not {allowed}"
