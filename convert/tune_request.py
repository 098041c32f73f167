"""What may be asked of `adapt tune`. Imports no tensors, so that a command line can build it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import UsageError
from ..runtime.options import SessionOptions

Goal = Literal["max_loss", "min_speed", "max_drop"]

LIMIT_TOKENS = 4096


@dataclass(frozen=True)
class TuneRequest:
    """What to tune on, what is aimed at, and how. Without a goal it is the loss that the bundle was made for.

    Raises:
        UsageError: not exactly one of `text` and `labels`, two goals, or a value out of its range.

    """

    bundle: Path
    text: Path | None = None
    labels: Path | None = None
    text_field: str | None = None
    label_field: str = "label"
    max_loss: float | None = None
    """Growth of perplexity at most, a share."""
    min_speed: float | None = None
    """Times as fast as the dense model at least."""
    max_drop: float | None = None
    """Accuracy given away at most (labelled rows)."""
    limit_tokens: int = LIMIT_TOKENS
    limit: int | None = None
    """Labelled rows at most."""
    seed: int = 0
    """How the text or the rows are dealt out to the two halves."""
    store: bool = True
    again: bool = False
    """Measure even where nothing changed."""
    options: SessionOptions = field(default_factory=SessionOptions)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.labels is None):
            what = "There is nothing to tune on" if self.text is None else "--text and --labels exclude each other"
            raise UsageError(what, "Give a text with --text FILE, or labelled rows with --labels FILE")
        goals = {"--max-loss": self.max_loss, "--min-speed": self.min_speed, "--max-drop": self.max_drop}
        given = [name for name, value in goals.items() if value is not None]
        if len(given) > 1:
            raise UsageError(f"{given[0]} and {given[1]} exclude each other", "Give one of them")
        if self.limit_tokens < 1 or (self.limit is not None and self.limit < 1):
            raise UsageError("the limit is not positive", "Give --limit-tokens or --limit 1 or more")
        if any(value is not None and not (0 <= value < math.inf) for value in goals.values()):
            raise UsageError(f"{given[0]} {goals[given[0]]:g} is not possible", "Give a number from 0 on")
        wrong = "--max-drop" if self.text is not None else "--max-loss"
        if goals[wrong] is not None:
            raise UsageError(f"{wrong} is for {'--labels' if self.text else '--text'}", "Leave it out")
