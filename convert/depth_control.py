"""What the mixture's training does besides fitting the text: the routers' warm-up, and the price of depth.

The price (beta) is given, or a controller steers it so that the expected depth meets a target: its state is a few
numbers that a checkpoint keeps. A target is an equality, so a steered price has either sign: below 0, depth is paid
for. Source: N-vium (arXiv 2605.13190) for the warm-up and the penalty; the authors' controller compares the loss with
a dense baseline's, ours compares the depth with what was asked for. Knows no model.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UP = 0.05
"""Share of the steps in which routers are drawn to equal masses, and depth costs nothing."""
BETA = 0.15
"""What depth costs where nothing else is said."""
FIRST, HIGHEST = 0.01, 20.0
"""Where a steered beta begins, and how far from 0 it may go: in nats, for the whole depth. It begins low: as long as
exits differ little, any price makes all tokens leave at the first, and what lies above it has nothing to learn from."""
_SCALE = 0.01
"""Beta is this times sinh(u), and u is steered: as by its logarithm where it is large, in even steps through 0."""
_RESPONSE = 6.0
"""How much a persistent error of the whole depth adds to u in the time below, and at once (integral and proportional
gain), while nothing swings."""
_TIME, _MEMORY = 0.06, 0.02
"""Shares of the steps: over which the integral acts, and over which the measured depth is averaged at most."""
_SMOOTH_TOKENS = 8192
"""Tokens over which the measured depth is averaged: those of one step may differ by far more than what is steered."""
_LEAP = 160.0
"""How far u may move in all steps together, at the fastest; in one step by _STRIDE."""
_STRIDE = 1.0
_AHEAD = 1.5
"""How far the integral may be ahead of u: what runs further away would have to be undone."""
_CALMER, _LEAST_GAIN = 0.6, 0.1
"""An error that changes its sign has been answered too strongly: both gains fall by this, down to a share."""
_DEAD = 0.01
"""Errors of the depth that count as none when signs are compared; so do those that may be noise."""


_KEPT = ("loss", "depth", "integral", "turn", "error", "noise", "side", "gain")


def warm_up_term(scores: Sequence[Tensor]) -> Tensor:
    """Sum over tokens and junctions of (r_k - 1 / (N - k))^2, from the scores [R] of junctions k = 0 .. N - 2.

    Its least is where every exit has the mass 1 / N.
    """
    exits = len(scores) + 1
    terms = [(score.sigmoid() - 1 / (exits - k)).square().sum() for k, score in enumerate(scores)]
    return torch.stack(terms).sum()


class DepthControl:
    """The price of depth at every step. A `training.Steering`; `add` is told what a pass of it measured."""

    def __init__(self, steps: int, *, beta: float, target: float | None = None, warm_up: float = WARM_UP) -> None:
        self.beta = beta
        self.warming = True
        self._target = target
        self._warm_steps = round(warm_up * steps)
        self._pull = 1 / max(1.0, _TIME * steps)
        self._newest = 1 / max(1.0, _MEMORY * steps)  # weight of a step in the average, at least
        self._stride = min(_STRIDE, _LEAP / steps)
        self._integral = self._turn = _turn(beta)
        self._error, self._noise, self._unsure = math.nan, 0.0, 0.0
        self._side, self._gain = 0.0, 1.0
        self._sums = [0.0, 0.0, 0.0]
        self._loss, self._depth = math.nan, math.nan

    def begin(self, step: int) -> None:
        """Step `step` (from 0) begins."""
        self.warming = step < self._warm_steps
        self._sums = [0.0, 0.0, 0.0]

    def add(self, loss: Tensor, depth: Tensor, tokens: int) -> None:
        """A pass: the mixture's summed loss, the summed share of the blocks run, over how many tokens."""
        self._sums[0] += float(loss.detach())
        self._sums[1] += float(depth.detach())
        self._sums[2] += tokens

    def sums(self) -> list[float]:
        """What this process measured since `begin`."""
        return self._sums

    def finish(self, sums: Sequence[float]) -> None:
        """The step is over; `sums` are those of all processes."""
        loss, depth, tokens = sums
        if not tokens:
            return
        self._loss, self._depth = loss / tokens, depth / tokens
        if self._target is not None and not self.warming:
            self._steer(self._smoothed(self._depth - self._target, tokens))

    def told(self) -> str:
        """The last step for people."""
        price = "routers warm up" if self.warming else f"beta {self.beta:.3g}"
        return f"mixture {self._loss:.4f}  depth {self._depth:.3f}  {price}"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {name: getattr(self, f"_{name}") for name in _KEPT} | {"beta": self.beta}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.beta = state["beta"]
        for name in _KEPT:
            setattr(self, f"_{name}", state[name])

    def _smoothed(self, error: float, tokens: float) -> float:
        """The error averaged over the last tokens; the first one is as good as it is."""
        weight = max(self._newest, min(4 * self._newest, -math.expm1(-tokens / _SMOOTH_TOKENS)))
        if math.isnan(self._error):
            self._error = error
        off = error - self._error
        self._noise += self._newest * (off * off - self._noise)
        self._unsure = math.sqrt(self._noise * weight / (2 - weight))
        self._error += weight * off
        return self._error

    def _steer(self, error: float) -> None:
        """Too deep makes depth dearer, too shallow cheaper. Prices that matter span three orders of magnitude."""
        self._calm(error)
        bound, gain = _turn(HIGHEST), _RESPONSE * self._gain
        wanted = min(max(self._integral + gain * error, -bound), bound)
        change = min(max(wanted - self._turn, -self._stride), self._stride)
        self._turn += change
        summed = self._integral + gain * self._gain * self._pull * error
        low, high = max(self._turn - _AHEAD, -bound), min(self._turn + _AHEAD, bound)
        self._integral = min(max(summed, low), high)
        self.beta = _SCALE * math.sinh(self._turn)

    def _calm(self, error: float) -> None:
        """Lower the gains when the error has changed its sign; they come back slowly."""
        self._gain = min(1.0, self._gain * (1 + self._pull / 8))
        if abs(error) > max(_DEAD, 2 * self._unsure):
            side = math.copysign(1.0, error)
            if side == -self._side:
                self._gain = max(_LEAST_GAIN, _CALMER * self._gain)
            self._side = side


def _turn(beta: float) -> float:
    return math.asinh(beta / _SCALE)
