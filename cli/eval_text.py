"""`adapt eval --text`: how well a bundle predicts a text, and how far it is from its own dense backbone."""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FormatError, UsageError
from ..runtime.progress import Reporter
from . import plots, services
from .charts import histogram
from .outputs import Outputs, head
from .tables import aligned, markdown

EXAMPLES = """\
  adapt eval qwen-river --text wiki.txt
  adapt eval qwen-river --text wiki.txt --tau 0.95 --limit-tokens 20000 --report wiki.md --plot wiki.png
  adapt eval smol-rcla --text - --ctx-size 2048 --json < wiki.txt | jq .perplexity
"""


@dataclass(frozen=True)
class TextRequest:
    """Which text, a UTF-8 file or - for stdin, and how many of its tokens."""

    text: Path
    limit: int | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return "stdin" if str(self.text) == "-" else self.text.name


def evaluate_text(
    bundle: Path,
    request: TextRequest,
    settings: Mapping[str, Any],
    *,
    outputs: Outputs,
    reporter: Reporter,
) -> None:
    """Measure and print. `settings` are the fields of SessionOptions.

    Raises UsageError and FormatError for a text that cannot be read.
    """
    outputs.check()
    text = _read(request.text)
    found = services.text_quality(bundle, text, settings, limit=request.limit, reporter=reporter)
    title = f"{bundle.name} on {request.name}"
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    about = f"{request.name} (sha256 of its text {digest}); every token is predicted once from those before it."
    outputs.publish(
        found,
        page(found),
        report(title, outputs.command, about, found),
        lambda path: plots.save_curve(path, found["by_position"], title=title),
    )


def _read(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text", "Save it as UTF-8.") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what people read."""
    for name, value in figures(found):
        yield f"{name:<18}  {value}"
    if found.get("exits"):
        yield "exits"
        yield from (f"  {line}" for line in aligned(exits(found["exits"])))
    if _leaves(found):
        yield "depth at which tokens left"
        yield from histogram(found["exit_histogram"])
    yield "perplexity by the number of tokens before"
    yield from (f"  {line}" for line in aligned(positions(found["by_position"])))


def report(title: str, command: str, about: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a Markdown page: the command, the machine, the figures, the curve."""
    lines = [about, "A token leaves where the bundle's rule says so for it alone. Nothing is random: there is no seed."]
    yield from head(title, command, lines, services.machine())
    yield from markdown([["figure", "value"], *([name, value] for name, value in figures(found))])
    if found.get("exits"):
        yield from ["", "Exits, each as if it spoke alone:", ""]
        yield from markdown(exits(found["exits"]))
    yield from ["", "Perplexity by the number of tokens before:", ""]
    yield from markdown(positions(found["by_position"]))
    if _leaves(found):
        yield from ["", "Depth at which tokens left:", "", "```"]
        yield from histogram(found["exit_histogram"])
        yield "```"


def _leaves(found: Mapping[str, Any]) -> bool:
    return sum(1 for count in found["exit_histogram"] if count) > 1


def figures(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values, in words."""
    layers = len(found["exit_histogram"])
    yield "tokens", str(found["tokens"])
    yield "perplexity", f"{found['perplexity']:.4g}"
    if found["dense_perplexity"] is not None:
        yield "last exit alone" if found.get("exits") else "dense perplexity", f"{found['dense_perplexity']:.4g}"
        yield "KL from dense", f"{found['kl']:.4g}"
        yield "same next token", f"{found['agreement']:.1%}"
    name = "expected depth" if found.get("exits") else "mean depth"
    yield name, f"{found['mean_depth']:.1f} of {layers}"


def exits(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of exits (N-vium)."""
    rows = ([str(part["depth"]), f"{part['mass']:.1%}", f"{part['perplexity']:.4g}"] for part in found)
    return [["after block", "share", "perplexity"], *rows]


def positions(ranges: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of the curve, with full depth beside it where there is one."""
    compares = any(part.get("dense_perplexity") is not None for part in ranges)
    table = [["tokens before", "perplexity", *(["at full depth"] if compares else []), "tokens"]]
    for part in ranges:
        first, last = part["first"], part["last"]
        dense = [f"{part['dense_perplexity']:.4g}"] if compares else []
        name = str(first) if first == last else f"{first}-{last}"
        table.append([name, f"{part['perplexity']:.4g}", *dense, str(part["tokens"])])
    return table
