"""What `adapt convert` was asked for, as data, checked before anything is read.

Each method's own settings are in a module of their own. Knows no models: what depends on the source (layers, widths)
is checked by the recipe.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ..errors import UsageError
from ..runtime.options import flag_of
from .backbone import BackboneMode

_BACKBONES = ("copy", "link", "reference")
_DTYPES = ("auto", "bf16", "fp16", "fp32")


@dataclass(frozen=True)
class MethodRequest:
    """What every method's settings have. `file_fields` name local files: their content matters, not their names."""

    method: ClassVar[str]
    file_fields: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{flag_of(each.name)} {value} is not a finite number")

    @property
    def files(self) -> tuple[Path, ...]:
        """Local files that the conversion reads besides its source."""
        values = [getattr(self, name) for name in self.file_fields]
        flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
        return tuple(path for path in flat if path is not None)

    def fingerprint(self) -> dict[str, Any]:
        """Every setting as JSON, without files: the recipe adds their sha256."""
        return {key: value for key, value in asdict(self).items() if key not in self.file_fields}


S_co = TypeVar("S_co", bound=MethodRequest, covariant=True)


@dataclass(frozen=True)
class ConvertRequest(Generic[S_co]):
    """A conversion as asked for. `resume`: None takes up matching work, True insists on it, False starts afresh."""

    source: str
    output: Path
    settings: S_co
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: Path | None = None
    offline: bool = False
    force: bool = False
    resume: bool | None = None
    dry_run: bool = False
    untrained: bool = False
    backbone: BackboneMode = "copy"
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        choice("--backbone", self.backbone, _BACKBONES)
        choice("--dtype", self.dtype, _DTYPES)
        demand(bool(self.output.name), f"{self.output} is no folder of its own", "name the bundle's folder with -o")
        demand(bool(self.source), "SOURCE is empty", "Name a Hub id, a folder, a .gguf file or a bundle.")
        demand(self.threads is None or self.threads > 0, f"--threads {self.threads} is not positive")
        source = Path(self.source)
        if source.exists() and self.output.exists():
            demand(not source.samefile(self.output), "The output is the source", "Choose another folder with -o.")

    @property
    def method(self) -> str:
        """The method's name, which its settings bring."""
        return self.settings.method

    def fingerprint(self) -> dict[str, Any]:
        """The part of the request that the result's bytes depend on, as JSON.

        The recipe adds the source's identity, the files' sha256 and the versions of programs.
        """
        return {
            "method": self.method,
            "backbone": self.backbone,
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "untrained": self.untrained,
            self.method: self.settings.fingerprint(),
        }


def choice(flag: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise UsageError unless the value of an option is one of those allowed."""
    if value not in allowed:
        raise UsageError(
            f"{flag} {value} is not possible",
            f"Use one of {', '.join(str(item) for item in allowed if item is not None)}.",
        )


def demand(condition: bool, what: str, hint: str = "") -> None:
    """Raise UsageError unless the condition holds."""
    if not condition:
        raise UsageError(what, hint)


def check_apart(validation: Path, data: Iterable[Path]) -> None:
    """Raise UsageError where held-out data is a file that is trained on."""
    for path in data:
        same = validation.exists() and path.exists() and validation.samefile(path)
        demand(not same, f"--validation {validation} is trained on", "Leave it out: a part of --data is held back.")
