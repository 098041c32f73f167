"""Which options of `adapt convert` a method takes, and what they say to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from ..errors import UsageError
from .groups import spelling

TAKES = {
    "river": ("river",),
    "rcla": ("training", "lora", "loop", "rcla"),
    "2dee": ("training", "lora", "2dee"),
    "nvium": ("training", "loop", "nvium"),
}
"""Method -> the groups of options that are its own."""
EXCLUDE_EACH_OTHER = (
    ("tau", "max_loss"),
    ("river_from", "quantizer"),
    ("river_from", "symmetric"),
    ("river_from", "group_size"),
    ("validation", "validation_share"),
)
"""Options of one method that say the same thing twice, or one of which leaves nothing for the other to say."""
MAY_BE_UNTRAINED = ("rcla",)
TRAINS = (
    *("steps", "learning_rate", "lora", "cross_prob", "cross_draw", "plain_passes", "distill"),
    *("batch_size", "micro_batch", "gradient_checkpointing", "checkpoint_every"),
)
"""Options that say how weights are trained."""
READS = ("validation", "sequence_length", "packed", "loss_on", "seed")
"""Options that say how `--data` is read; without training it still judges, and chooses a map."""


def settings_of(
    ctx: typer.Context, method: str, groups: Mapping[str, Mapping[str, Any]], *, untrained: bool
) -> dict[str, Any]:
    """Return the settings of a method. Raises UsageError for an option of another method, or one without effect."""
    taken = {name for group in TAKES[method] for name in groups[group]}
    given = {name: flag for name, flag in _flags(ctx).items() if _is_given(ctx, name)}
    for group, values in groups.items():
        for name in values:
            if name not in taken and name in given:
                owners = _listed([owner for owner, names in TAKES.items() if group in names])
                raise UsageError(f"{given[name]} is for {owners}, not for {method}", "Leave it out")
    for one, other in EXCLUDE_EACH_OTHER:
        if one in given and other in given:
            raise UsageError(f"{given[one]} and {given[other]} exclude each other", "Leave one of them out")
    if untrained:
        _check_untrained(method, given)
    chosen = {name: value for group in TAKES[method] for name, value in groups[group].items()}
    return chosen if method == "river" else _said(method, chosen)


def _listed(names: Sequence[str]) -> str:
    """Names as people list them: `a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _flags(ctx: typer.Context) -> dict[str, str]:
    return {param.name: spelling(param, ctx.params.get(param.name)) for param in ctx.command.params if param.name}


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_untrained(method: str, given: Mapping[str, str]) -> None:
    """Refuse `--untrained` where nothing is trained, or must be, and beside it what would do nothing."""
    if method not in MAY_BE_UNTRAINED:
        raise UsageError(f"--untrained is for {' and '.join(MAY_BE_UNTRAINED)}, not for {method}", "Leave it out")
    for name in (*TRAINS, *(() if "data" in given else READS)):
        if name in given:
            remedy = "Leave one of them out" if name in TRAINS else "Name texts with --data, or leave it out"
            raise UsageError(f"{given[name]} does nothing with --untrained", remedy)


def _said(method: str, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was not said: the method's own defaults hold."""
    said = {name: value for name, value in values.items() if value is not None}
    data = said.pop("data", [])
    if method == "2dee":
        if len(data) > 1:
            raise UsageError("2dee takes one file of labelled rows", "Join them, or give the second as --validation")
        said |= {"data": data[0]} if data else {}
    elif data:
        said["data"] = tuple(data)
    return said
