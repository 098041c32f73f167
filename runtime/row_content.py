"""Where a row has its content, and what is wrong with one that has none. Pure Python; knows no file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

CONTENT_KEYS = ("messages", "prompt", "text")
"""Where a row to be continued has its content; the first that is there counts."""
CLASSIFY_KEYS = ("sentences", "prompt", "text")
"""The same for a row to be classified: `sentences` is a text that is already cut into sentences."""
_NO_MESSAGES = "is neither a string nor a list of messages with role and content"
_NO_SENTENCES = "is neither a string nor a list of sentences, none of them empty"
_LISTS = ("messages", "sentences")

Content = str | list[dict[str, object]] | list[str]


@dataclass(frozen=True)
class Wanted:
    """Where content may be, and of which kind."""

    field_name: str | None
    keys: tuple[str, ...]

    def key_in(self, fields: Mapping[str, object]) -> str | None:
        """Return the key of a row's content, None where it has none."""
        if self.field_name:
            return self.field_name if self.field_name in fields else None
        # A row that was classified has a number under `sentences`; classified again, its text counts.
        there = [key for key in self.keys if key in fields]
        usable = (key for key in there if key != "sentences" or isinstance(fields[key], list))
        return next(usable, there[0] if there else None)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a table that may hold it."""
        return (self.field_name,) if self.field_name else tuple(key for key in self.keys if key not in _LISTS)

    def described(self) -> str:
        """Name the keys, as in `no key 'text' or 'prompt'`."""
        if self.field_name:
            return f"'{self.field_name}'"
        *others, last = (f"'{key}'" for key in reversed(self.keys))
        return f"{', '.join(others)} or {last}"


def content_problem(name: str, value: object, keys: Sequence[str]) -> str | None:
    """Say why the value of `name` is no content where content is looked for under `keys`; None where it is."""
    if isinstance(value, str):
        if not value.strip():
            return f"'{name}' is empty"
        return f"'{name}' is not Unicode text (lone surrogate)" if has_surrogate(value) else None
    items = cast("list[object]", value) if isinstance(value, list) else []
    if "sentences" in keys:
        return None if items and all(_is_sentence(item) for item in items) else f"'{name}' {_NO_SENTENCES}"
    return None if items and all(_is_message(item) for item in items) else f"'{name}' {_NO_MESSAGES}"


def _is_sentence(item: object) -> bool:
    return isinstance(item, str) and bool(item.strip()) and not has_surrogate(item)


def _is_message(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    message = cast("dict[str, object]", item)
    content = message.get("content")
    return isinstance(message.get("role"), str) and isinstance(content, str) and not has_surrogate(content)


def has_surrogate(text: str) -> bool:
    """Whether a text is not Unicode: JSON escapes and undecodable bytes can leave half a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
