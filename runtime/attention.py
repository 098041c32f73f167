"""Norms, rotation and attention on plain tensors: the arithmetic of a block without its weights' shapes.

Every function is differentiable and writes nothing in place. Knows no layers and no cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention, silu

from ..quant.kernels import small

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": silu, "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh")}
)

CAPPED_ROWS = 256  # of scores in memory at a time, where there is no fused kernel


@dataclass(frozen=True, slots=True)
class View:
    """What the layers of one kind (window, rotation) see in a pass.

    cos, sin [S, rotary_dim] or [B, 1, S, rotary_dim]; mask [S or G * S, T] or [B, 1, S or G * S, T], added to the
    scores, None when every key of the range counts or `causal` says it all.
    """

    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    causal: bool
    folded: bool
    first: int


def runs_native(weight: Tensor) -> bool:
    """Whether rows beside this weight go through the native operations: bf16 on the CPU, nothing trained."""
    return weight.dtype is torch.bfloat16 and weight.is_cpu and not weight.requires_grad and small.available()


class Gated:
    """activation(gate) * up: the middle of an MLP. `native` allows the native operation."""

    def __init__(self, activation: str, *, native: bool) -> None:
        self._activation = ACTIVATIONS[activation]
        self._native = small.Gate(activation) if native and activation in small.GATES else None

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """From gate and up [B, S, N] to the same shape."""
        if self._native is None or gate.requires_grad or up.requires_grad:
            return self._activation(gate) * up
        return self._native(gate, up)


class RMSNorm:
    """x / rms(x) * weight in float32, given back in the dtype of x. With `offset` the factor is 1 + weight (Gemma)."""

    def __init__(self, weight: Tensor, eps: float, *, offset: bool) -> None:
        self.weight = weight
        self._eps = eps
        self._offset = offset
        self._shape = weight.shape
        self._factor = 1.0 + weight.float() if offset and not weight.requires_grad else weight
        self._fixed = not weight.requires_grad and weight.device.type == "cpu"
        self._native = small.RowNorm(self._factor.float(), eps) if runs_native(weight) else None
        self._doubled = torch.cat((self._factor, self._factor)) if self._fixed else self._factor

    @property
    def native_factor(self) -> Tensor | None:
        """What native operations multiply with, float32 [D]; None where they do not serve."""
        return None if self._native is None else self._native.factor

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension of x [..., D]."""
        if self._native is not None and not x.requires_grad:
            return self._native(x)
        if self._fixed and x.numel() == self._shape[0]:
            return self._of_one_row(x)
        if not self._offset:
            return rms_norm(x, self._shape, self._factor, self._eps)
        factor = 1.0 + self.weight.float() if self.weight.requires_grad else self._factor
        return rms_norm(x.float(), self._shape, factor, self._eps).to(x.dtype)

    def _of_one_row(self, x: Tensor) -> Tensor:
        """The layer norm of (x, -x), whose mean is 0 and whose variance is the mean square.

        torch has one kernel for it on the CPU, where it has none for the RMS norm: half the time for one token.
        """
        width = self._shape[0]
        return layer_norm(torch.cat((x, -x), -1), (2 * width,), self._doubled, None, self._eps).narrow(-1, 0, width)


class HeadNorm:
    """RMS norm over head_dim of heads [B, heads, S, head_dim]; `weights` as (weight, number of heads it serves)."""

    def __init__(self, weights: Sequence[tuple[Tensor, int]], eps: float, *, offset: bool) -> None:
        self.weights = tuple(weights)
        self._eps = eps
        self._offset = offset
        self._trained = any(weight.requires_grad for weight, _ in weights)
        self._factor = self._build()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension of x."""
        factor = self._build() if self._trained else self._factor
        if self._offset:
            return (rms_norm(x.float(), x.shape[-1:], None, self._eps) * factor).to(x.dtype)
        return rms_norm(x, x.shape[-1:], None, self._eps) * factor

    def factors(self) -> Tensor:
        """What each head is multiplied by, float32 [heads, head_dim]."""
        return self._build().squeeze(1).float().contiguous()

    def _build(self) -> Tensor:
        rows = torch.cat([weight.expand(heads, -1) for weight, heads in self.weights]).unsqueeze(1)
        return 1.0 + rows.float() if self._offset else rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first rotary_dim dimensions of x [B, heads, S, head_dim]; the rest pass. `sin` is signed, see Rotary."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return torch.addcmul(x * cos, torch.roll(x, width // 2, -1), sin)
    turned, passed = x.split((width, x.shape[-1] - width), -1)
    return torch.cat((rotate(turned, cos, sin), passed), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, view: View, *, scale: float, softcap: float | None) -> Tensor:
    """Attention of q [B, heads, S, D] over k, v [B, kv_heads, T, D] -> [B, S, heads * D].

    For few rows the query heads that share keys are stacked as rows: on a CPU this is 10 times faster than repeating
    keys and values, and bf16 as fast as float32 (measured with torch 2.13 on AVX2).
    """
    batch, heads, rows, width = q.shape
    kv_heads = k.shape[1]
    if softcap is not None:
        out = _capped(q, k, v, view, scale=scale, softcap=softcap)
        return out.transpose(1, 2).reshape(batch, rows, heads * width)
    if not view.folded:
        grouped = heads != kv_heads
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=view.mask, is_causal=view.causal, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).reshape(batch, rows, heads * width)
    stacked = q.reshape(batch, kv_heads, heads // kv_heads * rows, width)
    out = scaled_dot_product_attention(stacked, k, v, attn_mask=view.mask, scale=scale)
    return out.view(batch, heads, rows, width).transpose(1, 2).reshape(batch, rows, heads * width)


def _capped(q: Tensor, k: Tensor, v: Tensor, view: View, *, scale: float, softcap: float) -> Tensor:
    """Gemma 2: scores pass through softcap * tanh(score / softcap) before the mask; some rows at a time."""
    batch, heads, rows, width = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], rows, width).float() * (scale / softcap)
    keys, values = k.float().unsqueeze(2).transpose(-1, -2), v.float().unsqueeze(2)
    parts: list[Tensor] = []
    for start in range(0, rows, CAPPED_ROWS):
        scores = softcap * torch.tanh(grouped[..., start : start + CAPPED_ROWS, :] @ keys)
        if view.mask is not None:
            scores = scores + view.mask[..., start : start + CAPPED_ROWS, :].unsqueeze(-3)
        parts.append(scores.softmax(-1) @ values)
    return torch.cat(parts, -2).view(batch, heads, rows, width).to(q.dtype)
