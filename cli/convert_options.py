"""The options of each method of `adapt convert`, in groups. A method's own defaults hold for what is None."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError
from .options import NVIUM, RCLA, RIVER, TWODEE


def river_options(
    *,
    quantizer: Annotated[
        Literal["gptq", "hqq", "rtn"],
        typer.Option(
            "--quantizer", rich_help_panel=RIVER, help="How exit layers are rounded; rtn and hqq need no text."
        ),
    ] = "gptq",
    bits: Annotated[int, typer.Option("--bits", "--q-bits", rich_help_panel=RIVER, help="Bits per weight.")] = 4,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            metavar="32|64|128|-1",
            rich_help_panel=RIVER,
            help="Weights that share a scale; -1: a whole row.",
        ),
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", rich_help_panel=RIVER, help="No zero points.")] = False,
    entry_layer: Annotated[
        int, typer.Option("--entry-layer", min=2, metavar="N", rich_help_panel=RIVER, help="First exit layer, from 1.")
    ] = 2,
    tau: Annotated[
        float | None,
        typer.Option(
            "--tau", rich_help_panel=RIVER, help="Exit threshold (default: chosen for --max-loss).", metavar="X"
        ),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(
            "--max-loss", metavar="X", rich_help_panel=RIVER, help="Accepted rise of perplexity: 0.02 is 2 %."
        ),
    ] = 0.1,
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", rich_help_panel=RIVER, help="A UTF-8 text (default: built in)."),
    ] = None,
    calibration_tokens: Annotated[
        int,
        typer.Option("--calibration-tokens", min=1, metavar="N", rich_help_panel=RIVER, help="How much of it is used."),
    ] = 8192,
    river_from: Annotated[
        str | None,
        typer.Option(
            "--river-from",
            metavar="SOURCE",
            rich_help_panel=RIVER,
            help="Take the 4-bit weights of this GPTQ checkpoint (Hub id or folder).",
        ),
    ] = None,
    resident: Annotated[
        int | None,
        typer.Option(
            "--resident", min=1, metavar="N", rich_help_panel=RIVER, help="Dense blocks kept in memory when it runs."
        ),
    ] = None,
) -> dict[str, Any]:
    """Read the options of River."""
    return dict(locals())


def _layers(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{flag} {text} is no list of layers", "Write it as 1,5,9") from error


def rcla_options(
    *,
    share_every: Annotated[
        int | None,
        typer.Option(
            "--share-every",
            min=1,
            metavar="G",
            rich_help_panel=RCLA,
            help="The first of every G layers keeps a cache, the others read it (default: 4).",
        ),
    ] = None,
    keep_layers: Annotated[
        str | None,
        typer.Option(
            "--keep-layers", metavar="1,5,9", rich_help_panel=RCLA, help="The layers that keep a cache, from 1."
        ),
    ] = None,
    keep_ratio: Annotated[
        float | None,
        typer.Option(
            "--keep-ratio",
            metavar="X",
            rich_help_panel=RCLA,
            help="Share of layers that keep a cache; which, is searched.",
        ),
    ] = None,
    cross_prob: Annotated[
        float | None,
        typer.Option(
            "--cross-prob",
            metavar="P",
            rich_help_panel=RCLA,
            help="How often a layer reads an earlier layer's cache in training (default: 0.6).",
        ),
    ] = None,
    cross_draw: Annotated[
        Literal["layers", "leaders"] | None,
        typer.Option(
            "--cross-draw",
            rich_help_panel=RCLA,
            help="What training draws: any earlier layer to read, or which layers lead, as in a map (default: layers).",
        ),
    ] = None,
    plain_passes: Annotated[
        float | None,
        typer.Option(
            "--plain-passes",
            metavar="X",
            rich_help_panel=RCLA,
            help="Share of training passes in which no layer reads another's cache (default: 0).",
        ),
    ] = None,
    distill: Annotated[
        float | None,
        typer.Option(
            "--distill",
            metavar="X",
            rich_help_panel=RCLA,
            help="Learn the text without crossing, and to predict the same with it, with this weight.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Read the options of R-CLA."""
    return {**locals(), "keep_layers": _layers("--keep-layers", keep_layers)}


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(","))


def twodee_options(
    *,
    labels: Annotated[
        str | None,
        typer.Option(
            "--labels", metavar="A,B", rich_help_panel=TWODEE, help="Labels in order (default: those in the data)."
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            "--field", metavar="NAME", rich_help_panel=TWODEE, help="Key or column of the text (default: text)."
        ),
    ] = None,
    label_field: Annotated[
        str | None,
        typer.Option(
            "--label-field", metavar="NAME", rich_help_panel=TWODEE, help="Key or column of the label (default: label)."
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            rich_help_panel=TWODEE,
            help="Read before every document (default: names the labels).",
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language", metavar="CODE", rich_help_panel=TWODEE, help="Of the sentences (default: by script)."
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop", metavar="X", rich_help_panel=TWODEE, help="Accuracy given away for speed (default: 0.02)."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", min=1, metavar="N", rich_help_panel=TWODEE, help="Longer texts are cut (default: 1024)."
        ),
    ] = None,
    validation_share: Annotated[
        float | None,
        typer.Option(
            "--validation-share",
            metavar="X",
            rich_help_panel=TWODEE,
            help="Of --data, to choose thresholds on (default: 0.2).",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs", min=1, metavar="N", rich_help_panel=TWODEE, help="Of the classifiers, at most (default: 30)."
        ),
    ] = None,
    class_weights: Annotated[
        bool | None,
        typer.Option("--class-weights/--no-class-weights", rich_help_panel=TWODEE, help="Weigh rare labels more."),
    ] = None,
) -> dict[str, Any]:
    """Read the options of 2D early exit."""
    return {**locals(), "labels": _names(labels)}


def nvium_options(
    *,
    exits: Annotated[
        int | None,
        typer.Option(
            "--exits",
            min=1,
            metavar="N",
            rich_help_panel=NVIUM,
            help="Exits at equal distances, the end included (default: 4).",
        ),
    ] = None,
    junctions: Annotated[
        str | None,
        typer.Option("--junctions", metavar="6,12,18", rich_help_panel=NVIUM, help="Exits after these blocks instead."),
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option("--beta", metavar="X", rich_help_panel=NVIUM, help="What the whole depth costs (default: 0.15)."),
    ] = None,
    target_depth: Annotated[
        float | None,
        typer.Option(
            "--target-depth",
            metavar="X",
            rich_help_panel=NVIUM,
            help="Steer beta until this share of the blocks is run on average.",
        ),
    ] = None,
    train: Annotated[
        Literal["routers", "all"] | None,
        typer.Option(
            "--train", rich_help_panel=NVIUM, help="Junctions beside a frozen model, or all weights (default: routers)."
        ),
    ] = None,
    from_scratch: Annotated[
        bool | None,
        typer.Option(
            "--from-scratch",
            rich_help_panel=NVIUM,
            help="SOURCE has a config.json and a tokenizer; weights are drawn. With --exits 1: the dense twin.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Read the options of N-vium."""
    return {**locals(), "junctions": _layers("--junctions", junctions)}
