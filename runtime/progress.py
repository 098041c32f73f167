"""How long work reports what it is doing, without knowing whether anybody watches.

Knows no terminal: `cli.console` implements `Reporter` with rich, tests with a list.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Task(Protocol):
    """One bar of known length."""

    def advance(self, amount: float = 1) -> None:
        """Add `amount` to what is done."""
        ...


class Reporter(Protocol):
    """Where long work reports to."""

    def task(self, title: str, total: float) -> AbstractContextManager[Task]:
        """Open a bar; it closes with the context."""
        ...

    def note(self, text: str) -> None:
        """Say something once."""
        ...

    def detail(self, text: str) -> None:
        """Say something that only a user who asks for more (`--verbose`) will see."""
        ...

    def warn(self, text: str) -> None:
        """Say something the user should act on."""
        ...


class _SilentTask:
    def advance(self, amount: float = 1) -> None:
        pass


class SilentReporter:
    """Reports nothing."""

    def task(self, title: str, total: float) -> AbstractContextManager[Task]:  # noqa: ARG002 - see Reporter
        """See `Reporter.task`."""
        return nullcontext(_SilentTask())

    def note(self, text: str) -> None:
        """See `Reporter.note`."""

    def detail(self, text: str) -> None:
        """See `Reporter.detail`."""

    def warn(self, text: str) -> None:
        """See `Reporter.warn`."""
