"""Several models that continue the same prompt, timed in turn in one process: what `adapt bench` measures.

Knows contenders by a protocol, and the machine by its bandwidth: no bundles, no files, no terminal.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from .progress import Reporter

PREFILL_SECONDS = 20.0
"""Prompts are timed in every round where that takes no longer than this in all, in fewer rounds otherwise."""
_DIGITS = 4


@dataclass(frozen=True)
class Lap:
    """One text of one contender: `steps` passes behind the prompt, each a token for every row."""

    seconds: float
    """Of all decode passes."""
    steps: int
    rows: int
    first_token_seconds: float | None
    """From nothing to the first token of every row; None where the prompt was in the cache already."""
    depths: Mapping[int, int]
    """Backbone blocks run -> tokens; empty for a model without exits."""
    bytes_read: float | None
    """Weights, keys and values of all decode passes, at least; None where that is not known."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Further figures of a method, summed over rounds."""


class Contender(Protocol):
    """A model with a prompt."""

    name: str

    def lap(self, *, afresh: bool) -> Lap:
        """Continue the prompt, `afresh` from an empty cache, otherwise from one that holds it. Greedy or seeded."""
        ...


class Reader(Protocol):
    """Reads memory as fast as it can be read."""

    def bytes_per_second(self) -> float:
        """One measurement."""
        ...


@dataclass
class Trial:
    """All rounds of all contenders on one prompt; `laps[name][i]` and `limits[i]` are of round i."""

    context: int
    rows: int
    laps: dict[str, list[Lap]]
    limits: list[float]
    """Bytes a second."""

    def figures(self, name: str) -> dict[str, Any]:
        """Return one contender's figures by stable keys."""
        laps = self.laps[name]
        steps = [lap.seconds / lap.steps for lap in laps]
        first = [lap.first_token_seconds for lap in laps if lap.first_token_seconds is not None]
        return {
            "decode_tokens_per_s": _round(self.rows / median(steps)),
            "prefill_tokens_per_s": _round(self.rows * self.context / median(first)),
            "first_token_ms": _round(median(first) * 1000),
            "decode_ms": spread([seconds * 1000 for seconds in steps]),
            **self._limit(laps),
        }

    def _limit(self, laps: Sequence[Lap]) -> dict[str, Any]:
        sizes = [lap.bytes_read / lap.steps for lap in laps if lap.bytes_read is not None]
        if len(sizes) < len(laps):
            return {"bytes_per_pass": None, "limit_ms": None, "used_fraction": None}
        pairs = list(zip(sizes, self.limits, strict=True))
        used = [size / limit * lap.steps / lap.seconds for (size, limit), lap in zip(pairs, laps, strict=True)]
        return {
            "bytes_per_pass": round(median(sizes)),
            "limit_ms": _round(median(1000 * size / limit for size, limit in pairs)),
            "used_fraction": _round(median(used)),
        }

    def speedup(self, name: str, over: str) -> dict[str, dict[str, float]]:
        """Return how much faster one contender is than another, round by round."""
        pairs = list(zip(self.laps[name], self.laps[over], strict=True))
        decode = [theirs.seconds / theirs.steps * ours.steps / ours.seconds for ours, theirs in pairs]
        both = [(ours.first_token_seconds, theirs.first_token_seconds) for ours, theirs in pairs]
        prefill = [theirs / ours for ours, theirs in both if ours is not None and theirs is not None]
        return {"decode": spread(decode), "prefill": spread(prefill)}

    def depths(self, name: str) -> Counter[int]:
        """Return how many tokens left at which depth, over all rounds."""
        return sum((Counter(lap.depths) for lap in self.laps[name]), Counter[int]())

    def counts(self, name: str) -> dict[str, float]:
        """Return a method's further figures, summed over all rounds."""
        found: Counter[str] = Counter()
        for lap in self.laps[name]:
            found.update(lap.counts)
        return {key: _round(value) for key, value in found.items()}

    @property
    def prefill_rounds(self) -> int:
        """In how many rounds prompts were timed."""
        return sum(1 for lap in next(iter(self.laps.values())) if lap.first_token_seconds is not None)

    @property
    def gb_per_s(self) -> float:
        """What memory gave, median of all rounds."""
        return _round(median(self.limits) / 1e9)


def race(
    contenders: Sequence[Contender], context: int, rows: int, *, rounds: int, reader: Reader, reporter: Reporter
) -> Trial:
    """Run every contender once in each round, each round begun by another; one run before the clock warms all up."""
    trial = Trial(context, rows, {contender.name: [] for contender in contenders}, [])
    title = f"{context} tokens" + (f", {rows} rows" if rows > 1 else "")
    with reporter.task(title, (rounds + 1) * len(contenders)) as task:
        slowest = 0.0
        for contender in contenders:
            slowest += contender.lap(afresh=True).first_token_seconds or 0.0
            task.advance()
        prompts = max(1, min(rounds, int(PREFILL_SECONDS / max(slowest, 1e-9))))
        for number in range(rounds):
            trial.limits.append(reader.bytes_per_second())
            for contender in turn(contenders, number):
                trial.laps[contender.name].append(contender.lap(afresh=number < prompts))
                task.advance()
    return trial


def turn(contenders: Sequence[Contender], number: int) -> Sequence[Contender]:
    """Return the order of round `number`: whoever comes after another may find caches warmer."""
    shift = number % len(contenders)
    return [*contenders[shift:], *contenders[:shift]]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and largest."""
    return {"median": _round(median(values)), "min": _round(min(values)), "max": _round(max(values))}


def _round(value: float) -> float:
    """To four significant digits: more would be noise."""
    return float(f"{value:.{_DIGITS}g}")
