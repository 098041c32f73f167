"""Algorithm 1 of two-dimensional early exit as data: which cells run, in which order they vote, and when to stop.

A cell is one sentence in one layer, an item a rectangle of cells that a document can run at once. Layers and sentences
are counted from 0 here. Source: 2D-EE (arXiv 2604.18592), section 3. Pure numpy: knows no tensors and no text.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

Array = NDArray[np.float64]


class Item(NamedTuple):
    """Layers `first_layer` .. `last_layer` - 1 of sentences `first_sentence` .. `last_sentence` - 1.

    `votes`: whether the classifiers of these cells are asked.
    """

    first_layer: int
    last_layer: int
    first_sentence: int
    last_sentence: int
    votes: bool = True

    @property
    def layers(self) -> int:
        """How many."""
        return self.last_layer - self.first_layer

    @property
    def sentences(self) -> int:
        """How many."""
        return self.last_sentence - self.first_sentence


def two_d(layers: int, sentences: int) -> Iterator[Item]:
    """The items of Algorithm 1, and at the end the layers it left out, which the fallback answer needs.

    Sentence s opens delta = max(1, layers // sentences) layers more (eq. 4): the sentences before it run through those
    from their stored states, then it runs through all that are open. Once all are open, the earlier ones have no more
    to do.
    """
    delta = max(1, layers // sentences)
    opened = 0
    for sentence in range(sentences):
        before, opened = opened, min((sentence + 1) * delta, layers)
        if sentence and before < opened:
            yield Item(before, opened, 0, sentence)
        yield Item(0, opened, sentence, sentence + 1)
    if opened < layers:
        yield Item(opened, layers, 0, sentences, votes=False)


def one_d(layer: int, sentences: int) -> Iterator[Item]:
    """The whole document through the first `layer` layers; nothing votes, the last of them answers."""
    yield Item(0, layer, 0, sentences, votes=False)


def full(layers: int, sentences: int) -> Iterator[Item]:
    """The whole document through every layer."""
    return one_d(layers, sentences)


def sweeps(items: Iterable[Item]) -> Iterator[tuple[Item, ...]]:
    """Items grouped so that each begins in the layer where the one before it ended: one passage up the model each.

    In Algorithm 1, sentence s climbs to where the next items take all sentences so far through the next layers.
    """
    group: list[Item] = []
    for item in items:
        if group and item.first_layer != group[-1].last_layer:
            yield tuple(group)
            group = []
        group.append(item)
    if group:
        yield tuple(group)


def cells(items: Iterable[Item]) -> NDArray[np.int64]:
    """(layer, sentence) of every cell that votes, in the order of the algorithm: [n, 2]; sentences outside layers."""
    parts = [
        (layer, sentence)
        for item in items
        if item.votes
        for sentence in range(item.first_sentence, item.last_sentence)
        for layer in range(item.first_layer, item.last_layer)
    ]
    return np.array(parts, dtype=np.int64).reshape(-1, 2)


def margins(probabilities: Array) -> tuple[NDArray[np.int64], Array]:
    """The most probable class of every row of [..., C], and how far it is ahead of the second (eq. 5)."""
    first, second = np.moveaxis(-np.partition(-probabilities, 1, axis=-1)[..., :2], -1, 0)
    return probabilities.argmax(-1), first - second


@dataclass(frozen=True)
class Rule:
    """When the answer is accepted: margins above `tau_ignore` count, until a class has more than `tau_acc` of them.

    Raises:
        UsageError: a threshold that is negative or no number.

    """

    tau_ignore: float
    tau_acc: float

    def __post_init__(self) -> None:
        for name, value in (("tau_ignore", self.tau_ignore), ("tau_acc", self.tau_acc)):
            if math.isnan(value) or value < 0:
                raise UsageError(f"{name} is {value}", "It must be 0 or more.")


@dataclass(frozen=True)
class Stop:
    """Where the rule fired: the cell, the answer, and the operations counted up to and with that cell.

    `scores` are mean class probabilities over the cells that counted; `layers`, `sentences`: how many were looked at.
    """

    label: int
    operations: int
    layer: int
    sentence: int
    layers: int
    sentences: int
    scores: tuple[float, ...]


class Votes:
    """The running score of one document: a sum of margins per class, never reset."""

    def __init__(self, rule: Rule, classes: int) -> None:
        self._rule = rule
        self._score = np.zeros(classes)
        self._total = np.zeros(classes)  # of the probabilities of cells that counted
        self._counted = 0
        self._layers = self._sentences = 0
        self.operations = 0

    def take(self, item: Item, probabilities: NDArray[np.floating]) -> Stop | None:
        """Count the cells of an item, probabilities [layers, sentences, C], one after the other; None: go on."""
        classes = self._score.shape[0]
        rows = np.asarray(probabilities, dtype=np.float64).swapaxes(0, 1).reshape(-1, classes)
        labels, margin = margins(rows)
        counts = margin > self._rule.tau_ignore
        added = np.zeros((len(rows) + 1, classes))
        added[0] = self._score
        added[1:][counts, labels[counts]] = margin[counts]
        running = added.cumsum(0)[1:]
        above = running[np.arange(len(rows)), labels] > self._rule.tau_acc
        end = int(above.argmax()) + 1 if above.any() else len(rows)
        self._total += rows[:end][counts[:end]].sum(0)
        self._counted += int(counts[:end].sum())
        self.operations += end
        self._sentences = max(self._sentences, item.first_sentence + 1 + (end - 1) // item.layers)
        self._layers = max(self._layers, item.last_layer if end >= item.layers else item.first_layer + end)
        self._score = running[-1]
        if not above.any():
            return None
        sentence, layer = divmod(end - 1, item.layers)
        return Stop(
            label=int(labels[end - 1]),
            operations=self.operations,
            layer=item.first_layer + layer,
            sentence=item.first_sentence + sentence,
            layers=self._layers,
            sentences=self._sentences,
            scores=tuple((self._total / self._counted).tolist()),
        )


@dataclass(frozen=True)
class TwoD:
    """Algorithm 1 with this rule."""

    rule: Rule

    def depth(self, layers: int) -> int:
        """Layers behind which the answer is read where the rule did not fire."""
        return layers

    def items(self, layers: int, sentences: int) -> Iterator[Item]:
        """What a document runs."""
        return two_d(layers, sentences)


@dataclass(frozen=True)
class OneD:
    """The whole document through the first `layer` layers (from 1)."""

    layer: int

    def depth(self, layers: int) -> int:
        """Layers behind which the answer is read. Raises UsageError when the model has not so many."""
        if not 1 <= self.layer <= layers:
            raise UsageError(f"Layer {self.layer} was asked for", f"The model has layers 1 to {layers}.")
        return self.layer

    def items(self, layers: int, sentences: int) -> Iterator[Item]:
        """What a document runs."""
        return one_d(self.depth(layers), sentences)


@dataclass(frozen=True)
class Full:
    """The whole document through all layers."""

    def depth(self, layers: int) -> int:
        """Layers behind which the answer is read."""
        return layers

    def items(self, layers: int, sentences: int) -> Iterator[Item]:
        """What a document runs."""
        return full(layers, sentences)


Mode = TwoD | OneD | Full
