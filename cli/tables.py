"""Tables as people read them: aligned for a terminal, and in Markdown. Pure Python; knows words only."""

from collections.abc import Iterator, Sequence


def aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table's lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = list(zip(row, widths, strict=True))
        yield "   ".join([cells[0][0].ljust(cells[0][1]), *(cell.rjust(size) for cell, size in cells[1:])])


def markdown(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table whose first row is the header."""
    first, *others = ([cell.replace("|", "\\|") for cell in row] for row in table)
    yield f"| {' | '.join(first)} |"
    yield f"|---{'|--:' * (len(first) - 1)}|"
    yield from (f"| {' | '.join(row)} |" for row in others)
