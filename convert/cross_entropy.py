"""The cross-entropy of a large vocabulary, without the logits of all tokens in memory.

The gradient is made in the forward pass, chunk by chunk, while the logits are there: nothing is computed twice (the
idea of Liger-Kernel, arXiv 2410.10989, section 3.2). Knows no models.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as nll_of

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
            if dx is None and dw is None:
                total += _loss(logits, targets[part], softcap)
                continue
            nll, slope = _loss_and_slope(logits, targets[part], softcap)
            total += nll
            slope = slope.to(x.dtype)
            if dx is not None:
                torch.mm(slope, matrix, out=dx[part])
            if dw is not None:
                add_product(dw, slope, x[part])
        ctx.save_for_backward(dx, dw)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
        factor = grads[0].item()
        dx, dw = (part if part is None or factor == 1 else part * factor for part in ctx.saved_tensors)
        return dx, dw, None, None


def _loss(logits: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return nll_of(logits, targets, reduction="sum")


def _loss_and_slope(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """The summed loss, and its gradient with respect to the logits [R, V] before the cap, which takes their place.

    One exponential of each logit: a pass over them costs as much as a tenth of the product that made them.
    """
    wanted, norm, tanh = exponentials(logits, targets, softcap)
    slope = logits.div_(norm)
    slope.scatter_add_(-1, targets[:, None], torch.full_like(norm, -1.0))
    return (norm.log() - wanted).sum(), slope if tanh is None else slope.mul_(1 - tanh * tanh)


def exponentials(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Let the exponentials of float32 logits [R, V] take their place, the greatest of a row being 1.

    Returns the targets' logits and the exponentials' sums, each [R, 1], between which lies log softmax[target]; and the
    cap's tanh [R, V], None without a cap.
    """
    tanh = None
    if softcap is not None:
        tanh = torch.tanh(logits.div_(softcap))
        torch.mul(tanh, softcap, out=logits)
    logits.sub_(logits.amax(-1, keepdim=True))
    wanted = logits.gather(-1, targets[:, None])
    return wanted, logits.exp_().sum(-1, keepdim=True), tanh


def add_product(total: Tensor, slope: Tensor, x: Tensor) -> None:
    """Add slope.T @ x to total; products of half precision are added in float32."""
    if slope.dtype is total.dtype:
        total.addmm_(slope.T, x)
    else:
        total += slope.T @ x
