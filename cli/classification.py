"""How to classify, as the command line says it: options, and the operating point they choose.

Knows a bundle's stored figures (`TwoDee`), no tensors: points become `runtime.schedule.Mode` in `services`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import UsageError
from .groups import spelling
from .options import ROWS, TWODEE

if TYPE_CHECKING:
    from ..runtime.methods import Decision, FixedLayer, Thresholds, TwoDee

OPENING = (
    *("ctx_size", "gpu_memory", "resident", "offload", "tau", "prefill", "chat_template", "head_bits"),
    *("lossless", "draft", "per_exit_truncation", "piggyback", "max_deferred", "cuda_graphs"),
)
"""Parameters of opening a bundle that mean nothing to one that classifies."""
GENERATION = (
    *("max_tokens", "temperature", "greedy", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    *("stop", "stop_token_id", "ignore_eos", "system", "raw", "no_stream"),
    *OPENING,
)
"""Parameters of commands that mean nothing to a bundle that classifies."""
CLASSIFICATION = ("threshold", "max_drop", "full", "one_d")
"""Parameters of commands that mean nothing to a bundle that generates."""


@dataclass(frozen=True)
class Asked:
    """What the command line says about how to decide; nothing: as the bundle was made to."""

    threshold: tuple[float, float] | None = None
    max_drop: float | None = None
    full: bool = False
    one_d: bool = False
    batch_size: int | None = None
    """Rows at once, whatever is done with them; None: decided by model and machine."""

    def __post_init__(self) -> None:
        given = {"--threshold": self.threshold is not None, "--max-drop": self.max_drop is not None}
        given |= {"--full": self.full, "--one-d": self.one_d}
        names = [name for name, said in given.items() if said]
        if len(names) > 1 and names != ["--max-drop", "--one-d"]:
            raise UsageError(f"{names[0]} and {names[1]} exclude each other", "Give one of them")


@dataclass(frozen=True)
class Point:
    """One way to decide. `expected`: what the validation rows gave for it, where it is a stored one."""

    name: Literal["2d", "1d", "full"]
    thresholds: tuple[float, float] | None = None
    """tau_ignore, tau_acc; for 2d."""
    layer: int | None = None
    """The deepest that a document may go, from 1: for 1d, and for 2d where it is not the last."""
    expected: "Decision | None" = None

    @property
    def work(self) -> float:
        """The share computed, as far as it is known."""
        return 1.0 if self.expected is None else self.expected.work

    def __str__(self) -> str:
        if self.thresholds is not None:
            within = "" if self.layer is None else f" in layers 1 to {self.layer}"
            return f"2D, thresholds {self.thresholds[0]:g},{self.thresholds[1]:g}{within}"
        return "all layers" if self.layer is None else f"1D, layer {self.layer}"


def full(settings: "TwoDee") -> Point:
    """Every document through every layer."""
    return Point("full", expected=settings.full)


def fixed(layer: "FixedLayer") -> Point:
    """Every document through the same layers."""
    return Point("1d", layer=layer.layer, expected=layer)


def rule(settings: "TwoDee", thresholds: "Thresholds") -> Point:
    """A stored point of the frontier."""
    return Point("2d", (thresholds.tau_ignore, thresholds.tau_acc), settings.depth, thresholds)


def choose(settings: "TwoDee", asked: Asked) -> Point:
    """Return the operating point: the bundle's own, unless something else was asked for."""
    if asked.full:
        return full(settings)
    if asked.one_d:
        return choose_one_d(settings, asked)
    if asked.threshold is not None:
        return Point("2d", asked.threshold, settings.depth, _stored(settings.frontier, asked.threshold))
    one_d, two_d = choose_one_d(settings, asked), _two_d(settings, asked)
    if asked.max_drop is None:
        return one_d if two_d is None or settings.use == "1d" else two_d
    return two_d if two_d is not None and two_d.work < one_d.work else one_d


