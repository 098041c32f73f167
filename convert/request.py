"""What `adapt convert` was asked for, as data, checked before anything is read.

Knows no models: what depends on the source (layers, widths) is checked by the recipe.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError
from .backbone import BackboneMode

METHOD_NAMES = ("river",)
Quantizer = Literal["gptq", "hqq", "rtn"]
_QUANTIZERS = ("gptq", "hqq", "rtn")
_BACKBONES = ("copy", "link", "reference")
_DTYPES = ("auto", "bf16", "fp16", "fp32")


@dataclass(frozen=True)
class RiverSettings:
    """River as asked for. Layers are counted from 1.

    group_size: inputs per scale (32, 64, 128; -1 a whole row); None takes the method's default.
    tau: the exit threshold; None chooses the lowest whose loss stays within `max_loss`.
    max_loss: the increase of perplexity over the dense model that is accepted, as a share (0.02 is 2 %).
    calibration: a UTF-8 text; None takes the one that comes with adapt. calibration_tokens: how much of it is used.
    river_from: a GPTQ checkpoint (Hub id or folder) whose 4-bit weights are taken instead of quantising.
    resident: dense blocks kept in device memory at run time; None keeps all.
    """

    quantizer: Quantizer = "gptq"
    bits: int = 4
    group_size: int | None = None
    symmetric: bool = False
    entry_layer: int = 2
    tau: float | None = None
    max_loss: float = 0.1
    calibration: Path | None = None
    calibration_tokens: int = 8192
    river_from: str | None = None
    resident: int | None = None

    def __post_init__(self) -> None:
        _choice("--quantizer", self.quantizer, _QUANTIZERS)
        _demand(self.bits == 4, f"--bits {self.bits} is not possible", "Exit layers have 4 bits.")
        _choice("--group-size", self.group_size, (None, 32, 64, 128, -1))
        _demand(
            self.entry_layer >= 2, f"--entry-layer {self.entry_layer} is too low", "Block 1 is always dense: use 2."
        )
        _demand(self.tau is None or -1 <= self.tau <= 1, f"--tau {self.tau} is no cosine", "Use a value up to 1.")
        _demand(
            0 <= self.max_loss < math.inf,
            f"--max-loss {self.max_loss} is not a number from 0 on",
            "0.02 accepts 2 % more perplexity.",
        )
        _demand(self.calibration_tokens > 0, "--calibration-tokens must be positive")
        self._check_combinations()

    def _check_combinations(self) -> None:
        hint = "Leave out one of the two."
        taken = self.river_from is not None
        _demand(not (taken and self.group_size), "--river-from brings its own --group-size", hint)
        symmetric_hqq = self.quantizer == "hqq" and self.symmetric
        _demand(not symmetric_hqq, "hqq has real-valued zeros and cannot be symmetric", "Use rtn or gptq.")
        if self.calibration is not None:
            _demand(self.calibration.is_file(), f"There is no calibration text {self.calibration}")
        if self.resident is not None:
            least = self.entry_layer - 1
            _demand(
                self.resident >= least,
                f"--resident {self.resident} drops blocks that never exit",
                f"Keep at least {least}.",
            )


@dataclass(frozen=True)
class ConvertRequest:
    """A conversion as asked for. `resume`: None takes up matching work, True insists on it, False starts afresh."""

    source: str
    output: Path
    method: str = "river"
    river: RiverSettings = field(default_factory=RiverSettings)
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
        _choice("--method", self.method, METHOD_NAMES)
        _choice("--backbone", self.backbone, _BACKBONES)
        _choice("--dtype", self.dtype, _DTYPES)
        _demand(bool(self.output.name), f"{self.output} is no folder of its own", "name the bundle's folder with -o")
        _demand(bool(self.source), "SOURCE is empty", "Name a Hub id, a folder, a .gguf file or a bundle.")
        _demand(self.threads is None or self.threads > 0, f"--threads {self.threads} is not positive")
        source = Path(self.source)
        if source.exists() and self.output.exists():
            _demand(not source.samefile(self.output), "The output is the source", "Choose another folder with -o.")

    def fingerprint(self) -> dict[str, Any]:
        """The part of the request that the result's bytes depend on, as JSON.

        The recipe adds the source's identity, the calibration text's sha256 and the versions of programs.
        """
        river = self.river
        return {
            "method": self.method,
            "backbone": self.backbone,
            "device": self.device,
            "dtype": self.dtype,
            "threads": self.threads,
            "untrained": self.untrained,
            "river": {
                "quantizer": river.quantizer,
                "bits": river.bits,
                "group_size": river.group_size,
                "symmetric": river.symmetric,
                "entry_layer": river.entry_layer,
                "tau": river.tau,
                "max_loss": river.max_loss,
                "calibration_tokens": river.calibration_tokens,
                "river_from": river.river_from,
                "resident": river.resident,
            },
        }


def _choice(flag: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise UsageError(
            f"{flag} {value} is not possible",
            f"Use one of {', '.join(str(item) for item in allowed if item is not None)}.",
        )


def _demand(condition: bool, what: str, hint: str = "") -> None:
    if not condition:
        raise UsageError(what, hint)
