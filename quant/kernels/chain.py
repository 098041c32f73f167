"""Decoder blocks one behind the other in one call: the arithmetic of `native` and `small`, without Python between it.

A block is described once, as numbers: addresses of its weights and norms. A pass adds its tokens' positions, rotations
and cache rows, and may go over from one chain to another (River's exit). What comes out is, bit for bit, what the
single operations give. Knows no layers and no cache.
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


Tables = tuple["array[int]", "array[int]", "array[int]"]


@dataclass(frozen=True)
class Rungs:
    """When the rows of a climb leave, all of them together.

    thresholds: of each block the cosine of before and after that every row must exceed to leave after it (River eq. 1);
    below -1 they leave, at 1 or more they stay, whatever they do. resident: after so many blocks all leave.
    """

    thresholds: "array[float]"
    resident: int


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
        return self._run(h, blocks, (rows, places, strides), (0, 0, 0))[0]

    def climb(self, exits: "Chain", rungs: Rungs, h: Tensor, tables: Tables) -> tuple[Tensor, int, int]:
        """Take h, as above, through all blocks of this chain until its rows leave, from then on through `exits`.

        `tables` are rows, places and strides as above. Returns h, how many blocks have run, fewer than all where the
        next one is not put in, and after how many the rows left, 0 where they have not.
        """
        leaving = exits._at(0), rungs.thresholds.buffer_info()[0], rungs.resident  # noqa: SLF001 - its own kind
        return self._run(h, range(len(self._links)), tables, leaving)

    def _at(self, block: int) -> int:
        """Where the numbers of a block begin."""
        return self._numbers.buffer_info()[0] + self._numbers.itemsize * _LINK * block

    def _run(self, h: Tensor, blocks: range, tables: Tables, leaving: tuple[int, int, int]) -> tuple[Tensor, int, int]:
        rows, places, strides = (table.buffer_info()[0] for table in tables)
        out = torch.empty_like(h)
        at = h.numel() // self._hidden, h.data_ptr(), out.data_ptr(), self._at(blocks.start), len(blocks)
        way = *self._way, torch.get_num_threads(), *self._isas
        done, depth = self._call(*way, *self._shape, *at, places, rows, strides, *leaving, *self._floats)
        return out, done, depth
