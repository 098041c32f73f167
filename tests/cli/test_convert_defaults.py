"""What the help of `adapt convert` says a default is, against the default that holds."""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from adapt_llm.cli.convert_loop import loop_options, training_options
from adapt_llm.cli.convert_options import nvium_options, rcla_options, twodee_options
from adapt_llm.convert.adapters import Fitting
from adapt_llm.convert.depth_control import BETA
from adapt_llm.convert.nvium_request import EXITS, RATE_ALL, RATE_ROUTERS, RATE_SCRATCH, NviumSettings
from adapt_llm.convert.rcla_request import RATE_FULL, RATE_LORA, RclaSettings
from adapt_llm.convert.request import MethodRequest
from adapt_llm.convert.twodee_request import TwoDeeSettings

NUMBER = r"\d[\d.]*(?:e-\d+)?"


def said(options: Callable[..., dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield name and help of every option."""
    for name, hint in get_type_hints(options, include_extras=True).items():
        if get_origin(hint) is Annotated:
            yield name, str(get_args(hint)[1].help)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (loop_options, RclaSettings),
        (loop_options, NviumSettings),
        (rcla_options, RclaSettings),
        (twodee_options, TwoDeeSettings),
    ],
)
def test_numbers_in_help_are_the_defaults(
    options: Callable[..., dict[str, Any]], settings: type[MethodRequest]
) -> None:
    defaults = {field.name: field.default for field in fields(settings)}
    found = {
        name: float(match[1]) for name, text in said(options) if (match := re.search(rf"\(default: ({NUMBER})\)", text))
    }
    found.pop("share_every", None)  # the plan's, where no other way to name keepers was chosen
    assert len(found) >= 2
    assert found == {name: defaults[name] for name in found}


def test_learning_rates_in_help_are_those_of_training() -> None:
    text = dict(said(training_options))["learning_rate"]
    match = re.search(
        rf"rcla ({NUMBER}), with --lora ({NUMBER}); nvium ({NUMBER}), with --train all ({NUMBER})\)\. ", text
    )
    classifiers = re.search(rf"2dee: .*\(default: ({NUMBER})\)", text)
    assert match is not None
    assert classifiers is not None
    assert RATE_SCRATCH == RATE_ROUTERS
    wanted = [RATE_FULL, RATE_LORA, RATE_ROUTERS, RATE_ALL, Fitting.learning_rate]
    assert [float(text) for text in (*match.groups(), classifiers[1])] == wanted


def test_numbers_in_help_of_nvium_are_the_defaults() -> None:
    text = dict(said(nvium_options))
    assert f"(default: {EXITS})" in text["exits"]
    assert f"(default: {BETA})" in text["beta"]
