"""What each model family's config.json means, as one table and the few rules that differ.

Defaults are those of the family's configuration class in transformers, since nested configs leave them out. Knows
nothing of weights; returns plain values for `Architecture`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import FormatError, UnsupportedError
from .config_types import REMEDY, check_types, is_size
from .layers import read_layers

Config = Mapping[str, Any]
_OTHER = "Convert another model, or check that the file is the one that was published."

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields of relatives of these families that change the maths, and the value at which they do nothing.
NEUTRAL: Mapping[str, Any] = {
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "num_experts": 0,
    "num_local_experts": 0,
    "n_routed_experts": 0,
    "clip_qkv": None,
    "alibi": False,
    "use_bidirectional_attention": False,
    "attention_chunk_size": None,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}

_GEMMA: Mapping[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA2 = {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}


@dataclass(frozen=True)
class Family:
    """Switches of one `model_type`. `windows` names the rule that gives each layer its window."""

    windows: str  # none | all | given | qwen | alternate | pattern | nope
    qkv_bias: bool | str = False  # a string is the config field that decides
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    gemma: bool = False
    fused: bool = False
    theta: float = 10_000.0
    defaults: Config = field(default_factory=dict)


_BIAS = "attention_bias"
_QWEN: Mapping[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_MINISTRAL3: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("none", _BIAS, _BIAS, "mlp_bias"),
    "mistral": Family("all", defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "ministral": Family("given", defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "ministral3": Family("all", defaults=_MINISTRAL3),
    "qwen2": Family("qwen", qkv_bias=True, defaults=_QWEN),
    "qwen3": Family("qwen", _BIAS, _BIAS, qk_norm=True, defaults={**_QWEN, "head_dim": 128}),
    "gemma2": Family("alternate", _BIAS, _BIAS, gemma=True, defaults=_GEMMA2),
    "gemma3_text": Family("pattern", _BIAS, _BIAS, qk_norm=True, gemma=True, theta=1e6, defaults=_GEMMA3),
    "phi3": Family("all", fused=True, defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
    "smollm3": Family(
        "nope", _BIAS, _BIAS, "mlp_bias", theta=2e6, defaults={"num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
}
# Computed with as they come; null is as good as absent. (Null for sliding_window or a softcap means: without.)
_NEVER_NULL = ("sliding_window_pattern", "max_window_layers", "query_pre_attn_scalar", "no_rope_layer_interval")
# Models with other towers, whose decoder is described under text_config.
COMPOSITES = ("gemma3", "mistral3")


def read_config(config: Config) -> dict[str, Any]:
    """The fields of Architecture, with `layers` as (window, rope index) pairs."""
    config, name, family = _select(config)
    _refuse_unknown_maths(config)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    head_dim = config.get("head_dim") or _head_dim(hidden, heads)
    positions = _size(config, "max_position_embeddings")
    layers, ropes = read_layers(config, family.windows, family.theta, head_dim)
    return {
        "family": name,
        "hidden_size": hidden,
        "intermediate_size": _size(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": _kv_heads(config, heads),
        "head_dim": head_dim,
        "vocab_size": _size(config, "vocab_size"),
        "max_positions": positions,
        "norm_eps": _positive(config, "rms_norm_eps", 1e-6),
        "activation": _activation(config, family),
        "norm_offset": family.gemma,
        "qkv_bias": _switch(config, family.qkv_bias),
        "o_bias": _switch(config, family.o_bias),
        "mlp_bias": _switch(config, family.mlp_bias),
        "qk_norm": family.qk_norm,
        "sandwich_norms": family.gemma,
        "embedding_scale": hidden**0.5 if family.gemma else None,
        "attention_scale": (config["query_pre_attn_scalar"] if family.gemma else head_dim) ** -0.5,
        "attention_softcap": config.get("attn_logit_softcapping") if family.gemma else None,
        "logit_softcap": config.get("final_logit_softcapping") if family.gemma else None,
        "query_scaling": _query_scaling(config, name),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "fused_qkv": family.fused,
        "fused_gate_up": family.fused,
        "layers": layers,
        "ropes": ropes,
    }


def _positive(config: Config, name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise FormatError(f"config.json has {name} = {value!r}, not a positive number", REMEDY)
    return float(value)


def _select(config: Config) -> tuple[dict[str, Any], str, Family]:
    name = config.get("model_type")
    if name in COMPOSITES and isinstance(config.get("text_config"), Mapping):
        text = dict(config["text_config"])
        if "tie_word_embeddings" in config:
            text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
        return _select({"model_type": "gemma3_text" if name == "gemma3" else "mistral", **text})
    if not isinstance(name, str):
        raise FormatError("config.json has no model_type", "Is this the config of a language model?")
    if name not in FAMILIES:
        raise UnsupportedError(f"Model family {name!r} is not supported", f"Known: {', '.join(FAMILIES)}.")
    check_types(config)
    family = FAMILIES[name]
    stated = {key: value for key, value in config.items() if value is not None or key not in _NEVER_NULL}
    return {**family.defaults, **stated}, name, family


def _refuse_unknown_maths(config: Config) -> None:
    for key, neutral in NEUTRAL.items():
        value = config.get(key)
        if value is not None and value != neutral:
            raise UnsupportedError(f"config.json sets {key} = {value}, which this program does not compute", _OTHER)
    if config["model_type"] == "gemma3_text" and config.get("attn_logit_softcapping") is not None:
        raise UnsupportedError("config.json sets attn_logit_softcapping, which Gemma 3 does not compute", _OTHER)
    if config["model_type"] == "phi3":
        return
    rope = config.get("rope_parameters") or {}
    partial = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise UnsupportedError(f"config.json sets partial_rotary_factor = {partial} for {config['model_type']}", _OTHER)


def _size(config: Config, key: str) -> int:
    value = config.get(key)
    if not is_size(value):
        raise FormatError(f"config.json has {key} = {value!r}, not a positive whole number", REMEDY)
    return value


def _head_dim(hidden: int, heads: int) -> int:
    if hidden < heads:
        raise FormatError(f"config.json has {heads} heads for a hidden_size of {hidden}", REMEDY)
    return hidden // heads


def _kv_heads(config: Config, heads: int) -> int:
    if config.get("num_key_value_heads") is None:
        return heads
    kv_heads = _size(config, "num_key_value_heads")
    if heads % kv_heads:
        raise FormatError(f"config.json has {heads} heads and {kv_heads} key-value heads, which do not divide", REMEDY)
    return kv_heads


def _switch(config: Config, decided_by: bool | str) -> bool:
    return bool(config.get(decided_by, False)) if isinstance(decided_by, str) else decided_by


def _activation(config: Config, family: Family) -> str:
    name = (
        (config.get("hidden_activation") or "gelu_pytorch_tanh") if family.gemma else config.get("hidden_act", "silu")
    )
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"Activation {name!r} is not supported", f"Known: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def _query_scaling(config: Config, name: str) -> tuple[float, int] | None:
    """Ministral 3 scales queries by 1 + beta * log(1 + floor(position / original length))."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    beta = rope.get("llama_4_scaling_beta")
    if name != "ministral3":
        if beta:
            raise UnsupportedError(f"config.json sets llama_4_scaling_beta for {name}", _OTHER)
        return None
    if beta is None:
        raise FormatError("config.json has no rope_parameters with llama_4_scaling_beta", REMEDY)
    return float(beta), int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
