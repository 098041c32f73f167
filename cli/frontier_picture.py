"""A frontier as a picture: quality lost against speed gained, drawn with matplotlib where it is installed."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from .writing import write_whole

Spot = tuple[float, float]
"""Speed over dense, and what is lost: KL in nats, or growth of perplexity (a share)."""
MARKS = "osD^vP*X<>"


def save_frontier(
    path: Path, series: Mapping[str, Sequence[Spot]], *, title: str, loses: str, chosen: Spot | None = None
) -> None:
    """Draw each series as a line with a mark of its own; a ring around the chosen point. `loses`: the y axis."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra; without pyplot, which keeps every figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, spots) in enumerate(series.items()):
        speeds, losses = zip(*sorted(spots), strict=True)
        axes.plot(speeds, losses, f"{MARKS[number % len(MARKS)]}-", markersize=5, linewidth=1, label=name)
    if chosen is not None:
        axes.plot([chosen[0]], [chosen[1]], "o", markersize=13, fillstyle="none", color="black", label="chosen")
    axes.set_xlabel("times as fast as the dense model")
    axes.set_ylabel(loses)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    axes.set_title(title)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower().removeprefix("."), dpi=150)
    write_whole(path, picture.getvalue())
