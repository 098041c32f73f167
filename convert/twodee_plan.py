"""What a 2D-EE conversion will do, before it does anything: inputs opened, rows read and split, sizes added up.

Knows the request, the source and the rows; writes nothing.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import ceil, prod
from typing import Any, Literal

import psutil
import torch

from ..errors import UnsupportedError, UsageError
from ..runtime.bundle import ADAPTERS, RIVER
from ..runtime.loading import resolve_dtype
from ..runtime.methods import LabelledRows, River
from ..runtime.progress import Reporter
from ..runtime.sentences import LEAST, MOST, split_sentences
from .features import PIECE_DOCUMENTS, ROWS, TOGETHER_BYTES
from .frozen_blocks import keeps_blocks, running_memory
from .labelled import Split, Text, class_weights
from .lora import LoraSettings
from .opening import OpenedPlan, open_request
from .preflight import PROGRAM_BYTES, check_disk, check_memory, human
from .request import ConvertRequest
from .training_settings import Precision, TrainingSettings
from .twodee_lora import EPOCHS, lora_settings, training_settings
from .twodee_request import TwoDeeSettings
from .twodee_rows import default_prompt, read_split
from .workspace import work_folder
from .writer import hash_file

ADAPTERS_FILE = f"{ADAPTERS}.safetensors"
CPU = torch.device("cpu")
BF16 = torch.bfloat16.itemsize
_TUNING_BYTES = 4 << 30
"""Activations, LoRA's matrices and their moments, about."""
_SAMPLE = 100
"""Texts looked at to estimate sizes."""
_TOKEN_CHARACTERS = 4


