"""How long the rest will take, told once the first step is done. Knows nothing of the steps but their number."""

import time

from ..runtime.progress import Reporter, Task


class Paced:
    """A task that says, after its first step that took any time, how long one takes and what remains."""

    def __init__(self, task: Task, total: int, reporter: Reporter, *, step: str = "layer") -> None:
        self._task, self._reporter, self._step = task, reporter, step
        self._left = total
        self._told = False
        self._last = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        """See `Task.advance`."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._left -= int(amount)
        self._task.advance(amount)
        if not self._told and amount and seconds > LONG_ENOUGH:
            self._told = True
            first = self._step if amount == 1 else f"{amount:.0f} x {self._step}"
            left = duration(seconds / amount * self._left)
            self._reporter.note(f"The first {first} took {seconds:.1f} s; about {left} for the others.")


LONG_ENOUGH = 0.05
"""Seconds; a step that was done already takes none."""


def duration(seconds: float) -> str:
    """Return a time as people say it: `45 s`, `3 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
