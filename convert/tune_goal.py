"""Which point of a frontier is taken for what is aimed at. Knows figures; no tensors and no files."""

import math
from collections.abc import Sequence

from ..errors import UsageError
from ..runtime.tuned import TunedPoint
from .tune_request import Goal, TuneRequest


def goal_of(request: TuneRequest, default_loss: float) -> tuple[Goal, float]:
    """Return what is aimed at in a text's figures; where nothing is said, a loss."""
    if request.min_speed is not None:
        return "min_speed", request.min_speed
    return "max_loss", default_loss if request.max_loss is None else request.max_loss


def choose(points: Sequence[TunedPoint], goal: Goal, limit: float) -> TunedPoint:
    """Return the fastest point that loses at most `limit`, or the one nearest the dense model that is fast enough.

    Decided on the half that is for choosing. Raises UsageError where there is none, saying what there is.
    """
    if goal == "min_speed":
        good = [point for point in points if point.speedup >= limit]
        if not good:
            best = max(points, key=lambda point: point.speedup)
            what = (
                f"No setting is {limit:g} times as fast as the dense model; '{best.name}' is {best.speedup:.2f} times"
            )
            raise UsageError(what, f"Give --min-speed {math.floor(best.speedup * 100) / 100:.2f} or less")
        return min(good, key=lambda point: (point.chosen_on.distance, -point.speedup))
    good = [point for point in points if point.chosen_on.loss <= limit]
    if not good:
        best = min(points, key=lambda point: point.chosen_on.loss)
        what = f"No setting loses {limit:.3g} or less; '{best.name}' loses {best.chosen_on.loss:.3g}"
        raise UsageError(what, "Give a larger --max-loss, or more resident blocks")
    return min(good, key=lambda point: (-point.speedup, point.chosen_on.distance))
