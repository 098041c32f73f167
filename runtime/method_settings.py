"""What the settings of several methods are made of: names, shares, and how weights were trained.

Knows no method; layers are counted from 1.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Share = Annotated[float, Field(ge=0, le=1)]


class MethodSettings(BaseModel, frozen=True):
    """What every method has: its name, by which the class is found."""

    model_config = ConfigDict(allow_inf_nan=False)
    name: str

    def misfit(self, layers: int) -> str | None:
        """What these settings say that a model of so many layers cannot have, in words; None: nothing."""
        del layers
        return None


class TextUsed(BaseModel, frozen=True):
    """A text that conversion looked at; `name` is a file name, never a path."""

    name: str
    sha256: Sha256
    tokens: Annotated[int, Field(gt=0)]


class TrainingRun(BaseModel, frozen=True):
    """How weights were trained. `data` is what they were trained on, `tokens` how many tokens they saw in all."""

    model_config = ConfigDict(allow_inf_nan=False)
    data: TextUsed
    steps: Annotated[int, Field(gt=0)]
    tokens: Annotated[int, Field(gt=0)]
    sequence_length: Annotated[int, Field(gt=0)]
    sequences_per_step: Annotated[int, Field(gt=0)]
    learning_rate: Annotated[float, Field(gt=0)]
    lora_rank: Annotated[int, Field(gt=0)] | None = None
    """None: all weights were trained."""
    loss_on: Literal["all", "answers"] = "all"
    seed: int = 0


def span(layers: tuple[int, ...]) -> str:
    """Layers as people write them: `2 to 30`, or one by one where there are gaps."""
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(str(layer) for layer in layers)
