"""A Hugging Face config from the metadata of a GGUF file.

Knows which metadata key means which config key, and the constants that llama.cpp keeps in its code instead of in the
file. Reads no weights, except the small tensors that hold rotation factors.

The config is in the form that both transformers 4 and 5 read: `rope_theta` and `rope_scaling` beside each other.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import FormatError, UnsupportedError
from ..runtime.layers import MOST_LAYERS
from .gguf_metadata import FETCH_AGAIN, Metadata
from .gguf_reader import GgufFile

Config = dict[str, Any]

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
# The llama3 rule's constants; the factor alone differs between releases, and the file stores none of them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hf_config(file: GgufFile, *, tied: bool) -> Config:
    """The config.json of the model in `file`.

    Raises `UnsupportedError` for an architecture or rotation that is not known, `FormatError` for a missing key.
    """
    data = Metadata(file)
    model_type, class_name = _CLASSES[data.architecture]
    config = {"architectures": [class_name], "model_type": model_type, **_geometry(data)}
    config |= _FAMILIES.get(data.architecture, _no_extras)(data, config)
    config |= {"rope_theta": data.positive("rope.freq_base", 10000.0), "rope_scaling": _rope_scaling(data, config)}
    config |= _special_ids(file.metadata)
    return {**config, "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "use_cache": True}


def _geometry(data: Metadata) -> Config:
    if data.get("expert_count", 0):
        raise UnsupportedError(f"{data.file.path.name} is a mixture of experts", "Only dense models are supported")
    heads, hidden, layers = (data.size(key) for key in ("attention.head_count", "embedding_length", "block_count"))
    if layers > MOST_LAYERS or heads > hidden:
        what = f"{data.file.path.name} claims {layers} layers of {heads} heads for an embedding_length of {hidden}"
        raise FormatError(what, FETCH_AGAIN)
    vocabulary = data.file.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise FormatError(f"{data.file.path.name} lacks tensor token_embd.weight", "Fetch the file again")
    return {
        "vocab_size": vocabulary.shape[0],
        "hidden_size": hidden,
        "intermediate_size": data.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": data.size("attention.head_count_kv", heads),
        "head_dim": data.size("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": data.size("context_length"),
        "rms_norm_eps": data.positive("attention.layer_norm_rms_epsilon"),
    }


def _no_extras(_data: Metadata, _config: Config) -> Config:
    return {}


def _llama(data: Metadata, config: Config) -> Config:
    rotated = data.get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise UnsupportedError(
            f"only {rotated} of {config['head_dim']} dimensions of a head are rotated", "Not supported for llama models"
        )
    return {
        "attention_bias": data.has("blk.0.attn_q.bias"),
        "mlp_bias": data.has("blk.0.ffn_gate.bias"),
    }


def _smollm3(data: Metadata, config: Config) -> Config:
    # Every fourth layer has no rotation: a constant of llama.cpp, as of the model's own config.
    layers = config["num_hidden_layers"]
    return {
        "attention_bias": data.has("blk.0.attn_q.bias"),
        "mlp_bias": data.has("blk.0.ffn_gate.bias"),
        "no_rope_layer_interval": 4,
        "no_rope_layers": [int((index + 1) % 4 != 0) for index in range(layers)],
        "use_sliding_window": False,
    }


def _qwen2(_data: Metadata, config: Config) -> Config:
    return {"use_sliding_window": False, "max_window_layers": config["num_hidden_layers"]}


def _qwen3(data: Metadata, config: Config) -> Config:
    return {**_qwen2(data, config), "attention_bias": data.has("blk.0.attn_q.bias")}


def _gemma(data: Metadata, config: Config, *, layers_of_27b: int) -> Config:
    # llama.cpp scales the 27B models' attention by hidden/heads and all others' by head_dim; the file does not say.
    largest = config["num_hidden_layers"] == layers_of_27b
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": data.get("attention.sliding_window", 4096),
        "attention_bias": False,
        "attn_logit_softcapping": data.get("attn_logit_softcapping"),
        "final_logit_softcapping": data.get("final_logit_softcapping"),
    }


def _layer_types(layers: int, full_every: int) -> list[str]:
    return ["sliding_attention" if (index + 1) % full_every else "full_attention" for index in range(layers)]


def _gemma2(data: Metadata, config: Config) -> Config:
    return {
        **_gemma(data, config, layers_of_27b=46),
        "attn_logit_softcapping": data.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": data.get("final_logit_softcapping", 30.0),
        "layer_types": _layer_types(config["num_hidden_layers"], 2),
    }


def _gemma3(data: Metadata, config: Config) -> Config:
    pattern = data.size("attention.sliding_window_pattern", 6)
    return {
        **_gemma(data, config, layers_of_27b=62),
        "rope_local_base_freq": data.positive("rope.freq_base_swa", 10000.0),
        "layer_types": _layer_types(config["num_hidden_layers"], pattern),
        "sliding_window_pattern": pattern,
    }


def _phi3(data: Metadata, config: Config) -> Config:
    rotated = data.size("rope.dimension_count", config["head_dim"])
    original = data.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {
        "sliding_window": data.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rotated / config["head_dim"],
    }


_FAMILIES: Mapping[str, Callable[[Metadata, Config], Config]] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}


def _rope_scaling(data: Metadata, config: Config) -> Config | None:
    if data.has("rope_factors_long.weight"):
        return _longrope(data)
    if data.has("rope_freqs.weight"):
        return _llama3(data, config)
    kind = data.get("rope.scaling.type", "none")
    factor = data.get("rope.scaling.factor", data.get("rope.scale_linear", 1.0))
    if kind == "none" and factor == 1.0:
        return None
    if kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(data, factor)
    raise UnsupportedError(f"RoPE scaling '{kind}' is not supported", "Supported: linear, yarn, llama3, longrope")


def _yarn(data: Metadata, factor: float) -> Config:
    if data.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedError(
            "yarn scaling with an attention factor of its own", "Convert from the original checkpoint."
        )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": data.size("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        value = data.get(f"rope.scaling.yarn_{name}")
        if value is not None:
            scaling[name] = value
    return scaling


def _factors(data: Metadata, tensor: str) -> list[float]:
    if not data.has(tensor):
        raise FormatError(f"{data.file.path.name} lacks tensor {tensor}", FETCH_AGAIN)
    values = data.file.rows(tensor, np.array([0])).ravel()
    return [float(str(value)) for value in values]


def _longrope(data: Metadata) -> Config:
    return {
        "type": "longrope",
        "rope_type": "longrope",
        "long_factor": _factors(data, "rope_factors_long.weight"),
        "short_factor": _factors(data, "rope_factors_short.weight"),
    }


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What the llama3 rule divides each of the head_dim / 2 frequencies by.

    As `_compute_llama3_parameters` of transformers and `generate_extra_tensors` of llama.cpp's converter.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    original, low, high = 8192, _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3(data: Metadata, config: Config) -> Config:
    stored = np.array(_factors(data, "rope_freqs.weight"))
    # The slowest frequency is divided by the whole factor.
    factor = round(float(stored.max()), 3)
    sound = np.isfinite(stored).all() and factor > 0
    expected = llama3_factors(data.positive("rope.freq_base", 10000.0), config["head_dim"], factor if sound else 1.0)
    if not sound or stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise UnsupportedError(
            "rope_freqs.weight does not follow the llama3 rule (low 1, high 4, original length 8192)",
            "Convert from the original checkpoint instead of its GGUF file",
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _special_ids(metadata: Mapping[str, Any]) -> Config:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {
        name: metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in keys.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
