"""When a text is over: stop tokens and stop strings, across the borders of tokens.

Knows no model; sees ids and the text that they decode to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from ..errors import UsageError
from .text import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Stops:
    """What ends a text: any of these tokens, or any of these strings in its text. Neither is part of the text."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, strings: Iterable[str] = (), ids: Iterable[int] = (), *, ignore_eos: bool = False
    ) -> Self:
        """Join what the model's files name as end with what the user asks for.

        A string that spells a control token also stops at that token, which has no text of its own.

        Args:
            tokenizer: its `stop_ids` count unless `ignore_eos`.
            strings: stop strings.
            ids: stop tokens.
            ignore_eos: only what is asked for stops the text.

        Raises:
            UsageError: an empty stop string, or a token that the model does not have.

        """
        wanted = tuple(dict.fromkeys(strings))
        if "" in wanted:
            raise UsageError("A stop string is empty", "Give --stop some text.")
        ids = frozenset(ids)
        unknown = next((index for index in sorted(ids) if not 0 <= index < tokenizer.size), None)
        if unknown is not None:
            raise UsageError(f"There is no token {unknown} to stop at", f"Tokens are 0 to {tokenizer.size - 1}.")
        spelled = {index for index in map(tokenizer.added_id, wanted) if index is not None}
        own = frozenset() if ignore_eos else tokenizer.stop_ids
        return cls(own | spelled | ids, wanted)


class StopMatcher:
    """Lets text through up to the first stop string; holds back what may be the beginning of one.

    What comes out does not depend on how the text is cut into pieces: the string that is complete first wins, the
    longest of those that end at the same place.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take text; return what is certainly not part of a stop string, and whether one was complete."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._strings if (at := self._held.find(stop)) >= 0]
        if found:
            safe, self._held = self._held[: min(found)[1]], ""
            return safe, True
        keep = max((self._overlap(stop) for stop in self._strings), default=0)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe, False

    def flush(self) -> str:
        """Return what was held back."""
        safe, self._held = self._held, ""
        return safe

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class StreamedText:
    """Ids in, text out that is safe to show: whole characters, and nothing of a stop string."""

    def __init__(self, decoder: IncrementalDecoder, stops: Stops) -> None:
        self._decoder = decoder
        self._stop_ids = stops.ids
        self._matcher = StopMatcher(stops.strings)

    def push(self, token: int) -> tuple[str, bool]:
        """Take one id; return its share of the text, and whether the text ends with it."""
        if token in self._stop_ids:
            return self.flush(), True
        return self._matcher.push(self._decoder.push(token))

    def flush(self) -> str:
        """Return what was held back: the text ends here."""
        safe, stopped = self._matcher.push(self._decoder.flush())
        return safe if stopped else safe + self._matcher.flush()
