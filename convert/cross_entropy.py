"""The cross-entropy of a large vocabulary, without the logits of all tokens in memory.

The gradient is made in the forward pass, chunk by chunk, while the logits are there: nothing is computed twice (the
idea of Liger-Kernel, arXiv 2410.10989, section 3.2). Knows no models.
"""

from typing import Any

import torch
from torch import Tensor

LOGIT_BYTES = 256 << 20
"""Float32 logits held at a time."""


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, softcap: float | None = None) -> Tensor:
    """Return the sum over rows of -log softmax(x @ weight.T)[target], in nats, as a float32 scalar.

    x [R, hidden] is what the head multiplies, weight [V, hidden] the head, targets [R] ids. With `softcap` the logits
    are softcap * tanh(logits / softcap), as Gemma 2 has them. Under autocast the products are in its dtype.
    Differentiable once, in x and weight.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _CrossEntropy.apply(x, weight, targets, softcap)  # pyright: ignore[reportReturnType] - apply gives Any


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:  # noqa: ANN401 - torch's
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        matrix = weight.to(x.dtype)
        dx = torch.empty_like(x) if wants_x else None
        dw = torch.zeros_like(weight) if wants_weight else None
        total = x.new_zeros((), dtype=torch.float32)
        step = max(1, LOGIT_BYTES // (4 * weight.shape[0]))
        for begin in range(0, len(x), step):
            part = slice(begin, begin + step)
            logits = (x[part] @ matrix.T).float()
            nll, tanh = _probabilities(logits, targets[part], softcap)
            total += nll
            if wants_x or wants_weight:
                slope = _slope(logits, targets[part], tanh).to(x.dtype)
                if dx is not None:
                    torch.mm(slope, matrix, out=dx[part])
                if dw is not None:
                    _add_product(dw, slope, x[part])
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
        (grad,) = grads
        dx, dw = ctx.saved_tensors
        return None if dx is None else dx * grad.to(dx.dtype), None if dw is None else dw * grad, None, None


def _probabilities(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Turn logits [R, V] into probabilities, in place; the summed loss, and tanh where logits are capped."""
    tanh = None
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        torch.mul(tanh, softcap, out=logits)
    norm = logits.logsumexp(-1, keepdim=True)
    nll = (norm - logits.gather(-1, targets[:, None])).sum()
    logits.sub_(norm).exp_()
    return nll, tanh


def _slope(probabilities: Tensor, targets: Tensor, tanh: Tensor | None) -> Tensor:
    """The gradient of the summed loss with respect to the logits before the cap, in place."""
    rows = torch.arange(len(targets), device=targets.device)
    probabilities[rows, targets] -= 1
    return probabilities if tanh is None else probabilities.mul_(1 - tanh * tanh)


def _add_product(total: Tensor, slope: Tensor, x: Tensor) -> None:
    """Add slope.T @ x to total; products of half precision are added in float32."""
    if slope.dtype is total.dtype:
        total.addmm_(slope.T, x)
    else:
        total += slope.T @ x
