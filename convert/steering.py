"""What the loop asks of a model, and of a method that changes from step to step by what it measures.

Knows no method and no loop.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import nn


class Learner(Protocol):
    """A model that can be trained; `trainable.Trainable` is one."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them, as torch has it."""
        ...

    def trained(self) -> dict[str, nn.Parameter]:
        """Those that are trained, by name."""
        ...


class Steering(Protocol):
    """What changes from step to step besides the learning rate, by what the steps before it measured."""

    def begin(self, step: int) -> None:
        """Step `step` (from 0) begins: nothing of it is measured yet."""
        ...

    def sums(self) -> list[float]:
        """What this process measured in its passes since `begin`; as many numbers whatever happened."""
        ...

    def finish(self, sums: Sequence[float]) -> None:
        """The step is over; `sums` are added over all processes."""
        ...

    def told(self) -> str:
        """How it goes, for people."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        ...
