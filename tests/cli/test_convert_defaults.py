"""What the help of `adapt convert` says a default is, against the default that holds."""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from adapt_llm.cli.convert_options import rcla_options, training_options, twodee_options
from adapt_llm.convert.adapters import Fitting
from adapt_llm.convert.rcla_request import RATE_FULL, RATE_LORA, RclaSettings
from adapt_llm.convert.request import MethodRequest
from adapt_llm.convert.twodee_request import TwoDeeSettings

NUMBER = r"\d[\d.]*(?:e-\d+)?"


def said(options: Callable[..., dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield name and help of every option."""
    for name, hint in get_type_hints(options, include_extras=True).items():
        if get_origin(hint) is Annotated:
            yield name, str(get_args(hint)[1].help)


@pytest.mark.parametrize(("options", "settings"), [(rcla_options, RclaSettings), (twodee_options, TwoDeeSettings)])
def test_numbers_in_help_are_the_defaults(
    options: Callable[..., dict[str, Any]], settings: type[MethodRequest]
) -> None:
    defaults = {field.name: field.default for field in fields(settings)}
    found = {
        name: float(match[1]) for name, text in said(options) if (match := re.search(rf"\(default: ({NUMBER})\)", text))
    }
    found.pop("share_every", None)  # the plan's, where no other way to name keepers was chosen
    assert len(found) >= 4
    assert found == {name: defaults[name] for name in found}


def test_learning_rates_in_help_are_those_of_training() -> None:
    text = dict(said(training_options))["learning_rate"]
    match = re.search(rf"rcla ({NUMBER}), with --lora ({NUMBER})\)\. 2dee: .*\(default: ({NUMBER})\)", text)
    assert match is not None
    assert [float(text) for text in match.groups()] == [RATE_FULL, RATE_LORA, Fitting.learning_rate]
