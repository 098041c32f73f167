"""From one row of logits to one token id: the law that is sampled, and its randomness.

The law, in this order (that of transformers' `generate`): repetition penalty, temperature, top-k, top-p, min-p.
Each filter sees the distribution renormalised after the one before it. Differences from transformers, all on ties:
temperature 0 is the argmax with the lowest id, and top-k keeps exactly k tokens, lowest ids first, so that
`top_k=1` is the argmax too.

Knows no model, no tokenizer and no batch: one row in, one id out.
"""

import hashlib
import math
import secrets
from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import AdaptError
from ..quant.kernels import draw as native_draw
from .options import Sampling

_FIRST_CANDIDATES = 256


def row_generator(seed: int | None, row: int = 0) -> torch.Generator:
    """Give a row its own source of randomness (CPU), a function of seed and row only.

    A row's text therefore does not depend on the batch it is in nor on the order of rows.
    """
    if seed is None or seed < 0:
        seed = secrets.randbits(62)
    digest = hashlib.sha256(f"adapt row {seed} {row}".encode()).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return generator


def argmax(logits: Tensor) -> int:
    """Index of the greatest of `logits` [V], the lowest one on ties, on every device.

    Raises:
        AdaptError: the greatest is NaN or infinite.

    """
    if native_draw.fits(logits):
        token = native_draw.greatest(logits)
        if token >= 0:  # otherwise the logits are refused below
            return token
    return int((logits == _greatest(logits)).nonzero()[0])


def _greatest(logits: Tensor) -> float:
    best = float(logits.max())
    if not math.isfinite(best):
        raise AdaptError(
            f"The model produced {best} as a logit, so no token can be chosen",
            "Try --dtype fp32; if that helps, the weights overflow in the narrower type.",
        )
    return best


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return `logits` [V] with the tokens marked in `seen` (bool [V]) made less likely (Keskar et al. 2019)."""
    reduced = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, reduced, logits)


def distribution(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Give the law that is sampled: ids [n] int64 and probabilities [n] float64 that sum to 1.

    With any filter on, the most probable id comes first; without, ids are in order.

    Args:
        logits: float [V], on any device, after any repetition penalty.
        sampling: its `seed` and `repetition_penalty` are not read here.

    Raises:
        AdaptError: the logits hold NaN, or no finite value.

    """
    if sampling.greedy:
        return torch.tensor([argmax(logits)]), torch.ones(1, dtype=torch.float64)
    weights = _weigh(logits, sampling)
    ids = _keep(weights, sampling)
    kept = weights if ids is None else weights[ids]
    return torch.arange(len(weights)) if ids is None else ids, kept / kept.sum()


def _weigh(logits: Tensor, sampling: Sampling) -> Tensor:
    """Unnormalised probabilities [V] before any filter, float64 on the CPU; the greatest is 1."""
    row = logits.detach().to(device="cpu", dtype=torch.float64, copy=True)
    row.sub_(_greatest(row))  # in place: a vocabulary in float64 is memory to be asked for, and to be touched
    if sampling.temperature != 1:
        row.div_(sampling.temperature)
    return row.exp_()


def _keep(weights: Tensor, sampling: Sampling) -> Tensor | None:
    """Apply the filters to unnormalised probabilities [V] whose maximum is 1; None = everything stays."""
    ids = None
    if 0 < sampling.top_k < len(weights):
        ids = _largest(weights, sampling.top_k)
    if sampling.top_p < 1:
        ids = _nucleus(weights, ids, sampling.top_p)
    if sampling.min_p > 0:
        ids = _sorted(weights, torch.arange(len(weights)) if ids is None else ids, sampling.min_p)
    return ids


def _largest(weights: Tensor, k: int) -> Tensor:
    """Ids of the k greatest, greatest first, lowest id first among equals."""
    threshold = weights.topk(k).values[-1]
    above = (weights > threshold).nonzero()[:, 0]
    equal = (weights == threshold).nonzero()[:, 0]
    return _sorted(weights, torch.cat([above, equal[: k - len(above)]]).sort().values)


