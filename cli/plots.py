"""Pictures in files, drawn with matplotlib where it is installed (extra `plot`). Knows counts, no models."""

import importlib.util
import io
from pathlib import Path

from ..errors import AdaptError, UsageError
from .heat import Stops
from .writing import write_whole

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
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix.lower().removeprefix("."), dpi=150)
    write_whole(path, picture.getvalue())
