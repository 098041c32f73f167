"""What `adapt convert --method river` was asked for, as data. Knows no models."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from .request import MethodRequest, choice, demand

Quantizer = Literal["gptq", "hqq", "rtn"]
_QUANTIZERS = ("gptq", "hqq", "rtn")


@dataclass(frozen=True)
class RiverSettings(MethodRequest):
    """River as asked for. Layers are counted from 1.

    group_size: inputs per scale (32, 64, 128; -1 a whole row); None takes the method's default.
    tau: the exit threshold; None chooses the lowest whose loss stays within `max_loss`.
    max_loss: the increase of perplexity over the dense model that is accepted, as a share (0.02 is 2 %).
    calibration: a UTF-8 text; None takes the one that comes with adapt. calibration_tokens: how much of it is used.
    river_from: a GPTQ checkpoint (Hub id or folder) whose 4-bit weights are taken instead of quantising.
    resident: dense blocks kept in device memory at run time; None keeps all.
    """

    method: ClassVar[str] = "river"
    file_fields: ClassVar[tuple[str, ...]] = ("calibration",)
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
        super().__post_init__()
        choice("--quantizer", self.quantizer, _QUANTIZERS)
        demand(self.bits == 4, f"--bits {self.bits} is not possible", "Exit layers have 4 bits.")
        choice("--group-size", self.group_size, (None, 32, 64, 128, -1))
        demand(self.entry_layer >= 2, f"--entry-layer {self.entry_layer} is too low", "Block 1 is always dense: use 2.")
        demand(self.tau is None or -1 <= self.tau <= 1, f"--tau {self.tau} is no cosine", "Use a value up to 1.")
        demand(
            self.max_loss >= 0,
            f"--max-loss {self.max_loss} is not a number from 0 on",
            "0.02 accepts 2 % more perplexity.",
        )
        demand(self.calibration_tokens > 0, "--calibration-tokens must be positive")
        self._check_combinations()

    def _check_combinations(self) -> None:
        hint = "Leave out one of the two."
        taken = self.river_from is not None
        demand(not (taken and self.group_size), "--river-from brings its own --group-size", hint)
        symmetric_hqq = self.quantizer == "hqq" and self.symmetric
        demand(not symmetric_hqq, "hqq has real-valued zeros and cannot be symmetric", "Use rtn or gptq.")
        if self.calibration is not None:
            demand(not self.calibration.is_dir(), f"{self.calibration} is a folder", "Name a UTF-8 text in it.")
            demand(self.calibration.is_file(), f"There is no calibration text {self.calibration}")
        if self.resident is not None:
            least = self.entry_layer - 1
            demand(
                self.resident >= least,
                f"--resident {self.resident} drops blocks that never exit",
                f"Keep at least {least}.",
            )
