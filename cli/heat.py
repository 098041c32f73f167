"""Where documents stopped, as a map in text: sentences to the right, layers downwards, darker where more stopped.

Pure Python; knows no model. Shades only, no colours.
"""

import codecs
import locale
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SHADES = " ░▒▓█"
ASCII_SHADES = " .:*#"
MAX_ROWS = 16
MAX_COLUMNS = 48

Stops = Mapping[tuple[int, int], int]
"""(sentences looked at, layers run), both from 1 -> documents."""


@dataclass(frozen=True)
class Bands:
    """Cells 1 .. `largest` in at most `most` bands of equal size."""

    largest: int
    most: int

    @property
    def size(self) -> int:
        """Cells in a band; the last band may have fewer."""
        return max(1, -(-self.largest // max(1, self.most)))

    def __len__(self) -> int:
        return (self.largest + self.size - 1) // self.size

    def of(self, cell: int) -> int:
        """The band that a cell is in, from 0."""
        return (min(max(cell, 1), self.largest) - 1) // self.size

    def name(self, band: int) -> str:
        """`3`, or `3-4`."""
        first, last = band * self.size + 1, min((band + 1) * self.size, self.largest)
        return str(first) if first == last else f"{first}-{last}"


def shades() -> str:
    """Return the shades that a terminal of this locale can show. The C locale stands for UTF-8, as in Python itself."""
    name = codecs.lookup(locale.getencoding()).name
    try:
        SHADES.encode("utf-8" if name == "ascii" else name)
    except UnicodeEncodeError:
        return ASCII_SHADES
    return SHADES


def _longest(stops: Stops, columns: int) -> int:
    """Sentences up to which the map goes: all where there is room, else as far as 99 % of the documents."""
    found = sorted((sentences, count) for (sentences, _), count in stops.items())
    if found[-1][0] <= columns:
        return found[-1][0]
    wanted, seen = 0.99 * sum(stops.values()), 0
    for sentences, count in found:
        seen += count
        if seen >= wanted:
            return sentences
    return found[-1][0]


def heat_map(stops: Stops, layers: int, *, width: int = 80, marks: str = SHADES) -> Iterator[str]:
    """Draw at most `width` characters a line.

    Documents with more sentences than the last column are counted in it. Bands of layers and of sentences keep the map
    small; the legend says what the darkest shade stands for.
    """
    if not stops:
        return
    rows = Bands(layers, MAX_ROWS)
    margin = max(map(len, ["layers", *map(rows.name, range(len(rows)))]))
    room = max(1, min(MAX_COLUMNS, width - margin - len("      100.0%")))
    last = _longest(stops, room)
    across = Bands(last, room)
    each = 2 if 2 * len(across) <= room else 1  # characters a column
    counts: Counter[tuple[int, int]] = Counter()
    for (sentences, depth), count in stops.items():
        counts[rows.of(depth), across.of(sentences)] += count
    darkest, total = max(counts.values()), sum(counts.values())
    yield f"  {'layers':>{margin}}"
    for row in range(len(rows)):
        line = [counts[row, column] for column in range(len(across))]
        drawn = "".join(each * _mark(count, darkest, marks) for count in line)
        yield f"  {rows.name(row):>{margin}}  {drawn} {sum(line) / total:6.1%}"
    yield f"  {'':>{margin}}  {_axis(across, each)}"
    more = "" if max(sentences for sentences, _ in stops) <= last else f", {last} or more in the last column"
    legend = f"sentences looked at{more}; {marks[-1]} = {darkest / total:.1%} of the documents"
    yield from (f"  {line}" for line in textwrap.wrap(legend, max(20, width - 2)))


def _mark(count: int, darkest: int, marks: str) -> str:
    if not count:
        return marks[0]
    # Square roots: a few documents somewhere are to be seen beside many elsewhere.
    return marks[max(1, round((len(marks) - 1) * (count / darkest) ** 0.5))]


def _axis(across: Bands, each: int) -> str:
    """Numbers of sentences below their columns, as many as there is room for."""
    line = ""
    for band in sorted({0, *range(4, len(across), 5), len(across) - 1}):
        at = band * each
        if not line or at > len(line):
            line = line.ljust(at) + str(band * across.size + 1)
    return line
