"""The likelihood of a mixture of exits, without the logits of all tokens in memory.

As `cross_entropy` does, the gradient is made in the forward pass, some tokens at a time, while their logits are there:
three products an exit, which is what its head needs in any case. Knows no models and no routers.
"""

from typing import Any

import torch
from torch import Tensor

from .cross_entropy import LOGIT_BYTES, add_product, exponentials


def mixture_loss(
    x: Tensor,
    log_weights: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    last: Tensor | None = None,
    softcap: float | None = None,
    own: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the sum over tokens of -log sum_k p_k pi_k(target), in nats, and log pi_k(target) [N, R] of each exit.

    x [K, R, hidden] is what the head multiplies at K exits, log_weights [N, R] are log p_k (float32), weight
    [V, hidden] the head that all exits share, targets [R] ids. K = N; with `last` [R], which is log pi_N(target) of
    an exit that nothing here changes, K = N - 1. `softcap` as in `cross_entropy`. Under autocast the products are in
    its dtype. Differentiable once, in x, log_weights and weight; the second result is a constant.

    With `own`, so many times each exit's own -log pi_k(target) is added to the sum: an exit with little mass then
    learns too. The authors have no such term.

    Source: N-vium (arXiv 2605.13190), the mixture's negative log-likelihood. With q_k the share of exit k in the
    mixture's probability of the target, the gradient is -q_k in log p_k and q_k (pi_k - target) in exit k's logits.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    last = None if last is None else last.float()
    return _MixtureLoss.apply(x, log_weights.float(), weight, targets, last, softcap, own)  # pyright: ignore[reportReturnType]


class _MixtureLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by position
        ctx: Any,  # noqa: ANN401 - torch's
        x: Tensor,
        log_weights: Tensor,
        weight: Tensor,
        targets: Tensor,
        last: Tensor | None,
        softcap: float | None,
        own: float,
    ) -> tuple[Tensor, Tensor]:
        wants_x, wants_weights, wants_weight = ctx.needs_input_grad[:3]
        matrix = weight.to(x.dtype)
        dx = torch.empty_like(x) if wants_x else None
        dw = torch.zeros_like(weight) if wants_weight else None
        total = log_weights.new_zeros(())
        exits, rows = x.shape[:2]
        log_likelihoods, shares = torch.empty_like(log_weights), torch.empty_like(log_weights)
        step = max(1, LOGIT_BYTES // (4 * weight.shape[0] * exits))
        for begin in range(0, rows, step):
            part = slice(begin, min(begin + step, rows))
            chunk = x[:, part].flatten(0, 1)
            logits, found = _log_likelihoods(chunk @ matrix.T, targets[part].repeat(exits), softcap)
            each = found.view(exits, -1)
            log_likelihoods[:, part] = each if last is None else torch.cat((each, last[None, part]))
            joint = log_weights[:, part] + log_likelihoods[:, part]
            total -= joint.logsumexp(0).sum() + own * each.sum()
            shares[:, part] = joint.softmax(0)
            if dx is None and dw is None:
                continue
            slope = logits.slope(own + shares[:exits, part].reshape(-1, 1)).to(x.dtype)
            if dx is not None:
                dx[:, part] = (slope @ matrix).view(exits, -1, x.shape[-1])
            if dw is not None:
                add_product(dw, slope, chunk)
        ctx.save_for_backward(dx, -shares if wants_weights else None, dw)
        ctx.mark_non_differentiable(log_likelihoods)
        return total, log_likelihoods

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
        factor = grads[0].item()
        scaled = (part if part is None or factor == 1 else part * factor for part in ctx.saved_tensors)
        return *scaled, None, None, None, None


class _Softmax:
    """Exponentials of some rows of logits, and what their gradient needs; they take the logits' place."""

    def __init__(self, exponentials: Tensor, norm: Tensor, targets: Tensor, tanh: Tensor | None) -> None:
        self._exponentials, self._norm, self._targets, self._tanh = exponentials, norm, targets, tanh

    def slope(self, shares: Tensor) -> Tensor:
        """The gradient [R, V] in the logits before the cap of the sum of -shares [R, 1] * log softmax[target]."""
        slope = self._exponentials.mul_(shares / self._norm)
        slope.scatter_add_(-1, self._targets[:, None], -shares)
        return slope if self._tanh is None else slope.mul_(1 - self._tanh * self._tanh)


def _log_likelihoods(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[_Softmax, Tensor]:
    """The log-likelihood of the target in each row [R], and what the gradient is made of. Spends the logits."""
    logits = logits.float()
    wanted, norm, tanh = exponentials(logits, targets, softcap)
    return _Softmax(logits, norm, targets, tanh), (wanted - norm.log())[:, 0]
