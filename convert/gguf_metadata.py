"""The metadata of a GGUF file by the keys of its architecture, each of the kind that it must be.

Knows no config key and no weights; see `gguf_config` for what the keys mean.
"""

from typing import Any

import numpy as np

from ..errors import FormatError, UnsupportedError
from ..runtime.config_types import POSITIVE, SIZE, Kind, shown
from .gguf_names import NAMINGS
from .gguf_reader import GgufFile

FETCH_AGAIN = "Fetch the file again."


def architecture_of(file: GgufFile) -> str:
    """GGUF's name of the architecture; `UnsupportedError` if it is none of those in `gguf_names`."""
    name = file.metadata.get("general.architecture", "none")
    if not isinstance(name, str) or name not in NAMINGS:
        hint = f"Supported: {', '.join(sorted(NAMINGS))}."
        raise UnsupportedError(f"{file.path.name} holds a model of architecture '{name}'", hint)
    return name


class Metadata:
    """Metadata keys of one architecture, with the shortest decimal for what was rounded to float32."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = architecture_of(file)

    def get(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - typed by the file
        """The value of `<architecture>.<key>`."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which no check lets through
            return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:  # noqa: ANN401 - typed by the file
        """As `get`; a missing key is a `FormatError`."""
        value = self.get(key)
        if value is None:
            raise FormatError(f"{self.file.path.name} lacks the key {self.architecture}.{key}", "Convert it again")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number, the same for all layers where it is one for each; otherwise as `get` or `need`."""
        return self._checked(key, _one(self.need(key) if default is None else self.get(key, default), key), SIZE)

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number; otherwise as `get` or `need`."""
        return self._checked(key, self.need(key) if default is None else self.get(key, default), POSITIVE)

    def _checked(self, key: str, value: object, kind: Kind) -> Any:  # noqa: ANN401 - as the kind says
        name, is_kind = kind
        if not is_kind(value):
            what = f"{self.file.path.name} has {self.architecture}.{key} = {shown(value)}, not {name}"
            raise FormatError(what, FETCH_AGAIN)
        return value

    def has(self, tensor: str) -> bool:
        """Whether the file holds this tensor."""
        return tensor in self.file.tensors


def _one(value: object, key: str) -> object:
    """Per-layer lists with one value only; pruned models have several, and no place here."""
    if isinstance(value, list) and value:
        if any(item != value[0] for item in value):
            raise UnsupportedError(f"{key} differs from layer to layer", "Only models of equal layers are supported")
        return value[0]
    return value