def _sorted(weights: Tensor, ids: Tensor, minimum: float = 0.0) -> Tensor:
    """Sort those of `ids` that weigh at least `minimum`, greatest first; equals keep their order."""
    ids = ids[weights[ids] >= minimum]
    return ids[weights[ids].sort(descending=True, stable=True).indices]


def _nucleus(weights: Tensor, ids: Tensor | None, top_p: float) -> Tensor:
    """Smallest set, greatest first, that holds at least `top_p` of the mass (Holtzman et al. 2020).

    A whole vocabulary is not sorted for it: the greatest few usually hold enough, else more are taken.
    """
    wanted = top_p * float(weights.sum() if ids is None else weights[ids].sum())
    candidates, count = ids, _FIRST_CANDIDATES
    while candidates is None:
        count = min(count, len(weights))
        tried = _largest(weights, count)
        if count == len(weights) or float(weights[tried].sum()) >= wanted:
            candidates = tried
        count *= 16
    reached = int((weights[candidates].cumsum(0) < wanted).sum()) + 1
    return candidates[:reached]


def draw(ids: Tensor | None, weights: Tensor, uniform: float) -> int:
    """Choose one of `ids` [n] (None: all, in order) by inverting the cumulative `weights` [n] at `uniform` in [0, 1).

    Weights are probabilities, or in proportion to them.
    """
    cumulative = weights.cumsum(0)
    at = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    at = min(at, len(cumulative) - 1)
    return at if ids is None else int(ids[at])


def sample(logits: Tensor, sampling: Sampling, uniform: float = 0.0) -> int:
    """Choose a token id from `logits` [V]; a pure function, `uniform` in [0, 1) is all its randomness.

    Raises:
        AdaptError: the logits hold NaN, or no finite value.

    """
    if sampling.greedy:
        return argmax(logits)
    if not sampling.filtered and native_draw.fits(logits):
        token = native_draw.draw(logits, sampling.temperature, uniform)
        if token >= 0:  # otherwise the logits are refused below
            return token
    weights = _weigh(logits, sampling)
    ids = _keep(weights, sampling)
    return draw(ids, weights if ids is None else weights[ids], uniform)


class Sampler:
    """`sample` with what it needs to remember: the row's randomness and, for the penalty, the tokens seen."""

    def __init__(self, sampling: Sampling, row: int = 0) -> None:
        self.sampling = sampling
        self._generator = row_generator(sampling.seed, row)
        self._seen: set[int] = set()

    def saw(self, ids: Iterable[int]) -> None:
        """Count `ids` as part of the context."""
        if self.sampling.repetition_penalty != 1:
            self._seen.update(ids)

    def __call__(self, logits: Tensor) -> int:
        """Choose a token id from `logits` [V] and count it as seen.

        One uniform number is drawn per token, whatever the filters.
        """
        if self._seen:
            seen = torch.zeros(len(logits), dtype=torch.bool)
            seen[[token for token in self._seen if token < len(logits)]] = True
            logits = penalize(logits, seen.to(logits.device), self.sampling.repetition_penalty)
        return self.take(sample(logits, self.sampling, 0.0 if self.sampling.greedy else self.uniform()))

    def take(self, token: int) -> int:
        """Count a token that was chosen elsewhere as seen, and give it back."""
        self.saw((token,))
        return token

    def uniform(self) -> float:
        """Draw the next number in [0, 1) of the row's own randomness."""
        return float(torch.rand(1, generator=self._generator, dtype=torch.float64))

    def copy(self) -> "Sampler":
        """Another sampler that will choose as this one would, without changing it: to look ahead."""
        other = Sampler(self.sampling)
        other._generator.set_state(self._generator.get_state())
        other._seen = set(self._seen)
        return other
