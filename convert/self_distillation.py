"""Teaching a model to predict under one map what it predicts under another (ours).

Knows states and the head; neither maps nor data.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from ..quant.linear import DenseLinear
from .cross_entropy import LOGIT_BYTES
from .trainable import Trainable

STEEPEST = 30.0
"""Nats for a relative change of a token's state by one: about the median in plain passes of SmolLM2-135M."""


def imitation(model: Trainable, states: Sequence[Tensor], wanted: Tensor, counted: Tensor, weight: float) -> Tensor:
    """`weight` times KL(wanted || states) in nats, summed over the tokens that count; a float32 scalar.

    states: the residual stream [B, S, hidden] after every block of the pass that learns; wanted [B, S, hidden]: after
    the last block of the pass that teaches; counted [B, S], bool. Gradients flow into `states` only, no steeper than in
    a plain pass, and the head stays as it is.
    """
    head, norm = model.decoder.head, model.decoder.final_norm
    if not isinstance(head, DenseLinear):
        raise TypeError("the head of a model in training is dense")
    for state in states:
        _limit(state, weight * STEEPEST)
    known = norm(wanted.detach()[counted]).detach()
    return weight * kl_divergence(
        norm(states[-1][counted]), known, head.weight.detach(), softcap=model.arch.logit_softcap
    )


def _limit(state: Tensor, most: float) -> None:
    """Let no token's gradient at this state pass `most` for a relative change by one.

    Under a map that the model does not know yet a small change of an early state changes all that comes after it: the
    gradient of a few tokens is hundreds of times that of a plain pass, and the plain passes would hardly count.
    """
    if not state.requires_grad:
        return
    size = state.detach().float().norm(dim=-1, keepdim=True)

    def limited(grad: Tensor) -> Tensor:
        steepness = grad.float().norm(dim=-1, keepdim=True) * size
        return grad * (most / steepness.clamp(min=most)).to(grad.dtype)

    state.register_hook(limited)


def kl_divergence(x: Tensor, wanted: Tensor, weight: Tensor, *, softcap: float | None = None) -> Tensor:
    """Return the sum over rows of KL(softmax(wanted @ weight.T) || softmax(x @ weight.T)), in nats, a float32 scalar.

    x and wanted [R, hidden] are what the head multiplies, weight [V, hidden] the head; `softcap` as in
    `cross_entropy`. Differentiable once, in x alone. As there, no logits are kept for the backward pass.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _Divergence.apply(x, wanted.to(x.dtype), weight, softcap)  # pyright: ignore[reportReturnType] - apply gives Any


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wanted: Tensor, weight: Tensor, softcap: float | None) -> Tensor:  # noqa: ANN401 - torch's
        matrix = weight.to(x.dtype)
        dx = torch.empty_like(x)
        total = x.new_zeros((), dtype=torch.float32)
        step = max(1, LOGIT_BYTES // (4 * weight.shape[0]))
        for begin in range(0, len(x), step):
            part = slice(begin, begin + step)
            log_q, tanh = _log_softmax(x[part] @ matrix.T, softcap)
            log_p, _ = _log_softmax(wanted[part] @ matrix.T, softcap)
            total += kl_div(log_q, log_p, reduction="sum", log_target=True)
            slope = log_q.exp_().sub_(log_p.exp_())
            if tanh is not None:
                slope.mul_(1 - tanh * tanh)
            torch.mm(slope.to(x.dtype), matrix, out=dx[part])
        ctx.save_for_backward(dx)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
        (dx,) = ctx.saved_tensors
        return dx * grads[0].to(dx.dtype), None, None, None


def _log_softmax(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Of logits [R, V], in float32; and the cap's tanh, None without a cap."""
    if softcap is None:
        return torch.log_softmax(logits.float(), -1), None
    tanh = torch.tanh(logits.float() / softcap)
    return torch.log_softmax(tanh * softcap, -1), tanh
