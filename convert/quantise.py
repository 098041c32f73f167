"""The 4-bit copies of the blocks, one block at a time: which inputs its matrices see, and how they are rounded.

Calibrated quantisers see the activations of a text that travels through the model block by block, through the copies
already made, so that each one may repair what the earlier ones lost. Memory does not grow with the number of blocks.
Knows no manifest and no exit rule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import FormatError
from ..quant.layout import Int4Matrix, choose_group_size, pack
from ..quant.quantizers import Hessian, Quantizer
from ..runtime.architecture import Architecture
from ..runtime.block import Block
from ..runtime.decoder import Decoder, load_block
from ..runtime.exit_layers import exit_block
from ..runtime.pass_store import PassStore
from ..runtime.progress import Task
from ..runtime.quality import sequences_at_once
from ..runtime.store import TensorStore
from .workspace import Workspace
from .writer import read_piece, write_piece


@dataclass(frozen=True)
class Climb:
    """Sequences below a block: h [n, S, hidden], and for some sequences each the keys and values read above (R-CLA)."""

    h: Tensor
    stores: Sequence[PassStore]

    @classmethod
    def start(cls, decoder: Decoder, h: Tensor, kept: Mapping[int, tuple[Tensor, Tensor]] | None = None) -> "Climb":
        """Begin with h, below which `kept` was stored: layer -> keys and values [n, kv_heads, S, head_dim]."""
        count = sequences_at_once(h.shape[1])
        parts = {layer: tuple(tensor.split(count) for tensor in pair) for layer, pair in (kept or {}).items()}
        own = [{layer: (k[at], v[at]) for layer, (k, v) in parts.items()} for at in range(-(-len(h) // count))]
        return cls(h, [PassStore(decoder.arch, kept=each) for each in own])

    def through(self, decoder: Decoder, block: Block, ids: Tensor) -> "Climb":
        """Go through one block, a few sequences at a time."""
        step, stores = decoder.step(None, ids[:1]), [store.copy() for store in self.stores]
        parts = zip(self.h.split(sequences_at_once(self.h.shape[1])), stores, strict=True)
        return Climb(torch.cat([block(rows, step, store) for rows, store in parts]), stores)

    def tensors(self, index: int) -> dict[str, Tensor]:
        """What block `index` and those above it need, to go on another time."""
        kept = [store.kept(index) for store in self.stores]
        pairs = {
            layer: [torch.cat(parts) for parts in zip(*(each[layer] for each in kept), strict=True)]
            for layer in kept[0]
        }
        named = {
            f"{name}.{layer}": tensor for layer, pair in pairs.items() for name, tensor in zip("kv", pair, strict=True)
        }
        return {"h": self.h, **named}

    @classmethod
    def from_tensors(cls, decoder: Decoder, tensors: Mapping[str, Tensor]) -> "Climb":
        """What `tensors` gave."""
        moved = {name: tensor.to(decoder.device) for name, tensor in tensors.items()}
        layers = [int(name.removeprefix("k.")) for name in moved if name.startswith("k.")]
        return cls.start(decoder, moved["h"], {layer: (moved[f"k.{layer}"], moved[f"v.{layer}"]) for layer in layers})


@dataclass(frozen=True)
class Recipe:
    """How matrices are rounded. `group_size` is what is wanted; a width it does not divide takes a smaller one."""

    quantizer: Quantizer
    group_size: int
    symmetric: bool

    def __call__(self, name: str, weight: Tensor, hessian: Tensor | None) -> Int4Matrix:
        """Round one matrix [N, K]; `hessian` [K, K] of its inputs, for calibrated quantisers. FormatError names it."""
        size = choose_group_size(weight.shape[1], self.group_size)
        try:
            return self.quantizer(weight, group_size=size, symmetric=self.symmetric, hessian=hessian)
        except FormatError as error:
            raise FormatError(f"{name}: {error.message}", error.hint) from error


@dataclass(frozen=True)
class Job:
    """What a conversion quantises: `frame` lends embedding, device and dtype, `store` the dense weights."""

    work: Workspace
    frame: Decoder
    store: TensorStore
    recipe: Recipe

    @property
    def arch(self) -> Architecture:
        """Geometry of the model."""
        return self.frame.arch

    def dense(self, index: int) -> Block:
        """Load block `index` (from 0) of the backbone."""
        return load_block(self.arch, self.store, index, device=self.frame.device, dtype=self.frame.dtype)


class _Tapped:
    """A linear or projection that shows its inputs to a Hessian."""

    def __init__(self, inner: Callable[[Tensor], Tensor], hessian: Hessian) -> None:
        self._inner, self._hessian = inner, hessian

    def __call__(self, x: Tensor) -> Tensor:
        self._hessian.add(x.reshape(-1, x.shape[-1]))
        return self._inner(x)


def piece_name(index: int) -> str:
    """Return the name of the piece that holds the exit layer of block `index` (from 0)."""
    return f"exit-{index + 1:04}.safetensors"


def _state_name(index: int) -> str:
    return f"calibration-{index + 1:04}.safetensors"


def quantise_plain(job: Job, indices: Sequence[int], task: Task) -> None:
    """Write the exit layers of `indices` with a quantiser that needs no text."""
    for index in indices:
        if not job.work.has(piece_name(index)):
            names = job.arch.block_matrices(index)
            matrices = {name: job.recipe(name, job.store.read(name), None) for name in names}
            write_piece(job.work, piece_name(index), packed(matrices))
            release(job.store, job.arch, index)
        task.advance(1)


def release(store: TensorStore, arch: Architecture, index: int) -> None:
    """Let the pages of a block go, so that memory does not grow with what was read."""
    for name in arch.block_tensors(index):
        store.release(name)


def quantise_calibrated(job: Job, indices: Sequence[int], ids: Tensor, task: Task) -> None:
    """Write the exit layers of `indices` (consecutive, up to the last) from the activations of ids [n, S].

    After each layer the activations are kept as a piece, so that a killed run
    takes up at the layer where it was.
    """
    climb: Climb | None = None
    for index in indices:
        if not job.work.has(piece_name(index)):
            if climb is None:
                climb = _start(job, ids, index, first=index == indices[0])
            climb = _one_layer(job, ids, climb, index)
            release(job.store, job.arch, index)
        task.advance(1)


@torch.inference_mode()
def _start(job: Job, ids: Tensor, index: int, *, first: bool) -> Climb:
    """Return the activations that enter block `index`: an earlier run's, or the dense blocks' before the first."""
    frame = job.frame
    if not first:
        return Climb.from_tensors(frame, read_piece(job.work, _state_name(index)))
    climb = Climb.start(frame, frame.embed(ids.to(frame.device)))
    for below in range(index):
        climb = climb.through(frame, job.dense(below), ids)
        release(job.store, job.arch, below)
    return climb


@torch.inference_mode()
def _one_layer(job: Job, ids: Tensor, climb: Climb, index: int) -> Climb:
    arch, frame = job.arch, job.frame
    hessians = watch(frame, job.dense(index), ids, climb)
    weights = {name: job.store.read(name).to(frame.device) for name in arch.block_matrices(index)}
    matrices = {name: job.recipe(name, weight, hessians[input_of(name)]) for name, weight in weights.items()}
    copy = exit_block(arch, job.store, index, matrices, device=frame.device, dtype=frame.dtype)
    climb = climb.through(frame, copy, ids)
    if index + 1 < arch.num_layers:
        kept = {name: tensor.cpu() for name, tensor in climb.tensors(index + 1).items()}
        write_piece(job.work, _state_name(index + 1), kept)
    write_piece(job.work, piece_name(index), packed(matrices))
    if job.work.has(_state_name(index)):
        job.work.spend(_state_name(index))
    return climb


def watch(decoder: Decoder, block: Block, ids: Tensor, climb: Climb) -> Mapping[str, Tensor]:
    """Return the Hessians of the inputs of a block's matrices: "qkv", "output", "gate_up", "down" -> [K, K]."""
    taps = {name: Hessian() for name in ("qkv", "output", "gate_up", "down")}
    climb.through(decoder, _tapped(decoder.arch, block, taps), ids)
    return {name: hessian.finish() for name, hessian in taps.items()}


def _tapped(arch: Architecture, block: Block, taps: Mapping[str, Hessian]) -> Block:
    parts = {name: _Tapped(getattr(block, name), hessian) for name, hessian in taps.items()}
    return Block(arch, block.index, block.norms, **parts)  # pyright: ignore[reportArgumentType]  # taps look like what they wrap


def input_of(name: str) -> str:
    """Return which of a block's inputs the weight `name` multiplies."""
    for mark, part in (("o_proj", "output"), ("down_proj", "down"), ("gate", "gate_up"), ("up_proj", "gate_up")):
        if mark in name:
            return part
    return "qkv"


def packed(matrices: Mapping[str, Int4Matrix]) -> dict[str, Tensor]:
    """Return the tensors of an exit layer, by Hugging Face name."""
    return {
        name.removesuffix("weight") + part: tensor.cpu()
        for name, matrix in matrices.items()
        for part, tensor in pack(matrix).items()
    }
