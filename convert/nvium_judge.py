"""What a mixture of exits is worth on held-out text: its perplexity, each exit's own and mass, and the depth it needs.

Also what it would be with every router's score moved by a bias: the trade-off of depth against perplexity. Knows
states and junctions; not how they were trained, and no files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError
from ..runtime.decoder import Decoder
from ..runtime.junctions import Junctions, log_weights
from ..runtime.methods import DepthPoint, MeasuredExit
from ..runtime.progress import Reporter
from ..runtime.quality import LOGIT_BYTES
from .junction_states import states_at
from .sequences import Batch
from .trainable import IGNORED

BIASES = (-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0)
"""Added to the routers' scores for the trade-off; at -8 nearly every token runs all blocks."""
NEAR = 0.05
"""Of all blocks: so far may the depth on held-out text lie from what was asked for without a warning."""


@dataclass(frozen=True)
class Measured:
    """Figures of held-out text. Perplexities; masses and depth as shares; KL of the mixture from the dense model."""

    tokens: int
    perplexity: float
    dense_perplexity: float
    exit_perplexities: tuple[float, ...]
    masses: tuple[float, ...]
    expected_depth: float
    kl: float
    agreement: float
    trade_off: tuple[tuple[float, float, float], ...] = field(default=())
    """(bias, expected depth, perplexity)."""

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Measured":
        """What `to_json` gave."""
        lists = {name: tuple(data[name]) for name in ("exit_perplexities", "masses")}
        return cls(**{**data, **lists, "trade_off": tuple(tuple(point) for point in data["trade_off"])})

    def exits(self, layers: Sequence[int]) -> tuple[MeasuredExit, ...]:
        """For the manifest; `layers`: blocks before each exit."""
        rows = zip(layers, self.masses, self.exit_perplexities, strict=True)
        return tuple(MeasuredExit(layers=count, mass=mass, perplexity=own) for count, mass, own in rows)

    def points(self) -> tuple[DepthPoint, ...]:
        """For the manifest."""
        return tuple(DepthPoint(bias=bias, expected_depth=depth, perplexity=p) for bias, depth, p in self.trade_off)

    def lines(self, layers: Sequence[int]) -> list[str]:
        """For people."""
        rows = zip(layers, self.masses, self.exit_perplexities, strict=True)
        return [
            "Held-out text   exit after   mass    perplexity alone",
            *(f"                {count:10}   {mass:5.1%}   {own:10.4g}" for count, mass, own in rows),
            f"The mixture's perplexity is {self.perplexity:.4g}, the dense model's {self.dense_perplexity:.4g}",
            f"Expected depth {self.expected_depth:.1%} of the blocks",
        ]

    def missed(self, target: float | None) -> str:
        """Say that the held-out text's depth is far from `target`, a share of the blocks; empty where it is not."""
        if target is None or abs(self.expected_depth - target) <= NEAR:
            return ""
        return (
            f"The depth on held-out text is {self.expected_depth:.1%} of the blocks, {target:.1%} were asked for: "
            "more --steps steer better, and `adapt tune` shifts it afterwards"
        )


def judge(
    frame: Decoder,
    junctions: Junctions,
    batches: Sequence[Batch],
    *,
    source: Decoder | None,
    reporter: Reporter,
) -> Measured:
    """Measure a mixture. `source` is the model as it came; None: the last exit stands for it.

    Raises FormatError where the text's likelihood is no number.
    """
    layers = frame.arch.num_layers
    with reporter.task("Measure the quality", layers * (1 if source is None else 2)) as task:
        states = states_at(frame, batches, [*junctions.points, layers], task)
        before = None if source is None else [h for (h,) in states_at(source, batches, [layers], task)]
    tally = _Tally()
    for number, batch in enumerate(batches):
        targets = batch.targets[batch.targets != IGNORED].to(frame.device)
        reference = None if before is None or source is None else (source, before[number])
        tally.add(frame, junctions, states[number], targets, reference)
    depths = [*(point / layers for point in junctions.points), 1.0]
    measured = tally.figures(depths)
    if not math.isfinite(measured.perplexity) or not math.isfinite(measured.dense_perplexity):
        what = "the model gives no finite likelihood on the text"
        raise FormatError(what, "Its weights may be damaged: download it again, or try --dtype fp32.")
    return measured


