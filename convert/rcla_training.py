"""How R-CLA trains: its numbers out of a request, and what every process of a training does.

Knows the request, the source and the loop; neither maps nor the bundle.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import FormatError
from ..runtime.progress import Reporter, SilentReporter
from ..runtime.template import Template, has_template
from ..runtime.text import Tokenizer
from .cross_layer import CrossLayer
from .data import DataSettings, TrainingData, prepare_data
from .lora import LoraSettings
from .opening import OpenedPlan
from .processes import Processes
from .rcla_request import RclaSettings
from .token_file import read_tokens
from .trainable import Trainable
from .training import train
from .training_memory import plan_memory
from .training_settings import Precision, TrainingSettings

TOKENS_A_PASS = 4096
"""Tokens of one pass unless `--micro-batch` says otherwise; not chosen by the memory there is, so that a run goes on
elsewhere."""
TRAINED = "trained.safetensors"
"""The piece of the work folder that holds the trained weights."""


@dataclass(frozen=True)
class Training(OpenedPlan[RclaSettings]):
    """A training as asked for."""

    @property
    def data(self) -> DataSettings:
        """What is read. Raises UsageError where there is none."""
        settings = self.settings
        return DataSettings(
            files=settings.data,
            evaluation=() if settings.validation is None else (settings.validation,),
            length=settings.sequence_length,
            packed=settings.packed,
            loss_on=settings.loss_on,
            seed=settings.seed,
        )

    @property
    def precision(self) -> Precision:
        """Of the products: bf16 where it was asked for, or on a GPU; weights are float32 in any case."""
        asked = self.request.dtype
        return "bf16" if asked == "bf16" or (asked == "auto" and self.device.type != "cpu") else "fp32"

    @property
    def micro_batch(self) -> int:
        """Sequences of one pass."""
        settings = self.settings
        share = -(-settings.batch_size // int(os.environ.get("WORLD_SIZE", "1")))  # torchrun's processes
        return settings.micro_batch or min(share, max(1, TOKENS_A_PASS // settings.sequence_length))

    @property
    def steps(self) -> TrainingSettings:
        """The numbers of the loop."""
        settings = self.settings
        return TrainingSettings(
            steps=settings.steps,
            learning_rate=settings.rate,
            batch_size=settings.batch_size,
            micro_batch=self.micro_batch,
            warmup=settings.warmup,
            weight_decay=settings.weight_decay,
            precision=self.precision,
            seed=settings.seed,
            checkpoint_steps=settings.checkpoint_every,
        )

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
            tokens=self.micro_batch * length,
            length=length,
            lora=self.lora,
            frozen_dtype=self.frozen_dtype,
            precision=self.precision,
            checkpointing=self.settings.gradient_checkpointing,
        )

    def line(self) -> str:
        """The training for people."""
        settings = self.settings
        tokens = settings.steps * settings.batch_size * settings.sequence_length
        what = "all weights" if settings.lora is None else f"LoRA of rank {settings.lora}"
        names = ", ".join(path.name for path in settings.data)
        return (
            f"{settings.steps} steps of {settings.batch_size} x {settings.sequence_length} tokens "
            f"({tokens / 1e6:.3g} million) from {names}; {what} at {settings.rate:g}, in {self.precision}, "
            f"layers cross with probability {settings.cross_prob:g}"
        )


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
            checkpointing=settings.gradient_checkpointing,
        )
        named = ("sequence_length", "packed", "loss_on", "cross_prob", "plain_passes", "lora")
        key = {"data": data.fingerprint, **{name: getattr(settings, name) for name in named}}
        objective = CrossLayer(settings.cross_prob, settings.plain_passes)
        folder = self._folder / "training"
        history = train(model, data.train, training.steps, objective, folder, reporter=reporter, key=key)
        return model, history.tokens


def prepare(training: Training, folder: Path, reporter: Reporter) -> TrainingData:
    """Tokenise the training data into the work folder, once. FormatError for tokens that the model does not have."""
    bundle = folder / "bundle"
    tokenizer = Tokenizer.load(bundle)
    template = None
    if has_template(bundle):
        special, bos = tokenizer.special_tokens, tokenizer.adds_bos
        template = Template.from_folder(bundle, special_tokens=special, adds_bos=bos)
    data = prepare_data(training.data, tokenizer, template, folder / "data", reporter)
    parts = [read_tokens(folder / "data" / f"{name}.safetensors")[0] for name in ("train", "held_out")]
    highest = max(int(ids.max()) for ids in parts if len(ids))
    if highest >= training.arch.vocab_size:
        raise FormatError(f"the tokenizer knows token {highest}, the model only {training.arch.vocab_size}")
    return data
