"""How the next token is chosen from a mixture of exits, met one after another from below: the law, and how early.

A `Choice` lives for one token. At each junction it may settle the token, and nothing above needs to run for it;
docs/nvium.md says which law is which. Source: N-vium (arXiv 2605.13190). Knows no cache and runs no blocks.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .decoder import Decoder
from .junctions import Junctions
from .options import Sampling
from .sampling import Sampler, argmax
from .side_by_side import together

SLACK = 1e-6
"""Of a lead in probability over what is still unknown: wider than float32 sums of it are off."""
HALF = 0.5
FEW = 0.05
"""Mass of exits not looked at, up to which it is worth to look at the last one alone first."""


class Exits:
    """The exits of a model: from the states at a junction to normalised states and scores, and on to logits."""

    def __init__(self, decoder: Decoder, junctions: Junctions) -> None:
        self.decoder = decoder
        self.junctions = junctions

    def look(self, junction: int, h: Tensor) -> tuple[Tensor, list[float]]:
        """From states h [R, hidden] at a junction (from 0) to normalised states and scores, whose sigmoid is r."""
        return self.junctions[junction].look(h)

    def early(self, junction: int, x: Tensor) -> Tensor:
        """From normalised x [..., hidden] at a junction to what the head multiplies."""
        return self.junctions[junction].adapter(x)

    def last(self, h: Tensor) -> Tensor:
        """From the last block's state [..., hidden] to what the head multiplies."""
        return self.junctions.adapt_final(self.decoder.final_norm(h))

    def logits(self, x: Tensor) -> Tensor:
        """From what the head multiplies [..., hidden] to logits [..., V], float32."""
        return self.decoder.scores(x)


class Choice(Protocol):
    """The choice of one token, which goes through the junctions (from 0) until it is settled, or to the end."""

    heads: list[Tensor]
    """What the head has to multiply [1, hidden] each, before the result is known."""

    def at(self, junction: int, x: Tensor, score: float) -> bool:
        """Look at a junction: normalised state [1, hidden] and score. True: settled here."""
        ...

    def end(self, h: Tensor) -> None:
        """Look at the state [1, hidden] of the last block, where nothing was settled before."""
        ...

    def result(self, logits: Tensor) -> tuple[Tensor, int | None]:
        """From the logits [n, V] of the n `heads` to one row of them [1, V], or log-probabilities.

        With the token where it need not be chosen from them.
        """
        ...


def pure(sampling: Sampling) -> bool:
    """Whether a token drawn from a drawn exit follows the law: nothing reshapes the mixture."""
    return not sampling.filtered and sampling.temperature == 1 and sampling.repetition_penalty == 1


def choice(exits: Exits, sampler: Sampler | None, *, per_exit: bool) -> Choice:
    """The choice that `sampler` (None: the argmax) asks for; `per_exit`: filters act on the drawn exit alone."""
    if sampler is None or (sampler.sampling.greedy and sampler.sampling.repetition_penalty == 1):
        return Greedy(exits)
    if pure(sampler.sampling) or (per_exit and not sampler.sampling.greedy):
        return Drawn(exits, sampler)
    return Whole(exits)


class Drawn:
    """The exit is drawn, one uniform number a junction; its logits are the result."""

    def __init__(self, exits: Exits, sampler: Sampler) -> None:
        self._exits, self._sampler = exits, sampler
        self.heads: list[Tensor] = []

    def at(self, junction: int, x: Tensor, score: float) -> bool:
        """See `Choice.at`."""
        if self._sampler.uniform() >= math.exp(_logsigmoid(score)):
            return False
        self.heads = [self._exits.early(junction, x)]
        return True

    def end(self, h: Tensor) -> None:
        """See `Choice.end`."""
        self.heads = [self._exits.last(h)]

    def result(self, logits: Tensor) -> tuple[Tensor, int | None]:
        """See `Choice.result`."""
        return logits, None


