"""What two-dimensional exit costs and gives at every pair of thresholds, from stored probabilities of held-out rows.

Algorithm 1 is simulated for a whole grid at once, in the order and with the counting of `runtime.schedule`. Source:
2D-EE (arXiv 2604.18592), sections 3 and 4; thresholds are chosen on validation rows, never on test rows.
Knows no tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ..runtime import scores
from ..runtime.methods import Decision, FixedLayer, Readout, Thresholds
from ..runtime.operating_point import expected
from ..runtime.schedule import cells, margins, two_d

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
READOUTS: tuple[Readout, ...] = get_args(Readout)

IGNORE: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ACCEPT: tuple[float, ...] = tuple(float(f"{tau:.4g}") for tau in np.geomspace(0.25, 220.0, 48))
"""Grids of tau_ignore and tau_acc; the paper sweeps about 250 pairs (Fig. 6)."""


@dataclass(frozen=True)
class Judged:
    """One row's probabilities: `cells` [L, m, C] of every sentence, `whole` [L, C] of the readout of all of it."""

    cells: NDArray[np.floating]
    whole: NDArray[np.floating]
    label: int

    @classmethod
    def of(cls, cells: NDArray[np.floating], mean: NDArray[np.floating], label: int, readout: Readout) -> "Judged":
        """Return a row whose whole is read in this way; `mean` [L, C] is the answer on the mean of its sentences."""
        return cls(cells, mean if readout == "mean" else cells[:, -1], label)


@dataclass(frozen=True)
class Runs:
    """How rows went, one entry a row: answers, operations counted, layers and sentences looked at; all [..., rows]."""

    answers: Ints
    operations: Ints
    layers: Ints
    sentences: Ints

    def at(self, ignore: int, accept: int) -> "Runs":
        """How rows went at one pair of thresholds of a surface."""
        figures = (self.answers, self.operations, self.layers, self.sentences)
        return Runs(*(part[ignore, accept] for part in figures))


def simulate(row: Judged, ignore: Sequence[float], accept: Sequence[float]) -> Runs:
    """Run Algorithm 1 on one row at every pair of thresholds: [len(ignore), len(accept)] each.

    `accept` must rise. Decisions are those of `runtime.schedule.Votes`, to the last bit.
    """
    layers, sentences, classes = row.cells.shape
    order = cells(two_d(layers, sentences))
    labels, margin = margins(row.cells[order[:, 0], order[:, 1]].astype(np.float64))
    votes = np.where(margin > np.asarray(ignore)[:, None], margin, 0.0)  # [ignore, cells]
    added = np.zeros((*votes.shape, classes))
    added[:, np.arange(len(labels)), labels] = votes
    score = added.cumsum(1)[:, np.arange(len(labels)), labels]
    # The score of the class that a cell names; whichever passes first, its highest so far has passed with it.
    highest = np.maximum.accumulate(score, axis=1)
    fired = np.stack([np.searchsorted(line, accept, side="right") for line in highest])
    stopped = fired < len(labels)
    at = np.minimum(fired, len(labels) - 1)
    deepest, furthest = np.maximum.accumulate(order + 1, axis=0).T
    return Runs(
        answers=np.where(stopped, labels[at], row.whole[-1].argmax()),
        operations=np.where(stopped, fired + 1, layers * sentences),
        layers=np.where(stopped, deepest[at], layers),
        sentences=np.where(stopped, furthest[at], sentences),
    )


def decision(runs: Runs, rows: Sequence[Judged], classes: int) -> Decision:
    """Figures of rows that went like this; `work` is a ratio of sums, as the authors' code reports it."""
    labels = np.array([row.label for row in rows])
    return Decision(
        accuracy=float((runs.answers == labels).mean()),
        macro_f1=macro_f1(labels, runs.answers, classes),
        work=float(runs.operations.sum() / sum(row.cells.shape[0] * row.cells.shape[1] for row in rows)),
        mean_layers=float(runs.layers.mean()),
        mean_sentences=float(runs.sentences.mean()),
    )


