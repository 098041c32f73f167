"""What `adapt eval` writes besides its page: a Markdown report, a picture. Knows no figures of its own."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import plots
from .writing import check_new, write_whole


@dataclass(frozen=True)
class Outputs:
    """Files to write. `command` is what was typed."""

    report: Path | None = None
    plot: Path | None = None
    force: bool = False
    command: str = "adapt eval"

    def check(self) -> None:
        """Raise UsageError, AdaptError for what can be known to fail before a model is loaded."""
        for path in (self.report, self.plot):
            check_new(path, force=self.force)
        if self.plot is not None:
            plots.check(self.plot)

    def write_report(self, lines: Iterable[str]) -> None:
        """Write the report, where one is asked for."""
        if self.report is not None:
            write_whole(self.report, "\n".join(lines) + "\n")


def head(title: str, command: str, about: Iterable[str], machine: Mapping[str, str]) -> Iterator[str]:
    """Yield how a report begins: its title, the command, what was measured and how, on what."""
    yield f"# {title}"
    yield ""
    yield f"`{command}`"
    yield ""
    yield from about
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in machine.items()) + "."
    yield ""