def choose_one_d(settings: "TwoDee", asked: Asked) -> Point:
    """Return the layer for what may be lost."""
    from ..runtime.operating_point import choose_layer  # noqa: PLC0415 - pydantic

    return fixed(settings.chosen_one_d if asked.max_drop is None else choose_layer(settings, asked.max_drop))


def choose_two_d(settings: "TwoDee", asked: Asked) -> Point | None:
    """Return the thresholds to measure: where none fit, the best there are; None where there are none at all."""
    if asked.threshold is not None:
        return choose(settings, asked)
    from ..runtime.operating_point import expected  # noqa: PLC0415 - pydantic

    best = max(settings.frontier, key=expected, default=None)
    return _two_d(settings, asked) or (None if best is None else rule(settings, best))


def _two_d(settings: "TwoDee", asked: Asked) -> Point | None:
    from ..runtime.operating_point import choose_thresholds  # noqa: PLC0415

    found = settings.chosen if asked.max_drop is None else choose_thresholds(settings, asked.max_drop)
    return None if found is None else rule(settings, found)


def _stored(frontier: Iterable["Thresholds"], asked: tuple[float, float]) -> "Thresholds | None":
    return next((point for point in frontier if (point.tau_ignore, point.tau_acc) == asked), None)


def _thresholds(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        ignore, accept = (float(part) for part in text.split(","))
    except ValueError:
        ignore = accept = -1.0
    if not (0 <= ignore <= 1 and 0 <= accept < float("inf")):
        hint = "Two numbers, for example 0.4,3.5: margins above the first count, and their sum decides above the second"
        raise UsageError(f"--threshold {text} is not IGNORE,ACC", hint)
    return ignore, accept


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 4096):
        raise UsageError(f"--batch-size {text} is neither auto nor a number from 1 to 4096")
    return int(text)


Threshold = Annotated[
    str | None,
    typer.Option(
        "--threshold",
        metavar="IGNORE,ACC",
        rich_help_panel=TWODEE,
        help="Margins above IGNORE count; their sum decides above ACC (default: the bundle's).",
    ),
]
MaxDrop = Annotated[
    float | None,
    typer.Option(
        "--max-drop",
        min=0,
        max=1,
        metavar="X",
        rich_help_panel=TWODEE,
        help="The fastest point that loses at most X of accuracy (0.02: 2 %).",
    ),
]


def _batch_option(panel: str) -> Any:  # noqa: ANN401 - typer's own
    return typer.Option("--batch-size", "-b", metavar="N|auto", rich_help_panel=panel, help="Rows at once.")


def classification(
    *,
    threshold: Threshold = None,
    max_drop: MaxDrop = None,
    full: Annotated[
        bool, typer.Option("--full", rich_help_panel=TWODEE, help="Read everything, through every layer.")
    ] = False,
    one_d: Annotated[
        bool, typer.Option("--one-d", rich_help_panel=TWODEE, help="Read everything, through a fixed number of layers.")
    ] = False,
    batch_size: Annotated[str, _batch_option(ROWS)] = "auto",
) -> Asked:
    """Read the options of classification, and how many rows are answered at once."""
    return Asked(_thresholds(threshold), max_drop, full, one_d, _batch_size(batch_size))


def comparison(
    *, threshold: Threshold = None, max_drop: MaxDrop = None, batch_size: Annotated[str, _batch_option(TWODEE)] = "auto"
) -> Asked:
    """Read the options of a comparison of all ways to decide."""
    return Asked(_thresholds(threshold), max_drop, batch_size=_batch_size(batch_size))


def refuse(ctx: typer.Context, names: Sequence[str], reason: str) -> None:
    """Raise UsageError for the first option among `names` that was said on the command line, or by a variable."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if param.name in names and source is not None and source.name in {"COMMANDLINE", "ENVIRONMENT"}:
            raise UsageError(f"{spelling(param, ctx.params.get(param.name))} {reason}", "Leave it out")
