"""JSON from outside as Python values. Knows no files and no meaning: who reads a file says which one is damaged."""

import json
from collections.abc import Callable
from typing import Any


def parse_json(
    text: str | bytes,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
) -> Any:  # noqa: ANN401 - JSON from outside
    """`json.loads` whose every refusal is a ValueError: Python tells a text nested too deeply by a RecursionError.

    `pairs` and `constant` are its object_pairs_hook and parse_constant.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
