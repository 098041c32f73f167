"""How well a bundle predicts a text, and how far it is from its own dense backbone: `adapt eval --text`.

The text is cut into sequences, which go through the model block by block, some at a time. A token leaves where the
bundle's rule says so for it alone, as in generation. Knows no files and no terminal.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, UsageError
from .bundle import Bundle
from .dense import Dense
from .exits import ExitPolicy, FixedExit
from .loading import river_route
from .methods import Rcla
from .methods import River as RiverSettings
from .models import load_model
from .options import SessionOptions
from .progress import Reporter
from .quality import LOGIT_BYTES, Track, push
from .river import River
from .routing import Ladder
from .text import Tokenizer

SEQUENCE = 1024
"""Tokens of a sequence unless `ctx_size` says otherwise."""
TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Positions:
    """Perplexity of the tokens that have `first` to `last` tokens before them in their sequence."""

    first: int
    last: int
    tokens: int
    perplexity: float


@dataclass(frozen=True)
class TextQuality:
    """Figures over `tokens` predicted tokens. KL is in nats, dense against bundle; agreement is of the best next token.

    `dense_perplexity`, `kl` and `agreement` are None where there is no dense backbone to compare with: R-CLA's weights
    have no cache of their own in every layer, and dropped blocks cannot run.
    """

    tokens: int
    perplexity: float
    dense_perplexity: float | None
    kl: float | None
    agreement: float | None
    mean_depth: float
    exit_histogram: list[int]
    by_position: list[Positions]

    def to_dict(self) -> dict[str, Any]:
        """The keys of `eval --text --json`."""
        return asdict(self)


def text_quality(
    bundle: Bundle, text: str, options: SessionOptions, *, limit: int | None, reporter: Reporter
) -> TextQuality:
    """Measure a bundle on a text, or on its first `limit` tokens.

    Raises UsageError for a text of less than two tokens or a sequence longer than the model's positions, and what
    `load_model` raises.
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
    if max(ids) >= arch.vocab_size:
        raise FormatError(f"the tokenizer knows token {max(ids)}, the model only {arch.vocab_size}")
    meter = _Meter(bundle, options, reporter, positions=length)
    with reporter.task("Measure the quality", len(ids)) as task:
        for rows in windows(ids, length, bos):
            meter.add(rows)
            task.advance(rows.numel())
    return meter.result()


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


class _Meter:
    """Sums over the sequences seen so far. `positions`: tokens of the longest sequence."""

    def __init__(self, bundle: Bundle, options: SessionOptions, reporter: Reporter, *, positions: int) -> None:
        model = load_model(bundle, options, reporter)
        if not isinstance(model, Dense | River):
            raise UsageError(f"{bundle.path} does not generate", "Measure it with --labels.")
        self._decoder = model.decoder
        self._exits = model.exits if isinstance(model, River) else model.decoder.blocks
        self._policies = _policies(bundle, model, options)
        self._compares = len(self._policies) > 1
        self._nll = torch.zeros(positions, dtype=torch.float64)
        self._counts = torch.zeros(positions, dtype=torch.int64)
        self._depths = torch.zeros(self._decoder.arch.num_layers, dtype=torch.int64)
        self._dense_nll, self._kl, self._same = 0.0, 0.0, 0

    @torch.inference_mode()
    def add(self, ids: Tensor) -> None:
        """Take in sequences [n, S]."""
        decoder, arch = self._decoder, self._decoder.arch
        ids = ids.to(decoder.device)
        start, step = decoder.embed(ids), decoder.step(None, ids[:1])
        tracks = [Track.start(policy, start) for policy in self._policies]
        ladder = Ladder(arch, decoder.blocks, self._exits)
        for layer in range(1, arch.num_layers + 1):
            push(tracks, step, ladder, layer)
        self._depths += torch.bincount(tracks[-1].depth.flatten().cpu() - 1, minlength=arch.num_layers)
        self._score([track.h[:, :-1].flatten(0, 1) for track in tracks], ids[:, 1:])

    def result(self) -> TextQuality:
        """The figures."""
        count, depths = int(self._counts.sum()), self._depths
        layers = torch.arange(1, len(depths) + 1)
        compares = self._compares
        return TextQuality(
            tokens=count,
            perplexity=math.exp(float(self._nll.sum()) / count),
            dense_perplexity=math.exp(self._dense_nll / count) if compares else None,
            kl=max(0.0, self._kl / count) if compares else None,
            agreement=self._same / count if compares else None,
            mean_depth=float((depths * layers).sum() / depths.sum()),
            exit_histogram=depths.tolist(),
            by_position=list(self._positions()),
        )

    def _score(self, hidden: Sequence[Tensor], ids: Tensor) -> None:
        """`hidden` [R, hidden] of each track predicts ids [n, S - 1], row after row."""
        targets, width = ids.flatten(), ids.shape[1]
        size = max(1, LOGIT_BYTES // (4 * self._decoder.arch.vocab_size * len(hidden)))
        for first in range(0, len(targets), size):
            part = slice(first, first + size)
            logs = [self._decoder.logits(h[part]).log_softmax(-1) for h in hidden]
            wanted = targets[part, None]
            nll = -logs[-1].gather(-1, wanted)[:, 0].double().cpu()
            places = torch.arange(first, first + len(nll)) % width
            self._nll.index_add_(0, places, nll)
            self._counts += torch.bincount(places, minlength=len(self._counts))
            if self._compares:
                dense, own = logs
                self._dense_nll -= float(dense.gather(-1, wanted).double().sum())
                self._kl += float((dense.exp() * (dense - own)).sum(-1).double().sum())
                self._same += int((dense.argmax(-1) == own.argmax(-1)).sum())

    def _positions(self) -> Iterator[Positions]:
        """Ranges that double: 1, 2-3, 4-7… tokens before."""
        first = 0
        while first < len(self._counts):
            last = min(2 * first, len(self._counts) - 1)
            tokens = int(self._counts[first : last + 1].sum())
            if tokens:
                mean = float(self._nll[first : last + 1].sum()) / tokens
                yield Positions(first + 1, last + 1, tokens, math.exp(mean))
            first = last + 1


def _policies(bundle: Bundle, model: Dense | River, options: SessionOptions) -> list[ExitPolicy]:
    """The bundle's own rule last; before it the dense backbone, where there is another one to compare with."""
    count = bundle.architecture.num_layers
    if isinstance(model, Dense):
        shares = bundle.manifest.method(Rcla) is not None
        return [FixedExit(count)] if shares else [FixedExit(count), FixedExit(count)]
    settings = bundle.manifest.method(RiverSettings)
    if settings is None:
        raise FormatError(f"{bundle.path} has no River settings", "Convert again.")
    own = river_route(settings, count, tau=options.tau, resident=model.deepest).policy
    return [FixedExit(count), own] if model.deepest == count else [own]
