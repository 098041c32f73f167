"""How to train: the numbers, and what they mean for one step. Knows no model and no tensors."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import UsageError

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class TrainingSettings:
    """AdamW with a linear warm-up and a linear decay to 0.

    steps: optimiser steps. batch_size: sequences of one step, over all processes. micro_batch: sequences of one pass
    (None: all of a process's share); only memory and speed depend on it, and which random draws a sequence meets.
    warmup: share of the steps. clip_norm: greatest norm of the gradient of the mean loss of a token (None: no limit).
    weight_decay spares norms and biases. precision: of the products; weights, gradients and moments are float32.
    checkpoint_steps, checkpoint_minutes: what comes first; None means never for this reason.
    log_every, evaluate_every: steps; evaluate_every None evaluates nothing on the way.
    """

    steps: int
    learning_rate: float
    batch_size: int = 16
    micro_batch: int | None = None
    warmup: float = 0.015
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    precision: Precision = "fp32"
    seed: int = 0
    checkpoint_steps: int | None = None
    checkpoint_minutes: float | None = 10.0
    log_every: int = 10
    evaluate_every: int | None = None

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.log_every) < 1:
            raise UsageError("Steps, batch size and steps between two lines are positive")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise UsageError(f"A pass of {self.micro_batch} sequences does nothing")
        if not 0 < self.learning_rate < 1:
            raise UsageError(f"Learning rate {self.learning_rate} is not in (0, 1)")
        if not 0 <= self.warmup <= 1:
            raise UsageError(f"Warm-up {self.warmup} is no share of the steps")

    def rate(self, step: int) -> float:
        """The learning rate of step `step` (from 0)."""
        rising = round(self.warmup * self.steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        return self.learning_rate * (self.steps - step) / (self.steps - rising)

    def passes(self, processes: int) -> list[range]:
        """The sequences of a step (from 0), a range for each pass, in order; pass i is for process i mod `processes`.

        What a pass holds does not depend on who computes it, as long as `micro_batch` is given.
        """
        size = self.micro_batch or max(1, -(-self.batch_size // processes))
        starts = range(0, self.batch_size, size)
        return [range(start, min(start + size, self.batch_size)) for start in starts]

    def key(self) -> dict[str, Any]:
        """What the weights at a step depend on, as JSON."""
        spared = ("checkpoint_steps", "checkpoint_minutes", "log_every", "evaluate_every")
        return {name: value for name, value in asdict(self).items() if name not in spared}
