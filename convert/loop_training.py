"""How weights are trained on texts: a request's numbers as the loop takes them, and the texts as tokens.

What methods that train have in common. Knows the request, the source and the loop; no method.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ..runtime.config_types import check_known
from ..runtime.progress import Reporter
from ..runtime.template import Template, has_template
from ..runtime.text import Tokenizer
from .data import DataSettings, TrainingData, prepare_data
from .opening import OpenedPlan
from .request import S_co
from .token_file import read_tokens
from .training_memory import activation_bytes
from .training_request import TrainingRequest
from .training_settings import Precision, TrainingSettings
from .workspace import TOKENS

TOKENS_A_PASS = 4096
"""Tokens of one pass unless `--micro-batch` says otherwise; not chosen by the memory there is, so that a run goes on
elsewhere."""
KEPT_ACTIVATIONS = 2 << 30
"""Bytes of one pass, above which a block's activations are computed again instead of being kept."""


@dataclass(frozen=True)
class LoopTraining(OpenedPlan[S_co]):
    """A training as asked for; its settings are a `TrainingRequest`."""

    @property
    def asked(self) -> TrainingRequest:
        """The part of the settings that every training has."""
        settings = self.request.settings
        if not isinstance(settings, TrainingRequest):
            raise TypeError(f"{self.request.method} asks for no training")
        return settings

    @property
    def data(self) -> DataSettings:
        """What is read. Raises UsageError where there is none."""
        settings = self.asked
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
        settings = self.asked
        share = -(-settings.batch_size // int(os.environ.get("WORLD_SIZE", "1")))  # torchrun's processes
        return settings.micro_batch or min(share, max(1, TOKENS_A_PASS // settings.sequence_length))

    @property
    def checkpointing(self) -> bool:
        """Whether a block's activations are computed again in the backward pass."""
        settings = self.asked
        if settings.gradient_checkpointing is not None:
            return settings.gradient_checkpointing
        length = settings.sequence_length
        return activation_bytes(self.arch, tokens=self.micro_batch * length, length=length) > KEPT_ACTIVATIONS

    @property
    def sharing(self) -> int:
        """Processes that train in this machine's memory (torchrun's); on a GPU each has its own."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.device.type == "cpu" else 1

    @property
    def steps(self) -> TrainingSettings:
        """The numbers of the loop."""
        settings = self.asked
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
    def amount(self) -> str:
        """How much is trained on what, for people."""
        settings = self.asked
        tokens = settings.steps * settings.batch_size * settings.sequence_length
        names = ", ".join(path.name for path in settings.data)
        return (
            f"{settings.steps} steps of {settings.batch_size} x {settings.sequence_length} tokens "
            f"({tokens:,}) from {names}"
        )

    def key(self, data: TrainingData) -> dict[str, object]:
        """What a checkpoint depends on besides the numbers of the loop, as JSON; a method adds its own."""
        settings = self.asked
        named = ("sequence_length", "packed", "loss_on")
        return {"data": data.fingerprint, **{name: getattr(settings, name) for name in named}}


def prepare(training: LoopTraining[TrainingRequest], folder: Path, reporter: Reporter) -> TrainingData:
    """Tokenise the training data into the work folder, once. FormatError for tokens that the model does not have."""
    bundle = folder / "bundle"
    tokenizer = Tokenizer.load(bundle)
    template = None
    if has_template(bundle):
        special, bos = tokenizer.special_tokens, tokenizer.adds_bos
        template = Template.from_folder(bundle, special_tokens=special, adds_bos=bos)
    data = prepare_data(training.data, tokenizer, template, folder / TOKENS, reporter)
    parts = [read_tokens(folder / TOKENS / f"{name}.safetensors")[0] for name in ("train", "held_out")]
    check_known(max(int(ids.max()) for ids in parts if len(ids)), training.arch.vocab_size)
    return data
