"""A decoder with junctions in training, and what is minimised: the mixture's loss and the price of its depth.

Source: N-vium (arXiv 2605.13190), the objective. Nothing is detached: exits and routers train the backbone too.
Knows no files and no optimiser.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ..quant.linear import DenseLinear
from ..runtime.architecture import Architecture
from ..runtime.junctions import Junctions, log_weights
from ..runtime.store import TensorStore
from .depth_control import DepthControl, warm_up_term
from .mixture_loss import mixture_loss
from .sequences import Batch
from .steering import Learner
from .trainable import IGNORED, Trainable


@dataclass(frozen=True)
class Readings:
    """What the exits say of R tokens. `x` [K, R, hidden] goes into the head, `scores` are N - 1 of [R], `targets` [R].

    `last` [R] is log pi_N(target) where the last exit is a constant; then K = N - 1. `head` [V, hidden].
    """

    x: Tensor
    scores: Sequence[Tensor]
    targets: Tensor
    head: Tensor
    softcap: float | None
    last: Tensor | None = None


class Reads(Learner, Protocol):
    """A model in training that can be asked for its exits' readings of a batch."""

    def readings(self, batch: Batch) -> Readings:
        """Of the tokens that count."""
        ...


class Mixed(Trainable):
    """A backbone in training with junctions, which are trained too. `points`: blocks before each."""

    def __init__(
        self, arch: Architecture, store: TensorStore, points: Sequence[int], start: Mapping[str, Tensor], **how: object
    ) -> None:
        super().__init__(arch, store, **how)  # pyright: ignore[reportArgumentType] - Trainable's own keywords
        device = next(self.parameters()).device
        self._added = {name: nn.Parameter(tensor.detach().clone().to(device)) for name, tensor in start.items()}
        for name, parameter in self._added.items():
            self.register_parameter(name.replace(".", "/"), parameter)
        self.junctions = Junctions.of(arch, points, self._added)

    def trained(self) -> dict[str, nn.Parameter]:
        """See `Trainable.trained`."""
        return super().trained() | self._added

    def junction_tensors(self) -> dict[str, Tensor]:
        """The junctions by their stored names. Not copies."""
        return {name: parameter.detach() for name, parameter in self._added.items()}

    def readings(self, batch: Batch) -> Readings:
        """See `Reads.readings`."""
        decoder, points = self.decoder, self.junctions.points
        counted = batch.targets != IGNORED
        states = self.states(
            batch.ids, batch.counts, after=[*(point - 1 for point in points), self.arch.num_layers - 1]
        )
        *early, end = (h[counted] for h in states)
        read = [junction.read(h) for junction, h in zip(self.junctions, early, strict=True)]
        x = [*(x for x, _ in read), self.junctions.adapt_final(decoder.final_norm(end))]
        if not isinstance(decoder.head, DenseLinear):
            raise TypeError("the head of a model in training is dense")
        scores, cap = [score for _, score in read], self.arch.logit_softcap
        return Readings(torch.stack(x), scores, batch.targets[counted], decoder.head.weight, cap)


@dataclass(frozen=True)
class MixtureObjective:
    """The mixture's loss, and what its depth costs. A `training.Objective`.

    depths: the share of the blocks that have run at each exit.
    """

    control: DepthControl
    depths: tuple[float, ...]

    def __call__(self, model: Reads, batch: Batch, draws: random.Random) -> tuple[Tensor, int]:  # noqa: ARG002
        """See `training.Objective`; nothing is random here."""
        read = model.readings(batch)
        logs = torch.stack(log_weights(read.scores))
        # Beside a frozen backbone an exit's own loss costs the others nothing; without it, bad exits stay bad.
        own = 0.0 if read.last is None else 1.0
        loss, each = mixture_loss(read.x, logs, read.head, read.targets, last=read.last, softcap=read.softcap, own=own)
        depth = (logs.exp().sum(1) * logs.new_tensor(self.depths)).sum()
        tokens = read.targets.numel()
        self.control.add(-(logs + each).logsumexp(0).sum(), depth, tokens)
        price = warm_up_term(read.scores) if self.control.warming else self.control.beta * depth
        return loss + price, tokens


def depths_of(arch: Architecture, points: Sequence[int]) -> tuple[float, ...]:
    """The share of the blocks that have run at each exit, the last one included."""
    return (*(point / arch.num_layers for point in points), 1.0)
