"""A text to be continued, and the text as it grows: which token comes next, where it ends, what it cost.

Knows what a model says about the next token, not the model, nor who else is continued beside this text.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import AdaptError, UsageError
from .options import Sampling
from .sampling import Sampler
from .stops import Stops, StreamedText
from .stream import FinishReason, GenerationStats, TokenRecord
from .text import IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from .generate import StepOutput


@dataclass(frozen=True)
class Request:
    """A text to be continued; see `generate.generate`. `context_size`: tokens of prompt and answer together."""

    ids: Sequence[int]
    sampling: Sampling
    stops: Stops
    context_size: int
    max_tokens: int | None = None
    row: int = 0
    continues: bool = False


def check_fits(tokens: int, context_size: int, most: int | None = None) -> int:
    """Return how many tokens may follow a prompt of `tokens`; `most`: how many the model's positions reach.

    Raises:
        UsageError: the prompt is empty.
        AdaptError: none may follow.

    """
    if tokens == 0:
        raise UsageError("The prompt is empty", "Give it some text.")
    if tokens >= context_size:
        raise AdaptError(
            f"The prompt has {tokens} tokens; the context holds {context_size}, the answer included",
            "Shorten the prompt: the model reads no more."
            if most is not None and tokens >= most
            else "Shorten the prompt, or raise --ctx-size if the model allows.",
        )
    return context_size - tokens


class Continuation:
    """A text as it grows: its tokens are chosen, its end is found, and it is counted.

    Attributes:
        sampler: chooses its tokens; has seen the prompt.
        limit: new tokens at most.
        stats: up to date after each record.

    Raises:
        UsageError: no prompt, or `max_tokens` below 1.
        AdaptError: the prompt does not fit in the context.

    """

    def __init__(self, request: Request, tokenizer: Tokenizer, cancelled: Callable[[], bool] | None = None) -> None:
        ids, most = request.ids, request.max_tokens
        room = check_fits(len(ids), request.context_size)
        if most is not None and most < 1:
            raise UsageError(f"max_tokens is {most}", "It must be 1 or more.")
        self.limit = room if most is None else min(room, most)
        self.sampler = Sampler(request.sampling, request.row)
        self.sampler.saw(ids)
        self.stats = GenerationStats(prompt_tokens=len(ids))
        self._text = StreamedText(IncrementalDecoder(tokenizer, after=ids if request.continues else ()), request.stops)
        self._cancelled = cancelled

    def take(self, output: "StepOutput", started: float) -> TokenRecord:
        """Choose the next token; work on it began at `started` (perf_counter). Raises AdaptError for broken logits."""
        token = self.sampler.take(output.token) if output.token is not None else self.sampler(output.logits[0])
        text, reason = self._read(token, self.stats.tokens)
        seconds = time.perf_counter() - started
        record = TokenRecord(self.stats.tokens, token, text, output.depth, seconds, reason, output.passes)
        self.stats.add(record)
        self.stats.drafted += output.drafted
        self.stats.accepted += output.accepted
        return record

    def _read(self, token: int, index: int) -> tuple[str, FinishReason | None]:
        text, stopped = self._text.push(token)
        reason: FinishReason | None = "stop" if stopped else "length" if index + 1 == self.limit else None
        if reason is None and self._cancelled is not None and self._cancelled():
            reason = "cancelled"
        return (text, reason) if reason in (None, "stop") else (text + self._text.flush(), reason)
