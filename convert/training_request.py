"""What may be asked of every method that trains weights on texts, checked before any work. Knows no models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from .examples import look_into
from .request import MethodRequest, check_apart, choice, demand


@dataclass(frozen=True)
class TrainingRequest(MethodRequest):
    """A training as asked for.

    data: training texts: .txt, or jsonl with `text`, `prompt` and `completion`, or `messages`.
    validation: held-out texts; None holds back a part of `data`.
    sequence_length: tokens of a training sequence; batch_size: sequences of one optimiser step, on all devices.
    micro_batch: sequences of one pass; None: some 4,096 tokens, see `loop_training`.
    loss_on: every token, or answers only (completions, assistant turns).
    gradient_checkpointing: compute activations twice; None: where keeping them takes much memory.
    checkpoint_every: optimiser steps between two checkpoints.
    """

    file_fields: ClassVar[tuple[str, ...]] = ("data", "validation")
    data: tuple[Path, ...] = ()
    validation: Path | None = None
    steps: int = 1000
    learning_rate: float | None = None
    sequence_length: int = 1024
    batch_size: int = 16
    micro_batch: int | None = None
    warmup: float = 0.015
    weight_decay: float = 0.1
    loss_on: Literal["all", "answers"] = "all"
    packed: bool = True
    gradient_checkpointing: bool | None = None
    checkpoint_every: int = 50
    seed: int = 0

    @property
    def rate(self) -> float:
        """The learning rate at its highest."""
        return self.default_rate if self.learning_rate is None else self.learning_rate

    @property
    def default_rate(self) -> float:
        """What the method takes where no rate is given."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, Any]:
        """Without what changes no byte (a block's activations are the same computed twice), and without `micro_batch`.

        By default that depends on the number of processes. A checkpoint of the training compares it; once the weights
        are there, nothing depends on it.
        """
        spared = ("gradient_checkpointing", "checkpoint_every", "micro_batch")
        return {name: value for name, value in super().fingerprint().items() if name not in spared}

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, value in (
            ("--steps", self.steps),
            ("--sequence-length", self.sequence_length),
            ("--batch-size", self.batch_size),
        ):
            demand(value >= 1, f"{flag} {value} is not positive")
        demand(
            self.learning_rate is None or 0 < self.learning_rate < 1,
            f"--learning-rate {self.learning_rate} is not in (0, 1)",
        )
        at_once, step = self.micro_batch or 1, self.batch_size
        demand(at_once <= step, f"--micro-batch {at_once} is more than --batch-size {step}", "A step has no more.")
        choice("--loss-on", self.loss_on, ("all", "answers"))
        for path in self.files:
            demand(not path.is_dir(), f"{path} is a folder", "Name the files in it.")
            demand(path.is_file(), f"There is no file {path}")
            look_into(path)
        if self.validation is not None:
            check_apart(self.validation, self.data)
