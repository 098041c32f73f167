"""Decoder blocks one behind the other in one call: the arithmetic of `native` and `small`, without Python between it.

A block is described once, as numbers: addresses of its weights and norms. A pass adds its tokens' positions, rotations
and cache rows, and rows may go over from one chain to another (River's exit), together or each at its own depth. What
comes out is, bit for bit, what the single operations give. Knows no layers and no cache.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from . import native, packing, small

MOST_ROWS: Final = small.MAX_ROWS
_PARTS = 3  # matrices of one product at most; enum in chain.h, as the other numbers
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
        """As chain.h names them."""
        factors = [0 if factor is None else factor.data_ptr() for factor in (*self.norms, self.heads)]
        return [self.kind, self.layer, int(self.stores), *factors, *(n for p in self.products for n in p.numbers)]


_NOBODY_LEAVES: Final = 0, 0, 0, 0, False
Tables = tuple["array[int]", "array[int]", "array[int]"]


@dataclass(frozen=True)
class Rungs:
    """When the rows of a climb leave.

    thresholds: of each block the cosine of before and after that a row must exceed to leave after it (River eq. 1);
    below -1 rows leave, at 1 or more they stay, whatever they do. resident: after so many blocks all leave. together:
    they leave only all at once.
    """

    thresholds: "array[float]"
    resident: int
    together: bool


@dataclass(frozen=True)
class Climbed:
    """Where a climb is: h [..., hidden] behind `done` blocks, and of each row after how many it left, or 0."""

    h: Tensor
    done: int
    depths: "array[int]"

    @classmethod
    def begin(cls, h: Tensor) -> "Climbed":
        """Before the first block."""
        return cls(h, 0, array("q", bytes(8 * (h.numel() // h.shape[-1]))))


class Chain:
    """`count` blocks of one shape, each put in when it is first needed.

    Two instruction sets may be named, of products and of small operations; by default the best.
    """

    def __init__(self, shape: Shape, count: int, *, isa: str | None = None) -> None:
        found = native.library()
        self._numbers = array("q", bytes(8 * _LINK * count))
        self._links: list[Link | None] = [None] * count
        self._call = found.module.blocks
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
        return self._run(h, blocks, (rows, places, strides), _NOBODY_LEAVES)[0]

    def climb(self, exits: "Chain", rungs: Rungs, climbed: Climbed, tables: Tables) -> Climbed:
        """Take rows from where they are through all other blocks; those that have left through those of `exits`.

        `tables` are rows, places and strides as above. It ends early where a block that rows need is not put in.
        """
        depths, blocks = climbed.depths[:], range(climbed.done, len(self._links))
        leaving = _at(exits._numbers), _at(rungs.thresholds), rungs.resident, _at(depths), rungs.together  # noqa: SLF001
        return Climbed(*self._run(climbed.h, blocks, tables, leaving), depths)

    def _run(self, h: Tensor, blocks: range, tables: Tables, leaving: Sequence[int]) -> tuple[Tensor, int]:
        out = torch.empty_like(h)
        at = h.numel() // self._hidden, h.data_ptr(), out.data_ptr(), _at(self._numbers), blocks.start, blocks.stop
        rows, places, strides = map(_at, tables)
        way = *self._way, torch.get_num_threads(), *self._isas
        return out, self._call(*way, *self._shape, *at, places, rows, strides, *leaving, *self._floats)


def _at(numbers: "array[int] | array[float]") -> int:
    return numbers.buffer_info()[0]
