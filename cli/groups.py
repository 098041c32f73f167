"""Options in groups: a parameter `x: Annotated[T, Group(make)]` of a command stands for all parameters of `make`.

So that commands which sample, or open a model, share the options for it and not a copy of them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Group:
    """Where a parameter's value comes from: `make`, whose own parameters are Typer options."""

    make: Callable[..., object]


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    return [parameter.replace(annotation=hints[parameter.name], kind=kind) for parameter in parameters]


def _group(parameter: inspect.Parameter) -> Group | None:
    found = getattr(parameter.annotation, "__metadata__", ())
    return next((item for item in found if isinstance(item, Group)), None)


def flattened(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` with every group replaced by its options, as Typer reads it."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Group, list[str]]] = {}
    for parameter in _parameters(function):
        group = _group(parameter)
        members = [parameter] if group is None else _parameters(group.make)
        parameters += members
        if group is not None:
            groups[parameter.name] = (group, [member.name for member in members])

    def call(**values: Any) -> None:  # noqa: ANN401 - whatever the options hold
        for name, (group, members) in groups.items():
            values[name] = group.make(**{member: values.pop(member) for member in members})
        function(**values)

    call.__doc__ = function.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return call


def spelling(param: Any, value: object) -> str:  # noqa: ANN401 - a parameter of Typer's own click
    """Of an option's several names its first long one, that of the documentation; of a switch turned off, `--no-…`."""
    off = getattr(param, "secondary_opts", ())  # arguments have none
    names = off if value is False and off else param.opts
    return next((name for name in names if name.startswith("--")), names[0])
