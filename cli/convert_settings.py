"""Which options of `adapt convert` a method takes, and what they say to it."""

from collections.abc import Mapping
from typing import Any

import typer

from ..errors import UsageError

TAKES = {"river": ("river",), "rcla": ("training", "rcla"), "2dee": ("training", "2dee")}
"""Method -> the groups of options that are its own."""


def settings_of(ctx: typer.Context, method: str, groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of a method. Raises UsageError for an option of another method."""
    taken = {name for group in TAKES[method] for name in groups[group]}
    flags = {param.name: max(param.opts, key=len) for param in ctx.command.params}
    for group, values in groups.items():
        for name in values:
            source = ctx.get_parameter_source(name)
            if name not in taken and source is not None and source.name == "COMMANDLINE":
                owners = " and ".join(owner for owner, names in TAKES.items() if group in names)
                raise UsageError(f"{flags[name]} is for {owners}, not for {method}", "Leave it out")
    chosen = {name: value for group in TAKES[method] for name, value in groups[group].items()}
    return chosen if method == "river" else _said(method, chosen)


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
