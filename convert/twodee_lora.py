"""Fine-tuning of a backbone for classification at every depth, with LoRA, before its classifiers are made.

The loss is that of 2D-EE (arXiv 2604.18592), eq. 3: every layer classifies every prefix of a document's sentences, the
last layer counts most. The heads used for it are thrown away: those of the bundle are trained on the merged weights.
Knows no files.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..runtime.architecture import Architecture
from ..runtime.documents import Document
from ..runtime.store import TensorStore
from .adapters import Fitting, Stack
from .lora import LoraSettings
from .sequences import Batch
from .trainable import IGNORED, Trainable
from .training_memory import activation_bytes
from .training_settings import Precision, TrainingSettings

LAST_WEIGHT, OTHER_WEIGHT = 0.8, 0.1
"""What the last layer and each other layer count (lambda in eq. 3)."""
RATE, BATCH, EPOCHS, WARMUP = 1e-4, 16, 2, 0.1
"""As in the paper, section 4, and in the authors' code."""
TOKENS_A_PASS = 2048
_ACTIVATION_BYTES = 2 << 30
"""Of one pass, above which a block's activations are computed again instead of being kept."""


def lora_settings(rank: int, seed: int) -> LoraSettings:
    """Return the paper's: queries and values, alpha 16 at rank 64."""
    return LoraSettings(rank=rank, alpha=rank / 4, targets=("q", "v"), seed=seed)


def training_settings(documents: int, max_tokens: int, precision: Precision, seed: int) -> TrainingSettings:
    """Return how many documents of at most `max_tokens` tokens are trained on."""
    return TrainingSettings(
        steps=ceil(EPOCHS * documents / BATCH),
        learning_rate=RATE,
        batch_size=BATCH,
        micro_batch=max(1, min(BATCH, TOKENS_A_PASS // max_tokens)),
        warmup=WARMUP,
        weight_decay=0.01,
        precision=precision,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class DocumentBatch(Batch):
    """Documents side by side. `means` [B, J, S]: what makes the state of the first j sentences out of the tokens'."""

    means: Tensor
    prefixes: tuple[int, ...]
    """How many there are for each document; rows of `means` beyond are 0."""
    labels: Tensor

    def to(self, device: torch.device | str) -> Self:
        """See `Batch.to`."""
        ids, targets, means, labels = (x.to(device) for x in (self.ids, self.targets, self.means, self.labels))
        return type(self)(ids, targets, self.counts, means, self.prefixes, labels)


class LabelledDocuments:
    """A `training.Sampled` of documents, each behind the same prefix."""

    def __init__(self, documents: Sequence[Document], labels: Sequence[int], prefix: Sequence[int]) -> None:
        self._documents, self._labels, self._prefix = documents, labels, list(prefix)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: list[int]) -> DocumentBatch:
        """See `training.Sampled`."""
        some = [self._documents[index] for index in indices]
        start = len(self._prefix)
        counts = tuple(start + len(document.ids) for document in some)
        ids = torch.zeros(len(some), max(counts), dtype=torch.int64)
        means = torch.zeros(len(some), max(len(document.ends) for document in some), max(counts))
        for row, document in enumerate(some):
            ids[row, : counts[row]] = torch.tensor([*self._prefix, *document.ids])
            means[row, : len(document.ends), start : counts[row]] = prefix_means(document.ends)
        labels = torch.tensor([self._labels[index] for index in indices])
        prefixes = tuple(len(document.ends) for document in some)
        return DocumentBatch(ids, torch.full_like(ids, IGNORED), counts, means, prefixes, labels)


def prefix_means(ends: Sequence[int]) -> Tensor:
    """Weights [sentences, tokens]; row j gives the mean over sentences 0 .. j of their tokens' means (eq. 1)."""
    sizes = torch.tensor([end - start for start, end in pairwise((0, *ends))])
    sentence = torch.arange(len(ends)).repeat_interleave(sizes)
    alone = (torch.arange(len(ends))[:, None] == sentence) / sizes[:, None]
    return alone.cumsum(0) / torch.arange(1, len(ends) + 1)[:, None]


class Classified(Trainable):
    """A backbone in training with a head behind every block, which are trained too."""

    def __init__(self, arch: Architecture, store: TensorStore, fitting: Fitting, **how: object) -> None:
        super().__init__(arch, store, **how)  # pyright: ignore[reportArgumentType] - Trainable's own keywords
        generator = torch.Generator().manual_seed(fitting.seed)
        device = next(self.parameters()).device
        self.stack = Stack(arch.num_layers, arch.hidden_size, fitting, generator)
        heads = [nn.Parameter(tensor.detach().to(device)) for tensor in self.stack.parameters]
        self.stack.parameters = heads
        self._heads = {f"head.{number}": parameter for number, parameter in enumerate(heads)}
        for name, parameter in self._heads.items():
            self.register_parameter(name.replace(".", "/"), parameter)

    def trained(self) -> dict[str, nn.Parameter]:
        """See `Trainable.trained`."""
        return super().trained() | self._heads


@dataclass(frozen=True)
class PrefixLoss:
    """Eq. 3 of the paper, summed over documents. A `training.Objective` for `Classified` and `DocumentBatch`."""

    class_weights: tuple[float, ...] = ()

    def __call__(self, model: Trainable, batch: Batch, draws: random.Random) -> tuple[Tensor, int]:  # noqa: ARG002
        """See `training.Objective`; nothing is random here."""
        if not isinstance(model, Classified) or not isinstance(batch, DocumentBatch):
            raise TypeError("this loss is for documents, and for a model with heads")
        layers = model.arch.num_layers
        states = model.states(batch.ids, batch.counts, after=range(layers))
        means = torch.stack([_normed(batch.means @ h.float()) for h in states])  # [L, B, J, hidden]
        losses = self._losses(model.stack.logits(means.flatten(1, 2)), batch)
        weights = torch.full((layers,), OTHER_WEIGHT, device=losses.device)
        weights[-1] = LAST_WEIGHT
        return (weights @ losses).sum(), len(batch.prefixes)

    def _losses(self, logits: Tensor, batch: DocumentBatch) -> Tensor:
        """Logits [L, B * J, C] -> mean over each document's prefixes [L, B]."""
        layers, rows, classes = logits.shape
        most = batch.means.shape[1]
        weight = torch.tensor(self.class_weights, device=logits.device) if self.class_weights else None
        targets = batch.labels.repeat_interleave(most).repeat(layers)
        all_losses = cross_entropy(logits.float().reshape(-1, classes), targets, weight=weight, reduction="none")
        counts = torch.tensor(batch.prefixes, device=logits.device)
        inside = torch.arange(most, device=logits.device) < counts[:, None]  # [B, J]
        return (all_losses.view(layers, rows // most, most) * inside).sum(-1) / counts


def _normed(x: Tensor) -> Tensor:
    """Bring states of every depth to one size; a throw-away head has no measured scale to go by."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def keeps_activations(arch: Architecture, tokens: int) -> bool:
    """Whether a pass of so many tokens may keep all activations."""
    return activation_bytes(arch, tokens=tokens, length=tokens) <= _ACTIVATION_BYTES
