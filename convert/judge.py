"""What a conversion cost in quality, measured on text that the quantiser never saw, and the threshold chosen by it.

Goes through the model block by block, all thresholds at once, from the files just written. Knows no manifest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..runtime.exit_quality import Files, measure
from ..runtime.exits import HELD, CosineExit, FixedExit, Route
from ..runtime.progress import Reporter
from ..runtime.quality import Quality

__all__ = ["TAUS", "Files", "Verdict", "choose_tau", "judge", "loss", "measure"]

TAUS = (0.5, 0.8, 0.9, 0.95, 0.98)
"""Thresholds of the curve in the manifest."""


@dataclass(frozen=True)
class Verdict:
    """`dense` and `floor` (tokens leave as early as they may) bracket the curve; `curve` is by threshold."""

    dense: Quality
    floor: Quality
    curve: dict[float, Quality]


def judge(
    files: Files,
    ids: Tensor,
    *,
    entry_layer: int,
    resident: int | None,
    taus: Sequence[float],
    reporter: Reporter,
    held: int = HELD,
) -> Verdict:
    """Measure the dense model, the floor and a threshold curve on ids [n, S]. `held`: see `exits.Route`."""
    count = files.frame.arch.num_layers
    policies = [FixedExit(entry_layer - 1), *(CosineExit.uniform(tau, count, entry_layer) for tau in taus)]
    routes = [Route(policy, held=held, resident=resident) for policy in policies]
    dense, floor, *curve = measure(files, ids, [FixedExit(count), *routes], reporter)
    return Verdict(dense, floor, dict(zip(taus, curve, strict=True)))


def loss(quality: Quality, dense: Quality) -> float:
    """Return how much the perplexity grew, as a share of the dense model's."""
    return quality.perplexity / dense.perplexity - 1


def choose_tau(verdict: Verdict, max_loss: float) -> float:
    """Return the lowest threshold of the curve whose loss stays within `max_loss`; the highest where none does."""
    for tau in sorted(verdict.curve):
        if loss(verdict.curve[tau], verdict.dense) <= max_loss:
            return tau
    return max(verdict.curve)
