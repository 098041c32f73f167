"""How much memory training takes, before it starts. Knows sizes only."""

from math import prod

import torch

from ..runtime.architecture import Architecture
from .cross_entropy import LOGIT_BYTES
from .lora import LoraSettings, adapted
from .training_settings import Precision

_FLOAT = 4


def plan_memory(
    arch: Architecture,
    *,
    tokens: int,
    length: int,
    lora: LoraSettings | None = None,
    frozen_dtype: torch.dtype = torch.float32,
    precision: Precision = "fp32",
    checkpointing: bool = False,
) -> int:
    """Return the bytes at the peak of a step: weights, gradients, AdamW's moments, activations, logits.

    `tokens` are those of one pass (sequences times their length), `length` those of one sequence. Activations are
    counted as float32, so with bf16 products it is less; those need a copy of what is trained.
    """
    trained, frozen = trained_numbers(arch, lora), 0
    if lora is not None:
        frozen = trained_numbers(arch) * frozen_dtype.itemsize
    copies = trained * torch.bfloat16.itemsize if precision == "bf16" else 0
    head = _FLOAT * arch.vocab_size * arch.hidden_size * (0 if lora else 2)  # its gradient, and the embedding's
    activations = activation_bytes(arch, tokens=tokens, length=length, checkpointing=checkpointing)
    return frozen + 4 * _FLOAT * trained + copies + head + activations + 2 * LOGIT_BYTES


def trained_numbers(arch: Architecture, lora: LoraSettings | None = None) -> int:
    """How many numbers training changes: all weights, or LoRA's matrices."""
    if lora is None:
        return sum(prod(shape) for shape in arch.tensors().values())
    return sum(lora.rank * (N + K) for N, K in adapted(arch, lora.targets).values())


def activation_bytes(arch: Architecture, *, tokens: int, length: int, checkpointing: bool = False) -> int:
    """Return what a pass leaves for the backward pass; `tokens` and `length` as in `plan_memory`."""
    return _FLOAT * tokens * _floats(arch, length, checkpointing=checkpointing)


def _floats(arch: Architecture, length: int, *, checkpointing: bool) -> int:
    """Return the float32 numbers that a token leaves for the backward pass.

    Counted from what autograd keeps of a block: four of the MLP's width; of the hidden width three for each norm;
    query, key and value before and after rotation, and the output; with head norms three more of query and key; where
    scores are capped there is no fused attention, and three rows of them are kept.
    """
    wide, narrow = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    norms = 4 if arch.sandwich_norms else 2
    block = 4 * arch.intermediate_size + 3 * norms * arch.hidden_size + 3 * wide + 4 * narrow
    if arch.qk_norm:
        block += 3 * (wide + narrow)
    if arch.attention_softcap is not None:
        block += 3 * arch.num_heads * length
    if checkpointing:  # what goes into every block, its keys and values, and one block whole
        return arch.num_layers * (arch.hidden_size + 2 * narrow) + block
    return arch.num_layers * block
