"""Which recipe builds which method: plan first, then build. A new method is one line here.

Imports a recipe when it is asked for.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from ..runtime.progress import Reporter
from .nvium_request import NviumSettings
from .rcla_request import RclaSettings
from .request import ConvertRequest, MethodRequest
from .river_request import RiverSettings
from .twodee_request import TwoDeeSettings

SETTINGS: Mapping[str, type[MethodRequest]] = MappingProxyType(
    {settings.method: settings for settings in (RiverSettings, RclaSettings, TwoDeeSettings, NviumSettings)}
)
"""Method -> what can be asked of it."""
RECIPES: Mapping[str, str] = MappingProxyType(
    {"river": ".river", "rcla": ".rcla", "2dee": ".twodee", "nvium": ".nvium"}
)
"""Method -> module of this package with `plan` and `build`."""


class Plan(Protocol):
    """A conversion that may start: checked, nothing written."""

    @property
    def request(self) -> ConvertRequest[Any]:
        """What was asked for."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The plan for scripts."""
        ...

    def lines(self) -> list[str]:
        """The plan for people."""
        ...


class Recipe(Protocol):
    """How one method is built."""

    def plan(self, request: ConvertRequest[Any], reporter: Reporter) -> Plan:
        """Open the inputs and check that the conversion can be done. Raises AdaptError; writes nothing."""
        ...

    def build(self, plan: Plan, reporter: Reporter) -> Path:
        """Carry a plan out; return the bundle's folder."""
        ...


def request(method: str, settings: Mapping[str, Any], **values: Any) -> ConvertRequest[Any]:  # noqa: ANN401
    """Say what is asked for, checked: `settings` of the method, `values` of every conversion. Raises UsageError."""
    return ConvertRequest(settings=SETTINGS[method](**settings), **values)


def recipe(method: str) -> Recipe:
    """Return the recipe of a method."""
    return cast("Recipe", import_module(RECIPES[method], __package__))
