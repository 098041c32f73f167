"""`adapt bench` of a bundle that classifies: rows a second of full, 1D and 2D, side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..runtime.label_quality import Comparison, Rows, Tally, compare, spread
from ..runtime.progress import Reporter
from . import plots, services
from .classification import Asked, Point, choose_one_d, choose_two_d, full
from .outputs import Outputs, machine_line
from .tables import aligned, markdown

if TYPE_CHECKING:
    from .text_classifier import TextClassifier

CHUNKS = 5
"""Parts of the rows that go through all ways in turn: as many ratios."""
_NAMES = {"dense": "full", "one_d": "1D", "two_d": "2D"}


@dataclass(frozen=True)
class RowsToTime:
    """Which rows, and how they are decided. Labels are not needed."""

    inputs: tuple[str, ...]
    field_name: str | None = None
    limit: int = 64
    asked: Asked = field(default_factory=Asked)


def measure(
    bundle: Path, rows: RowsToTime, settings: Mapping[str, Any], *, batch_size: int | None, reporter: Reporter
) -> dict[str, Any]:
    """Return the keys of `bench --json`. Raises UsageError where no row can be read."""
    twodee = services.twodee(bundle)
    if twodee is None:
        raise UsageError(f"{bundle} generates; it does not classify rows", "Leave -i out")
    points: dict[str, Point] = {"dense": full(twodee), "one_d": choose_one_d(twodee, rows.asked)}
    two_d = choose_two_d(twodee, rows.asked)
    points |= {} if two_d is None else {"two_d": two_d}
    texts = _texts(rows, reporter)
    chosen = [texts[place] for place in spread(len(texts), rows.limit)]
    classifier = services.open_classifier(bundle, settings, reporter)
    size = batch_size or classifier.batch_size
    modes = {name: services.mode(point) for name, point in points.items()}
    chunk = -(-len(chosen) // CHUNKS)
    found = compare(classifier, Rows(chosen, [0] * len(chosen)), modes, batch_size=size, chunk=chunk, reporter=reporter)
    if found.unreadable:
        reporter.warn(f"{found.unreadable} rows are left out; the first: {found.first_unreadable}")
    return summary(bundle, found, points, classifier)


def _texts(rows: RowsToTime, reporter: Reporter) -> "Sequence[str | Sequence[str]]":
    texts, problems = services.texts(rows.inputs, rows.field_name)
    if not texts:
        why = f"no row has a text; the first, {problems[0]}" if problems else "there are no rows"
        raise UsageError(f"There is nothing to classify: {why}", "Look at the files given with -i, or name a --field")
    if problems:
        reporter.warn(f"{len(problems)} rows have no text and are left out; the first, {problems[0]}")
    return texts


def summary(
    bundle: Path, found: Comparison, points: Mapping[str, Point], classifier: "TextClassifier"
) -> dict[str, Any]:
    """Return the figures by stable keys; those at the top are 2D's, without thresholds 1D's."""
    tallies, first = found.tallies, "two_d" if "two_d" in points else "one_d"
    ways = {name: _figures(tally, points[name], tallies["dense"]) for name, tally in tallies.items()}
    main = tallies[first]
    return {
        "bundle": bundle.resolve().name,
        "machine": services.machine(),
        "settings": {"rows": main.confusion.rows, "batch_size": found.batch_size, "chunks": len(main.seconds)},
        "layers": classifier.layers,
        "rows_per_s": ways[first]["rows_per_s"],
        "work": ways[first]["work"],
        "speedup": {"over_dense": main.speedup(tallies["dense"]), "over_one_d": main.speedup(tallies["one_d"])},
        "dense": ways["dense"],
        "method": ways[first],
        "one_d": ways["one_d"],
        "ways": ways,
    }


def _figures(tally: Tally, point: Point, dense: Tally) -> dict[str, Any]:
    names = ("rows_per_s", "work", "mean_layers", "mean_sentences", "same_as_dense")
    figures = tally.figures(dense)
    return {**{name: figures[name] for name in names}, "point": str(point), "speedup": tally.speedup(dense)}


def publish(where: Outputs, result: Mapping[str, Any], command: str) -> None:
    """Print the page or JSON; write the report and the picture where asked for."""
    where.publish(result, page(result), report(result, command), lambda path: _draw(path, result))


def _draw(path: Path, result: Mapping[str, Any]) -> None:
    place = f"{result['settings']['batch_size']} at once"
    rates = {_NAMES[name]: figures["rows_per_s"] for name, figures in result["ways"].items()}
    bars = {name: [(place, rate, rate, rate)] for name, rate in rates.items()}
    plots.save_speeds(path, bars, title=result["bundle"], unit="rows/s")


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what people read."""
    yield from _about(result)
    yield ""
    yield from aligned(table(result))


def report(result: Mapping[str, Any], command: str) -> Iterator[str]:
    """Yield a Markdown page: the command, the machine, the table."""
    yield from (f"## {result['bundle']}", "", f"`{command}`", "")
    yield from _about(result)
    yield ""
    yield from markdown(table(result))


def _about(result: Mapping[str, Any]) -> Iterator[str]:
    machine, settings = result["machine"], result["settings"]
    yield f"{result['bundle']}; {machine_line(machine)}"
    yield (
        f"{settings['rows']} rows, {settings['batch_size']} at once, in {settings['chunks']} parts through all ways in "
        "turn, reading included; median (least to largest)"
    )


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return a line for each way to decide."""
    lines = [["", "how", "rows/s", "speed of full", "work", "layers", "sentences", "same as full"]]
    for name, figures in result["ways"].items():
        over = figures["speedup"]
        lines.append(
            [
                _NAMES[name],
                figures["point"].removeprefix(f"{_NAMES[name]}, "),
                f"{figures['rows_per_s']:.4g}",
                f"{over['median']:.2f} ({over['min']:.2f} to {over['max']:.2f})",
                *(f"{figures[key]:{form}}" for key, form in _FORMS),
            ]
        )
    return lines


_FORMS = (("work", ".3f"), ("mean_layers", ".1f"), ("mean_sentences", ".1f"), ("same_as_dense", ".3f"))
