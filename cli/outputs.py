"""Where the figures of a measurement go: a page or JSON on stdout, a Markdown page, a picture. Knows no figures."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from . import plots
from .writing import check_new, write_whole


@dataclass(frozen=True)
class Outputs:
    """What is written besides the page. `command` is what was typed."""

    plot: Path | None = None
    report: Path | None = None
    force: bool = False
    as_json: bool = False
    command: str = "adapt"

    def check(self) -> None:
        """Raise UsageError, AdaptError for what can be known to fail before the work."""
        for path in (self.report, self.plot):
            check_new(path, force=self.force)
        if self.plot is not None:
            plots.check(self.plot)

    def publish(
        self,
        result: Mapping[str, Any],
        page: Iterable[str],
        report: Iterable[str] = (),
        draw: Callable[[Path], None] | None = None,
    ) -> None:
        """Write picture and Markdown page where asked for, and the page or JSON on stdout, whatever became of them."""
        try:
            if self.plot is not None and draw is not None:
                draw(self.plot)
            if self.report is not None:
                write_whole(self.report, "\n".join(report) + "\n")
        finally:  # a file that cannot be written must not cost the figures
            self._print(result, page)

    def _print(self, result: Mapping[str, Any], page: Iterable[str]) -> None:
        if self.as_json:
            typer.echo(json.dumps(result, ensure_ascii=False, indent=2))
            return
        for line in page:
            typer.echo(line.rstrip())


def head(title: str, command: str, about: Iterable[str], machine: Mapping[str, str]) -> Iterator[str]:
    """Yield how a report of `adapt eval` begins: its title, the command, what was measured and how, on what."""
    yield from (f"# {title}", "", f"`{command}`", "")
    yield from about
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in machine.items()) + "."
    yield ""


def machine_line(machine: Mapping[str, str]) -> str:
    """Say in one line what figures depend on: the device, then versions."""
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "device")
    return f"{machine['device']}; {versions}"
