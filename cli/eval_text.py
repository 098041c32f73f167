"""`adapt eval --text`: how well a bundle predicts a text, and how far it is from its own dense backbone."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from ..errors import FormatError, UsageError
from ..runtime.progress import Reporter
from . import services
from .charts import histogram

EXAMPLES = """\
  adapt eval qwen-river --text wiki.txt
  adapt eval qwen-river --text wiki.txt --tau 0.95 --limit-tokens 20000
  adapt eval smol-rcla --text - --ctx-size 2048 --json < wiki.txt | jq .perplexity
"""


def evaluate_text(
    bundle: Path,
    text: Path,
    settings: Mapping[str, Any],
    *,
    limit: int | None,
    reporter: Reporter,
    as_json: bool = False,
) -> None:
    """Measure and print. `settings` are the fields of SessionOptions; `text` is a UTF-8 file, or - for stdin.

    Raises UsageError and FormatError for a text that cannot be read.
    """
    found = services.text_quality(bundle, _read(text), settings, limit=limit, reporter=reporter)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
        return
    for line in _page(found):
        typer.echo(line.rstrip())


def _read(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text", "Save it as UTF-8.") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _page(found: Mapping[str, Any]) -> Iterator[str]:
    for name, value in _figures(found):
        yield f"{name:<18}  {value}"
    if sum(1 for count in found["exit_histogram"] if count) > 1:
        yield "depth at which tokens left"
        yield from histogram(found["exit_histogram"])
    yield "perplexity by the number of tokens before"
    yield from _positions(found["by_position"])


def _figures(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "tokens", str(found["tokens"])
    yield "perplexity", f"{found['perplexity']:.4g}"
    if found["dense_perplexity"] is not None:
        yield "dense perplexity", f"{found['dense_perplexity']:.4g}"
        yield "KL from dense", f"{found['kl']:.4g}"
        yield "same next token", f"{found['agreement']:.1%}"
    yield "mean depth", f"{found['mean_depth']:.1f} of {len(found['exit_histogram'])}"


def _positions(ranges: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for part in ranges:
        first, last = part["first"], part["last"]
        name = str(first) if first == last else f"{first}-{last}"
        yield f"  {name:>9}  {part['perplexity']:10.4g}  ({part['tokens']} tokens)"