@dataclass(frozen=True)
class Plan(OpenedPlan[TwoDeeSettings]):
    """A conversion that may start."""

    split: Split

    @property
    def names(self) -> tuple[str, ...]:
        """Label names in order."""
        return self.split.train.names

    @property
    def texts(self) -> tuple[Text, ...]:
        """All texts: those that train, then those that judge."""
        return self.split.train.texts + self.split.validation.texts

    @property
    def labels(self) -> tuple[int, ...]:
        """Of `texts`."""
        return self.split.train.labels + self.split.validation.labels

    @property
    def rows_used(self) -> tuple[LabelledRows, LabelledRows | None]:
        """For the manifest: the rows of `--data`, and those of a validation file of its own."""
        train, judged = self.split.train, self.split.validation
        if self.settings.validation is None:
            rows = len(train) + len(judged)
            return LabelledRows(name=train.name, sha256=train.sha256, rows=rows, validation=len(judged)), None
        own = LabelledRows(name=judged.name, sha256=judged.sha256, rows=len(judged), validation=len(judged))
        return LabelledRows(name=train.name, sha256=train.sha256, rows=len(train), validation=0), own

    @property
    def class_weights(self) -> tuple[float, ...]:
        """What a label's rows weigh in training; empty: all the same."""
        return class_weights(self.split.train) if self.settings.class_weights else ()

    @property
    def prompt(self) -> str:
        """What is read before every document."""
        return default_prompt(self.names) if self.settings.prompt is None else self.settings.prompt

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest document; the prompt leaves fewer where the model has no more positions."""
        return min(self.settings.max_tokens, self.arch.max_positions)

    @property
    def blocks(self) -> Literal["dense", "4bit"]:
        """Which blocks documents run through: a River bundle's exit layers where there are any."""
        return "4bit" if any(isinstance(method, River) for method in self.opened.below.methods) else "dense"

    @property
    def lora(self) -> LoraSettings | None:
        """How the backbone is fine-tuned; None: it stays as it is."""
        rank = self.settings.lora
        return None if rank is None else lora_settings(rank, self.settings.seed)

    @property
    def tuning(self) -> TrainingSettings:
        """How long it is fine-tuned for, and with what."""
        precision: Precision = "bf16" if self.frozen_dtype is torch.bfloat16 else "fp32"
        return training_settings(len(self.split.train), self.max_tokens, precision, self.settings.seed)

    @property
    def frozen_dtype(self) -> torch.dtype:
        """Of the weights that LoRA leaves alone, in memory."""
        wide = self.request.dtype == "fp32" or (self.request.dtype == "auto" and self.device.type == "cpu")
        return torch.float32 if wide else torch.bfloat16

    @property
    def dtype(self) -> torch.dtype:
        """In which documents run: float32 on a CPU that has the memory (the fastest for many rows), else as asked."""
        wide = self._weights(torch.float32.itemsize) < psutil.virtual_memory().total // 2
        automatic = self.request.dtype == "auto" and self.device.type == "cpu"
        return torch.float32 if automatic and wide else self.opened.dtype

    @cached_property
    def tokens(self) -> int:
        """Tokens of all documents, estimated from their characters."""
        longest = self.max_tokens * _TOKEN_CHARACTERS
        return sum(min(_length(text), longest) for text in self.texts) // _TOKEN_CHARACTERS

    @cached_property
    def sentences(self) -> int:
        """Sentences of all documents, estimated from some."""
        step = max(1, len(self.texts) // _SAMPLE)
        some = list(islice(self.texts, 0, None, step))
        longest = self.max_tokens * _TOKEN_CHARACTERS
        found = sum(
            len(split_sentences(text[:longest], self.settings.language)) if isinstance(text, str) else len(text)
            for text in some
        )
        return ceil(found * len(self.texts) / len(some))

    @property
    def feature_bytes(self) -> int:
        """Bytes of the pooled states, estimated."""
        return self.sentences * self.arch.num_layers * self.arch.hidden_size * torch.bfloat16.itemsize

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the classifiers."""
        hidden, width = self.arch.hidden_size, self.settings.hidden
        return 4 * self.arch.num_layers * (width * (hidden + 1) + len(self.names) * (width + 1))

    @property
    def river_bytes(self) -> int:
        """Bytes of exit layers taken over."""
        return 0 if self.opened.bundle is None else self.opened.bundle.weight_bytes(RIVER)

    @property
    def disk(self) -> int:
        """Bytes of disk needed: the bundle, and the pooled states until it is whole."""
        backbone = self.backbone.disk if self.lora is None else 2 * self.backbone.nbytes
        return backbone + self.river_bytes + 2 * self.adapter_bytes + self.feature_bytes

    @property
    def memory(self) -> int:
        """Bytes of memory at the peak, estimated; the pooled states are mapped and give way."""
        checking = self._running(resolve_dtype("auto", CPU), CPU)
        running = self._running(self.dtype, self.device) + self._states()
        tuning = 0 if self.lora is None else self._weights(self.frozen_dtype.itemsize) + _TUNING_BYTES
        return PROGRAM_BYTES + max(running, checking, 8 * self.adapter_bytes, tuning)

    def keeps_blocks(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether blocks stay in memory once they are read; else they are read again for every passage."""
        return keeps_blocks(self.arch, dtype, device)

    def _running(self, dtype: torch.dtype, device: torch.device) -> int:
        return running_memory(self.arch, dtype, device, rows=ROWS + self.max_tokens)

    def _states(self) -> int:
        """Of the documents that climb side by side."""
        arch, count = self.arch, len(self.texts)
        tokens, sentences = (ceil(PIECE_DOCUMENTS * each / count) for each in (self.tokens, self.sentences))
        piece = arch.hidden_size * (tokens * self.dtype.itemsize + sentences * arch.num_layers * BF16)
        return piece if self.keeps_blocks(self.dtype, self.device) else max(piece, TOGETHER_BYTES)

    def fingerprint(self) -> dict[str, Any]:
        """What the result's bytes depend on, as JSON."""
        validation = self.settings.validation
        return {
            **super().fingerprint(),
            "data": self.split.train.sha256,
            "validation": None if validation is None else hash_file(validation).sha256,
            "documents": {"dtype": str(self.dtype), "prompt": self.prompt, "least": LEAST, "most": MOST},
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan for scripts."""
        train, validation = self.split.train, self.split.validation
        return {
            **super().to_dict(),
            "labels": dict(zip(self.names, zip(train.counts, validation.counts, strict=True), strict=True)),
            "rows": {"train": len(train), "validation": len(validation), "skipped": train.skipped},
            "tokens": self.tokens,
            "prompt": self.prompt,
            "blocks": self.blocks,
            "bytes": {
                "backbone": self.backbone.nbytes,
                "river": self.river_bytes,
                "adapters": self.adapter_bytes,
                "features": self.feature_bytes,
            },
            "disk_bytes": self.disk,
            "memory_bytes": self.memory,
        }

    def lines(self) -> list[str]:
        """The plan for people."""
        arch, backbone = self.arch, self.backbone
        how = {"copy": "copied", "link": "hard-linked", "reference": "left in the Hub cache"}[backbone.mode]
        train, validation = self.split.train, self.split.validation
        counts = ", ".join(
            f"{name} {a} + {b}" for name, a, b in zip(self.names, train.counts, validation.counts, strict=True)
        )
        frozen = "4-bit blocks" if self.blocks == "4bit" else "blocks"
        return [
            f"Source       {self.origin}",
            f"Output       {self.request.output}",
            f"Backbone     {human(backbone.nbytes)}, {'rewritten' if backbone.entries or self.lora else how}",
            f"Rows         {len(train)} to train on + {len(validation)} to choose thresholds on: {counts}",
            f"Classifiers  one behind each of {arch.num_layers} {frozen}: {human(self.adapter_bytes)}",
            f"Work         {self._work()}",
            f"Needs        {human(self.disk)} of disk, about {human(self.memory)} of memory, on {self.device}",
        ]

    def _work(self) -> str:
        once = f"about {self.tokens:,} tokens through the model once, {human(self.feature_bytes)} of states"
        return once if self.lora is None else f"{once}; before that, {EPOCHS} epochs of LoRA of rank {self.lora.rank}"

    def _weights(self, itemsize: int) -> int:
        return itemsize * sum(prod(shape) for shape in self.arch.tensors().values())


def _length(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def plan(request: ConvertRequest[TwoDeeSettings], reporter: Reporter) -> Plan:
    """Open the inputs and check that the conversion can be done. Raises AdaptError of every kind; writes nothing."""
    if request.untrained:
        raise UsageError("--untrained is not for 2dee: its classifiers are what it is", "Leave it out.")
    opened = open_request(request, reporter, stacks_on=("river", "rcla"))
    _check_length(request.settings.max_tokens, opened.arch.max_positions, reporter)
    made = Plan(request, opened, read_split(request.settings, opened.tokenizer, reporter))
    _check_tuning(made)
    check_memory(made.memory)
    if not work_folder(request.output).is_dir():
        check_disk(request.output, made.disk)
    return made


def _check_length(max_tokens: int, positions: int, reporter: Reporter) -> None:
    """Refuse documents longer than the model's positions, if somebody asked for them."""
    if max_tokens <= positions:
        return
    if max_tokens != TwoDeeSettings.max_tokens:
        what = f"--max-tokens {max_tokens} is more than the model's {positions} positions"
        raise UsageError(what, "The prompt needs some of them, too.")
    reporter.note(f"Texts are cut at the model's {positions} positions, less those of the prompt.")


def _check_tuning(made: Plan) -> None:
    """Refuse a fine-tuning that would not reach what documents run through, or could not be written."""
    if made.lora is None:
        return
    if made.blocks == "4bit":
        what = "--lora changes the backbone, and documents of a River bundle run through its 4-bit exit layers"
        raise UnsupportedError(what, "Fine-tune the plain model, or leave --lora out.")
    if made.request.backbone == "reference":
        raise UsageError("--lora writes a backbone of its own: it cannot be a reference", "Leave out --backbone.")
