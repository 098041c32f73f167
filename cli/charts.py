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