def macro_f1(labels: Ints, answers: Ints, classes: int) -> float:
    """See `runtime.scores.macro_f1`."""
    places = (labels * classes + answers).ravel()
    counts = np.bincount(places, minlength=classes**2).reshape(classes, classes)
    return scores.macro_f1(counts.tolist())


def fixed_layers(rows: Sequence[Judged], classes: int) -> tuple[FixedLayer, ...]:
    """Figures of the whole document through the first 1, 2, … L blocks."""
    count = rows[0].whole.shape[0]
    answers = np.stack([row.whole.argmax(-1) for row in rows], axis=1)
    sentences = np.array([row.cells.shape[1] for row in rows])

    def point(layer: int) -> FixedLayer:
        runs = Runs(answers[layer - 1], layer * sentences, np.full(len(rows), layer), sentences)
        return FixedLayer(layer=layer, **decision(runs, rows, classes).model_dump())

    return tuple(point(layer) for layer in range(1, count + 1))


def surface(rows: Sequence[Judged], ignore: Sequence[float], accept: Sequence[float]) -> Runs:
    """Run Algorithm 1 on all rows at every pair of thresholds: [len(ignore), len(accept), rows] each."""
    runs = [simulate(row, ignore, accept) for row in rows]
    return Runs(
        *(
            np.stack([getattr(run, name) for run in runs], -1)
            for name in ("answers", "operations", "layers", "sentences")
        )
    )


@dataclass(frozen=True)
class Curve:
    """What was found on the validation rows. `frontier` rises in work and in accuracy; `layers` are all of them.

    `depth`: Algorithm 1 ran on the first so many blocks.
    """

    readout: Readout
    depth: int
    frontier: tuple[Thresholds, ...]
    layers: tuple[FixedLayer, ...]

    @property
    def full(self) -> FixedLayer:
        """The whole document through all layers."""
        return self.layers[-1]


def measure(rows: Sequence[Judged], classes: int, readout: Readout) -> Curve:
    """Run every layer with the whole document, and Algorithm 1 at every pair of the grid, as deep as pays."""
    layers = fixed_layers(rows, classes)
    depth = useful_depth(layers)
    runs = surface([Judged(row.cells[:depth], row.whole[:depth], row.label) for row in rows], IGNORE, ACCEPT)
    labels = np.array([row.label for row in rows])
    steady = smoothed((runs.answers == labels).mean(-1))

    def point(i: int, j: int) -> Thresholds:
        figures = decision(runs.at(i, j), rows, classes).model_dump()
        return Thresholds(tau_ignore=IGNORE[i], tau_acc=ACCEPT[j], steady=float(steady[i, j]), **figures)

    points = [point(i, j) for i in range(len(IGNORE)) for j in range(len(ACCEPT))]
    return Curve(readout, depth, pareto(points), layers)


def useful_depth(layers: Sequence[FixedLayer]) -> int:
    """Return how many blocks two dimensions should use: up to the best layer, smoothed over its neighbours.

    Classifiers of a frozen model are best around the middle. Layers beyond only add votes that are no better, and cost
    most where the rule does not fire.
    """
    return 1 + int(smoothed(np.array([point.accuracy for point in layers])).argmax())


def smoothed(surface: Floats) -> Floats:
    """Mean of every point of a line or a grid and its neighbours on all sides; edges count themselves again."""
    window = (3,) * surface.ndim
    padded = np.pad(surface, 1, mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, window).mean(tuple(range(-surface.ndim, 0)))


def pareto(points: Iterable[Thresholds]) -> tuple[Thresholds, ...]:
    """Return the points of which no other is expected to be as accurate with the same work or less, by rising work."""
    kept: list[Thresholds] = []
    for point in sorted(points, key=lambda point: (point.work, -expected(point))):
        if not kept or expected(point) > expected(kept[-1]):
            kept.append(point)
    return tuple(kept)
