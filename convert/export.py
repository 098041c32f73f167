"""From a bundle to what other programs load: a GPTQ checkpoint of its 4-bit weights, or its plain backbone.

The output is whole or absent. Knows the GPTQ layout's config, not how weights were quantised.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from .. import __version__
from ..errors import FormatError, UnsupportedError
from ..quant.layout import pack, packed_shapes, trivial_g_idx
from ..quant.quantizers import QUANTIZERS
from ..runtime.bundle import BACKBONE, RIVER, Bundle
from ..runtime.manifest import MANIFEST_NAME
from ..runtime.methods import Nvium, River
from ..runtime.progress import Reporter
from .backbone import plan_backbone
from .preflight import check_disk
from .stream import Entry, entries_by_name, read_entries
from .workspace import Workspace, check_replaceable
from .writer import hash_file, json_bytes, place_backbone, place_bytes, place_shards, place_text_files, write_piece

Format = Literal["gptq", "hf"]


def export(bundle: Bundle, fmt: Format, output: Path, *, reporter: Reporter, force: bool = False) -> Path:
    """Write the bundle in another format. Returns the output's path.

    Raises UsageError (output in the way), UnsupportedError (the format cannot hold it), ResourceError (disk).
    """
    _refuse_shared(bundle)
    _refuse_adapted(bundle)
    if force:
        check_replaceable(output, [bundle.path, bundle.backbone_folder])
    river = _exportable(bundle) if fmt == "gptq" else None
    check_disk(output, bundle.weight_bytes(BACKBONE))
    fingerprint = {"export": fmt, "adapt": __version__, "bundle": hash_file(bundle.path / MANIFEST_NAME).sha256}
    with Workspace(output, fingerprint, force=force) as work:
        if river is None:
            _plain(bundle, work, reporter)
        else:
            _gptq(bundle, river, work, reporter)
        return work.publish()


def _refuse_shared(bundle: Bundle) -> None:
    """Other programs give every layer its own keys and values, for which an R-CLA bundle has no weights."""
    sources = bundle.architecture.kv_sources
    followers = sum(source != layer for layer, source in enumerate(sources))
    if followers:
        what = f"{followers} of {len(sources)} layers of {bundle.path} read another layer's cache"
        raise UnsupportedError(f"{what}: no other program can run that", "Run it with adapt.")


def _refuse_adapted(bundle: Bundle) -> None:
    """Other programs have no adapter between the last norm and the head; without it the last exit is another model."""
    mixture = bundle.manifest.method(Nvium)
    if mixture is not None and mixture.final_adapter:
        what = f"the last exit of {bundle.path} has an adapter before the head"
        raise UnsupportedError(f"{what}: no other program can run that", "Run it with adapt.")


def _plain(bundle: Bundle, work: Workspace, reporter: Reporter) -> None:
    architecture = bundle.architecture
    plan = plan_backbone(
        files=[bundle.backbone_folder / name for name in bundle.weight_files(BACKBONE)],
        store=bundle.backbone,
        expected=architecture.tensors(),
        tied=architecture.tied,
        mode="copy",
    )
    place_text_files(work, dict(bundle.text_files))
    place_backbone(work, plan, reporter)


def _exportable(bundle: Bundle) -> River:
    """The river, where a GPTQ checkpoint can hold it."""
    river = bundle.manifest.method(River)
    if river is None:
        raise UnsupportedError(f"{bundle.path} has no 4-bit weights", "Export it with --format hf.")
    if river.float_zeros:
        what = f"{river.quantizer} stores real-valued zeros, which GPTQ checkpoints cannot hold"
        raise UnsupportedError(what, "Convert again with --quantizer gptq or rtn.")
    for name, (_, K) in _matrices(bundle).items():
        if river.group_size != -1 and K % river.group_size:
            what = f"{name} has {K} inputs, which groups of {river.group_size} do not divide"
            raise UnsupportedError(what, "Convert again with a smaller --group-size.")
    return river


def _matrices(bundle: Bundle) -> dict[str, tuple[int, int]]:
    architecture = bundle.architecture
    blocks = (architecture.block_matrices(index) for index in range(architecture.num_layers))
    return {name: shape for block in blocks for name, shape in block.items()}


def _gptq(bundle: Bundle, river: River, work: Workspace, reporter: Reporter) -> None:
    rounded = _round_rest(bundle, river, work, reporter)
    entries = [*_stored_entries(bundle, river), *rounded]
    quantization = _quantization_config(river, act_order=_has_act_order(bundle, river))
    text = {name: path for name, path in bundle.text_files.items() if name != "config.json"}
    place_text_files(work, dict(text))
    place_bytes(work, "config.json", json_bytes({**bundle.config, "quantization_config": quantization}))
    place_bytes(work, "quantize_config.json", json_bytes(quantization))
    with reporter.task("Write the checkpoint", sum(entry.nbytes for entry in entries)) as task:
        place_shards(work, BACKBONE, entries, task.advance)


def _round_rest(bundle: Bundle, river: River, work: Workspace, reporter: Reporter) -> list[Entry]:
    """Quantise the blocks without an exit layer: loaders expect every matrix of a block in 4 bits.

    transformers can leave out kinds of matrices (`modules_in_block_to_quantize`), but not single blocks.
    """
    architecture = bundle.architecture
    rest = [layer for layer in range(1, architecture.num_layers + 1) if layer not in river.exit_layers]
    if rest:
        named = ", ".join(str(layer) for layer in rest)
        reporter.note(f"Block {named} has no 4-bit weights: rounded to nearest for this checkpoint.")
    entries: list[Entry] = []
    for layer in rest:
        piece = f"block-{layer:05d}.safetensors"
        if not work.has(piece):
            write_piece(work, piece, dict(_round(bundle, river, layer)))
        entries += read_entries(work.piece(piece))
    return entries


def _round(bundle: Bundle, river: River, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name in bundle.architecture.block_matrices(layer - 1):
        weight = bundle.backbone.read(name).float()
        matrix = QUANTIZERS["rtn"](weight, group_size=river.group_size, symmetric=river.symmetric)
        for suffix, tensor in pack(matrix).items():
            yield f"{name.removesuffix('weight')}{suffix}", tensor


def _stored_entries(bundle: Bundle, river: River) -> Iterator[Entry]:
    """Everything the bundle has: 16-bit tensors that are not quantised, and the river's."""
    matrices, architecture = _matrices(bundle), bundle.architecture
    backbone = entries_by_name(bundle.backbone_folder / name for name in bundle.weight_files(BACKBONE))
    packed = entries_by_name(bundle.path / name for name in bundle.weight_files(RIVER))
    for name, shape in architecture.tensors().items():
        if name not in matrices:
            yield _found(backbone, name, shape)
    for layer in river.exit_layers:
        for name, (N, K) in architecture.block_matrices(layer - 1).items():
            for suffix, (_, shape) in packed_shapes(N, K, river.group_size).items():
                yield _found(packed, f"{name.removesuffix('weight')}{suffix}", shape)


def _found(entries: Mapping[str, Entry], name: str, shape: tuple[int, ...]) -> Entry:
    entry = entries.get(name)
    if entry is None or entry.shape != shape:
        raise FormatError(f"The bundle's {name} is missing or misshapen", "Run `adapt verify`, and convert again.")
    return entry


def _has_act_order(bundle: Bundle, river: River) -> bool:
    """Whether any exit layer's groups are not consecutive inputs."""
    return any(
        not torch.equal(bundle.river.read(name), trivial_g_idx(K, K if river.group_size == -1 else river.group_size))
        for layer in river.exit_layers
        for matrix, (_, K) in bundle.architecture.block_matrices(layer - 1).items()
        if (name := f"{matrix.removesuffix('weight')}g_idx")
    )


def _quantization_config(river: River, *, act_order: bool) -> dict[str, Any]:
    """What AutoGPTQ, GPTQModel, optimum and vLLM read. v1: each zero is stored minus one."""
    return {
        "bits": river.bits,
        "group_size": river.group_size,
        "sym": river.symmetric,
        "desc_act": act_order,
        "quant_method": "gptq",
        "format": "gptq",
        "checkpoint_format": "gptq",
        "lm_head": False,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"adapt:{__version__}"]},
    }
