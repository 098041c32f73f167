"""Settings of each method as the manifest records them, in one table.

A new method is a class here and a line in METHODS. Knows no tensors; layers are counted from 1.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0, le=1)]


class MethodSettings(BaseModel, frozen=True):
    """What every method has: its name, by which the class is found."""

    model_config = ConfigDict(allow_inf_nan=False)
    name: str


class TextUsed(BaseModel, frozen=True):
    """A text that conversion looked at; `name` is a file name, never a path."""

    name: str
    sha256: Sha256
    tokens: Annotated[int, Field(gt=0)]


class TauPoint(BaseModel, frozen=True):
    """Quality at one threshold, measured at conversion. KL in nats; depth in backbone blocks.

    `exit_histogram[i]` is how many tokens (or which share) left after block i + 1.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    tau: Annotated[float, Field(ge=-1, le=1)]
    kl: float
    agreement: Share
    perplexity: float
    mean_depth: float
    exit_histogram: tuple[int | float, ...] = ()


class River(MethodSettings, frozen=True):
    """River (papers: River-LLM): 4-bit exit layers from `entry_layer` on, left into when cos(h(l-1), h(l)) > tau."""

    name: Literal["river"] = "river"
    quantizer: str
    bits: Literal[4] = 4
    group_size: int
    """Inputs per scale; -1: one scale per output row. Where it does not divide, `layout.choose_group_size` decides."""
    symmetric: bool = False
    float_zeros: bool = False
    entry_layer: Annotated[int, Field(ge=2)] = 2
    exit_layers: tuple[Annotated[int, Field(ge=2)], ...]
    tau: Annotated[float, Field(ge=-1, le=1)]
    tau_curve: tuple[TauPoint, ...] = ()
    max_loss: Annotated[float, Field(ge=0)] | None = None
    """The relative increase of perplexity that `tau` was chosen for; None when `tau` was given."""
    calibration: TextUsed | None = None
    resident: Annotated[int, Field(ge=1)] | None = None
    """Dense blocks kept in device memory, counted from the first; None: all."""
    river_source: str | None = None
    """Id or folder name of the GPTQ checkpoint that the 4-bit weights were taken from."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layers = self.exit_layers
        if list(layers) != sorted(set(layers)) or not layers or layers[0] < self.entry_layer:
            raise ValueError(f"exit_layers must rise from entry_layer ({self.entry_layer}) on, not {list(layers)}")
        if self.group_size != -1 and (self.group_size <= 0 or self.group_size % 8):
            raise ValueError(f"group_size {self.group_size} is neither -1 nor a multiple of 8")
        if self.resident is not None and self.resident < self.entry_layer - 1:
            raise ValueError(f"resident {self.resident} drops blocks before entry_layer {self.entry_layer}")
        return self


METHODS: Mapping[str, type[MethodSettings]] = MappingProxyType({"river": River})
