"""Random models for gpu.py: tiny ones of several families, and the shapes of Llama-3.2-1B and Llama-3.1-8B."""

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

from adapt_llm.quant.layout import Int4Matrix
from adapt_llm.quant.quantizers import QUANTIZERS
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.block import Block
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.exit_layers import exit_block
from adapt_llm.runtime.store import TensorInfo

COMMON = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GEMMA2 = {
    "model_type": "gemma2",
    "head_dim": 16,
    "sliding_window": 60,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral, window": {"model_type": "mistral", "sliding_window": 40},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "phi3, fused": {"model_type": "phi3", "sliding_window": None},
    "gemma2, capped": GEMMA2,
}
LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.2-1B": {
        **LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        **LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "tie_word_embeddings": False,
    },
}


class RandomStore:
    """Every tensor of an architecture, made when it is read, the same each time."""

    def __init__(self, arch: Architecture, scale: float, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = {name: shape for name, shape in arch.tensors().items() if not (arch.tied and "lm_head" in name)}
        self._scale, self._device, self._dtype = scale, device, dtype
        self._offset = 0.0 if arch.norm_offset else 1.0

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def info(self, name: str) -> TensorInfo:
        raise KeyError(name)

    def release(self, name: str) -> None:
        pass

    def read(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype).normal_(0, self._scale, generator=generator)
        return tensor.add_(self._offset) if name.endswith("norm.weight") else tensor


def tiny(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, list[Block], RandomStore]:
    """A tiny model, exit layers rounded from it, and its weights."""
    arch = Architecture.from_config({**COMMON, **TINY[name]})
    store = RandomStore(arch, 0.25, torch.device("cpu"), torch.float32)
    exits = []
    for index in range(arch.num_layers):
        matrices = {
            matrix: QUANTIZERS["rtn"](store.read(matrix), group_size=32) for matrix in arch.block_matrices(index)
        }
        exits.append(exit_block(arch, store, index, matrices, device=device, dtype=dtype))
    return load_decoder(arch, store, device=device, dtype=dtype), exits, store


def large(config: Mapping[str, Any], device: torch.device, group_size: int) -> tuple[Decoder, list[Block]]:
    """A model of a real shape in bf16 with 4-bit exit layers of other random numbers: for time only."""
    arch = Architecture.from_config(dict(config))
    store = RandomStore(arch, 0.02, device, torch.bfloat16)
    decoder = load_decoder(arch, store, device=device, dtype=torch.bfloat16)
    exits = []
    for index in range(arch.num_layers):
        matrices = {name: codes(N, K, group_size, device) for name, (N, K) in arch.block_matrices(index).items()}
        exits.append(exit_block(arch, store, index, matrices, device=device, dtype=torch.bfloat16))
        for part in (exits[-1].qkv, exits[-1].gate_up):
            for linear in part.linears:
                linear.prepare()
        exits[-1].output.prepare()
        exits[-1].down.prepare()
    return decoder, exits


def codes(N: int, K: int, group_size: int, device: torch.device) -> Int4Matrix:
    """A random 4-bit matrix whose weights have a standard deviation of about 0.02."""
    matrix = torch.randint(0, 16, (N, K), dtype=torch.uint8, device=device)
    scales = torch.full((N, K // group_size), 2.0**-8, device=device)
    return Int4Matrix(matrix, scales, torch.full(scales.shape, 8, dtype=torch.uint8, device=device), group_size)
