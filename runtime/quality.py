"""How far the exits are from the dense model on a text: perplexity, KL, agreement, depth.

Several exit policies are measured at once and block by block, so a model larger than memory can be judged:
within a block all tokens are computed in parallel, each row with the dense or the 4-bit weights as its policy
decided, against the keys and values that the same pass wrote. That is exact, because a token's decision at a
layer depends on nothing above it. Knows nothing of files or of how a text became tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .exits import ExitPolicy, Route, exit_histogram
from .pass_store import PassStore
from .routing import Ladder
from .step import Step

LOGIT_BYTES = 384 << 20
"""Float32 logits held at a time: all policies of a slice of tokens."""
TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class Quality:
    """What one policy gives on a text. KL is in nats, dense against policy; agreement is of the next token."""

    perplexity: float
    kl: float
    agreement: float
    mean_depth: float
    exit_histogram: list[int]


@dataclass
class Track:
    """One policy's state between two blocks: residual stream h [n, S, hidden], who has left, and after which block.

    `stores` hold the keys and values that layers above read (R-CLA), for some sequences each.
    """

    route: Route
    h: Tensor
    left: Tensor
    depth: Tensor
    stores: Sequence[PassStore] = ()

    @classmethod
    def start(cls, way: ExitPolicy | Route, h: Tensor) -> "Track":
        """Begin below block 1 with the embeddings of whole sequences; a bare policy is the paper's rule."""
        left = torch.zeros(h.shape[:2], dtype=torch.bool, device=h.device)
        depth = torch.zeros_like(left, dtype=torch.int64)
        return cls(Route.of(way), h, left, depth)

    def in_river(self, layer: int) -> Tensor:
        """Which rows run block `layer` in 4 bits, bool [n, S]."""
        return torch.zeros_like(self.left) if layer in self.route.dense_layers else self.left

    def decide(self, layer: int, before: Tensor, after: Tensor, *, last: bool) -> None:
        """Let the rows still in the backbone leave after block `layer` where the route says so."""
        staying = ~self.left
        self.depth[staying] = layer
        if not last:
            positions = torch.arange(after.shape[1], device=after.device)[None]
            self.left |= staying & self.route.leaves(layer, before, after, positions)
        self.h = after


def push(tracks: Sequence[Track], step: Step, ladder: Ladder, layer: int) -> None:
    """Take every track through block `layer` (from 1). Tracks that agree so far are computed once.

    `step` is one for a sequence of S tokens without a cache; a few sequences run at a time, so that memory does not
    grow with their number. Only rung `layer - 1` of the ladder is used.
    """
    done: list[tuple[Tensor, Tensor, tuple[Tensor, Sequence[PassStore]]]] = []
    for track in tracks:
        before, left = track.h, track.in_river(layer)
        found = next((out for h, who, out in done if h is before and torch.equal(who, left)), None)
        if found is None:
            found = _through(track, left, step, ladder, layer)
            done.append((before, left.clone(), found))
        after, track.stores = found
        track.decide(layer, before, after, last=layer == ladder.arch.num_layers)


def _through(track: Track, left: Tensor, step: Step, ladder: Ladder, layer: int) -> tuple[Tensor, Sequence[PassStore]]:
    """The stores of the track are not changed: other tracks may go on from them."""
    count = sequences_at_once(step.width)
    parts = list(zip(track.h.split(count), left.split(count), strict=True))
    stores = [store.copy() for store in track.stores] or [PassStore(ladder.arch) for _ in parts]
    rows = zip(parts, stores, strict=True)
    return torch.cat([ladder.run(h, step, store, layer - 1, left) for (h, left), store in rows]), stores


def sequences_at_once(length: int) -> int:
    """Return how many sequences of `length` tokens to run together: weights are unpacked once for all of them."""
    return max(1, TOKENS_AT_ONCE // length)


@dataclass
class _Sums:
    nll: float = 0.0
    kl: float = 0.0
    agree: int = 0
    count: int = 0
    depths: list[int] = field(default_factory=list)


def score(
    tracks: Sequence[Track], ids: Tensor, logits_of: Callable[[Tensor], Tensor], num_layers: int
) -> list[Quality]:
    """Compare each track with the first one, which must be dense.

    `ids` [n, S] are the tokens; `logits_of` maps residual streams [R, hidden] to float32 logits [R, V].
    The last position of each sequence predicts nothing and is left out.
    """
    hidden = [track.h[:, :-1].flatten(0, 1) for track in tracks]
    targets = ids[:, 1:].flatten().to(hidden[0].device)
    sums = [_Sums(depths=track.depth.flatten().tolist()) for track in tracks]
    vocab = logits_of(hidden[0][:1]).shape[-1]
    rows = max(1, LOGIT_BYTES // (4 * vocab * len(tracks)))
    for start in range(0, targets.numel(), rows):
        part = slice(start, start + rows)
        logits = logits_of(torch.cat([h[part] for h in hidden]))
        _add(sums, logits.view(len(tracks), -1, vocab), targets[part])
    return [_quality(s, num_layers) for s in sums]


def _add(sums: Sequence[_Sums], logits: Tensor, targets: Tensor) -> None:
    dense = torch.log_softmax(logits[0], dim=-1)
    best, weights = dense.argmax(-1), dense.exp()
    for total, own in zip(sums, logits, strict=True):
        log_probs = torch.log_softmax(own, dim=-1)
        total.nll -= float(log_probs.gather(-1, targets[:, None]).double().sum())
        total.kl += float((weights * (dense - log_probs)).sum(-1).double().sum())
        total.agree += int((log_probs.argmax(-1) == best).sum())
        total.count += targets.numel()


def _quality(total: _Sums, num_layers: int) -> Quality:
    return Quality(
        perplexity=float(torch.tensor(total.nll / total.count, dtype=torch.float64).exp()),
        kl=max(0.0, total.kl / total.count),
        agreement=total.agree / total.count,
        mean_depth=sum(total.depths) / len(total.depths),
        exit_histogram=exit_histogram(total.depths, num_layers),
    )
