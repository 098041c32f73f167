"""GGUF models of every architecture: tiny random transformers models, written as llama.cpp's converter does.

The names come from the `gguf` package's own table, so the mapping under test has an independent counterpart.
"""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue
from gguf.quants import quantize
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from adapt_llm.convert.gguf_config import llama3_factors
from adapt_llm.convert.source_gguf import GgufSource
from adapt_llm.errors import AdaptError, FormatError, UnsupportedError
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.progress import SilentReporter

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
PHI4_MINI = {
    "rope_scaling": LONGROPE,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
# architecture, transformers model type, config beside SIZES
CASES = [
    ("llama", "llama", {"tie_word_embeddings": False}),
    ("llama", "llama", {"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    ("llama", "llama", {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", "mistral", {"sliding_window": None, "head_dim": 32}),
    ("smollm3", "smollm3", {"tie_word_embeddings": True, "rope_theta": 5e6}),
    ("qwen2", "qwen2", {"tie_word_embeddings": False}),
    ("qwen2", "qwen2", {"rope_scaling": YARN}),
    ("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ("gemma2", "gemma2", {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    ("gemma3", "gemma3_text", GEMMA),
    ("phi3", "phi3", {"sliding_window": 32}),
    ("phi3", "phi3", PHI4_MINI),
]
IDS = [f"{index}-{case[1]}" for index, case in enumerate(CASES)]


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(
    writer: GGUFWriter, arch: str, config: transformers.PreTrainedConfig, given: Mapping[str, Any]
) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(given.get("rope_theta", 1e6 if arch == "gemma3" else 10000.0))
    writer.add_rope_dimension_count(int(head_dim * given.get("partial_rotary_factor", 1)))
    if given.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if given.get("sliding_window"):
        writer.add_sliding_window(given["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(96)])


def add_rotation(writer: GGUFWriter, given: Mapping[str, Any]) -> None:
    scaling = given.get("rope_scaling") or {}
    kind = scaling.get("rope_type")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    elif kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(given["original_max_position_embeddings"])
        writer.add_tensor("rope_factors_long.weight", np.array(scaling["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(scaling["short_factor"], dtype=np.float32))


def write_model(
    path: Path, arch: str, model: transformers.PreTrainedModel, given: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Write `model` as GGUF and return its tensors under Hugging Face names."""
    config = model.config
    writer = GGUFWriter(path, arch)
    add_metadata(writer, arch, config, given)
    add_rotation(writer, given)
    if (given.get("rope_scaling") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_freqs(config))
    names = gguf.get_tensor_name_map(getattr(MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, value in state.items():
        stored = value.float()
        if arch in ("llama", "smollm3") and ".q_proj." in name:
            stored = interleave(stored, config.num_attention_heads)
        if arch in ("llama", "smollm3") and ".k_proj." in name:
            stored = interleave(stored, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            stored = stored + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), stored.numpy())
    finish(writer)
    return state


def _rope_freqs(config: transformers.PreTrainedConfig) -> np.ndarray:
    """How much slower than unscaled, from transformers' own rule."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = config.hidden_size // config.num_attention_heads
    plain = 1.0 / 500000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy().astype(np.float32)


def tiny_model(model_type: str, given: Mapping[str, Any]) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **given})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.01 if "norm" in name else torch.randn_like(value))
    return model


@pytest.mark.parametrize(("arch", "model_type", "given"), CASES, ids=IDS)
def test_a_model_comes_back(tmp_path: Path, arch: str, model_type: str, given: dict[str, Any]) -> None:
    model = tiny_model(model_type, given)
    state = write_model(tmp_path / "m.gguf", arch, model, given)
    source = GgufSource(tmp_path / "m.gguf", SilentReporter())

    assert set(source.store.names()) == set(state)
    for name, value in state.items():
        read = source.store.read(name)
        assert source.store.info(name).shape == read.shape == value.shape
        # Gemma's norms too: 1 + w in float32 keeps w to bf16's 8 bits down to |w| of 2^-16.
        assert torch.equal(read, value), name

    ours, theirs = Architecture.from_config(source.config), Architecture.from_config(model.config.to_dict())
    expected = {name: getattr(theirs, name) for name in theirs.__dataclass_fields__}
    if model_type == "mistral":
        expected["family"] = "llama"
    assert {name: getattr(ours, name) for name in ours.__dataclass_fields__} == expected


def test_the_config_loads_in_transformers(tmp_path: Path) -> None:
    given = CASES[1][2]
    model = tiny_model("llama", given)
    write_model(tmp_path / "m.gguf", "llama", model, given)
    config = GgufSource(tmp_path / "m.gguf", SilentReporter()).config
    loaded = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    assert loaded.rope_parameters == model.config.rope_parameters
    assert (loaded.dtype, loaded.eos_token_id, loaded.tie_word_embeddings) == (torch.bfloat16, 2, True)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_llama3_rule_is_that_of_transformers(factor: float) -> None:
    given = {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "factor": factor}}
    config = transformers.AutoConfig.for_model("llama", **{**SIZES, **given, "hidden_size": 512})
    assert np.allclose(llama3_factors(500000.0, 128, factor), _rope_freqs(config), rtol=1e-5)


def _two_matrices(path: Path, embedding: np.ndarray, head: np.ndarray, head_type: GGMLQuantizationType) -> GgufSource:
    model = tiny_model("llama", {})
    writer = GGUFWriter(path, "llama")
    add_metadata(writer, "llama", model.config, {})
    kind = GGMLQuantizationType.Q5_0
    writer.add_tensor("token_embd.weight", quantize(embedding, kind), raw_dtype=kind)
    writer.add_tensor("output.weight", quantize(head, head_type), raw_dtype=head_type)
    finish(writer)
    return GgufSource(path, Notes())


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("head_type", "kept"),
    [(GGMLQuantizationType.Q8_0, "output.weight"), (GGMLQuantizationType.Q4_0, "token_embd.weight")],
)
def test_a_tied_matrix_stored_twice_keeps_the_better_copy(
    tmp_path: Path, head_type: GGMLQuantizationType, kept: str
) -> None:
    matrix = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    source = _two_matrices(tmp_path / "m.gguf", matrix, matrix, head_type)
    assert source.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in source.store.names()
    best = GGMLQuantizationType.Q8_0 if kept == "output.weight" else GGMLQuantizationType.Q5_0
    expected = gguf.quants.dequantize(quantize(matrix, best), best)
    assert torch.equal(source.store.read("model.embed_tokens.weight"), torch.from_numpy(expected).bfloat16())
    assert kept in source.reporter.said[0].split("kept")[0]


@pytest.mark.parametrize("head_type", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0])
def test_two_matrices_that_differ_stay_two(tmp_path: Path, head_type: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(0)
    embedding, noise = (rng.normal(size=(96, 64)).astype(np.float32) for _ in range(2))
    source = _two_matrices(tmp_path / "m.gguf", embedding, embedding + noise, head_type)  # correlate by 0.7
    assert source.config["tie_word_embeddings"] is False
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(source.store.names())
    assert source.reporter.said == []


def _broken(
    path: Path, *, drop: str = "", arch: str = "llama", put: Mapping[str, object] | None = None, **extra: np.ndarray
) -> Path:
    """A file without one metadata key, with others than it should have, or with more tensors."""
    model = tiny_model("llama", {})
    writer = GGUFWriter(path, arch)
    add_metadata(writer, arch, model.config, {"sliding_window": 16} if arch.startswith("gemma") else {})
    for key, value in (put or {}).items():
        writer.kv_data[0][f"{arch}.{key}"] = GGUFValue(value, _kind(value))
    for shard in writer.kv_data:
        shard.pop(drop, None)
    writer.add_tensor("token_embd.weight", np.zeros((96, 64), dtype=np.float32))
    for name, value in extra.items():
        writer.add_tensor(name.replace("__", "."), value)
    finish(writer)
    return path


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = _broken(tmp_path / "m.gguf", drop="llama.attention.head_count")
    with pytest.raises(FormatError, match=r"lacks the key llama\.attention\.head_count"):
        GgufSource(path, SilentReporter())


def _kind(value: object) -> GGUFValueType:
    """As the writer tells it, but for numbers that its 32 bits cannot hold."""
    plain = GGUFValueType.get_type(value)
    return {GGUFValueType.INT32: GGUFValueType.INT64, GGUFValueType.FLOAT32: GGUFValueType.FLOAT64}.get(plain, plain)


COUNTS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "context_length",
)
NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
NO_NUMBERS = (0.0, -1.0, math.nan, math.inf, 1e300, "x", [1.0, 2.0])


@pytest.mark.parametrize("value", [0, -1, 1 << 40, 2.5, "4", True, [0, 0]], ids=str)
@pytest.mark.parametrize("key", COUNTS)
def test_a_count_that_cannot_be_is_named(tmp_path: Path, key: str, value: object) -> None:
    path = _broken(tmp_path / "m.gguf", put={key: value})
    with pytest.raises(FormatError, match=rf"m\.gguf has llama\.{key} = .*, not a positive whole number") as caught:
        GgufSource(path, SilentReporter())
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_cannot_be_is_named(tmp_path: Path, key: str, value: object) -> None:
    path = _broken(tmp_path / "m.gguf", put={key: value})
    with pytest.raises(FormatError, match=rf"m\.gguf has llama\.{key} = .*, not a positive number"):
        GgufSource(path, SilentReporter())


@pytest.mark.parametrize("put", [{"block_count": 1001}, {"attention.head_count": 65}, {"embedding_length": 1}], ids=str)
def test_counts_that_no_model_has(tmp_path: Path, put: dict[str, object]) -> None:
    with pytest.raises(FormatError, match=r"m\.gguf claims \d+ layers of \d+ heads for an embedding_length of \d+"):
        GgufSource(_broken(tmp_path / "m.gguf", put=put), SilentReporter())


@pytest.mark.parametrize("value", [0, -1, 1 << 40, "x", [True, False], 1e300], ids=str)
@pytest.mark.parametrize(
    ("arch", "key"),
    [
        ("gemma3", "attention.sliding_window_pattern"),
        ("gemma3", "attention.sliding_window"),
        ("gemma3", "rope.freq_base_swa"),
        ("gemma3", "final_logit_softcapping"),
        ("phi3", "attention.key_length"),
        ("phi3", "rope.dimension_count"),
        ("phi3", "rope.scaling.original_context_length"),
        ("smollm3", "block_count"),
        ("llama", "rope.scaling.factor"),
        ("llama", "rope.dimension_count"),
    ],
)
def test_any_value_of_a_family_comes_to_one_line(tmp_path: Path, arch: str, key: str, value: object) -> None:
    path = _broken(tmp_path / "m.gguf", arch=arch, put={key: value})
    with contextlib.suppress(AdaptError):
        GgufSource(path, SilentReporter())


@pytest.mark.parametrize("values", [[0.0] * 8, [math.inf] * 8, [math.nan] * 8, [-1.0] * 8], ids=str)
@pytest.mark.parametrize("name", ["rope_freqs__weight", "rope_factors_long__weight"])
def test_rope_factors_that_cannot_be(tmp_path: Path, name: str, values: list[float]) -> None:
    path = _broken(tmp_path / "m.gguf", **{name: np.array(values, dtype=np.float32)})
    with pytest.raises(AdaptError, match=r"rope_freqs\.weight|lacks tensor rope_factors_short\.weight"):
        GgufSource(path, SilentReporter())


def test_experts_are_refused(tmp_path: Path) -> None:
    path = _broken(tmp_path / "m.gguf", blk__0__ffn_gate_exps__weight=np.zeros((2, 64, 64), dtype=np.float32))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ffn_gate_exps\.weight .*[Ee]xperts"):
        GgufSource(path, SilentReporter())


def test_rope_factors_of_another_rule_are_refused(tmp_path: Path) -> None:
    path = _broken(tmp_path / "m.gguf", rope_freqs__weight=np.linspace(1, 8, 8, dtype=np.float32))
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight does not follow the llama3 rule"):
        GgufSource(path, SilentReporter())


def test_the_fingerprint_sees_a_change(tmp_path: Path) -> None:
    path = _broken(tmp_path / "m.gguf")
    source = GgufSource(path, SilentReporter())
    assert (first := source.fingerprint()) == GgufSource(path, SilentReporter()).fingerprint()
    assert str(tmp_path) not in repr(source.identity)
    _broken(path, blk__0__attn_norm__weight=np.zeros(64, dtype=np.float32))
    assert GgufSource(path, SilentReporter()).fingerprint() != first
