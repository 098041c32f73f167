"""Norms, rotation and attention on plain tensors: the arithmetic of a block without its weights' shapes.

Every function is differentiable and writes nothing in place. Knows no layers and no cache.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention, silu

from .step import View

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": silu, "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh")}
)

CAPPED_ROWS = 256  # of scores in memory at a time, where there is no fused kernel


class RMSNorm:
    """x / rms(x) * weight in float32, given back in the dtype of x. With `offset` the factor is 1 + weight (Gemma)."""

    def __init__(self, weight: Tensor, eps: float, *, offset: bool) -> None:
        self.weight = weight
        self._eps = eps
        self._offset = offset
        self._shape = weight.shape
        self._factor = 1.0 + weight.float() if offset and not weight.requires_grad else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension of x [..., D]."""
        if not self._offset:
            return rms_norm(x, self._shape, self._factor, self._eps)
        factor = 1.0 + self.weight.float() if self.weight.requires_grad else self._factor
        return rms_norm(x.float(), self._shape, factor, self._eps).to(x.dtype)


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
    """Gemma 2: scores pass through softcap * tanh(score / softcap) before the mask; as matrices, some rows at a time."""
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
