"""Training of the classifiers of 2D-EE: those of all layers at once, on stored states of a frozen model.

Every step takes some documents; a sample is the mean state of one sentence, or the mean of the first j sentences, with
the document's label. Source: 2D-EE (arXiv 2604.18592), section 3.1, and the authors' code. Knows no text and no blocks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout

from ..runtime.adapters import Adapters
from ..runtime.progress import Reporter
from .features import Features

Answers = NDArray[np.float32]
BATCH_DOCUMENTS = 32
_SMALLEST_SPREAD = 1e-3
"""Of the layer's mean standard deviation: a channel that never varies is not blown up."""


@dataclass(frozen=True)
class Fitting:
    """How the classifiers are trained. `class_weights`: one number per class, or none."""

    classes: int
    hidden: int = 256
    epochs: int = 30
    learning_rate: float = 1e-3
    weight_decay: float = 5.0
    """Decoupled (AdamW): at this rate weights lose 0.5 % a step. Compared in docs/2dee.md."""
    dropout: float = 0.2
    smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    patience: int = 4
    """Epochs without a layer that became better on the validation rows, after which training ends."""
    prefixes: float = 0.5
    """Weight of means over several sentences in the loss; the rest is single sentences'."""
    samples: int = 4
    """Of each kind that a document gives in one epoch, on average; a document with fewer sentences gives all."""
    seed: int = 0


