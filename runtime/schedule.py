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


def margins(probabilities: NDArray[np.floating]) -> tuple[NDArray[np.int64], Array]:
    """The most probable class of every row of [..., C], and how far it is ahead of the second (eq. 5)."""
    rows = probabilities.astype(np.float64)
    top = np.partition(rows, -2, axis=-1)
    return rows.argmax(-1), top[..., -1] - top[..., -2]


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
        self._score = [0.0] * classes
        self._total = np.zeros(classes)  # of the probabilities of cells that counted
        self._counted = self._operations = 0
        self._layers = self._sentences = 0

    def take(self, item: Item, probabilities: NDArray[np.floating]) -> Stop | None:
        """Count the cells of an item, probabilities [layers, sentences, C], one after the other; None: go on."""
        labels, ahead = (found.T.tolist() for found in margins(probabilities))
        for sentence in range(item.sentences):
            for layer in range(item.layers):
                label, margin = labels[sentence][layer], ahead[sentence][layer]
                if margin > self._rule.tau_ignore:
                    self._score[label] += margin
                    self._total += probabilities[layer, sentence]
                    self._counted += 1
                self._operations += 1
                if self._score[label] > self._rule.tau_acc:
                    self._look(item, layer, sentence)
                    return self._stop(item.first_layer + layer, item.first_sentence + sentence, label)
        self._look(item, item.layers - 1, item.sentences - 1)
        return None

    def _look(self, item: Item, layer: int, sentence: int) -> None:
        """Cells of the item were looked at, up to and with this one (counted within it)."""
        deepest = item.last_layer if sentence else item.first_layer + layer + 1
        self._layers = max(self._layers, deepest)
        self._sentences = max(self._sentences, item.first_sentence + sentence + 1)

    def _stop(self, layer: int, sentence: int, label: int) -> Stop:
        scores = tuple((self._total / self._counted).tolist())
        return Stop(label, self._operations, layer, sentence, self._layers, self._sentences, scores)


@dataclass(frozen=True)
class TwoD:
    """Algorithm 1 with this rule, on the first `limit` layers; None: on all of them, as in the paper."""

    rule: Rule
    limit: int | None = None

    def depth(self, layers: int) -> int:
        """Layers behind which the answer is read where the rule did not fire."""
        return layers if self.limit is None else min(self.limit, layers)

    def items(self, layers: int, sentences: int) -> Iterator[Item]:
        """What a document runs."""
        return two_d(self.depth(layers), sentences)


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
