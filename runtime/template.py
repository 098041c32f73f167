"""Chat templates: from messages to the text a model was trained on.

A template is untrusted code from the model's author: it runs in a sandbox (template_sandbox.py), and whatever it does
there becomes an AdaptError. Knows no tokenizer and no model: special tokens come in as strings, text goes out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from ..errors import AdaptError, FormatError, UnsupportedError, UsageError
from .chat_formats import BUILT_IN
from .row_content import has_surrogate
from .template_sandbox import environment
from .text import read_json

Message = Mapping[str, Any]
"""`role` and `content`, as everywhere."""

_PROBE = "system-probe-7f3a"

_MOST_TEXT = 16 * 2**20
"""Characters that a template may write: more than any context holds, and less than memory does."""

_MOST_SAID = 500


@dataclass(frozen=True)
class Template:
    """One chat template.

    Raises:
        FormatError: on first use, the source is not valid jinja, or too much of it.

    """

    source: str
    name: str = "the model's chat template"
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token`, `eos_token`, … for the template's use."""
    adds_bos: bool = False
    """Whether the tokenizer begins texts with BOS; built-in templates write one only then."""
    stops: tuple[str, ...] = ()
    """Strings that end an answer in this format, for models whose vocabulary has no token for it."""

    @classmethod
    def from_folder(
        cls, folder: Path, choice: str | None = None, *, special_tokens: Mapping[str, str], adds_bos: bool
    ) -> "Template":
        """Take the folder's own template, or `choice`: one of its named ones, a built-in name, or a file.

        Raises:
            AdaptError: no `choice`, and the folder has no template (a base model).
            UsageError: `choice` is neither a name nor a file.
            FormatError: a file is damaged.

        """
        own = _own_templates(folder)
        if choice is None:
            if not own:
                raise _no_template(folder)
            source, name, stops = own.get("default") or next(iter(own.values())), cls.name, ()
        else:
            source, name, stops = _chosen(choice, own)
        template = cls(source, name, special_tokens, adds_bos, stops)
        _ = template.compiled
        return template

    @cached_property
    def compiled(self) -> jinja2.Template:
        """The template, ready to render."""
        try:
            return environment().from_string(self.source)
        except Exception as error:  # jinja computes constants as it compiles, Python limits nesting: anything comes
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            hint = "Give another with --chat-template FILE|NAME."
            raise FormatError(f"{self.name}{line}: {_one_line(error)}", hint) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: object) -> str:
        """Write `messages` as the model reads them. Encode the result without adding special tokens.

        A system message that the template cannot place is put before the first user message.

        Args:
            messages: `role` (system, user, assistant, …) and `content` (text, or a list of text parts) each.
            add_generation_prompt: end where the assistant begins to speak.
            variables: further variables of this template, such as `enable_thinking`.

        Raises:
            AdaptError: the template refuses these messages.
            UnsupportedError: a message holds something other than text.

        """
        plain = [_plain(message) for message in messages]
        if plain and plain[0].get("role") == "system" and not self.supports_system:
            plain = _fold_system(plain)
        return self._render(plain, {**variables, "add_generation_prompt": add_generation_prompt})

    @cached_property
    def supports_system(self) -> bool:
        """Whether a system message comes through; some templates refuse it and some drop it silently."""
        user = {"role": "user", "content": "x"}
        try:
            return _PROBE in self._render([{"role": "system", "content": _PROBE}, user])
        except AdaptError:
            return not self._accepts([user])

    def _accepts(self, messages: list[dict[str, Any]]) -> bool:
        try:
            self._render(messages)
        except AdaptError:
            return False
        return True

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, object] | None = None) -> str:
        context: dict[str, object] = {
            "tools": None,
            "documents": None,
            "bos": self.special_tokens.get("bos_token", "") if self.adds_bos else "",
            **self.special_tokens,
            "add_generation_prompt": True,
            **(variables or {}),
        }
        compiled = self.compiled
        try:
            text = _joined(compiled.generate(messages=messages, **context))
        except Exception as error:  # a value in a template can raise what any Python expression can
            raise AdaptError(
                f"{self.name} refuses these messages: {_one_line(error)}", "See --chat-template and --raw."
            ) from error
        if has_surrogate(text):
            raise AdaptError(f"{self.name} writes what is not Unicode text (lone surrogate)", "See --chat-template.")
        return text


def _joined(pieces: Iterable[str]) -> str:
    """Join what a template writes, piece by piece, until it is too much."""
    size, kept = 0, []
    for piece in pieces:
        size += len(piece)
        if size > _MOST_TEXT:
            raise jinja2.TemplateError(f"it writes more than {_MOST_TEXT} characters")
        kept.append(piece)
    return "".join(kept)


def has_template(folder: Path) -> bool:
    """Whether the folder's model comes with a chat template. Raises FormatError where a file is damaged."""
    return bool(_own_templates(folder))


def _own_templates(folder: Path) -> dict[str, str]:
    """Templates by name; the file is preferred to the configuration's, as transformers does."""
    templates: dict[str, str] = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = read_json(folder / name).get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {item["name"]: item["template"] for item in value if _is_named(item)}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read(folder / "chat_template.jinja")
    return templates


def _is_named(item: object) -> bool:
    return isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in ("name", "template"))


def _chosen(choice: str, own: Mapping[str, str]) -> tuple[str, str, tuple[str, ...]]:
    if choice in own:
        return own[choice], f"the model's chat template {choice!r}", ()
    if choice in BUILT_IN:
        return BUILT_IN[choice].source, f"chat template {choice!r}", BUILT_IN[choice].stops
    if Path(choice).is_file():
        return _read(Path(choice)), f"chat template {choice}", ()
    names = ", ".join(sorted({*own, *BUILT_IN}))
    raise UsageError(f"There is no chat template {choice!r}", f"Give a file, or one of: {names}.")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise FormatError(f"{path} is not UTF-8 text: {error}") from error


def _no_template(folder: Path) -> AdaptError:
    return AdaptError(
        f"{folder.name or folder} has no chat template: it is a base model, made to continue text, not to converse",
        f"Give a template with --chat-template FILE or one of {', '.join(BUILT_IN)}, "
        "or let it continue your text with --raw.",
    )


def _plain(message: Message) -> dict[str, Any]:
    """Join a list of text parts, which most templates do not take."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UnsupportedError(f"A message holds a part of type {kind!r}", "Only text is handled.")
        parts.append(text)
    return {**message, "content": "".join(parts)}


def _fold_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system, *rest = messages
    for at, message in enumerate(rest):
        if message.get("role") == "user":
            rest[at] = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return rest
    return [{"role": "user", "content": system["content"]}, *rest]


def _one_line(error: Exception) -> str:
    """What an error says, which may be the template's own words."""
    said = str(error)[:_MOST_SAID].encode("utf-8", "backslashreplace").decode("utf-8")
    return " ".join(said.split()).rstrip(".") or type(error).__name__
