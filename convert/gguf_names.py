"""GGUF tensors under their Hugging Face names, with what the GGUF converter did to the values undone.

Knows the naming of llama.cpp's converter for each architecture. Reads no file.

Two changes are undone: in the llama architectures the rows of q and k are interleaved for llama.cpp's rotation, and in
Gemma the norm weights are stored plus one.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from ..errors import UnsupportedError

Undo = Callable[[torch.Tensor], torch.Tensor]

# Tensors that say something about the rotation; `gguf_config` reads them.
ROTATION_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PLAIN = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Naming:
    """How one GGUF architecture names the parts of a block, and what was done to them."""

    parts: Mapping[str, str]
    interleaved: bool = False
    norm_plus_one: bool = False


NAMINGS: Mapping[str, Naming] = {
    "llama": Naming(_PLAIN, interleaved=True),
    "smollm3": Naming(_PLAIN, interleaved=True),
    "qwen2": Naming(_PLAIN),
    "qwen3": Naming({**_PLAIN, **_QK_NORM}),
    "gemma2": Naming(_SANDWICH, norm_plus_one=True),
    "gemma3": Naming({**_SANDWICH, **_QK_NORM}, norm_plus_one=True),
    "phi3": Naming(_FUSED),
}


def deinterleave(heads: int) -> Undo:
    """Undo the row order [heads, head_dim / 2, 2] that llama.cpp wants, back to [heads, 2, head_dim / 2]."""

    def undo(weight: torch.Tensor) -> torch.Tensor:
        rows = weight.shape[0]
        split = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
        return split.transpose(1, 2).reshape(weight.shape)

    return undo


def _minus_one(weight: torch.Tensor) -> torch.Tensor:
    # `weight` is float32 here: near one, bf16 has steps of 2^-7, which would swallow what the subtraction leaves.
    return weight - 1


def hf_name(architecture: str, name: str) -> str:
    """Hugging Face name of one GGUF tensor.

    Raises `UnsupportedError` for a tensor that the architecture is not known to have.
    """
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, kind = rest.rpartition(".")
    parts = NAMINGS[architecture].parts
    if not name.startswith("blk.") or part not in parts or kind not in ("weight", "bias"):
        what = "experts are not supported." if "_exps" in name else "the model may be a variant that is not known here."
        raise UnsupportedError(f"tensor {name} has no place in a {architecture} model", what.capitalize())
    return f"model.layers.{block}.{parts[part]}.{kind}"


def hf_names(architecture: str, names: Collection[str]) -> dict[str, str]:
    """Hugging Face name -> GGUF name, for every tensor but those of the rotation."""
    return {hf_name(architecture, name): name for name in names if name not in ROTATION_TENSORS}


def undo_for(architecture: str, name: str, *, heads: int, kv_heads: int) -> Undo | None:
    """What to do to the dequantised values of the GGUF tensor `name`; None = nothing."""
    naming = NAMINGS[architecture]
    if naming.interleaved and ".attn_q." in name:
        return deinterleave(heads)
    if naming.interleaved and ".attn_k." in name:
        return deinterleave(kv_heads)
    if naming.norm_plus_one and name.endswith("norm.weight"):
        return _minus_one
    return None
