"""How each kind of model reads sequences for `eval --text`: what it predicts, and what it would at full depth.

A token leaves where the bundle's rule says so for it alone, as in generation. Knows no text and no files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import UsageError
from . import nvium
from .bundle import Bundle
from .decoder import Decoder
from .dense import Dense
from .exits import ExitPolicy, FixedExit, Route
from .generate import Model
from .lossless import LosslessRiver
from .methods import Rcla
from .nvium import Nvium
from .quality import Track, push
from .river import River
from .routing import Ladder
from .scoring import picked


@dataclass(frozen=True)
class AgainstDense:
    """How rows compare with full depth: its nll float64 [R], the sum of KL(dense || own), equal best tokens."""

    nll: Tensor
    kl: float
    same: int


@dataclass(frozen=True)
class RowScores:
    """What rows gave: nll float64 [R]; `exits` float64 [2, N], sums of each exit's mass and nll over the rows."""

    nll: Tensor
    dense: AgainstDense | None
    exits: Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """Sequences [n, S] that were read. `depths` [L]: how many of their tokens ran 1, 2, … L blocks.

    `score` takes a slice of the n * (S - 1) predicting rows and the tokens that follow them. `copies`: how many
    logits a row needs at a time, for the size of a slice.
    """

    depths: Tensor
    copies: int
    score: Callable[[slice, Tensor], RowScores]


class Meter(Protocol):
    """Reads sequences. `compares`: whether there is a full depth to compare with; `exits`: depths of a mixture's."""

    layers: int
    vocab: int
    compares: bool
    exits: Sequence[int]

    def read(self, ids: Tensor) -> Reading:
        """Read ids [n, S] from position 0 on."""
        ...


def meter_of(model: Model, bundle: Bundle, exact: Decoder) -> Meter:
    """Return how a bundle's model is measured; `exact` has the head of full depth, see `LadderMeter`.

    Raises UsageError for a model that cannot be measured.
    """
    if isinstance(model, LosslessRiver):
        raise UsageError("A lossless river says what the dense model says", "Leave out --lossless, or give --tau 1.")
    if isinstance(model, Nvium):
        return MixtureMeter(model)
    if isinstance(model, Dense | River):
        return LadderMeter(model, exact, shares=bundle.manifest.method(Rcla) is not None)
    raise UsageError(f"{bundle.path} cannot be measured on a text", "Measure it with --labels.")


class LadderMeter:
    """Backbone and exit layers side by side, block by block: full depth and the bundle's rule in one passage.

    `exact` is the model's decoder, where the model's own head is rounded with the one that it had. `shares`: the cache
    is shared (R-CLA), and without the sharing the weights are no model.
    """

    exits: Sequence[int] = ()

    def __init__(self, model: Dense | River, exact: Decoder, *, shares: bool = False) -> None:
        decoder = self._decoder = model.decoder
        self._exact = exact
        self.layers, self.vocab = decoder.arch.num_layers, decoder.arch.vocab_size
        exits = model.exits if isinstance(model, River) else decoder.blocks
        self._ladder = Ladder(decoder.arch, decoder.blocks, exits)
        self._ways = _ways(model, shares=shares)
        self.compares = len(self._ways) > 1

    def read(self, ids: Tensor) -> Reading:
        """See `Meter`."""
        decoder = self._decoder
        ids = ids.to(decoder.device)
        start, step = decoder.embed(ids), decoder.step(None, ids[:1])
        tracks = [Track.start(way, start) for way in self._ways]
        for layer in range(1, self.layers + 1):
            push(tracks, step, self._ladder, layer)
        depths = torch.bincount(tracks[-1].depth.flatten().cpu() - 1, minlength=self.layers)
        hidden = [track.h[:, :-1].flatten(0, 1) for track in tracks]
        heads = [self._exact, decoder][-len(hidden) :]
        sides = list(zip(heads, hidden, strict=True))
        return Reading(depths, len(hidden), lambda part, wanted: _score(sides, part, wanted))


def _ways(model: Dense | River, *, shares: bool) -> list[ExitPolicy | Route]:
    """The model's own rule last; before it full depth, where there is another one to compare with."""
    count = model.decoder.arch.num_layers
    if isinstance(model, Dense):
        return [FixedExit(count)] if shares else [FixedExit(count), FixedExit(count)]
    return [FixedExit(count), model.route] if model.deepest == count else [model.route]


def _score(sides: Sequence[tuple[Decoder, Tensor]], part: slice, wanted: Tensor) -> RowScores:
    """The model's own side last; before it that of full depth, where there is one."""
    logs = [decoder.logits(h[part]).log_softmax(-1) for decoder, h in sides]
    return row_scores(logs[-1], logs[0] if len(logs) > 1 else None, wanted.to(logs[0].device))


class MixtureMeter:
    """A mixture of exits (N-vium): its likelihood, that of each exit alone, and the last one as full depth.

    All have one head: one that is rounded (`head_bits`) is full depth's too.
    Depths are expected ones: a token counts at every exit with the weight that the mixture gives it.
    """

    compares = True

    def __init__(self, model: Nvium) -> None:
        self._model = model
        arch = model.decoder.arch
        self.layers, self.vocab = arch.num_layers, arch.vocab_size
        self.exits: Sequence[int] = (*model.junctions.points, arch.num_layers)

    def read(self, ids: Tensor) -> Reading:
        """See `Meter`."""
        found = self._model.read(ids)
        depths = torch.zeros(self.layers, dtype=torch.float64)
        masses = found.log_weights.double().exp().flatten(1).sum(1).cpu()
        depths[torch.tensor(self.exits) - 1] = masses
        # The last place of a sequence predicts nothing.
        predicting = nvium.Reading(found.exits, found.log_weights[..., :-1], tuple(x[:, :-1] for x in found.states))
        return Reading(depths, 3, lambda part, wanted: _score_mixture(picked(predicting, part), wanted))


def _score_mixture(found: nvium.Reading, wanted: Tensor) -> RowScores:
    own = found.log_probabilities(slice(None))[0]
    wanted = wanted.to(own.device)
    nlls: list[Tensor] = []
    last = own
    for last in (logs[0] for logs in found.by_exit(slice(None))):
        nlls.append(-last.gather(-1, wanted[:, None])[:, 0].double().sum())
    masses = found.log_weights[:, 0].double().exp().sum(-1)
    return row_scores(own, last, wanted, torch.stack([masses, torch.stack(nlls)]))


def row_scores(own: Tensor, dense: Tensor | None, wanted: Tensor, exits: Tensor | None = None) -> RowScores:
    """From log-probabilities [R, V] of the model and of full depth, and the tokens [R] that followed."""
    nll = -own.gather(-1, wanted[:, None])[:, 0].double()
    if dense is None:
        return RowScores(nll, None, exits)
    kl = float((dense.exp() * (dense - own)).sum(-1).double().sum())
    same = int((dense.argmax(-1) == own.argmax(-1)).sum())
    return RowScores(nll, AgainstDense(-dense.gather(-1, wanted[:, None])[:, 0].double(), kl, same), exits)
