"""What sharing a cache cost: held-out perplexity of the model as it came and as it is now, under the same maps.

Knows texts and maps; not how weights were trained, and no files.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import FormatError, UsageError
from ..runtime.method_settings import TextUsed
from ..runtime.methods import RetentionPoint
from ..runtime.progress import Reporter
from ..runtime.quality import sequences_at_once
from .calibration import load_calibration
from .data import TrainingData
from .kv_map import KVMap, keepers_of
from .map_loss import Weights, divergence, mean_loss, run_maps
from .rcla_plan import MEASURED_TOKENS
from .sequences import Batch, Sequences

if TYPE_CHECKING:
    from ..runtime.text import Tokenizer

SEARCHED_TOKENS = 2048
"""Tokens by which a map is chosen, none of those that judge it."""


@dataclass(frozen=True)
class Texts:
    """`search` chooses a map, `judged` measures it; `used` is what all was taken from, `name` says so to people."""

    search: Sequence[Batch]
    judged: Sequence[Batch]
    used: TextUsed
    name: str

    @property
    def tokens(self) -> int:
        """Targets that judge."""
        return sum(batch.counted for batch in self.judged)


def texts_of(data: TrainingData) -> Texts:
    """Search on sequences that were trained on, judge on those held out. Raises UsageError where nothing is."""
    if data.held_out is None:
        raise UsageError("Nothing of the data could be held out to judge by", "Name a file with --validation.")
    learnt, judging = (", ".join(text.name for text in texts) for texts in (data.used, data.evaluation))
    return Texts(
        _batches(data.train, SEARCHED_TOKENS),
        _batches(data.held_out, MEASURED_TOKENS),
        _joined(data.used),
        judging or f"held out of {learnt}",
    )


def shipped_texts(tokenizer: "Tokenizer", max_positions: int) -> Texts:
    """The text that comes with adapt, for a conversion without data."""
    text = load_calibration(None, tokenizer, tokens=SEARCHED_TOKENS, max_positions=max_positions)
    used = TextUsed(name=text.name, sha256=text.sha256, tokens=text.tokens)
    return Texts(_cut(text.quantise), _cut(text.judge), used, f"the end of {text.name}")


@dataclass(frozen=True)
class Measured:
    """Mean loss in nats of each map, source and trained; KL and agreement of the bundle with the source as it came."""

    maps: tuple[KVMap, ...]
    source: tuple[float, ...]
    trained: tuple[float, ...]
    kl: float
    agreement: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Measured":
        """What `dataclasses.asdict` gave."""
        maps = tuple(tuple(each) for each in data["maps"])
        return cls(maps, tuple(data["source"]), tuple(data["trained"]), data["kl"], data["agreement"])

    def perplexity(self, which: str, sources: KVMap) -> float:
        """Of "source" or "trained" under a map."""
        return _perplexity(getattr(self, which)[self.maps.index(sources)])


def judge(
    source: Weights,
    trained: Weights,
    batches: Sequence[Batch],
    *,
    maps: Sequence[KVMap],
    own: KVMap,
    reporter: Reporter,
) -> Measured:
    """Measure both models under all `maps`, of which `own` is the bundle's. `trained` may be `source` itself."""
    dense = tuple(range(source.frame.arch.num_layers))
    with reporter.task("Measure the quality", 2 * len(dense)) as task:
        before = run_maps(source, batches, maps, task)
        lost = [mean_loss(source.frame, before[each], batches) for each in maps]
        reference = before[dense]
        after = before if trained is source else run_maps(trained, batches, maps, task)
        now = lost if trained is source else [mean_loss(trained.frame, after[each], batches) for each in maps]
        kl, agreement = divergence((source.frame, reference), (trained.frame, after[own]), batches)
    if not math.isfinite(lost[maps.index(dense)]):
        what = "the model gives no finite likelihood on the text"
        raise FormatError(what, "Its weights may be damaged: download it again, or try --dtype fp32.")
    for line in table(maps, lost, None if trained is source else now):
        reporter.note(line)
    return Measured(tuple(maps), tuple(lost), tuple(now), kl, agreement)


def table(maps: Sequence[KVMap], source: Sequence[float], trained: Sequence[float] | None) -> list[str]:
    """The perplexities for people, largest cache first."""
    lines = ["Held-out perplexity   cache   as it came" + ("" if trained is None else "   trained")]
    for number in sorted(range(len(maps)), key=lambda at: -len(keepers_of(maps[at]))):
        keepers, layers = len(keepers_of(maps[number])), len(maps[number])
        row = f"  {keepers:3} of {layers:3} layers   {keepers / layers:6.1%}   {_perplexity(source[number]):10.4g}"
        lines.append(row + ("" if trained is None else f"   {_perplexity(trained[number]):7.4g}"))
    return lines


def retention(measured: Measured, *, trained: bool) -> tuple[RetentionPoint, ...]:
    """The same for the manifest, largest cache first."""
    rows = zip(measured.maps, measured.source, measured.trained, strict=True)
    points = [
        RetentionPoint(
            keepers=len(keepers_of(each)),
            kv_sources=tuple(layer + 1 for layer in each),
            source=_perplexity(before),
            trained=_perplexity(after) if trained else None,
        )
        for each, before, after in rows
    ]
    return tuple(sorted(points, key=lambda point: -point.keepers))


def _perplexity(loss: float) -> float:
    """Of a loss in nats; a loss that no float can hold as a perplexity is the largest one."""
    return math.exp(min(loss, 700.0))


def _batches(sequences: Sequences, tokens: int) -> list[Batch]:
    """Sequences at equal distances, up to so many tokens in all."""
    count = min(len(sequences), max(1, tokens // sequences.length))
    chosen = [number * len(sequences) // count for number in range(count)]
    size = sequences_at_once(sequences.length)
    return [sequences.batch(chosen[start : start + size]) for start in range(0, count, size)]


def _cut(ids: Tensor) -> list[Batch]:
    """Whole sequences [n, S] as batches."""
    return [
        Batch(some[:, :-1], some[:, 1:], (some.shape[1] - 1,) * len(some))
        for some in ids.split(sequences_at_once(ids.shape[1]))
    ]


def _joined(used: Sequence[TextUsed]) -> TextUsed:
    """Several files as one: names side by side, the sha256 of their sha256."""
    if len(used) == 1:
        return used[0]
    digest = hashlib.sha256("".join(each.sha256 for each in used).encode("ascii")).hexdigest()
    return TextUsed(name=", ".join(each.name for each in used), sha256=digest, tokens=sum(each.tokens for each in used))
