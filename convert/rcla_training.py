"""How R-CLA trains: what every process of a training does.

Knows the request, the source and the loop; neither maps nor the bundle.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..runtime.progress import Reporter, SilentReporter
from .cross_layer import CrossLayer
from .data import TrainingData
from .loop_training import LoopTraining, prepare
from .lora import LoraSettings
from .processes import Processes
from .rcla_request import RclaSettings
from .trainable import Trainable
from .training import train
from .training_memory import plan_memory

TRAINED = "trained.safetensors"
"""The piece of the work folder that holds the trained weights."""


@dataclass(frozen=True)
class Training(LoopTraining[RclaSettings]):
    """A training as asked for."""

    @property
    def lora(self) -> LoraSettings | None:
        """Low-rank training, or None where all weights are trained."""
        rank = self.settings.lora
        return None if rank is None else LoraSettings(rank=rank, seed=self.settings.seed)

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Of the weights that LoRA leaves alone, in memory."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def memory(self) -> int:
        """Bytes at the peak of a step in one process, estimated."""
        length = self.settings.sequence_length
        return plan_memory(
            self.arch,
            tokens=self.micro_batch * length * (1 if self.settings.distill is None else 2),  # both passes are kept
            length=length,
            lora=self.lora,
            frozen_dtype=self.frozen_dtype,
            precision=self.precision,
            checkpointing=self.checkpointing,
        )

    def line(self) -> str:
        """The training for people."""
        settings = self.settings
        what = "all weights" if settings.lora is None else f"LoRA of rank {settings.lora}"
        crossing = f"layers cross with probability {settings.cross_prob:g}"
        if settings.cross_draw == "leaders":
            crossing = f"up to {settings.cross_prob:.0%} of the layers follow"
        taught = "" if settings.distill is None else f", taught by plain passes with weight {settings.distill:g}"
        return f"{self.amount}; {what} at {settings.rate:g}, in {self.precision}, {crossing}{taught}"


class Trainer:
    """What every process of a training does: the same data, the same model, the same steps."""

    def __init__(self, training: Training, folder: Path, processes: Processes) -> None:
        self._training, self._folder, self._processes = training, folder, processes

    def follow(self) -> None:
        """Train with the leading process, once it has made the data; unless the weights are there already."""
        self._processes.wait()
        if not (self._folder / "pieces" / TRAINED).is_file():
            self.run(prepare(self._training, self._folder, SilentReporter()), SilentReporter())

    def run(self, data: TrainingData, reporter: Reporter) -> tuple[Trainable, int]:
        """Train; return the model and the tokens it saw."""
        training, settings = self._training, self._training.settings
        model = Trainable(
            training.arch,
            training.source.store,
            device=self._processes.device,
            lora_settings=training.lora,
            frozen_dtype=training.frozen_dtype,
            checkpointing=training.checkpointing,
        )
        named = ("cross_prob", "cross_draw", "plain_passes", "distill", "lora")
        key = {**training.key(data), **{name: getattr(settings, name) for name in named}}
        objective = CrossLayer(settings.cross_prob, settings.plain_passes, settings.cross_draw, settings.distill)
        folder = self._folder / "training"
        history = train(model, data.train, training.steps, objective, folder, reporter=reporter, key=key)
        return model, history.tokens
