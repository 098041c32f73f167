"""How many tokens to draft before they are verified, and among how much of the vocabulary: chosen for speed alone.

Costs are in passes of the dense model and come from the model's shape, acceptance from what was accepted so far; no
clock is read, so a text is drafted the same way each time. Knows no model and no cache; what it decides never changes
a token.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .architecture import Architecture
from .options import LONGEST_DRAFT

PARTS = 16
"""The vocabulary is taken in sixteenths."""
INT4_COST = 0.5
"""Of a 4-bit block in dense blocks, one token on a CPU, with what a draft costs besides: docs/benchmarks.md."""
ROW_COST = 0.15
"""Of one row more in a dense pass, in passes of one row."""
_EDGES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.96, 0.99)
_PRIOR = (0.35, 0.55, 0.7, 0.8, 0.87, 0.92, 0.96, 0.99)
_PRIOR_COUNT = 4.0
_MEAN, _MEAN_COUNT = 0.85, 10.0
_FORGET = 128.0  # outcomes after which older ones count half
_WINDOW = 512  # tokens whose ids say how much of the vocabulary is in use
_EXPLORE = 8  # where drafting does not pay, one pass in so many still tries


@dataclass(frozen=True)
class Costs:
    """What a drafted token costs, in dense passes of one row: the blocks, and the head over the whole vocabulary."""

    blocks: float
    head: float

    @classmethod
    def of(cls, arch: Architecture, dense_blocks: int) -> "Costs":
        """Costs of a draft that runs `dense_blocks` blocks of the backbone and the others in 4 bits."""
        sizes = [sum(N * K for N, K in arch.block_matrices(index).values()) for index in range(arch.num_layers)]
        head = arch.vocab_size * arch.hidden_size
        whole = sum(sizes) + head
        run = sum(sizes[:dense_blocks]) + INT4_COST * sum(sizes[dense_blocks:])
        return cls(run / whole, head / whole)


class Pace:
    """Decides draft lengths for one sequence.

    One more token is drafted while the chance that it and all before it are accepted is worth more than its cost, at
    the rate of tokens per cost so far. The chance of a token is what tokens of like confidence have had.
    """

    def __init__(self, costs: Costs, vocabulary: int, fixed: int | None = None) -> None:
        self._costs, self._vocabulary, self._fixed = costs, vocabulary, fixed
        self._hits = [_PRIOR_COUNT * share for share in _PRIOR]
        self._tries = [_PRIOR_COUNT] * len(_PRIOR)
        self._right, self._seen = _MEAN_COUNT * _MEAN, _MEAN_COUNT
        self._tokens, self._spent = 13.0, 10.0  # 1.3 tokens per dense pass, until something is known
        self._recent: deque[int] = deque(maxlen=_WINDOW)
        self._passes = 0
        self._part = 1

    def saw(self, ids: Iterable[int]) -> None:
        """Count tokens of the sequence: their ids say which beginning of the vocabulary is in use."""
        self._recent.extend(ids)

    def vocabulary(self) -> int:
        """How many ids, from 0 on, are worth a look: vocabularies begin with what is frequent."""
        step = -(-self._vocabulary // PARTS)
        counts = [0] * PARTS
        for token in self._recent:
            counts[min(token // step, PARTS - 1)] += 1
        best, most, covered = PARTS, -1.0, 0
        for part, count in enumerate(counts, start=1):
            covered += count
            worth = covered / max(len(self._recent), 1) - self._rate() * self._costs.head * part / PARTS
            best, most = (part, worth) if worth > most else (best, most)
        self._part = best
        return min(best * step, self._vocabulary)

    def limit(self) -> int:
        """How many tokens may be drafted now."""
        if self._fixed is not None:
            return self._fixed
        self._passes += 1
        pays = self._chance() > self._threshold()
        return LONGEST_DRAFT if pays else int(self._passes % _EXPLORE == 0)

    def more(self, confidences: Sequence[float]) -> bool:
        """Whether to draft another token behind those drafted with these probabilities; the first is up to `limit`."""
        if self._fixed is not None or not confidences:
            return True
        chance = self._chance()
        for confidence in confidences:
            chance *= self._share(confidence)
        return chance > self._threshold()

    def learn(self, confidences: Sequence[float], accepted: int) -> None:
        """Count what became of a draft: its first `accepted` tokens were right, the next one, if any, was not."""
        for at, confidence in enumerate(confidences[: accepted + 1]):
            kind = _kind(confidence)
            self._hits[kind] += at < accepted
            self._tries[kind] += 1
            self._right += at < accepted
            self._seen += 1
            if self._tries[kind] > _FORGET:
                self._hits[kind] /= 2
                self._tries[kind] /= 2
        if self._seen > _FORGET:
            self._right /= 2
            self._seen /= 2
        drafted = len(confidences)
        self._tokens += 1 + accepted
        self._spent += 1 + drafted * (self._draft_cost() + ROW_COST)
        if self._spent > _FORGET:
            self._tokens /= 2
            self._spent /= 2

    def _draft_cost(self) -> float:
        return self._costs.blocks + self._costs.head * self._part / PARTS

    def _threshold(self) -> float:
        return self._rate() * (self._draft_cost() + ROW_COST)

    def _rate(self) -> float:
        """Tokens for the cost of one dense pass, at least what drafting nothing gives."""
        return max(1.0, self._tokens / self._spent)

    def _chance(self) -> float:
        """Of a token whose confidence is not known yet."""
        return self._right / self._seen

    def _share(self, confidence: float) -> float:
        kind = _kind(confidence)
        return self._hits[kind] / self._tries[kind]


def _kind(confidence: float) -> int:
    return sum(confidence >= edge for edge in _EDGES)
