"""What is in a bundle, as data: `adapt inspect` prints it.

Everything comes from the manifest and the geometry; no tensor is read. Layers are counted from 1, sizes are bytes.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .architecture import Architecture
from .bundle import ADAPTERS, BACKBONE, JUNCTIONS, RIVER, Bundle
from .manifest import Manifest
from .methods import Nvium, River, TwoDee
from .tensors import junctions_expected, packed_tensors

_TWO_BYTES = 2  # 16-bit weights
_RUN_TIME_ONLY_ON_DEMAND = frozenset({"g_idx"})  # trivial in what this package writes; not kept in memory
_LICENCE_LINE = re.compile(r"^license:\s*[\"']?([\w.+-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Memory:
    """Bytes of parameters in memory with `resident` dense blocks: weights in 16 bits, scales and zeros as stored."""

    resident: int
    embeddings: int
    head: int
    final_norm: int
    dense_blocks: int
    exit_layers: int
    total: int
    junctions: int = 0


def describe(bundle: Bundle, *, resident: int | None = None) -> dict[str, Any]:
    """The keys of `inspect --json`, and `license`, `memory`. `resident` overrides the bundle's own setting.

    Raises UsageError where `resident` does not fit, UnsupportedError for a family that is not handled.
    """
    manifest, architecture = bundle.manifest, bundle.architecture
    data = manifest.model_dump(mode="json")
    river = manifest.method(River)
    mixture = manifest.method(Nvium)
    if mixture is not None and river is not None and resident is None:
        # Passes go through the exit layers and the blocks that have none, or through the backbone.
        resident = river.entry_layer - 1 if mixture.blocks == "4bit" else architecture.num_layers
    memory = _with_junctions(resident_memory(architecture, river, resident), architecture, mixture)
    return {
        "format_version": manifest.format_version,
        "methods": data["methods"],
        "base": data["base"],
        "family": architecture.family,
        "layers": _layers(architecture, manifest, memory.resident),
        "bytes": _bytes(bundle, architecture),
        "memory": asdict(memory),
        "backbone": manifest.backbone.mode,
        "quality": data["quality"],
        "tuned": data["tuned"],
        "trained": manifest.trained,
        "license": licence(bundle.text_files),
        "libraries": data["libraries"],
    }


def resident_memory(
    architecture: Architecture, river: River | None, resident: int | None = None, *, itemsize: int = _TWO_BYTES
) -> Memory:
    """Parameters in memory when only the first `resident` dense blocks are kept (papers: River-LLM, Table 6).

    The paper counts exit layers at exactly 4 bits; here scales and zeros are counted. An exit layer whose dense block
    is dropped keeps that block's norms and biases. Blocks that stay dense in the river are kept, their exit layers not.
    """
    count = _resident(architecture, river, resident)
    stay = set(river.dense_layers) if river else set()
    kept = sum(_block_bytes(architecture, layer - 1, itemsize) for layer in stay | set(range(1, count + 1)))
    exits = sum(
        _packed_bytes(architecture, river, layer - 1)
        + (_extras(architecture, layer - 1, itemsize) if layer > count else 0)
        for layer in sorted(set(river.exit_layers if river else ()) - stay)
    )
    table = architecture.vocab_size * architecture.hidden_size * itemsize
    head = 0 if architecture.tied else table
    norm = architecture.hidden_size * itemsize
    return Memory(count, table, head, norm, kept, exits, table + head + norm + kept + exits)


def _with_junctions(memory: Memory, architecture: Architecture, settings: Nvium | None) -> Memory:
    if settings is None:
        return memory
    shapes = (shape for _, shape in junctions_expected(architecture, settings).values())
    size = _TWO_BYTES * sum(map(math.prod, shapes))
    return replace(memory, junctions=size, total=memory.total + size)


def _resident(architecture: Architecture, river: River | None, asked: int | None) -> int:
    stored = river.resident if river else None
    count = next((value for value in (asked, stored) if value is not None), architecture.num_layers)
    least = river.entry_layer - 1 if river else architecture.num_layers
    if not least <= count <= architecture.num_layers:
        what = f"{count} resident blocks are not possible"
        raise UsageError(what, f"This model can keep {least} to {architecture.num_layers}.")
    return count


def _block_bytes(architecture: Architecture, index: int, itemsize: int) -> int:
    return itemsize * sum(math.prod(shape) for shape in architecture.block_tensors(index).values())


def _extras(architecture: Architecture, index: int, itemsize: int) -> int:
    """Norms and biases of a block."""
    matrices = sum(N * K for N, K in architecture.block_matrices(index).values())
    return _block_bytes(architecture, index, itemsize) - itemsize * matrices


def _packed_bytes(architecture: Architecture, river: River | None, index: int) -> int:
    if river is None:
        return 0
    return sum(
        next(iter(dtypes)).itemsize * math.prod(shape)
        for N, K in architecture.block_matrices(index).values()
        for name, (dtypes, shape) in packed_tensors(N, K, river).items()
        if name not in _RUN_TIME_ONLY_ON_DEMAND
    )


def _layers(architecture: Architecture, manifest: Manifest, resident: int) -> list[dict[str, Any]]:
    river, classifiers = manifest.method(River), manifest.method(TwoDee)
    exits = set(river.exit_layers) if river else set()
    stay = set(river.dense_layers) if river else set()
    mixture = manifest.method(Nvium)
    junctions = {layer: number for number, layer in enumerate(mixture.junctions if mixture else (), start=1)}
    return [
        {
            "index": layer,
            "dense": layer <= resident or layer in stay,
            "exit_layer": layer in exits,
            "kv_source": architecture.kv_sources[layer - 1] + 1,
            "junction": junctions.get(layer),
            "adapter": classifiers.hidden if classifiers else None,
        }
        for layer in range(1, architecture.num_layers + 1)
    ]


def _bytes(bundle: Bundle, architecture: Architecture) -> dict[str, int]:
    parts = {"backbone": bundle.weight_bytes(BACKBONE), "river": bundle.weight_bytes(RIVER)}
    parts |= {"junctions": bundle.weight_bytes(JUNCTIONS), "adapters": bundle.weight_bytes(ADAPTERS)}
    return {
        **parts,
        "total": sum(parts.values()),
        "kv_per_token": architecture.kv_bytes(),
        "dense_kv_per_token": architecture.share(range(architecture.num_layers)).kv_bytes(),
    }


def licence(files: dict[str, Path]) -> str | None:
    """The model's licence: the id in README.md's front matter, else the first line of its licence file, else None."""
    readme = files.get("README.md")
    if readme is not None:
        parts = readme.read_text(encoding="utf-8", errors="replace").split("---", 2)
        if len(parts) == 3 and not parts[0].strip() and (found := _LICENCE_LINE.search(parts[1])):
            return found[1]
    for name in sorted(files):
        if name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
            lines = files[name].read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line.strip()[:80] for line in lines if line.strip()), name)
    return None
