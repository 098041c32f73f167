"""Decoder blocks one behind the other in one call: the arithmetic of `native` and `small`, without Python between it.

A block is described once, as numbers: addresses of its weights and norms. A pass adds its tokens' positions, rotations
and cache rows. What comes out is, bit for bit, what the single operations give. Knows no layers and no cache.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from . import native, packing, small

MOST_ROWS: Final = small.MAX_ROWS
_PARTS = 3  # matrices of one product at most; enum in chain.c, as the other numbers
_PRODUCT = 2 + 3 * _PARTS
_LINK = 8 + 4 * _PRODUCT


@dataclass(frozen=True)
class Operand:
    """The weights of one product as numbers, and the tensors whose memory they point to."""

    numbers: tuple[int, ...]
    out_features: int
    kept: tuple[Tensor, ...]

    @classmethod
    def dense(cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> "Operand | None":
        """bf16 matrices [N, K] of one K, contiguous on the CPU; None where they are too many."""
        if len(weights) > _PARTS:
            return None
        numbers = [len(weights), weights[0].shape[1]]
        for weight, bias in zip(weights, biases, strict=True):
            numbers += (weight.data_ptr(), weight.shape[0], 0 if bias is None else bias.data_ptr())
        kept = (*weights, *(bias for bias in biases if bias is not None))
        return cls(_filled(numbers), sum(weight.shape[0] for weight in weights), kept)

    @classmethod
    def int4(cls, packed: packing.PackedInt4, bias: Tensor | None) -> "Operand":
        """A packed matrix."""
        at = packed.data.data_ptr(), packed.out_features, 0 if bias is None else bias.data_ptr()
        numbers = (0, packed.in_features, *at, packed.groups, int(packed.wide))
        return cls(_filled(numbers), packed.out_features, (packed.data, *([] if bias is None else [bias])))


def _filled(numbers: Sequence[int]) -> tuple[int, ...]:
    return (*numbers, *(0,) * (_PRODUCT - len(numbers)))


@dataclass(frozen=True)
class Shape:
    """What all blocks of a chain have in common; `gate` is a key of `small.GATES`, `kinds` how many kinds of layer."""

    hidden: int
    inner: int
    queries: int
    groups: int
    width: int
    gate: str
    eps: float
    scale: float
    kinds: int


@dataclass(frozen=True)
class Link:
    """One block of a chain.

    kind: of its layer, by which rows know their rotation and what they see. layer: its place among the caches.
    stores: it has keys and values of its own. norms: float32 factors [hidden] before attention, after it, before the
    MLP, after it. heads: of a norm over each head [queries + groups, width]. products: query, key and value side by
    side; output; gate and up; down.
    """

    kind: int
    layer: int
    stores: bool
    norms: tuple[Tensor, Tensor | None, Tensor, Tensor | None]
    heads: Tensor | None
    products: tuple[Operand, Operand, Operand, Operand]

    def numbers(self) -> list[int]:
        """As chain.c reads them."""
        factors = [0 if factor is None else factor.data_ptr() for factor in (*self.norms, self.heads)]
        return [self.kind, self.layer, int(self.stores), *factors, *(n for p in self.products for n in p.numbers)]


class Chain:
    """`count` blocks of one shape, each put in when it is first needed.

    Two instruction sets may be named, of products and of small operations; by default the best.
    """

    def __init__(self, shape: Shape, count: int, *, isa: str | None = None) -> None:
        found = native.library()
        self._numbers = array("q", bytes(8 * _LINK * count))
        self._links: list[Link | None] = [None] * count
        self._call = found.module.chain
        products = next(iter(found.isas.values())) if isa is None else found.isas[isa]
        self._way = found.team, found.team_size
        self._isas = products, small.index(isa)
        sizes = shape.hidden, shape.inner, shape.queries, shape.groups, shape.width
        self._shape = (*sizes, small.GATES[shape.gate], shape.kinds)
        self._hidden, self._floats = shape.hidden, (shape.eps, shape.scale)

    def has(self, index: int) -> bool:
        """Whether block `index` has been put in."""
        return self._links[index] is not None

    def put(self, index: int, link: Link) -> None:
        """Describe block `index`; its tensors are kept."""
        self._links[index] = link
        self._numbers[index * _LINK : (index + 1) * _LINK] = array("q", link.numbers())

    def __call__(
        self, h: Tensor, blocks: range, rows: "array[int]", places: "array[int]", strides: "array[int]"
    ) -> Tensor:
        """Take contiguous bf16 h [..., hidden] on the CPU through `blocks`, all put in; gives the same shape.

        rows: for each row of h its position, its row of the cache, and for each kind of layer the addresses of cosine
        and signed sine, their width, and the first position seen. places: addresses of each layer's keys and values,
        bf16 [rows, groups, capacity, width]. strides: values from one group to the next there, and from row to row.
        """
        out = torch.empty_like(h)
        count, first = h.numel() // self._hidden, self._numbers.buffer_info()[0] + 8 * _LINK * blocks.start
        at = count, h.data_ptr(), out.data_ptr(), first, len(blocks)
        tables = places.buffer_info()[0], rows.buffer_info()[0], strides.buffer_info()[0]
        self._call(*self._way, torch.get_num_threads(), *self._isas, *self._shape, *at, *tables, *self._floats)
        return out
