"""Pictures in files, drawn with matplotlib where it is installed (extra `plot`). Knows counts, no models."""

import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AdaptError, UsageError
from .heat import Stops
from .writing import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = (".png", ".pdf", ".svg")


def check(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before the work. Raises UsageError, AdaptError."""
    if path.suffix.lower() not in FORMS:
        raise UsageError(f"{path}: pictures are {', '.join(FORMS)}", "Give a name that ends so")
    if importlib.util.find_spec("matplotlib") is None:
        raise AdaptError("--plot needs matplotlib", "Install it: pip install 'adapt-llm[plot]'")


def save(path: Path, stops: Stops, layers: int, *, title: str) -> None:
    """Draw where documents stopped: sentences looked at to the right, layers downwards, both from 1."""
    from matplotlib.colors import PowerNorm  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - without pyplot, which keeps every figure
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    last = max(sentences for sentences, _ in stops)
    counts = [[stops.get((sentence, layer), 0) for sentence in range(1, last + 1)] for layer in range(1, layers + 1)]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    # Square roots: a few documents somewhere are to be seen beside many elsewhere.
    image = axes.imshow(
        counts,
        cmap="viridis",
        norm=PowerNorm(0.5, vmin=0),
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, last + 0.5, layers + 0.5, 0.5),
    )
    figure.colorbar(image, ax=axes, label="documents")
    axes.set_xlabel("sentences looked at")
    axes.set_ylabel("layers run")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"Where documents stopped: {title}")
    _write(path, figure)


def save_curve(path: Path, ranges: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Draw perplexity by the number of tokens before (`by_position` of `eval --text`), full depth beside it."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra; without pyplot, which keeps every figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    before = [(part["first"] * part["last"]) ** 0.5 for part in ranges]
    axes.plot(before, [part["perplexity"] for part in ranges], "o-", label="under the exit rule")
    dense = [part["dense_perplexity"] for part in ranges if part.get("dense_perplexity") is not None]
    if len(dense) == len(before):
        axes.plot(before, dense, "s--", label="at full depth")
        axes.legend()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens before, in the sequence")
    axes.set_ylabel("perplexity")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.set_title(title)
    _write(path, figure)


def save_speeds(
    path: Path, bars: Mapping[str, Sequence[tuple[str, float, float, float]]], *, title: str, unit: str = "tokens/s"
) -> None:
    """Draw speeds side by side: for each name its trials, each with median, least and largest."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra; without pyplot, which keeps every figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(bars)
    for number, (name, trials) in enumerate(bars.items()):
        places = [at + number * width for at in range(len(trials))]
        rates = [median for _, median, _, _ in trials]
        errors = [[median - least for _, median, least, _ in trials], [most - median for _, median, _, most in trials]]
        axes.bar(places, rates, width, yerr=errors, capsize=3, label=name)
    labels = [place for place, *_ in next(iter(bars.values()))]
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(labels))], labels)
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend()
    _write(path, figure)


def _write(path: Path, figure: "Figure") -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower().removeprefix("."), dpi=150)
    write_whole(path, picture.getvalue())
