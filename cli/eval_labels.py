"""`adapt eval --labels`: what a bundle's labels are worth, and what stopping early costs and saves."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..runtime.label_quality import Comparison, Rows, compare, spread
from ..runtime.progress import Reporter
from . import plots, services
from .classification import Asked, Point, choose_one_d, choose_two_d, full
from .heat import Stops, heat_map, shades
from .outputs import Outputs, head
from .tables import aligned, markdown
from .text_classifier import TextClassifier

if TYPE_CHECKING:
    from ..runtime.methods import TwoDee

EXAMPLES = """\
  adapt eval qwen-2dee --labels test.jsonl
  adapt eval qwen-2dee --labels test.csv --label-field stars --max-drop 0.04 --limit 1000
  adapt eval qwen-2dee --labels test.jsonl --report eval.md --plot stops.png
  adapt eval qwen-2dee --labels test.jsonl --json | jq '.accuracy, .dense.accuracy'
"""

_FIGURES = (
    *(("accuracy", "accuracy", ".4f"), ("macro-F1", "macro_f1", ".4f"), ("same as full", "same_as_dense", ".4f")),
    *(("work", "work", ".3f"), ("mean layers", "mean_layers", ".1f"), ("mean sentences", "mean_sentences", ".1f")),
    ("rows/s", "rows_per_s", ".4g"),
)


@dataclass(frozen=True)
class LabelsRequest:
    """Which rows."""

    labels: Path
    field: str | None = None
    label_field: str = "label"
    limit: int | None = None


def evaluate_labels(
    bundle: Path,
    request: LabelsRequest,
    settings: Mapping[str, Any],
    asked: Asked,
    *,
    outputs: Outputs,
    reporter: Reporter,
) -> None:
    """Measure and print. `settings` are the fields of SessionOptions. Raises UsageError, FormatError for bad rows."""
    twodee = services.twodee(bundle)
    if twodee is None:
        raise UsageError(f"{bundle} generates; it has no labels", "Measure it with --text FILE")
    outputs.check()
    points: dict[str, Point] = {"dense": full(twodee), "one_d": choose_one_d(twodee, asked)}
    two_d = choose_two_d(twodee, asked)
    points |= {} if two_d is None else {"two_d": two_d}
    data = services.labelled(request.labels, request.field, request.label_field, twodee.labels)
    if data.skipped:
        reporter.warn(f"{data.skipped} rows have no text or no label and are left out; the first: {data.first_skipped}")
    if (used := used_for(twodee, data.sha256)) is not None:
        reporter.warn(f"{data.name} is the file that {used}: these figures are too good")
    data = data.select(spread(len(data), request.limit))
    classifier = services.open_classifier(bundle, settings, reporter)
    batch_size = asked.batch_size or classifier.batch_size
    modes = {name: services.mode(point) for name, point in points.items()}
    rows = Rows(data.texts, data.labels, data.rows)
    found = compare(classifier, rows, modes, batch_size=batch_size, reporter=reporter)
    if found.unreadable:
        reporter.warn(f"{found.unreadable} rows are left out; the first: {found.first_unreadable}")
    result = summary(found, points, classifier, {"name": data.name, "sha256": data.sha256, "bundle": bundle.name})
    result["use"] = twodee.use
    outputs.publish(
        result,
        page(result, width=shutil.get_terminal_size().columns, marks=shades()),
        report(outputs.command, result),
        lambda path: plots.save(path, stops_of(result), result["layers"], title=bundle.name),
    )


def used_for(twodee: "TwoDee", sha256: str) -> str | None:
    """Say what conversion did with a file; None where it did not have it."""
    if sha256 == twodee.data.sha256:
        return "the classifiers were trained on"
    judged = twodee.validation_data
    return "thresholds were chosen on" if judged is not None and sha256 == judged.sha256 else None


def summary(
    found: Comparison, points: Mapping[str, Point], classifier: TextClassifier, data: Mapping[str, str]
) -> dict[str, Any]:
    """Return the keys of `eval --labels --json`. The figures at the top are 2D's; without thresholds 1D's."""
    tallies, first = found.tallies, "two_d" if "two_d" in found.tallies else "one_d"
    main, dense = tallies[first], tallies["dense"]
    figures: dict[str, dict[str, Any]] = {}
    for name, point in points.items():
        chosen = {"name": point.name, "thresholds": point.thresholds, "layer": point.layer}
        figures[name] = {**tallies[name].figures(dense), "point": chosen}
    return {
        "rows": main.confusion.rows,
        **figures[first],
        "interval": [round(end, 4) for end in main.confusion.interval],
        "dense": figures["dense"],
        "one_d": figures["one_d"],
        "speedup": {"over_dense": main.speedup(dense), "over_one_d": main.speedup(tallies["one_d"])},
        "labels": list(classifier.labels),
        "layers": classifier.layers,
        "batch_size": found.batch_size,
        "truncated": found.truncated,
        "unreadable": found.unreadable,
        "data": dict(data),
        "machine": services.machine(),
    }


def stops_of(result: Mapping[str, Any]) -> Stops:
    """Return (sentences, layers) -> documents."""
    return {(sentences, layers): count for sentences, layers, count in result["stops"]}


def page(result: Mapping[str, Any], *, width: int, marks: str) -> Iterator[str]:
    """Yield what people read: the comparison, the classes, where documents stopped."""
    data = result["data"]
    yield f"{data['bundle']} on {result['rows']} rows of {data['name']}, {result['batch_size']} at once"
    yield ""
    yield from aligned(comparison(result))
    yield ""
    yield from _remarks(result)
    yield ""
    yield from aligned(classes(result))
    yield ""
    yield "where documents stopped"
    yield from heat_map(stops_of(result), result["layers"], width=width, marks=marks)


def _remarks(result: Mapping[str, Any]) -> Iterator[str]:
    low, high = result["interval"]
    yield f"95 % interval of the accuracy ({result['accuracy']:.3f}): {low:.3f} to {high:.3f}"
    yield f"`adapt run` uses {result['use'].upper()} with this bundle"
    over = result["speedup"]["over_one_d"]
    if result["point"]["name"] == "2d":
        spread_of = "" if over["min"] == over["max"] else f" ({over['min']:.2f} to {over['max']:.2f}, chunk by chunk)"
        yield f"2D is {over['median']:.2f} x as fast as 1D{spread_of}"
    if result["truncated"]:
        yield f"{result['truncated']} texts are longer than the bundle reads; their ends were left out"


def comparison(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table: the three ways side by side, each speed also against full."""
    columns = {"full": result["dense"], "1D": result["one_d"]}
    columns |= {"2D": result} if result["point"]["name"] == "2d" else {}
    table = [["", *columns], ["", *(_point(column["point"], result["layers"]) for column in columns.values())]]
    for name, key, form in _FIGURES:
        table.append([name, *(format(column[key], form) for column in columns.values())])
    full_speed = result["dense"]["rows_per_s"]
    table.append(["speed of full", *(f"{column['rows_per_s'] / full_speed:.2f} x" for column in columns.values())])
    return table


