"""Exit layers: the 4-bit copy of a block, from packed tensors or from matrices just quantised.

Norms and biases are the backbone's own. Knows no exit rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import torch

from ..quant.layout import Int4Matrix, unpack
from ..quant.linear import Int4Linear, Linear
from .architecture import Architecture, block_prefix
from .block import Block, Fused, Projection
from .decoder import make_norms
from .store import TensorStore

MATRIX_PARTS = ("qweight", "qzeros", "zeros", "scales", "g_idx")


class LazyBlocks(Sequence[Block]):
    """Blocks that are loaded when first asked for. Without `keep`, only the one asked for last stays in memory."""

    def __init__(self, count: int, load: Callable[[int], Block], *, keep: bool = True) -> None:
        self._load, self._keep = load, keep
        self._blocks: list[Block | None] = [None] * count

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        block = self._blocks[index]
        if block is None:
            if not self._keep:
                self._blocks = [None] * len(self._blocks)
            block = self._blocks[index] = self._load(index)
        return block

    def __iter__(self) -> Iterator[Block]:
        return (self[index] for index in range(len(self)))


def read_matrix(store: TensorStore, name: str, *, symmetric: bool | None, checkpoint_format: str | None) -> Int4Matrix:
    """Read a packed matrix by the name of the weight that it stands for ("….q_proj.weight")."""
    stem = name.removesuffix("weight")
    present = store.names()
    tensors = {part: store.read(stem + part) for part in MATRIX_PARTS if stem + part in present}
    return unpack(tensors, symmetric=symmetric, checkpoint_format=checkpoint_format)


def load_exit_block(
    arch: Architecture,
    backbone: TensorStore,
    river: TensorStore,
    index: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Block:
    """Read the exit layer of block `index` (counted from 0) of a bundle."""
    names = arch.block_matrices(index)
    matrices = {name: read_matrix(river, name, symmetric=False, checkpoint_format="gptq") for name in names}
    return exit_block(arch, backbone, index, matrices, device=device, dtype=dtype)


def exit_block(
    arch: Architecture,
    backbone: TensorStore,
    index: int,
    matrices: Mapping[str, Int4Matrix],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Block:
    """Build the exit layer of block `index` from 4-bit matrices by weight name; norms and biases are the backbone's."""
    prefix = block_prefix(index)
    small = arch.block_tensors(index).keys() - arch.block_matrices(index).keys()
    tensors = {name.removeprefix(prefix): backbone.read(name).to(device, dtype) for name in small}

    def linear(*names: str) -> Int4Linear:
        parts = [matrices[f"{prefix}{name}.weight"] for name in names]
        biases = [bias for name in names if (bias := tensors.get(f"{name}.bias")) is not None]
        return Int4Linear(parts, torch.cat(biases) if biases else None, device=torch.device(device), dtype=dtype)

    return Block(
        arch,
        index,
        make_norms(arch, tensors),
        qkv=_fused(linear, arch.fused_qkv, "self_attn", "qkv" if arch.has_kv(index) else "q", arch.qkv_sizes(index)),
        output=linear("self_attn.o_proj"),
        gate_up=Fused(
            linear("mlp.gate_up_proj") if arch.fused_gate_up else linear("mlp.gate_proj", "mlp.up_proj"),
            (arch.intermediate_size,) * 2,
        ),
        down=linear("mlp.down_proj"),
    )


def _fused(
    linear: Callable[..., Linear],
    is_fused: bool,
    where: str,
    letters: str,
    sizes: Sequence[int],
) -> Projection:
    names = ["qkv_proj"] if is_fused else [f"{letter}_proj" for letter in letters]
    return Fused(linear(*(f"{where}.{name}" for name in names)), sizes)
