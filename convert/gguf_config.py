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
from .gguf_names import NAMINGS
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


def architecture_of(file: GgufFile) -> str:
    """GGUF's name of the architecture; `UnsupportedError` if it is none of those in `gguf_names`."""
    name = file.metadata.get("general.architecture", "none")
    if name not in NAMINGS:
        hint = f"Supported: {', '.join(sorted(NAMINGS))}."
        raise UnsupportedError(f"{file.path.name} holds a model of architecture '{name}'", hint)
    return name


class Metadata:
    """Metadata keys of one architecture, with the shortest decimal for what was rounded to float32."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = architecture_of(file)

    def get(self, key: str, default: object = None) -> Any:  # noqa: ANN401 - typed by the file
        """The value of `<architecture>.<key>`."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:  # noqa: ANN401 - typed by the file
        """As `get`; a missing key is a `FormatError`."""
        value = self.get(key)
        if value is None:
            raise FormatError(f"{self.file.path.name} lacks the key {self.architecture}.{key}", "Convert it again")
        return value

    def has(self, tensor: str) -> bool:
        """Whether the file holds this tensor."""
        return tensor in self.file.tensors


def hf_config(file: GgufFile, *, tied: bool) -> Config:
    """The config.json of the model in `file`.

    Raises `UnsupportedError` for an architecture or rotation that is not known, `FormatError` for a missing key.
    """
    data = Metadata(file)
    model_type, class_name = _CLASSES[data.architecture]
    config = {"architectures": [class_name], "model_type": model_type, **_geometry(data)}
    config |= _FAMILIES.get(data.architecture, _no_extras)(data, config)
    config |= {"rope_theta": data.get("rope.freq_base", 10000.0), "rope_scaling": _rope_scaling(data, config)}
    config |= _special_ids(file.metadata)
    return {**config, "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "use_cache": True}


def _one(value: int | list[int], key: str) -> int:
    """Per-layer lists with one value only; pruned models have several, and no place here."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedError(f"{key} differs from layer to layer", "Only models of equal layers are supported")
        return value[0]
    return value


def _geometry(data: Metadata) -> Config:
    if data.get("expert_count", 0):
        raise UnsupportedError(f"{data.file.path.name} is a mixture of experts", "Only dense models are supported")
    heads = _one(data.need("attention.head_count"), "attention.head_count")
    hidden = data.need("embedding_length")
    vocabulary = data.file.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise FormatError(f"{data.file.path.name} lacks tensor token_embd.weight", "Fetch the file again")
    return {
        "vocab_size": vocabulary.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _one(data.need("feed_forward_length"), "feed_forward_length"),
        "num_hidden_layers": data.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _one(data.get("attention.head_count_kv", heads), "attention.head_count_kv"),
        "head_dim": data.get("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": data.need("context_length"),
        "rms_norm_eps": data.need("attention.layer_norm_rms_epsilon"),
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
    pattern = data.get("attention.sliding_window_pattern", 6)
    return {
        **_gemma(data, config, layers_of_27b=62),
        "rope_local_base_freq": data.get("rope.freq_base_swa", 10000.0),
        "layer_types": _layer_types(config["num_hidden_layers"], pattern),
        "sliding_window_pattern": pattern,
    }


def _phi3(data: Metadata, config: Config) -> Config:
    rotated = data.get("rope.dimension_count", config["head_dim"])
    original = data.get("rope.scaling.original_context_length", config["max_position_embeddings"])
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
        "original_max_position_embeddings": data.need("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        value = data.get(f"rope.scaling.yarn_{name}")
        if value is not None:
            scaling[name] = value
    return scaling


def _factors(data: Metadata, tensor: str) -> list[float]:
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
    expected = llama3_factors(data.get("rope.freq_base", 10000.0), config["head_dim"], factor)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
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