def _point(point: Mapping[str, Any], layers: int) -> str:
    if point["thresholds"] is not None:
        return ",".join(f"{value:g}" for value in point["thresholds"])
    return f"layer {point['layer'] or layers}"


def classes(result: Mapping[str, Any]) -> list[list[str]]:
    """Return precision, recall and F1 of each class, and the answers that its rows got."""
    table = [["label", "precision", "recall", "F1", "rows"]]
    for name, figures in result["per_class"].items():
        shares = ("-" if (value := figures[key]) is None else f"{value:.3f}" for key in ("precision", "recall", "f1"))
        table.append([name, *shares, str(figures["rows"])])
    return table


def report(command: str, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a Markdown page: the command, the machine, the tables, the confusion matrix, the map."""
    data = result["data"]
    about = [
        f"{result['rows']} rows (sha256 of the file {data['sha256'][:16]}), {result['batch_size']} documents at once.",
        "Chunks of rows went through full, 1D and 2D in turn in one process; times include reading the texts.",
        "Nothing is random: there is no seed.",
    ]
    yield from head(f"{data['bundle']} on {data['name']}", command, about, result["machine"])
    yield from markdown(comparison(result))
    yield ""
    yield from _remarks(result)
    yield ""
    yield from markdown(classes(result))
    yield ""
    yield "Rows by label (downwards) and answer (to the right):"
    yield ""
    names = result["labels"]
    lines = ([name, *map(str, row)] for name, row in zip(names, result["confusion"], strict=True))
    yield from markdown([["", *names], *lines])
    yield ""
    yield "Where documents stopped:"
    yield ""
    yield "```"
    yield from heat_map(stops_of(result), result["layers"])
    yield "```"