@dataclass(frozen=True)
class Fitted:
    """What training gave. `losses`: the best validation loss of each layer; `epochs`: how many were run."""

    adapters: Adapters
    losses: tuple[float, ...]
    epochs: int


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation [L, hidden] of the training sentences' states, float32."""

    mean: Tensor
    spread: Tensor

    @classmethod
    def of(cls, features: Features, documents: range) -> "Scale":
        """Measure it, one piece after the other."""
        layers, hidden = features.shape
        count, total, squares = 0, *torch.zeros(2, layers, hidden, dtype=torch.float64)
        for states, _ in features.pieces(documents):
            x = states.double()
            count += len(x)
            total += x.sum(0)
            squares += x.square().sum(0)
        mean = total / count
        spread = (squares / count - mean.square()).clamp(min=0).sqrt()
        spread = spread.clamp(min=_SMALLEST_SPREAD * spread.mean(1, keepdim=True))
        return cls(mean.float(), spread.clamp(min=1e-6).float())

    def __call__(self, states: Tensor) -> Tensor:
        """States [n, L, hidden] -> float32 [L, n, hidden] around 0."""
        return ((states.float() - self.mean) / self.spread).transpose(0, 1)

    def fold(self, up: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights for states as they come, from those for scaled ones: [L, width, hidden], [L, width]."""
        folded = up.double() / self.spread[:, None]
        return folded.float(), (bias.double() - (folded @ self.mean.double()[..., None])[..., 0]).float()


class Stack:
    """The classifiers of all layers as one batched product each; `parameters` [L, …] in the order of `Adapters`."""

    def __init__(self, layers: int, inputs: int, fitting: Fitting, generator: torch.Generator) -> None:
        def uniform(*shape: int, fan: int) -> Tensor:
            bound = 1 / math.sqrt(fan)
            return torch.empty(*shape).uniform_(-bound, bound, generator=generator).requires_grad_()

        width = fitting.hidden
        self.parameters: Sequence[Tensor] = [
            uniform(layers, width, inputs, fan=inputs),
            uniform(layers, width, fan=inputs),
            uniform(layers, fitting.classes, width, fan=width),
            uniform(layers, fitting.classes, fan=width),
        ]

    def logits(self, x: Tensor, drop: float = 0.0) -> Tensor:
        """Scaled means [L, n, hidden] -> [L, n, C]."""
        up, up_bias, down, down_bias = self.parameters
        x = dropout(x, drop, training=drop > 0)
        middle = torch.baddbmm(up_bias[:, None], x, up.mT).relu()
        return torch.baddbmm(down_bias[:, None], dropout(middle, drop, training=drop > 0), down.mT)


def fit(features: Features, labels: Sequence[int], train: int, fitting: Fitting, reporter: Reporter) -> Fitted:
    """Train all layers' classifiers on the first `train` documents, and keep of each what is best on the others.

    The same inputs give the same bytes on the same machine and number of threads.
    """
    epoch = 0
    with torch.random.fork_rng(devices=[]), reporter.task("Train the classifiers", fitting.epochs) as task:
        torch.manual_seed(fitting.seed)
        run = _Run(features, torch.tensor(list(labels)), range(train), fitting)
        while epoch < fitting.epochs and run.stale < fitting.patience:
            run.epoch()
            run.keep_best(range(train, len(labels)))
            epoch += 1
            task.advance(1)
        task.advance(fitting.epochs - epoch)
    return Fitted(run.adapters(), tuple(run.losses.tolist()), epoch)


class _Run:
    """A training under way."""

    def __init__(self, features: Features, labels: Tensor, train: range, fitting: Fitting) -> None:
        self._features, self._labels, self._train, self._fitting = features, labels, train, fitting
        self._generator = torch.Generator().manual_seed(fitting.seed)
        layers, inputs = features.shape
        self._scale = Scale.of(features, train)
        self._stack = Stack(layers, inputs, fitting, self._generator)
        self._weights = torch.tensor(fitting.class_weights) if fitting.class_weights else None
        self._optimizer = torch.optim.AdamW(
            self._stack.parameters, lr=fitting.learning_rate, weight_decay=fitting.weight_decay
        )
        self._best = [parameter.detach().clone() for parameter in self._stack.parameters]
        self.losses = torch.full((layers,), math.inf)
        self.stale = 0

    def epoch(self) -> None:
        """See every training document once."""
        order = torch.randperm(len(self._train), generator=self._generator) + self._train.start
        for documents in order.split(BATCH_DOCUMENTS):
            loss = self._loss(documents, training=True).sum()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    @torch.no_grad()
    def keep_best(self, validation: range) -> None:
        """Keep the parameters of the layers that are better on the validation documents than ever before."""
        parts = [
            self._loss(documents, training=False) * len(documents)
            for documents in torch.arange(validation.start, validation.stop).split(BATCH_DOCUMENTS)
        ]
        losses = torch.stack(parts).sum(0) / len(validation)
        better = losses < self.losses
        self.losses = torch.where(better, losses, self.losses)
        for best, parameter in zip(self._best, self._stack.parameters, strict=True):
            best[better] = parameter[better]
        self.stale = 0 if bool(better.any()) else self.stale + 1

    def adapters(self) -> Adapters:
        """Return the best of every layer, for states as they come."""
        up, up_bias, down, down_bias = self._best
        return Adapters(*self._scale.fold(up, up_bias), down, down_bias)

    def _loss(self, documents: Tensor, *, training: bool) -> Tensor:
        """Cross-entropy of every layer, [L]; in training of some samples, with dropout."""
        states, counts = self._features.gather(documents.tolist())
        single = self._scale(states)
        targets = self._labels[documents].repeat_interleave(counts)
        if training:
            odds = (self._fitting.samples / counts).repeat_interleave(counts)
            some, others = (torch.rand(len(odds), generator=self._generator) < odds for _ in range(2))
        else:
            some = others = torch.ones_like(targets, dtype=torch.bool)
        alone = self._cross_entropy(single[:, some], targets[some], training=training)
        means = running_means(single, counts)[:, others]
        share = self._fitting.prefixes
        return (1 - share) * alone + share * self._cross_entropy(means, targets[others], training=training)

    def _cross_entropy(self, x: Tensor, targets: Tensor, *, training: bool) -> Tensor:
        """Mean over samples x [L, n, hidden] of one kind, [L]."""
        fitting = self._fitting
        logits = self._stack.logits(x, fitting.dropout if training else 0.0)
        layers, n, classes = logits.shape
        losses = cross_entropy(
            logits.reshape(-1, classes),
            targets.repeat(layers),
            weight=self._weights,
            label_smoothing=fitting.smoothing if training else 0.0,
            reduction="none",
        )
        return losses.view(layers, n).mean(1)


def running_means(x: Tensor, counts: Tensor) -> Tensor:
    """Means over the first 1, 2, … sentences of every document (eq. 1): x [L, n, hidden], documents' counts [k]."""
    parts = x.split(counts.tolist(), 1)
    return torch.cat([part.cumsum(1) / torch.arange(1, part.shape[1] + 1)[:, None] for part in parts], 1)


def probabilities(adapters: Adapters, features: Features, documents: range) -> Iterator[tuple[Answers, Answers]]:
    """Yield, document by document, probabilities of every sentence [L, m, C] and of their mean [L, C]."""
    for states, counts in features.pieces(documents):
        yield from answers(adapters, states, counts.tolist())


def answers(adapters: Adapters, states: Tensor, counts: Sequence[int]) -> Iterator[tuple[Answers, Answers]]:
    """Yield `probabilities` of documents of so many sentences each, from their states [sentences, L, hidden]."""
    means = torch.stack([part.mean(0) for part in states.float().split(list(counts))])
    both = torch.cat([states.float(), means]).to(adapters.up_weight.device)
    asked = torch.stack([adapters.probabilities(layer, both[:, layer]) for layer in range(adapters.layers)]).cpu()
    sentences, whole = asked.split([len(states), len(means)], 1)
    for cells, mean in zip(sentences.split(list(counts), 1), whole.unbind(1), strict=True):
        yield cells.numpy(), mean.numpy()
