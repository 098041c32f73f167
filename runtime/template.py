"""Chat templates: from messages to the text a model was trained on.

A template is untrusted code from the model's author. It runs in jinja2's immutable sandbox, with the helpers that
transformers gives it. Knows no tokenizer and no model: special tokens come in as strings, text goes out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls  # noqa: N812 - jinja2 gives this class a lower-case name
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import AdaptError, FormatError, UnsupportedError, UsageError
from .chat_formats import BUILT_IN
from .text import read_json

Message = Mapping[str, Any]
"""`role` and `content`, as everywhere."""

_PROBE = "system-probe-7f3a"

# A value in a template can raise what any Python expression can.
_RENDER_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it is only let through."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """jinja2's namespace without underscore names, which would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - so that namespace(self=…) works
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - as dict()
    """Stand in for the class `dict`: a function has no attributes that lead elsewhere."""
    return dict(*args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControls]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., object]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _make_dict,
    }
    environment.globals.update(helpers)
    return environment


@dataclass(frozen=True)
class Template:
    """One chat template.

    Raises:
        FormatError: on first use, the source is not valid jinja.

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
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise FormatError(
                f"{self.name}, line {error.lineno}: {_one_line(error)}", "Give another with --chat-template FILE|NAME."
            ) from error

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
        try:
            return self.compiled.render(messages=messages, **context)
        except (jinja2.TemplateError, *_RENDER_ERRORS) as error:
            raise AdaptError(
                f"{self.name} refuses these messages: {_one_line(error)}", "See --chat-template and --raw."
            ) from error


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
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