class Whole:
    """Every exit is looked at, and the result is the whole mixture's log-probabilities."""

    def __init__(self, exits: Exits) -> None:
        self._exits = exits
        self._masses = _Masses()
        self._logs: list[float] = []
        self.heads: list[Tensor] = []

    def at(self, junction: int, x: Tensor, score: float) -> bool:
        """See `Choice.at`."""
        self.heads.append(self._exits.early(junction, x))
        self._logs.append(self._masses.leave(score))
        return False

    def end(self, h: Tensor) -> None:
        """See `Choice.end`."""
        self.heads.append(self._exits.last(h))
        self._logs.append(self._masses.rest)

    def result(self, logits: Tensor) -> tuple[Tensor, int | None]:
        """See `Choice.result`."""
        parts = logits.log_softmax(-1)
        weights = torch.tensor(self._logs, device=logits.device)
        return (weights[:, None] + parts).logsumexp(0, keepdim=True), None


class Greedy:
    """The mixture's argmax, settled as soon as no exit that was not looked at can change it.

    An exit adds at most its own mass to any token. The best token of the partial mixture is the whole one's as soon as
    its lead over the second exceeds the mass outside; exits whose heads cannot settle anything yet wait, and are
    multiplied together with the next.
    """

    def __init__(self, exits: Exits) -> None:
        self._exits = exits
        self._masses = _Masses()
        self._waiting: list[tuple[float, Tensor]] = []  # mass of an exit, and what the head multiplies there
        self._counted = 0.0
        self._mixed: Tensor | None = None
        self.heads: list[Tensor] = []

    def at(self, junction: int, x: Tensor, score: float) -> bool:
        """See `Choice.at`."""
        mass = math.exp(self._masses.leave(score))
        if mass > 0:
            self._waiting.append((mass, self._exits.early(junction, x)))
        if self._counted + self._mass() <= HALF:  # a lead is at most what was counted
            return False
        self._count()
        return self._leads()

    def end(self, h: Tensor) -> None:
        """See `Choice.end`."""
        few = self._mass() < FEW
        before, self._waiting = self._waiting, [(math.exp(self._masses.rest), self._exits.last(h))]
        if few:
            self._count()
            if self._leads():
                return
        self._waiting += before
        self._count()

    def result(self, logits: Tensor) -> tuple[Tensor, int | None]:  # noqa: ARG002 - looked at already
        """See `Choice.result`: log-probabilities as far as they were summed."""
        if self._mixed is None:
            raise ValueError("nothing was chosen yet")
        return self._mixed.log(), argmax(self._mixed[0])

    def _mass(self) -> float:
        return sum(mass for mass, _ in self._waiting)

    def _count(self) -> None:
        """Add what waits to the partial mixture."""
        if not self._waiting:
            return
        masses, states = zip(*self._waiting, strict=True)
        logits = self._exits.logits(together(states))
        parts = torch.tensor([masses], device=logits.device) @ logits.softmax(-1)
        self._mixed = parts if self._mixed is None else self._mixed + parts
        self._counted += sum(masses)
        self._waiting = []

    def _leads(self) -> bool:
        """Whether the best token's lead exceeds all mass that was not counted."""
        if self._mixed is None:
            return False
        first, second = self._mixed[0].topk(2).values.tolist()
        return first - second > 1 - self._counted + SLACK


class _Masses:
    """The logarithms of p_k, exit after exit; `rest` is that of everything above."""

    def __init__(self) -> None:
        self.rest = 0.0

    def leave(self, score: float) -> float:
        """The next junction's, from its score."""
        mass = self.rest + _logsigmoid(score)
        self.rest += _logsigmoid(-score)
        return mass


def _logsigmoid(score: float) -> float:
    """log(1 / (1 + exp(-score))), for scores of any size."""
    return min(score, 0.0) - math.log1p(math.exp(-abs(score)))


def start(exits: Exits, samplers: Sequence[Sampler | None], *, per_exit: bool) -> list[Choice]:
    """A choice for each sampler."""
    return [choice(exits, sampler, per_exit=per_exit) for sampler in samplers]


def finish(exits: Exits, choices: Sequence[Choice]) -> list[tuple[Tensor, int | None]]:
    """The results of choices that are settled or at their end; their heads in one product."""
    states = [x for asked in choices for x in asked.heads]
    if not states:
        none = torch.empty(0)
        return [asked.result(none) for asked in choices]
    logits = exits.logits(together(states))
    parts = (logits,) if len(choices) == 1 else logits.split([len(asked.heads) for asked in choices])
    return [asked.result(part) for asked, part in zip(choices, parts, strict=True)]
