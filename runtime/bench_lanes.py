"""Models as contenders of a race: one text through the token stream that `run` uses, or several rows at once.

Knows models by their protocols, and what their passes read; opens no bundle.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import UsageError
from . import batch
from .batch import BatchModel
from .bench import Contender, Lap
from .generate import Model, PromptCache, StepOutput, generate
from .options import Sampling
from .sampling import Sampler
from .stops import Stops
from .text import Tokenizer
from .traffic import traffic_of

PASSAGE = (
    "The history of the bridge begins with a ferry. For two hundred years the only way across the river was a flat "
    "boat on a rope, and whoever missed the last crossing slept in the inn on the near bank. In 1784 the towns on both "
    "sides agreed to share the cost of eleven stone arches. The builders drove oak piles into the mud through two dry "
    "summers; the third brought a flood that took four of them away. When the last arch was closed, a baker from the "
    "north side and a smith from the south met in the middle and found that they had been cousins all along. Trains "
    "came later, and then a road with four lanes, but the old toll house still stands, and on market days its window "
    "is open. "
)
"""The prompt where no other text is given: over again as often as its length needs."""


@dataclass(frozen=True)
class Prompt:
    """Ids of every row, all of one length; how many tokens follow, and how they are chosen."""

    rows: tuple[tuple[int, ...], ...]
    tokens: int
    sampling: Sampling

    @property
    def context(self) -> int:
        """Tokens of each row."""
        return len(self.rows[0])


def make_rows(tokenizer: Tokenizer, text: str, context: int, rows: int) -> tuple[tuple[int, ...], ...]:
    """Cut `context` tokens for each row from `text`, repeated; every row begins elsewhere in it.

    Raises UsageError for a text without a token.
    """
    before = tokenizer.encode("")
    body = tokenizer.encode(text, add_special_tokens=False)
    if not body:
        raise UsageError("The text of the prompt has no token", "Give another with --text FILE.")
    long = body * (context // len(body) + 2)
    starts = [row * len(body) // rows for row in range(rows)]
    return tuple(tuple([*before, *long[start : start + context]][:context]) for start in starts)


def check_room(model: Model, rows: int, capacity: int) -> None:
    """Refuse more keys and values than there is memory for, which a system may answer by killing any process.

    Raises ResourceError. `capacity`: tokens of each row.
    """
    if not isinstance(model, BatchModel):
        return  # `lane` says so
    batch.check_room(model.new_cache(1, 1), rows, capacity, hint="Give a smaller --batch-size or --context.")


def lane(name: str, model: Model, tokenizer: Tokenizer, prompt: Prompt) -> Contender:
    """Make a contender of a model. Raises UsageError for several rows where the model takes one."""
    if len(prompt.rows) == 1:
        return OneRow(name, model, tokenizer, prompt)
    if not isinstance(model, BatchModel):
        raise UsageError(f"{name} continues one text at a time", "Leave --batch-size out.")
    return ManyRows(name, model, prompt)


class OneRow:
    """One text, as `run` would generate it; times are those of its token stream."""

    def __init__(self, name: str, model: Model, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self.name = name
        self._model, self._tokenizer, self._prompt = model, tokenizer, prompt
        self._cache = PromptCache(model, prompt.context + prompt.tokens + 1, whole=True)

    def lap(self, *, afresh: bool) -> Lap:
        """See `bench.Contender`."""
        prompt = self._prompt
        if afresh:
            self._cache.reuse(())
        stream = generate(
            self._model,
            prompt.rows[0],
            tokenizer=self._tokenizer,
            sampling=prompt.sampling,
            stops=Stops(),
            cache=self._cache,
            max_tokens=prompt.tokens + 1,
        )
        depths = [(record.depth,) for record in stream][1:]
        stats = stream.stats
        passes, rows = sum(stats.pass_rows.values()), sum(size * count for size, count in stats.pass_rows.items())
        counts = {"drafted": stats.drafted, "accepted": stats.accepted, "passes": passes, "pass_rows": rows}
        return Lap(
            seconds=stats.decode_seconds,
            steps=prompt.tokens,
            rows=1,
            first_token_seconds=None if stats.reused_tokens else stats.prefill_seconds,
            depths=stats.exit_histogram,
            bytes_read=bytes_read(self._model, depths, prompt.context),
            counts={name: count for name, count in counts.items() if count},
        )


class ManyRows:
    """Several texts of one length, a token of each in a pass. Prompts enter one after another, as in `run -i`."""

    def __init__(self, name: str, model: BatchModel, prompt: Prompt) -> None:
        self.name = name
        self._model, self._prompt = model, prompt
        self._cache = model.new_cache(len(prompt.rows), prompt.context + prompt.tokens + 1)
        self._tokens: list[int] = []
        self._samplers: list[Sampler] = []

    @torch.inference_mode()
    def lap(self, *, afresh: bool) -> Lap:
        """See `bench.Contender`."""
        first = self._prefill() if afresh or not self._tokens else None
        self._cache.truncate(self._prompt.context)
        tokens, samplers = list(self._tokens), [sampler.copy() for sampler in self._samplers]
        depths: list[tuple[int | None, ...]] = []
        started = time.perf_counter()
        for _ in range(self._prompt.tokens):
            outputs = self._model.decode_batch(torch.tensor(tokens)[:, None], self._cache, samplers)
            tokens = [choose(output, sampler) for output, sampler in zip(outputs, samplers, strict=True)]
            depths.append(tuple(output.depth for output in outputs))
        return Lap(
            seconds=time.perf_counter() - started,
            steps=self._prompt.tokens,
            rows=len(tokens),
            first_token_seconds=first,
            depths=Counter(depth for row in depths for depth in row if depth is not None),
            bytes_read=bytes_read(self._model, depths, self._prompt.context),
        )

    def _prefill(self) -> float:
        """Take all prompts in; return the seconds until each has its first token."""
        self._cache.truncate(0)
        self._samplers = [Sampler(self._prompt.sampling, row) for row in range(len(self._prompt.rows))]
        self._tokens = []
        started = time.perf_counter()
        for row, (ids, sampler) in enumerate(zip(self._prompt.rows, self._samplers, strict=True)):
            sampler.saw(ids)
            output = self._model.prefill(torch.tensor([ids]), self._cache.rows(row), sampler)
            self._tokens.append(choose(output, sampler))
        return time.perf_counter() - started


def choose(output: StepOutput, sampler: Sampler) -> int:
    """Return the next token: the model's own choice, or the sampler's."""
    return sampler(output.logits[0]) if output.token is None else sampler.take(output.token)


def bytes_read(model: Model, depths: Sequence[Sequence[int | None]], context: int) -> float | None:
    """Bytes that passes with rows of these depths must have read, behind `context` tokens; None where not known."""
    traffic = traffic_of(model)
    if traffic is None:
        return None
    layers = traffic.layers
    passes = ([layers if depth is None else depth for depth in rows] for rows in depths)
    return float(sum(traffic.of_pass(rows, context + number) for number, rows in enumerate(passes, start=1)))
