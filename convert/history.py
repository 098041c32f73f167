"""What happened in a training, and the lines that say so while it runs. Knows no tensors."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..runtime.progress import Reporter
from .pace import duration
from .training_settings import TrainingSettings


@dataclass(frozen=True)
class Logged:
    """One step: the mean loss, the learning rate, the gradient's norm before clipping, terms of the loss."""

    step: int
    loss: float
    rate: float
    norm: float
    terms: int


@dataclass
class History:
    """What happened: every step, the evaluations on the way (step -> figures), tokens read, seconds of training."""

    steps: list[Logged] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON; floats come back exactly."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "History":
        """What `to_json` gave."""
        evaluations = {int(step): dict(figures) for step, figures in data["evaluations"].items()}
        return cls([Logged(**item) for item in data["steps"]], evaluations, data["tokens"], data["seconds"])


class Pace:
    """Lines of progress: loss, tokens a second, time left; all over the steps since the line before."""

    def __init__(self, done: int, settings: TrainingSettings, reporter: Reporter) -> None:
        self._settings, self._reporter = settings, reporter
        self._from, self._when, self._tokens = done, time.monotonic(), 0

    def tell(self, history: History, tokens: int, more: str = "") -> None:
        """Say how it goes, after every `log_every` steps, the first and the last; `more` besides loss and speed."""
        self._tokens += tokens
        step, settings = history.steps[-1].step, self._settings
        if not (due(step, settings.log_every) or step in (1, settings.steps)):
            return
        now = time.monotonic()
        seconds, recent = max(now - self._when, 1e-9), history.steps[self._from :]
        loss = sum(item.loss for item in recent) / len(recent)
        left = duration(seconds / len(recent) * (settings.steps - step))
        speed = self._tokens / seconds
        self._reporter.note(
            f"step {step}/{settings.steps}  loss {loss:.4f}  {more + '  ' if more else ''}rate {recent[-1].rate:.2g}  "
            f"{speed:.0f} tokens/s  {left} left"
        )
        self._from, self._when, self._tokens = step, now, 0


def due(step: int, every: int | None) -> bool:
    """Whether something that happens after every so many steps happens after this one."""
    return every is not None and step % every == 0
