"""`adapt tune`: what a bundle could give at other settings, and the one that it runs with from now on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from . import services
from .charts import scatter
from .classification import MaxDrop, refuse
from .console import make_reporter
from .frontier_picture import save_frontier
from .groups import Group
from .options import OUTPUT, RIVER, CacheDir, Device, DtypeOption, Force, Json, Threads
from .outputs import Outputs
from .tables import aligned

EXAMPLES = """\
  adapt tune qwen-river --text wiki.txt --max-loss 0.02
  adapt tune qwen-river --text wiki.txt --min-speed 1.4 --plot frontier.png
  adapt tune qwen-river --text wiki.txt --dry-run --json | jq '.frontier[].name'
  adapt tune qwen-2dee --labels validation.jsonl --max-drop 0.04
"""
DATA = "Data"
GOAL = "What is aimed at"
ROUNDING = 1e-6


def data(
    *,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", rich_help_panel=DATA, help="A UTF-8 text to predict.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", metavar="FILE", rich_help_panel=DATA, help="Labelled rows: jsonl, csv, tsv, .gz."),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            "--field", metavar="NAME", rich_help_panel=DATA, help="Key or column of the text (default: text)."
        ),
    ] = None,
    label_field: Annotated[
        str, typer.Option("--label-field", metavar="NAME", rich_help_panel=DATA, help="Key or column of the label.")
    ] = "label",
    limit_tokens: Annotated[
        int,
        typer.Option(
            "--limit-tokens", min=128, metavar="N", rich_help_panel=DATA, help="Read so many tokens, all over the text."
        ),
    ] = 4096,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=8, metavar="N", rich_help_panel=DATA, help="Only N rows, evenly over the file."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, metavar="N", rich_help_panel=DATA, help="Deals the data out to the two halves."),
    ] = 0,
) -> dict[str, Any]:
    """Return what is measured on; the names are those of `convert.tune_request.TuneRequest`."""
    return {
        "text": text,
        "labels": labels,
        "text_field": field,
        "label_field": label_field,
        "limit_tokens": limit_tokens,
        "limit": limit,
        "seed": seed,
    }


def goal(
    *,
    max_loss: Annotated[
        float | None,
        typer.Option(
            "--max-loss", min=0, metavar="X", rich_help_panel=GOAL, help="The fastest that loses X of perplexity."
        ),
    ] = None,
    min_speed: Annotated[
        float | None,
        typer.Option(
            "--min-speed", min=0, metavar="X", rich_help_panel=GOAL, help="The best that is X times as fast as dense."
        ),
    ] = None,
    max_drop: MaxDrop = None,
) -> dict[str, Any]:
    """Return what is aimed at; as above."""
    return {"max_loss": max_loss, "min_speed": min_speed, "max_drop": max_drop}


def machine(
    *,
    device: Device = "auto",
    dtype: DtypeOption = "auto",
    threads: Threads = None,
    resident: Annotated[
        int | None,
        typer.Option(
            "--resident", min=1, metavar="N", rich_help_panel=RIVER, help="Tune for N dense blocks; stored as well."
        ),
    ] = None,
    cache_dir: CacheDir = None,
) -> dict[str, Any]:
    """Return how the bundle is opened; the names are those of `runtime.options.SessionOptions`."""
    return {"device": device, "dtype": dtype, "threads": threads, "resident": resident, "cache_dir": cache_dir}


def outputs(
    *,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.png", rich_help_panel=OUTPUT, help="Draw the frontier (.png, .pdf, .svg)."
        ),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> Outputs:
    """Read where results go."""
    return Outputs(plot, force=force, as_json=as_json)


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    measured: Annotated[dict[str, Any], Group(data)],
    wanted: Annotated[dict[str, Any], Group(goal)],
    opening: Annotated[dict[str, Any], Group(machine)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be chosen; store nothing.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure although nothing has changed.")] = False,
    where: Annotated[Outputs, Group(outputs)],
) -> None:
    """Find the settings that suit you, and store them in the bundle.

    Measures the rules that a bundle's method allows on one half of the data, chooses by what you aim at, and reports on
    the other half. What was measured is stored too: another goal is answered at once, and so is the same one.
    """
    where.check()
    if measured["text"] is not None:
        refuse(ctx, ("field", "label_field", "limit"), "is for --labels")
    if measured["labels"] is not None:
        refuse(ctx, ("limit_tokens", "resident"), "is for --text")
    reporter = make_reporter(ctx.obj)
    values = {**measured, **wanted, "store": not dry_run, "again": again}
    found = services.tune(bundle, values, opening, reporter)
    if where.plot is not None and not found["frontier"]:
        reporter.warn("There is no picture of labelled rows' thresholds here: use `adapt eval --plot`")
        where = replace(where, plot=None)
    where.publish(found, _page(bundle, found), draw=lambda path: _draw(path, bundle, found))


def _draw(path: Path, bundle: Path, found: Mapping[str, Any]) -> None:
    spots = [_spot(point) for point in found["frontier"]]
    chosen = _spot(_chosen(found))
    save_frontier(path, {"settings": spots}, title=bundle.name, loses=_loses(found), chosen=chosen)


def _loses(found: Mapping[str, Any]) -> str:
    """What the second number of a spot is."""
    known = all(point["held_out"]["kl"] is not None for point in found["frontier"])
    return "KL from dense" if known else "growth of perplexity"


def _spot(point: Mapping[str, Any]) -> tuple[float, float]:
    """Speed and KL (N-vium: growth of perplexity), where nothing was chosen on it."""
    figures = point["held_out"]
    return point["speedup"], figures["loss"] if figures["kl"] is None else figures["kl"]


def _chosen(found: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(point for point in found["frontier"] if point["name"] == found["chosen"])


def _page(bundle: Path, found: Mapping[str, Any]) -> Iterator[str]:
    yield from aligned(_classes(found["held_out"]) if found["held_out"] else _rules(found))
    yield ""
    if found["frontier"]:
        marks = {found["chosen"]: "●"}
        spots = [(*_spot(point), marks.get(point["name"], "·")) for point in found["frontier"]]
        spots.sort(key=lambda spot: spot[2] == "●")
        yield from scatter(spots, x_label="times as fast as dense", y_label=f"{_loses(found)}, on the other half")
        yield ""
    aim = {"max_loss": "loses at most", "min_speed": "times as fast at least", "max_drop": "loses at most"}
    yield f"chosen     {found['chosen']} ({aim[found['goal']]} {found['limit']:g})"
    yield from _missed(found)
    stored = "now runs so" if found["stored"] else "is as it was"
    yield f"{bundle}  {stored}"


def _missed(found: Mapping[str, Any]) -> Iterator[str]:
    """Say where the point chosen loses more on the half that it was not chosen on."""
    if found["goal"] == "max_loss":
        loss = _chosen(found)["held_out"]["loss"]
    elif found["goal"] == "max_drop":
        ways = found["held_out"]
        loss = max(figures["accuracy"] for figures in ways.values()) - ways[found["chosen"]]["accuracy"]
    else:
        return
    if loss > found["limit"] + ROUNDING:
        yield f"           on the other half it loses {loss:.3g}: a longer text, or more rows, make the two agree"


def _rules(found: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """The frontier as a table; figures of both halves where they differ in what they are for."""
    table = [["setting", "dense blocks", "speed", "KL", "other half", "loss", "other half", "same token"]]
    for point in found["frontier"]:
        ours, other = point["chosen_on"], point["held_out"]
        mark = "●" if point["name"] == found["chosen"] else " "
        table.append(
            [
                f"{mark} {point['name']}",
                f"{point['dense_blocks']:.1f}",
                f"{point['speedup']:.2f}",
                _number(ours["kl"], ".4f"),
                _number(other["kl"], ".4f"),
                f"{ours['loss']:.2%}",
                f"{other['loss']:.2%}",
                _number(other["agreement"], ".1%"),
            ]
        )
    return _without_empty(table)


def _without_empty(table: Sequence[Sequence[str]]) -> list[list[str]]:
    """Leave out columns that no line below the head has anything in, with what was measured besides (N-vium: KL)."""
    kept = [at for at in range(len(table[0])) if any(line[at] for line in table[1:])]
    return [[line[at] for at in kept] for line in table]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _classes(held_out: Mapping[str, Mapping[str, float]]) -> Sequence[Sequence[str]]:
    table = [["on the other half", "accuracy", "macro-F1", "work", "mean layers", "mean sentences"]]
    for name, figures in held_out.items():
        cells = [f"{figures['accuracy']:.4f}", f"{figures['macro_f1']:.4f}", f"{figures['work']:.3f}"]
        table.append([name, *cells, f"{figures['mean_layers']:.1f}", f"{figures['mean_sentences']:.1f}"])
    return table
