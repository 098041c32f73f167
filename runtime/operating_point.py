"""From a bundle's stored curve to the thresholds or the layer for an accuracy that may be given away.

Conversion chooses with these functions, and so does `--max-drop` when a bundle runs. Knows no tensors.
"""

from collections.abc import Iterable
from typing import TypeVar

from .methods import Decision, FixedLayer, Thresholds, TwoDee

D = TypeVar("D", bound=Decision)

ROUNDING = 2e-6  # a manifest keeps six digits, and 0.93 - 0.02 is more than 0.91


def best_accuracy(layers: Iterable[FixedLayer]) -> float:
    """What a drop is measured from: the best accuracy of any layer with the whole document (eq. 6)."""
    return max(point.accuracy for point in layers)


def expected(point: Decision) -> float:
    """Return the accuracy that a point is chosen by."""
    steady = point.steady if isinstance(point, Thresholds) else None
    return point.accuracy if steady is None else steady


def cheapest(points: Iterable[D], accuracy: float) -> D | None:
    """Return the point with the least work among those of this accuracy or more; None where there is none."""
    good = [point for point in points if expected(point) >= accuracy - ROUNDING]
    return min(good, key=lambda point: (point.work, -expected(point)), default=None)


def choose_thresholds(settings: TwoDee, max_drop: float) -> Thresholds | None:
    """Return the cheapest thresholds that lose at most `max_drop` on the validation rows; None where there are none."""
    return cheapest(settings.frontier, best_accuracy(settings.one_d) - max_drop)


def choose_layer(settings: TwoDee, max_drop: float) -> FixedLayer:
    """Return the first layer that loses at most `max_drop` with the whole document: the one-dimensional baseline."""
    return cheapest(settings.one_d, best_accuracy(settings.one_d) - max_drop) or settings.full
