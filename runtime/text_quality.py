"""How well a bundle predicts a text, and how far it is from its own dense backbone: `adapt eval --text`.

The text is cut into sequences, which go through the model some at a time (`text_meters`). Knows no files.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import AdaptError, UsageError
from .bundle import Bundle
from .config_types import check_known
from .models import load_beside_exact
from .options import SessionOptions
from .progress import Reporter
from .quality import LOGIT_BYTES
from .text import Tokenizer
from .text_meters import Meter, Reading, meter_of

SEQUENCE = 1024
"""Tokens of a sequence unless `ctx_size` says otherwise."""
TOKENS_AT_ONCE = 8192
_MOST = 700.0  # nats a token: e to that is still a number


@dataclass(frozen=True)
class Positions:
    """Perplexity of the tokens that have `first` to `last` tokens before them in their sequence.

    `dense_perplexity` is that of the backbone at full depth, None where there is none to compare with.
    """

    first: int
    last: int
    tokens: int
    perplexity: float
    dense_perplexity: float | None = None


@dataclass(frozen=True)
class ExitQuality:
    """One exit of a mixture (N-vium), behind `depth` blocks: its mean share of the weight, and its own perplexity."""

    depth: int
    mass: float
    perplexity: float


@dataclass(frozen=True)
class TextQuality:
    """Figures over `tokens` predicted tokens. KL is in nats, dense against bundle; agreement is of the best next token.

    `dense_perplexity`, `kl` and `agreement` are None where there is no dense backbone to compare with: R-CLA's weights
    have no cache of their own in every layer, and dropped blocks cannot run. For a mixture of exits (N-vium) dense is
    its last exit, `mean_depth` and `exit_histogram` are expected values, and `exits` says what each exit is worth.
    """

    tokens: int
    perplexity: float
    dense_perplexity: float | None
    kl: float | None
    agreement: float | None
    mean_depth: float
    exit_histogram: list[int | float]
    by_position: list[Positions]
    exits: list[ExitQuality] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The keys of `eval --text --json`."""
        return asdict(self)


def text_quality(
    bundle: Bundle, text: str, options: SessionOptions, *, limit: int | None, reporter: Reporter
) -> TextQuality:
    """Measure a bundle on a text, or on its first `limit` tokens.

    Full depth has the head as the bundle has it, also where the model's own is rounded (`head_bits`).

    Raises UsageError for a text of less than two tokens or a sequence longer than the model's positions, AdaptError for
    broken logits, and what `load_model` raises.
    """
    tokenizer = Tokenizer.load(bundle.path)
    arch = bundle.architecture
    length = min(SEQUENCE, arch.max_positions) if options.ctx_size is None else options.ctx_size
    if length > arch.max_positions:
        what = f"ctx_size is {length}; the model's positions reach {arch.max_positions}"
        raise UsageError(what, f"Give --ctx-size {arch.max_positions} or less.")
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    if length < 2 + (bos is not None):
        raise UsageError(f"Sequences of {length} tokens predict nothing", "Use 128 or more.")
    ids = tokenizer.encode(text, add_special_tokens=False)[:limit]
    if len(ids) < 2:
        raise UsageError("The text has less than two tokens", "Give a longer one.")
    check_known(max(ids), arch.vocab_size)
    model, exact = load_beside_exact(bundle, options, reporter)
    sums = Sums(meter_of(model, bundle, exact), positions=length)
    with reporter.task("Measure the quality", len(ids)) as task:
        for rows in windows(ids, length, bos):
            sums.add(rows)
            task.advance(rows.numel())
    return sums.result()


def windows(ids: Sequence[int], length: int, bos: int | None) -> Iterator[Tensor]:
    """Cut ids into sequences [n, length], each begun with `bos` where there is one, and the rest [1, fewer]."""
    own = length - (bos is not None)
    whole = len(ids) // own
    start = [] if bos is None else [bos]
    rows = [[*start, *ids[at * own : (at + 1) * own]] for at in range(whole)]
    count = max(1, TOKENS_AT_ONCE // length)
    for first in range(0, whole, count):
        yield torch.tensor(rows[first : first + count])
    rest = [*start, *ids[whole * own :]]
    if len(rest) > 1:
        yield torch.tensor([rest])


def _perplexity(nll: float) -> float:
    if not nll < _MOST:  # NaN too
        raise AdaptError(
            f"The model gives a token {nll} nats on average, so it has no perplexity",
            "Try --dtype fp32; if that helps, the weights overflow in the narrower type.",
        )
    return math.exp(nll)


class Sums:
    """Sums over the sequences seen so far. `positions`: tokens of the longest sequence."""

    def __init__(self, meter: Meter, *, positions: int) -> None:
        self._meter = meter
        self._nll = torch.zeros(2, positions, dtype=torch.float64)  # own, dense
        self._counts = torch.zeros(positions, dtype=torch.int64)
        self._depths = torch.zeros(meter.layers, dtype=torch.float64)
        self._kl, self._same = 0.0, 0
        self._exits = torch.zeros(2, len(meter.exits), dtype=torch.float64)  # mass, nll

    @torch.inference_mode()
    def add(self, ids: Tensor) -> None:
        """Take in sequences [n, S]."""
        reading = self._meter.read(ids)
        self._depths += reading.depths
        targets, width = ids[:, 1:].flatten(), ids.shape[1] - 1
        size = max(1, LOGIT_BYTES // (4 * self._meter.vocab * reading.copies))
        for first in range(0, len(targets), size):
            part = slice(first, first + size)
            self._score(reading, part, targets[part], torch.arange(len(targets))[part] % width)

    def _score(self, reading: Reading, part: slice, targets: Tensor, places: Tensor) -> None:
        """Rows `part` predict `targets`; `places` are those in their sequences."""
        found = reading.score(part, targets)
        self._counts += torch.bincount(places, minlength=len(self._counts))
        self._nll[0].index_add_(0, places, found.nll.cpu())
        if found.dense is not None:
            self._nll[1].index_add_(0, places, found.dense.nll.cpu())
            self._kl += found.dense.kl
            self._same += found.dense.same
        if found.exits is not None:
            self._exits += found.exits.cpu()

    def result(self) -> TextQuality:
        """The figures. Raises AdaptError where the model's logits are broken."""
        count, depths = int(self._counts.sum()), self._depths
        own, dense = (self._nll.sum(1) / count).tolist()
        layers, compares = torch.arange(1, len(depths) + 1), self._meter.compares
        whole = bool((depths == depths.round()).all())
        return TextQuality(
            tokens=count,
            perplexity=_perplexity(own),
            dense_perplexity=_perplexity(dense) if compares else None,
            kl=max(0.0, self._kl / count) if compares else None,
            agreement=self._same / count if compares else None,
            mean_depth=float((depths * layers).sum() / depths.sum()),
            exit_histogram=[int(n) if whole else round(n, 3) for n in depths.tolist()],
            by_position=list(self._positions()),
            exits=[
                ExitQuality(depth, mass / count, _perplexity(nll / count))
                for depth, (mass, nll) in zip(self._meter.exits, self._exits.T.tolist(), strict=True)
            ]
            or None,
        )

    def _positions(self) -> Iterator[Positions]:
        """Ranges that double: 1, 2-3, 4-7… tokens before."""
        first = 0
        while first < len(self._counts):
            last = min(2 * first, len(self._counts) - 1)
            tokens = int(self._counts[first : last + 1].sum())
            if tokens:
                own, dense = (self._nll[:, first : last + 1].sum(1) / tokens).exp().tolist()
                yield Positions(first + 1, last + 1, tokens, own, dense if self._meter.compares else None)
            first = last + 1
