"""Small drawings in text: a histogram of exit depths, sizes and rates as people read them."""

from collections.abc import Iterator, Sequence

BAR_WIDTH = 32
MAX_LINES = 16
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(count: float) -> str:
    """Write bytes as `6.73 GiB`."""
    unit = 0
    while abs(count) >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.2f} {_UNITS[unit]}"


def histogram(counts: Sequence[float]) -> Iterator[str]:
    """Draw how many tokens left after each block; `counts[i]` is of depth i + 1.

    Depths without tokens are left out; a long list is drawn in bands of equal height.
    """
    total = sum(counts)
    if not total:
        return
    bands = _bands(counts)
    largest = max(count for _, _, count in bands)
    for first, last, count in bands:
        if count:
            name = str(first) if first == last else f"{first}-{last}"
            bar = "█" * max(1, round(BAR_WIDTH * count / largest))
            yield f"  {name:>9}  {bar:<{BAR_WIDTH}} {count / total:6.1%}"


def _bands(counts: Sequence[float]) -> list[tuple[int, int, float]]:
    used = sum(1 for count in counts if count)
    height = 1 if used <= MAX_LINES else -(-len(counts) // MAX_LINES)
    starts = range(0, len(counts), height)
    return [(start + 1, min(start + height, len(counts)), sum(counts[start : start + height])) for start in starts]


def scatter(
    points: Sequence[tuple[float, float, str]], *, x_label: str, y_label: str, width: int = 56, height: int = 14
) -> Iterator[str]:
    """Draw points (x, y, mark) in a frame, the highest y on top; of points in one place the last one is seen."""
    if not points:
        return
    left, right = min(x for x, _, _ in points), max(x for x, _, _ in points)
    low, high = min(y for _, y, _ in points), max(y for _, y, _ in points)
    grid = [[" "] * width for _ in range(height)]
    for x, y, mark in points:
        column = round((x - left) / ((right - left) or 1) * (width - 1))
        row = round((high - y) / ((high - low) or 1) * (height - 1))
        grid[row][column] = mark
    yield f"  {y_label}"
    for number, row in enumerate(grid):
        name = f"{high:.3g}" if number == 0 else f"{low:.3g}" if number == height - 1 else ""
        yield f"  {name:>8} │{''.join(row).rstrip()}"
    yield f"  {'':>8} └{'─' * width}"
    ends = f"{left:.3g}", f"{right:.3g}"
    yield f"  {'':>9} {ends[0]}{x_label:^{width - len(ends[0]) - len(ends[1])}}{ends[1]}"
