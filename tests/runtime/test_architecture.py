"""Reading config.json: every family's defaults and names against transformers, both generations of keys, refusals."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers

from adapt_llm.errors import AdaptError, FormatError, UnsupportedError, UsageError
from adapt_llm.runtime.architecture import Architecture

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 32,
    "vocab_size": 33,
    "max_position_embeddings": 512,
}
LLAMA = {"model_type": "llama", **SIZES}


def configured(name: str, **settings: Any) -> transformers.PreTrainedConfig:
    return getattr(transformers, f"{FAMILIES[name]}Config")(**{"pad_token_id": 0, **settings})


# Transformers' MinistralConfig leaves head_dim at None, with which its model cannot be built.
EXTRA = {"ministral": {"head_dim": 8}}


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    config = configured(name, **SIZES, **EXTRA.get(name, {}))
    with torch.device("meta"):
        model = getattr(transformers, f"{FAMILIES[name].removesuffix('Text')}ForCausalLM")(config)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    arch = Architecture.from_config(config.to_dict())
    if arch.tied:
        expected.pop("lm_head.weight")
    assert arch.tensors() == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_config_leaves_out_is_filled_as_in_transformers(name: str) -> None:
    complete = configured(name, **SIZES).to_dict()
    assert Architecture.from_config({"model_type": name, **SIZES}) == Architecture.from_config(complete)


def test_a_nested_config_may_leave_out_nearly_everything() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    whole = transformers.Gemma3Config(text_config={**text, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    given = {"model_type": "gemma3", "text_config": {**text, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}
    assert Architecture.from_config(given) == Architecture.from_config(whole.to_dict()["text_config"])
    assert Architecture.from_config(given).family == "gemma3_text"


GEMMA3_OLD = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
GEMMA3_NEW = {
    "rope_parameters": {
        "full_attention": {"factor": 8.0, "rope_type": "linear", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qwen2", {"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        ),
        ("gemma3_text", GEMMA3_OLD, GEMMA3_NEW),
        (
            "phi3",
            {"partial_rotary_factor": 0.5, "rope_theta": 1e4},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
    ],
)
def test_keys_of_both_generations(name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    read = [Architecture.from_config({"model_type": name, **SIZES, **keys}) for keys in (old, new)]
    theirs = Architecture.from_config(configured(name, **SIZES, **old).to_dict())
    assert read == [theirs, theirs]


@pytest.mark.parametrize(
    ("name", "settings", "windows"),
    [
        ("llama", {"sliding_window": 9}, [None] * 7),
        ("mistral", {"sliding_window": 9}, [9] * 7),
        ("mistral", {"sliding_window": None}, [None] * 7),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 5}, [None] * 7),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 5, "use_sliding_window": True}, [None] * 5 + [9] * 2),
        ("gemma2", {"sliding_window": 9}, [9, None] * 3 + [9]),
        ("gemma3_text", {"sliding_window": 9}, [9] * 5 + [None, 9]),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 3}, [9, 9, None] * 2 + [9]),
        ("smollm3", {"sliding_window": 9, "use_sliding_window": True}, [None] * 3 + [9] + [None] * 3),
    ],
)
def test_windows(name: str, settings: dict[str, Any], windows: list[int | None]) -> None:
    arch = Architecture.from_config({"model_type": name, **SIZES, **settings})
    assert [layer.window for layer in arch.layers] == windows


def test_layers_without_rotation() -> None:
    arch = Architecture.from_config({"model_type": "smollm3", **SIZES, "no_rope_layers": [1, 1, 0, 1, 1, 0, 1]})
    assert [layer.rope for layer in arch.layers] == [0, 0, None, 0, 0, None, 0]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**LLAMA, "model_type": "mamba"}, "mamba"),
        ({**LLAMA, "model_type": "qwen3_moe"}, "qwen3_moe"),
        ({**LLAMA, "rope_scaling": {"type": "spiral", "factor": 2}}, "spiral"),
        ({**LLAMA, "hidden_act": "relu6"}, "relu6"),
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts"),
        ({**LLAMA, "residual_multiplier": 0.22}, "residual_multiplier"),
        ({**LLAMA, "attention_multiplier": 0.0078125}, "attention_multiplier"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "model_type": "qwen2", "layer_types": ["linear_attention"] * 7}, "linear_attention"),
        ({**LLAMA, "model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_unknown_maths_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        Architecture.from_config(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 7}, "sliding_window"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor",
        ),
    ],
)
def test_broken_configs_are_refused_by_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatError, match=named):
        Architecture.from_config({**LLAMA, **change})


@pytest.mark.parametrize("key", sorted(LLAMA))
def test_a_missing_field_is_an_error_the_user_can_read(key: str) -> None:
    with pytest.raises(AdaptError, match=key):
        Architecture.from_config({name: value for name, value in LLAMA.items() if name != key})


class TestShare:
    arch = Architecture.from_config({"model_type": "llama", **SIZES, "num_key_value_heads": 2})

    def test_followers_have_no_projections_and_no_slot(self) -> None:
        shared = self.arch.share([0, 0, 0, 3, 3, 3, 6])
        assert shared.slots == (0, 0, 0, 1, 1, 1, 2)
        assert [name.split(".")[-2] for name in shared.block_matrices(1)][:2] == ["q_proj", "o_proj"]
        missing = self.arch.tensors().keys() - shared.tensors().keys()
        assert len(missing) == 4 * 2
        assert all(".k_proj." in name or ".v_proj." in name for name in missing)

    @pytest.mark.parametrize("sources", [[0, 1], [0, 2, 2, 3, 4, 5, 6], [0, 0, 1, 3, 4, 5, 6], [-1, 1, 2, 3, 4, 5, 6]])
    def test_impossible_maps(self, sources: list[int]) -> None:
        with pytest.raises(UsageError):
            self.arch.share(sources)

    def test_layers_that_attend_differently(self) -> None:
        gemma = Architecture.from_config({"model_type": "gemma2", **SIZES})
        with pytest.raises(UsageError, match="differently"):
            gemma.share([0, 0, 2, 3, 4, 5, 6])
        assert gemma.share([0, 1, 0, 1, 0, 1, 0]).slots == (0, 1, 0, 1, 0, 1, 0)


def test_an_architecture_is_plain_data() -> None:
    arch = Architecture.from_config(LLAMA)
    assert dataclasses.replace(arch) == arch
    assert hash(arch) == hash(dataclasses.replace(arch))
