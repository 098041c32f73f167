"""What generation hands out: a record per token, and the figures of a stream.

Data only: knows no model, no tokenizer, no tensor.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class TokenRecord:
    """One token of a stream. The texts of all records joined are the answer."""

    index: int
    """0 for the first new token."""
    id: int
    text: str
    """What became certain with this token: empty while a character or a stop string is incomplete."""
    depth: int | None
    """Backbone blocks executed; None = the model has no exits. The first token's is that of the prompt."""
    seconds: float
    """Time spent on this token; the first one's includes the prompt. Time of the reader is not in it."""
    finish_reason: FinishReason | None = None
    """Set in the last record only."""
    passes: tuple[int, ...] = ()
    """Rows of each pass above an exit: this token, and those that had waited there (N-vium)."""


@dataclass
class GenerationStats:
    """A stream in figures, up to date after each record."""

    prompt_tokens: int
    reused_tokens: int = 0
    """Of the prompt, already in the cache."""
    tokens: int = 0
    prefill_seconds: float = 0.0
    """Until the first token was there."""
    decode_seconds: float = 0.0
    prefill_depth: int | None = None
    finish_reason: FinishReason | None = None
    exit_histogram: dict[int, int] = field(default_factory=dict)
    """Depth -> tokens after the first, whose depth is the prompt's."""
    pass_rows: dict[int, int] = field(default_factory=dict)
    """Rows -> passes above an exit, of the tokens after the first (N-vium)."""
    drafted: int = 0
    """Tokens that were drafted ahead (lossless River)."""
    accepted: int = 0
    """Of them, those that the dense model would have chosen."""

    def add(self, record: TokenRecord) -> None:
        """Count one record."""
        self.tokens += 1
        self.finish_reason = record.finish_reason
        if record.index == 0:
            self.prefill_seconds, self.prefill_depth = record.seconds, record.depth
            return
        self.decode_seconds += record.seconds
        for rows in record.passes:
            self.pass_rows[rows] = self.pass_rows.get(rows, 0) + 1
        if record.depth is not None:
            self.exit_histogram[record.depth] = self.exit_histogram.get(record.depth, 0) + 1

    @property
    def first_token_ms(self) -> float:
        """Milliseconds until the first token was there."""
        return self.prefill_seconds * 1000

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens a second, those found in the cache not counted."""
        done = self.prompt_tokens - self.reused_tokens
        return done / self.prefill_seconds if self.prefill_seconds > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second after the first; None for fewer than two."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 and self.decode_seconds > 0 else None

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that were accepted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_verify(self) -> float | None:
        """Tokens after the first for each dense pass; None where nothing was drafted."""
        return (self.tokens - 1) / max(self.tokens - 1 - self.accepted, 1) if self.drafted else None

    @property
    def mean_pass_rows(self) -> float | None:
        """Rows of a pass above an exit, on average; None where there were none."""
        count = sum(self.pass_rows.values())
        return sum(rows * n for rows, n in self.pass_rows.items()) / count if count else None

    @property
    def mean_depth(self) -> float | None:
        """Mean depth of the tokens after the first; of the first where there are no others."""
        count = sum(self.exit_histogram.values())
        if not count:
            return None if self.prefill_depth is None else float(self.prefill_depth)
        return sum(depth * n for depth, n in self.exit_histogram.items()) / count


class TokenStream(Iterator[TokenRecord]):
    """Records as they come, and their figures so far. `close` ends it early; what it works on stays usable."""

    def __init__(self, records: Generator[TokenRecord, None, None], stats: GenerationStats) -> None:
        self._records = records
        self.stats = stats

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenRecord:
        return next(self._records)

    def close(self) -> None:
        """Stop generating."""
        self._records.close()
