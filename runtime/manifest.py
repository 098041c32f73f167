"""adapt.json: what a bundle is, as typed data.

Reads, checks and writes the manifest. Knows no tensors, no torch and nothing about how a bundle was made.
The text is the same for the same content: no dates, no absolute paths, sorted where order has no meaning.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from ..errors import FormatError, UnsupportedError
from .json_text import parse_json
from .method_settings import MethodSettings, Sha256
from .methods import METHODS
from .progress import Reporter
from .row_content import has_surrogate
from .tuned import Tuned

MANIFEST_NAME = "adapt.json"
FORMAT_VERSION = 1
NEEDS_ADAPT = "0.1.0"
"""The first version of adapt that reads what this one writes."""

KNOWN_FEATURES = frozenset({"river", "float-zeros", "exit-rule", "rcla", "2dee", "nvium"})
"""Features that a reader must know, or refuse the bundle."""
KNOWN_OPTIONAL = frozenset({"tau-curve"})

M = TypeVar("M", bound=MethodSettings)

_SIGNIFICANT_DIGITS = 6
_ABSOLUTE = re.compile(r"^(/|~|\\\\|[A-Za-z]:[\\/]|file:)")


def _no_name(text: str) -> bool:
    return "\0" in text or has_surrogate(text)


def _relative_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or _ABSOLUTE.match(name) or ".." in parts or "\\" in name or _no_name(name):
        raise ValueError(f"{name!r} is not a file name inside the bundle")
    return name


FileName = Annotated[str, AfterValidator(_relative_name)]


class _Strict(BaseModel, frozen=True):
    model_config = ConfigDict(allow_inf_nan=False)


class FileRecord(_Strict, frozen=True):
    """What a file must be."""

    sha256: Sha256
    bytes: Annotated[int, Field(ge=0)]


class Base(_Strict, frozen=True):
    """The model that was converted. `id` is a Hub id, or the name of a folder or file."""

    id: str
    revision: str | None = None
    config_sha256: Sha256
    index_sha256: Sha256 | None = None


class Backbone(_Strict, frozen=True):
    """Where the 16-bit weights are: in the bundle (`copy`, `link`), or in the Hub cache (`reference`)."""

    mode: Literal["copy", "link", "reference"] = "copy"
    files: dict[FileName, FileRecord] = Field(default_factory=dict)
    """Only for `reference`: the files of `base.id` at `base.revision`."""

    @model_validator(mode="after")
    def _reference_names_files(self) -> Self:
        if (self.mode == "reference") != bool(self.files):
            raise ValueError("backbone.files is for mode 'reference', and needed there")
        return self


class Quality(_Strict, frozen=True):
    """Figures measured at conversion on a held-out text: perplexities, KL in nats, agreement as a share of tokens."""

    tokens: Annotated[int, Field(gt=0)]
    text: str
    dense_perplexity: float
    perplexity: float
    kl: float
    agreement: float
    mean_depth: float
    exit_histogram: tuple[int | float, ...] = ()
    all_4bit: dict[str, float] = Field(default_factory=dict)
    """The same figures with every exit layer in use: the floor of any threshold."""


class SelfCheck(_Strict, frozen=True):
    """What the self-check's text gave at conversion: mean negative log-likelihood in nats a token.

    `dense_nll` without an exit, through all blocks as they are stored; `river_nll` by River's rule; `scores` are the
    last layer's classifier on the text (2D-EE); `mixture_nll` by the mixture of all exits (N-vium).
    """

    tokens: Annotated[int, Field(gt=0)]
    dense_nll: float
    river_nll: float | None = None
    mixture_nll: float | None = None
    scores: tuple[float, ...] = ()


def _method(value: object) -> object:
    if isinstance(value, MethodSettings):
        return value
    name = value.get("name") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"unknown method {name!r}; this version knows {', '.join(sorted(METHODS))}")
    return METHODS[name].model_validate(value)


AnyMethod = Annotated[SerializeAsAny[MethodSettings], BeforeValidator(_method)]


class Manifest(_Strict, frozen=True):
    """The whole of adapt.json."""

    format_version: Literal[1] = FORMAT_VERSION
    needs_adapt: str = NEEDS_ADAPT
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    base: Base
    methods: Annotated[tuple[AnyMethod, ...], Field(min_length=1)]
    trained: bool = True
    """False: a method that needs training was converted without (`--untrained`)."""
    backbone: Backbone = Backbone()
    quality: Quality | None = None
    self_check: SelfCheck | None = None
    tuned: Tuned | None = None
    """What `tune` measured last, and the point of it that the methods' settings now stand for."""
    libraries: dict[str, str] = Field(default_factory=dict)
    files: dict[FileName, FileRecord] = Field(default_factory=dict)
    """Every file of the bundle except adapt.json itself."""

    @field_validator("required", "optional")
    @classmethod
    def _sorted(cls, features: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(features)))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if MANIFEST_NAME in self.files:
            raise ValueError(f"{MANIFEST_NAME} cannot list itself")
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise ValueError(f"methods: a method is there twice ({', '.join(names)})")
        for where, text in _strings(self.model_dump()):
            if _ABSOLUTE.match(text):
                raise ValueError(f"{where} holds a path of one machine: {text!r}")
            if _no_name(text):  # no file, no model and no label is called so; the system refuses it in a path
                raise ValueError(f"{where} holds a NUL byte or half a character: {text!r}")
        return self

    def method(self, kind: type[M]) -> M | None:
        """Settings of the first method of this kind, or None."""
        return next((method for method in self.methods if isinstance(method, kind)), None)

    def dumps(self) -> str:
        """Text of adapt.json: floats to six significant digits, tables sorted, ends with a newline."""
        data = _rounded(self.model_dump(mode="json"))
        for table in (data["libraries"], data["files"], data["backbone"]["files"]):
            _sort(table)
        return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _strings(value: object, where: str = "adapt.json") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{where}: a key", str(key)
            yield from _strings(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _strings(item, f"{where}[{number}]")


def _rounded(value: Any) -> Any:  # noqa: ANN401 - walks any JSON value
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def _sort(table: dict[str, object]) -> None:
    items = sorted(table.items())
    table.clear()
    table.update(items)


def loads(text: str, *, reporter: Reporter | None = None) -> Manifest:
    """Parse and check a manifest.

    Raises FormatError (damaged), UnsupportedError (made by a newer adapt). Warns of optional features not known here.
    """
    try:
        data = parse_json(text)
    except ValueError as error:
        raise FormatError(f"{MANIFEST_NAME} is not JSON: {error}", REPAIR) from error
    if not isinstance(data, dict):
        raise FormatError(f"{MANIFEST_NAME} is not a JSON object", REPAIR)
    _check_features(data)
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        raise FormatError(f"{MANIFEST_NAME}: {_first(error)}", REPAIR) from error
    ignored = sorted(set(manifest.optional) - KNOWN_OPTIONAL)
    if ignored and reporter is not None:
        reporter.warn(f"Ignored: {', '.join(ignored)} (optional parts of the bundle that this adapt does not know)")
    return manifest


def read_manifest(path: Path, *, reporter: Reporter | None = None) -> Manifest:
    """Read a manifest file. Raises FormatError, UnsupportedError as `loads`."""
    try:
        return loads(path.read_text(encoding="utf-8"), reporter=reporter)
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text", REPAIR) from error


REPAIR = "Convert again, or fetch the bundle again."


def _check_features(data: Mapping[str, Any]) -> None:
    """Newer things first: a newer manifest need not look like ours."""
    version = data.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{MANIFEST_NAME} has no format_version", REPAIR)
    needed = f"Install adapt-llm {data.get('needs_adapt', 'of a newer version')} or newer."
    if version > FORMAT_VERSION:
        raise UnsupportedError(f"The bundle's format is version {version}, this adapt reads {FORMAT_VERSION}", needed)
    required = data.get("required", [])
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    unknown = sorted(set(names) - KNOWN_FEATURES)
    if unknown:
        raise UnsupportedError(f"The bundle needs {', '.join(unknown)}, which this adapt does not have", needed)


def _first(error: ValidationError) -> str:
    """The first complaint of pydantic as one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = repr(".".join(str(part) for part in first["loc"]))[1:-1]  # what cannot be printed is escaped
    what = first["msg"].removeprefix("Value error, ")
    more = error.error_count() - 1
    return (f"{where}: {what}" if where else what) + (f" (and {more} more)" if more else "")
