"""One decoder block: the forward that dense layers, exit layers and training share.

Its matrices are `quant.linear.Linear` objects, so a block does not know whether they are dense or 4-bit; keys and
values go through a KV store, so it does not know whether there is a cache. Knows no files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..quant.kernels import small
from ..quant.kernels.chain import Link
from ..quant.linear import DenseGroup, Linear, operand
from .architecture import Architecture
from .attention import Gated, HeadNorm, RMSNorm, rotate, runs_native
from .cache import KVStore
from .step import Pass, Step


class Projection(Protocol):
    """Several products of one input: query with key, and value; or gate and up."""

    @property
    def linears(self) -> Sequence[Linear]:
        """What gives all of them side by side."""
        ...

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """One tensor [..., N_i] per product of x [..., K]."""
        ...


class Separate:
    """One linear per product."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self._group = DenseGroup.of(linears)
        self._sizes = [linear.out_features for linear in linears]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """See `Projection`."""
        if self._group is not None and self._group.fits(x):
            return self._group(x).split_with_sizes(self._sizes, -1)
        return [linear(x) for linear in self.linears]


class SeparateHeads:
    """Query and key as one tensor, and value, from a linear each; or the query alone."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self._group = DenseGroup.of(linears)
        *heads, value = [linear.out_features for linear in linears]
        self._sizes = [sum(heads), value]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """See `Projection`."""
        if self._group is not None and self._group.fits(x):
            return self._group(x).split_with_sizes(self._sizes, -1)
        if len(self.linears) == 1:
            return (self.linears[0](x),)
        query, key, value = self.linears
        return torch.cat((query(x), key(x)), -1), value(x)


class Fused:
    """One linear whose output is cut into `sizes`."""

    def __init__(self, linear: Linear, sizes: Sequence[int]) -> None:
        self.linears = (linear,)
        self._sizes = list(sizes)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """See `Projection`."""
        return self.linears[0](x).split_with_sizes(self._sizes, -1)


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a block; the last three only where the family has them."""

    before_attention: RMSNorm
    before_mlp: RMSNorm
    after_attention: RMSNorm | None = None
    after_mlp: RMSNorm | None = None
    heads: HeadNorm | None = None


class Block:
    """Attention and MLP with their norms and residuals.

    `qkv` gives query and key side by side (they are normalised and rotated together) and value, or the query alone
    where the layer reads another layer's keys and values.
    """

    def __init__(
        self,
        arch: Architecture,
        index: int,
        norms: Norms,
        *,
        qkv: Projection,
        output: Linear,
        gate_up: Projection,
        down: Linear,
    ) -> None:
        self.index = index
        self.norms = norms
        self.qkv, self.output, self.gate_up, self.down = qkv, output, gate_up, down
        self._kind = arch.kind_of[index]
        self._window = arch.layers[index].window
        self._heads, self._width = [arch.num_heads, arch.num_kv_heads], arch.head_dim
        self._scale, self._softcap = arch.attention_scale, arch.attention_softcap
        native = runs_native(norms.before_attention.weight)
        self._gated = Gated(arch.activation, native=native)
        self._token = _token_attention(arch, norms.heads) if native else None

    def link(self) -> Link | None:
        """The block for a native chain of blocks; None where it has a part that such a chain cannot run."""
        norms = self.norms
        inner, middle = norms.before_attention.native_factor, norms.before_mlp.native_factor
        if self._token is None or inner is None or middle is None:
            return None
        after = [None if norm is None else norm.native_factor for norm in (norms.after_attention, norms.after_mlp)]
        found = [operand(linears) for linears in (self.qkv.linears, [self.output], self.gate_up.linears, [self.down])]
        products = [each for each in found if each is not None]
        if len(products) != len(found):
            return None
        queries, groups = self._heads
        stores = products[0].out_features == (queries + 2 * groups) * self._width
        return Link(
            kind=self._kind,
            layer=self.index,
            stores=stores,
            norms=(inner, after[0], middle, after[1]),
            heads=self._token.factors,
            products=(products[0], products[1], products[2], products[3]),
        )

    def __call__(self, h: Tensor, step: Pass, kv: KVStore) -> Tensor:
        """Map h [B, S, hidden] to the same shape and dtype. Keys and values go to and come from `kv`."""
        norms = self.norms
        mixed = self._attention(norms.before_attention(h), step, kv)
        h = h + (mixed if norms.after_attention is None else norms.after_attention(mixed))
        gate, up = self.gate_up(norms.before_mlp(h))
        mixed = self.down(self._gated(gate, up))
        return h + (mixed if norms.after_mlp is None else norms.after_mlp(mixed))

    def _attention(self, x: Tensor, step: Pass, kv: KVStore) -> Tensor:
        view = step.views[self._kind]
        heads, *value = self.qkv(x)
        if self._token is not None and isinstance(step, Step) and (step.few or step.tokens) and not heads.requires_grad:
            buffers = kv.claim(step, self.index)
            if buffers is not None:
                own, (keys, values), turn = value[0] if value else None, buffers, (view.cos, view.sin)
                if not step.few:
                    return self.output(self._token.rows(heads, own, *turn, keys, values, step.seen[self._kind]))
                seen = range(view.first, step.end)
                return self.output(self._token(heads, own, *turn, keys, values, seen, self._window))
        q, own = self._turn(heads, view.cos, view.sin), None
        if value:
            q, k = q.split_with_sizes(self._heads, 1)
            own = k, self._split(value[0])
        return self.output(step.attend(q, own, kv, self.index, scale=self._scale, softcap=self._softcap))

    def _split(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        return x.view(batch, rows, -1, self._width).transpose(1, 2)

    def _turn(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        heads = self._split(x)
        norm = self.norms.heads
        heads = heads if norm is None else norm(heads)
        return heads if cos is None or sin is None else rotate(heads, cos, sin)


def _token_attention(arch: Architecture, norm: HeadNorm | None) -> small.TokenAttention | None:
    """The native attention of one token, where it can do what the family wants."""
    if arch.attention_softcap is not None:
        return None
    return small.TokenAttention(
        arch.num_heads,
        arch.num_kv_heads,
        arch.head_dim,
        scale=arch.attention_scale,
        factors=None if norm is None else norm.factors(),
        eps=arch.norm_eps,
    )
