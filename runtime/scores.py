"""How good labels are: accuracy, precision, recall, F1. Pure Python; knows counts and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

DIGITS = 6
"""Of figures in JSON."""


def macro_f1(counts: Sequence[Sequence[int]]) -> float:
    """Mean of the classes' F1; a class that is neither there nor answered does not count. `counts[label][answer]`."""
    answered = [sum(column) for column in zip(*counts, strict=True)]
    found = [_f1(row[place], sum(row), answered[place]) for place, row in enumerate(counts)]
    known = [value for value in found if value is not None]
    return sum(known) / len(known)


def _f1(hits: int, there: int, answered: int) -> float | None:
    return 2 * hits / (there + answered) if there + answered else None


@dataclass
class Confusion:
    """Rows by their label and by the answer they got: `counts[label][answer]`, both places in `names`."""

    names: Sequence[str]
    counts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.counts or [[0] * len(self.names) for _ in self.names]

    def add(self, label: int, answer: int) -> None:
        """Count one row."""
        self.counts[label][answer] += 1

    @property
    def rows(self) -> int:
        """How many were counted."""
        return sum(map(sum, self.counts))

    @property
    def accuracy(self) -> float:
        """Share of rows whose answer is their label."""
        return sum(self.counts[place][place] for place in range(len(self.names))) / self.rows

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's 95 % interval (Wilson's score interval, which has a width where all rows are right, too)."""
        z, rows, accuracy = 1.96, self.rows, self.accuracy
        shrink = 1 + z * z / rows
        middle = (accuracy + z * z / (2 * rows)) / shrink
        half = z * (accuracy * (1 - accuracy) / rows + (z / (2 * rows)) ** 2) ** 0.5 / shrink
        return max(0.0, middle - half), min(1.0, middle + half)

    @property
    def macro_f1(self) -> float:
        """See the function of this name."""
        return macro_f1(self.counts)

    def per_class(self) -> Mapping[str, Mapping[str, float | None]]:
        """Precision, recall and F1 of each class, None where nothing is divided by, and its rows."""
        return {
            name: {
                "precision": self._share(place, self._answered(place)),
                "recall": self._share(place, sum(self.counts[place])),
                "f1": _f1(self.counts[place][place], sum(self.counts[place]), self._answered(place)),
                "rows": sum(self.counts[place]),
            }
            for place, name in enumerate(self.names)
        }

    def _answered(self, place: int) -> int:
        return sum(row[place] for row in self.counts)

    def _share(self, place: int, total: int) -> float | None:
        return self.counts[place][place] / total if total else None
