"""Reporters: bars on a terminal, lines elsewhere, nothing when quiet."""

import sys
from pathlib import Path

import pexpect
import pytest

from adapt_llm.cli import console
from adapt_llm.cli.console import BarReporter, LogReporter, PlainReporter, make_reporter
from adapt_llm.cli.state import State
from adapt_llm.runtime.progress import SilentReporter


def test_choice_of_reporter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert isinstance(make_reporter(State(quiet=True)), SilentReporter)
    assert isinstance(make_reporter(State()), PlainReporter)
    assert isinstance(make_reporter(State(log_file=tmp_path / "log")), LogReporter)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(make_reporter(State()), BarReporter)
    assert isinstance(make_reporter(State(progress=False)), PlainReporter)


def test_plain_lines_come_at_most_every_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    reporter = PlainReporter()
    with reporter.task("Quantise", 4) as task:
        for seconds in (1, 30, 1, 30):
            now[0] += seconds
            task.advance()
    reporter.warn("watch out")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Quantise: 50%\nQuantise: 100%\nadapt: warning: watch out\n"


def test_no_progress_keeps_notices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "PLAIN_INTERVAL", 0.0)
    reporter = PlainReporter(progress=False)
    with reporter.task("Quantise", 0) as task:
        task.advance()
    reporter.note("done")
    assert capsys.readouterr().err == "done\n"


SCRIPT = """
from adapt_llm.cli.console import make_reporter
from adapt_llm.cli.state import State
reporter = make_reporter(State())
with reporter.task("Outer [x]", 2) as outer:
    with reporter.task("Inner", 1) as inner:
        inner.advance()
    reporter.note("a [note]")
    outer.advance(2)
print("end")
"""


@pytest.mark.parametrize("color", [True, False])
def test_bars_on_a_terminal(color: bool) -> None:
    environment = {"TERM": "xterm-256color", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "COLUMNS": "80"}
    if not color:
        environment["NO_COLOR"] = "1"
    child = pexpect.spawn(sys.executable, ["-c", SCRIPT], encoding="utf-8", timeout=20, env=environment)
    child.expect(pexpect.EOF)
    text = child.before or ""
    assert "Outer [x]" in text
    assert "Inner" in text
    assert "a [note]" in text
    assert ("\x1b[38;5;" in text or "\x1b[3" in text or "\x1b[9" in text) == color
