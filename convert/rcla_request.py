"""What `adapt convert --method rcla` was asked for, as data. Knows no models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from .request import MethodRequest, choice, demand

RATE_FULL, RATE_LORA = 5e-6, 1e-4
"""Learning rates (papers: R-CLA section 4.1 for full tuning; what LoRA usually takes)."""


@dataclass(frozen=True)
class RclaSettings(MethodRequest):
    """R-CLA as asked for. Layers are counted from 1. One of the first three says which layers keep a cache.

    share_every: the first of every so many layers keeps its cache, the others read it (default 4).
    keep_layers: the keepers, named. keep_ratio: a share of layers, chosen by the loss on some of the training text.
    data: training texts: .txt, or jsonl with `text`, `prompt` and `completion`, or `messages`.
    validation: held-out texts; None holds back a part of `data`.
    cross_prob: probability that a layer reads an earlier layer's keys and values in a training pass.
    plain_passes: share of the training passes in which every layer reads its own.
    sequence_length: tokens of a training sequence; batch_size: sequences of one optimiser step, on all devices.
    micro_batch: sequences of one pass; None: some 4,096 tokens, see `rcla_training`.
    loss_on: every token, or answers only (completions, assistant turns).
    lora: rank; None trains all weights. checkpoint_every: optimiser steps between two checkpoints.
    """

    method: ClassVar[str] = "rcla"
    file_fields: ClassVar[tuple[str, ...]] = ("data", "validation")
    share_every: int | None = None
    keep_layers: tuple[int, ...] | None = None
    keep_ratio: float | None = None
    data: tuple[Path, ...] = ()
    validation: Path | None = None
    cross_prob: float = 0.6
    plain_passes: float = 0.0
    steps: int = 1000
    learning_rate: float | None = None
    sequence_length: int = 1024
    batch_size: int = 16
    micro_batch: int | None = None
    warmup: float = 0.015
    weight_decay: float = 0.1
    loss_on: Literal["all", "answers"] = "all"
    packed: bool = True
    lora: int | None = None
    gradient_checkpointing: bool = True
    checkpoint_every: int = 50
    seed: int = 0

    @property
    def rate(self) -> float:
        """The learning rate at its highest."""
        default = RATE_FULL if self.lora is None else RATE_LORA
        return default if self.learning_rate is None else self.learning_rate

    def fingerprint(self) -> dict[str, Any]:
        """Without what changes no byte (a block's activations are the same computed twice), and without `micro_batch`.

        By default that depends on the number of processes. A checkpoint of the training compares it; once the weights
        are there, nothing depends on it.
        """
        spared = ("gradient_checkpointing", "checkpoint_every", "micro_batch")
        return {name: value for name, value in super().fingerprint().items() if name not in spared}

    def __post_init__(self) -> None:
        given = [self.share_every is not None, self.keep_layers is not None, self.keep_ratio is not None]
        demand(
            sum(given) <= 1,
            "the layers that keep a cache are named twice",
            "Give --share-every or --keep-layers or --keep-ratio.",
        )
        demand(self.share_every is None or self.share_every >= 1, f"--share-every {self.share_every} is not positive")
        demand(self.keep_ratio is None or 0 < self.keep_ratio <= 1, f"--keep-ratio {self.keep_ratio} is not in (0, 1]")
        if self.keep_layers is not None:
            rising = list(self.keep_layers) == sorted(set(self.keep_layers))
            demand(
                rising and self.keep_layers[:1] == (1,),
                "--keep-layers must rise from 1",
                "Layer 1 always keeps its cache: 1,5,9.",
            )
        for flag, share in (("--cross-prob", self.cross_prob), ("--plain-passes", self.plain_passes)):
            demand(0 <= share <= 1, f"{flag} {share} is no probability")
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
        demand(
            self.lora is None or self.lora >= 1, f"--lora {self.lora} is not a rank", "Use 8 to 64, or leave it out."
        )
        choice("--loss-on", self.loss_on, ("all", "answers"))
        for path in self.files:
            demand(not path.is_dir(), f"{path} is a folder", "Name the files in it.")
            demand(path.is_file(), f"There is no file {path}")