class _Tally:
    """Every token's likelihood under each exit, and the routers' scores; sums of what needs whole distributions."""

    def __init__(self) -> None:
        self._likelihoods: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._dense: list[Tensor] = []
        self._kl, self._same = 0.0, 0

    @torch.inference_mode()
    def add(
        self,
        frame: Decoder,
        junctions: Junctions,
        states: Sequence[Tensor],
        targets: Tensor,
        reference: tuple[Decoder, Tensor] | None,
    ) -> None:
        """Tokens [R]: their states [R, hidden] at each exit, their targets, and the dense model's own states."""
        exits = len(junctions) + 1
        step = max(1, LOGIT_BYTES // (4 * frame.arch.vocab_size * (exits + 2)))
        for begin in range(0, len(targets), step):
            part = slice(begin, begin + step)
            logs, scores = _exits(frame, junctions, [h[part] for h in states])
            wanted = targets[part]
            dense = logs[-1] if reference is None else reference[0].logits(reference[1][part]).log_softmax(-1)
            self._likelihoods.append(torch.stack([_at(log, wanted) for log in logs]))
            self._scores.append(scores)
            self._dense.append(_at(dense, wanted))
            mixture = _mixed(logs, _logs(scores))
            self._kl += float((dense.exp() * (dense - mixture)).sum(-1).double().sum())
            self._same += int((dense.argmax(-1) == mixture.argmax(-1)).sum())

    def figures(self, depths: Sequence[float]) -> Measured:
        """Everything, over all tokens; `depths`: share of the blocks at each exit."""
        likelihoods = torch.cat(self._likelihoods, 1).double().cpu()
        scores = torch.cat(self._scores, 1).double().cpu()
        dense = torch.cat(self._dense).double().cpu()
        tokens = dense.numel()
        share = torch.tensor(depths, dtype=torch.float64)
        perplexity, masses, depth = _summed(likelihoods, scores, 0.0, share)
        moved = [(bias, *_summed(likelihoods, scores, bias, share)) for bias in (BIASES if len(scores) else ())]
        return Measured(
            tokens=tokens,
            perplexity=perplexity,
            dense_perplexity=_perplexity(dense),
            exit_perplexities=tuple(_perplexity(own) for own in likelihoods),
            masses=masses,
            expected_depth=depth,
            kl=max(0.0, self._kl / tokens),
            agreement=self._same / tokens,
            trade_off=tuple((bias, at, value) for bias, value, _, at in moved),
        )


def _exits(frame: Decoder, junctions: Junctions, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Log-probabilities [R, V] of every exit, and the routers' scores [N - 1, R]."""
    *early, end = states
    logs: list[Tensor] = []
    scores: list[Tensor] = []
    for junction, h in zip(junctions, early, strict=True):
        x, score = junction.read(h)
        logs.append(frame.scores(x).log_softmax(-1))
        scores.append(score)
    logs.append(frame.scores(junctions.adapt_final(frame.final_norm(end))).log_softmax(-1))
    return logs, torch.stack(scores) if scores else end.new_zeros((0, len(end)), dtype=torch.float32)


def _logs(scores: Tensor, bias: float = 0.0) -> Tensor:
    """Log-weights [N, R] of scores [N - 1, R]."""
    return torch.stack(log_weights(list(scores + bias))) if len(scores) else scores.new_zeros((1, scores.shape[1]))


def _mixed(logs: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Log-probabilities [R, V] of the mixture."""
    total = logs[0] + weights[0][:, None]
    for log, weight in zip(logs[1:], weights[1:], strict=True):
        total = torch.logaddexp(total, log + weight[:, None])
    return total


def _summed(likelihoods: Tensor, scores: Tensor, bias: float, depths: Tensor) -> tuple[float, tuple[float, ...], float]:
    """The mixture's perplexity, the exits' mean masses, and the expected depth."""
    logs = _logs(scores, bias)
    masses = logs.exp().mean(1)
    return _perplexity((logs + likelihoods).logsumexp(0)), tuple(masses.tolist()), float(masses @ depths)


def _at(log: Tensor, targets: Tensor) -> Tensor:
    return log.gather(-1, targets[:, None])[:, 0]


def _perplexity(logs: Tensor) -> float:
    """Of log-likelihoods; one that no float can hold is the largest."""
    return math.exp(min(-float(logs.mean()), 700.0))
