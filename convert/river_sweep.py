"""The sweep of a River bundle: rules measured on one half of a text, the better ones again on the other half.

Rules are the paper's one threshold, thresholds by block, and blocks that stay dense in the river. Knows no goal: what
is chosen from the frontier is decided elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.exit_quality import Files, measure, measure_errors
from ..runtime.exit_rules import (
    AT_ONCE,
    NEVER,
    ExitErrors,
    most_sensitive,
    sensitivities,
    sizes,
    thresholds_by_layer,
)
from ..runtime.loading import river_route
from ..runtime.methods import River
from ..runtime.progress import Reporter
from ..runtime.quality import Quality
from ..runtime.tuned import BlockSpeed, Figures, TunedPoint
from .judge import loss
from .tune_text import Halves

TAUS = (0.5, 0.9, 0.95, 0.97, 0.98, 0.99)
PRICES = (0.5, 0.7, 0.85, 1.0, 1.2)
"""What a dense block costs when thresholds are made by block, in shares of what one block loses on average. Between a
half and somewhat more than one, depths go from nearly all blocks to nearly none."""
ERROR_SHARE = 4
"""Leaving after every block is measured on this part of one half; it costs about L / 2 passes over it. A few hundred
tokens say which blocks are sensitive (docs/tune.md)."""
DENSE, FLOOR = "dense", "all 4-bit"


@dataclass(frozen=True)
class Candidate:
    """A rule: the fields of River's settings that make it."""

    name: str
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        name: str,
        *,
        tau: float | None = None,
        thresholds: tuple[float, ...] | None = None,
        dense_layers: frozenset[int] = frozenset(),
    ) -> "Candidate":
        """A rule by its fields: one threshold, or one by block."""
        own = {} if tau is None else {"tau": tau}
        return cls(name, {**own, "thresholds": thresholds, "dense_layers": tuple(sorted(dense_layers))})

    def under(self, river: River) -> River:
        """Return a bundle's settings with this rule."""
        return River.model_validate({**river.model_dump(), **self.settings})


def sweep(files: Files, river: River, halves: Halves, speed: BlockSpeed, reporter: Reporter) -> list[TunedPoint]:
    """Measure all rules on one half, and those that no other beats on the other half too; by rising speed.

    Where `river` keeps only some blocks resident, every climb ends there, but for the dense model it is compared with.
    """
    count = files.frame.arch.num_layers
    part = halves.choose[: max(1, len(halves.choose) // ERROR_SHARE)]
    errors = measure_errors(files, part, river.entry_layer, reporter)
    rules = candidates(errors, river.entry_layer)
    dense, *others = (rule.under(river) for rule in rules)
    routes = [river_route(dense, count), *(river_route(way, count, resident=way.resident) for way in others)]
    first = measure(files, halves.choose, routes, reporter, title="Measure the rules")
    blocks = [dense_blocks(quality, rule.settings) for quality, rule in zip(first, rules, strict=True)]
    costs = [speed.token_ms(count_of, count) for count_of in blocks]
    kept = frontier(costs, [quality.kl for quality in first], always=(0, 1))
    second = measure(files, halves.report, [routes[at] for at in kept], reporter, title="Measure on the other half")
    points = [
        _point(rules[at], speed, (first[at], first[0]), (quality, second[0]), count)
        for at, quality in zip(kept, second, strict=True)
    ]
    return sorted(points, key=lambda point: point.speedup)


def candidates(errors: ExitErrors, entry_layer: int) -> list[Candidate]:
    """Return the rules to measure; the dense model first, then the river as it is from the first block on."""
    layers = errors.losses.shape[0]
    found = sensitivities(errors, entry_layer)
    average = float(errors.losses[0].double().mean()) / max(1, len(found))
    rules = [Candidate.of(DENSE, tau=NEVER), Candidate.of(FLOOR, tau=AT_ONCE)]
    rules += [Candidate.of(f"tau {tau:g}", tau=tau) for tau in TAUS]
    for share in PRICES:
        table = thresholds_by_layer(errors, share * average, entry_layer)
        rules.append(Candidate.of(f"tau by block, price {share:g}", thresholds=table))
    for size in sizes(layers, entry_layer):
        stay = most_sensitive(found, size)
        rules.append(Candidate.of(f"{size} dense", tau=AT_ONCE, dense_layers=stay))
    return rules


def dense_blocks(quality: Quality, settings: Mapping[str, Any]) -> float:
    """Return how many blocks a token runs with the backbone's weights: those it climbs, and those that stay dense."""
    stay: Sequence[int] = settings["dense_layers"]
    counts = quality.exit_histogram
    run = sum(count * (depth + sum(layer > depth for layer in stay)) for depth, count in enumerate(counts, start=1))
    return run / sum(counts)


def frontier(costs: Sequence[float], kls: Sequence[float], always: Sequence[int] = ()) -> list[int]:
    """Return which settings no other beats: none that costs as little has a smaller KL; and those in `always`."""
    kept: list[int] = []
    for at in sorted(range(len(costs)), key=lambda at: (costs[at], kls[at], at)):
        if not kept or kls[at] < kls[kept[-1]]:
            kept.append(at)
    return sorted({*kept, *always})


def _point(
    rule: Candidate,
    speed: BlockSpeed,
    chosen_on: tuple[Quality, Quality],
    held_out: tuple[Quality, Quality],
    layers: int,
) -> TunedPoint:
    blocks = float(f"{dense_blocks(chosen_on[0], rule.settings):.6g}")
    return TunedPoint(
        name=rule.name,
        settings=dict(rule.settings),
        dense_blocks=blocks,
        speedup=speed.speedup(blocks, layers),
        chosen_on=_figures(*chosen_on),
        held_out=_figures(*held_out),
    )


def _figures(quality: Quality, dense: Quality) -> Figures:
    return Figures(
        perplexity=quality.perplexity,
        loss=loss(quality, dense),
        kl=quality.kl,
        agreement=quality.agreement,
        mean_depth=quality.mean_depth,
        exit_histogram=tuple(quality.exit_histogram),
    )
