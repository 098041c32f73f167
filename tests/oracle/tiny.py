"""Tiny random models of every family, made and saved by transformers, loaded by us.

Weights are large enough for every term to show in the logits; biases and norms are random, so that leaving one out
fails. Sequences are longer than the sliding windows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.store import TensorStore, check_tensors, open_safetensors

VOCABULARY = 97
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SHORT, LONG = [1.0, 1.1, 1.3, 1.6], [1.5, 2.5, 4.0, 7.0]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 24,
}


@dataclass(frozen=True)
class Case:
    """A configuration: its class and what differs from `COMMON`."""

    family: str  # the prefix of transformers' config class
    settings: Mapping[str, Any] = field(default_factory=dict)


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALL_BIASES = {"attention_bias": True, "mlp_bias": True}


def _rope(parameters: Mapping[str, Any], theta: float = 500.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **parameters}}


CASES: Mapping[str, Case] = {
    "llama": Case("Llama"),
    "llama-tied": Case("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-head-dim": Case("Llama", {"head_dim": 12, "num_key_value_heads": 1}),
    "llama-biases": Case("Llama", {**ALL_BIASES, "hidden_act": "gelu"}),
    "llama-llama3": Case("Llama", _rope(LLAMA3)),
    "llama-linear": Case("Llama", _rope({"rope_type": "linear", "factor": 4.0})),
    "llama-yarn": Case("Llama", _rope(YARN)),
    "llama-yarn-mscale": Case("Llama", _rope({**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False})),
    "llama-dynamic": Case("Llama", {**_rope({"rope_type": "dynamic", "factor": 4.0}), "max_position_embeddings": 24}),
    "mistral": Case("Mistral", {"sliding_window": 7, "head_dim": 12}),
    "mistral-full": Case("Mistral", {"sliding_window": None}),
    "ministral": Case("Ministral", {"sliding_window": 7, "head_dim": 8, "layer_types": [FULL, SLIDING, FULL]}),
    "ministral3": Case(
        "Ministral3",
        {"head_dim": 12, **_rope({**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0})},
    ),
    "qwen2": Case("Qwen2"),
    "qwen2-window": Case("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-yarn": Case("Qwen2", {**_rope(YARN), "tie_word_embeddings": True}),
    "qwen3": Case("Qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": Case(
        "Qwen3", {"head_dim": 12, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    ),
    "gemma2": Case(
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": Case(
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": Case("Phi3", {"sliding_window": 7, "tie_word_embeddings": False}),
    "phi3-longrope": Case(
        "Phi3", {**_rope(LONGROPE), "original_max_position_embeddings": 24, "max_position_embeddings": 96}
    ),
    "phi3-partial": Case(
        "Phi3", {**_rope({"rope_type": "default", "partial_rotary_factor": 0.5}), "num_key_value_heads": 6}
    ),
    "smollm3": Case("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], **ALL_BIASES}),
    "smollm3-window": Case(
        "SmolLM3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2},
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """One model twice: transformers' and ours, and the folder that both came from."""

    folder: Path
    reference: transformers.PreTrainedModel
    arch: Architecture
    store: TensorStore
    decoder: Decoder

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        """Transformers' logits [B, S, V] of a pass without cache."""
        with torch.inference_mode():
            return self.reference(ids, use_cache=False).logits


def make(name: str, folder: Path) -> TinyModel:
    """Make the case `name` with transformers, save it to `folder`, and load it with our own reader."""
    reference = build(CASES[name])
    reference.save_pretrained(folder)
    arch = Architecture.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    store = open_safetensors(folder)
    check_tensors(store, arch.tensors(), tied=arch.tied)
    decoder = load_decoder(arch, store, device="cpu", dtype=torch.float32)
    return TinyModel(folder, reference, arch, store, decoder)


def build(case: Case) -> transformers.PreTrainedModel:
    """Transformers' model of a case with random weights, in float32, with exact attention."""
    config = getattr(transformers, f"{case.family}Config")(**{**COMMON, **case.settings})
    config._attn_implementation = "eager"
    torch.manual_seed(len(case.settings))
    family = case.family.removesuffix("Text")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.25 if parameter.dim() > 1 else 0.5
            offset = 1.0 if "norm" in name and "Gemma" not in case.family else 0.0
            parameter.copy_(torch.randn_like(parameter) * scale + offset)
    return model


def random_ids(batch: int, length: int) -> torch.Tensor:
    """Ids [B, S], none of them padding."""
    return torch.randint(3, VOCABULARY, (batch, length))
