"""Rotations against transformers': frequencies and factors of published configs, long positions, switches."""

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.cache import KVCache, RotationChangedError
from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.rope import Rotary, inverse_frequencies

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
SHORT = [1.0 + 0.02 * i for i in range(48)]
LONG = [1.0 + 0.9 * i for i in range(48)]
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PHI = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
# Shapes and scalings of published models; head_dim 128 unless hidden / heads says otherwise.
PUBLISHED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("Llama", {"rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": LLAMA31}),
    "llama-3.2-1b": (
        "Llama",
        {
            "rope_theta": 5e5,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rope_scaling": {**LLAMA31, "factor": 32.0},
        },
    ),
    "qwen2.5-yarn": (
        "Qwen2",
        {
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
    ),
    "yarn-every-field": (
        "Llama",
        {
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 20,
                "beta_slow": 2,
                "truncate": False,
                "attention_factor": 1.25,
            },
        },
    ),
    "linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_position_embeddings": 512}),
    "dynamic": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096}),
    "phi-4-mini": (
        "Phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            "rope_scaling": PHI,
        },
    ),
}
SHAPE = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
NEEDED = {"intermediate_size": 64, "vocab_size": 64}


@pytest.mark.parametrize("length", [1, 4096, 4097, 100_000])
@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies(name: str, length: int) -> None:
    family, settings = PUBLISHED[name]
    settings = {**SHAPE, **NEEDED, **settings}
    arch = Architecture.from_config({"model_type": family.lower(), **settings})
    config = getattr(transformers, f"{family}Config")(**{**settings, "rope_scaling": dict(settings["rope_scaling"])})
    expected, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)
    ours, ours_factor = inverse_frequencies(arch.ropes[0], length)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert ours_factor == pytest.approx(factor, abs=1e-9)


def test_earlier_names_of_longrope() -> None:
    settings = {"model_type": "phi3", **SHAPE, **NEEDED, **PUBLISHED["phi-4-mini"][1]}
    read = [Architecture.from_config({**settings, "rope_scaling": {**PHI, "type": kind}}) for kind in ("su", "yarn")]
    assert read == [Architecture.from_config(settings)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_positions(dtype: torch.dtype) -> None:
    """At position 131 000 the table is bit for bit transformers'."""
    family, settings = PUBLISHED["phi-4-mini"]
    settings = {**SHAPE, **NEEDED, **settings}
    arch = Architecture.from_config({"model_type": family.lower(), **settings})
    config = transformers.Phi3Config(**{**settings, "rope_scaling": dict(PHI)})
    positions = torch.arange(131_000, 131_010)[None]
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)
    ours_cos, ours_sin = Rotary(arch.ropes[0], device=torch.device("cpu"), dtype=dtype).range(131_000, 131_010, 131_010)
    half = cos.shape[-1] // 2
    assert torch.equal(ours_cos, cos[0])
    assert torch.equal(ours_sin[:, half:], sin[0, :, half:])
    assert torch.equal(ours_sin[:, :half], -sin[0, :, :half])


SCALED = [
    "llama-llama3",
    "llama-linear",
    "llama-yarn",
    "llama-dynamic",
    "qwen2-yarn",
    "ministral3",
    "gemma3",
    "phi3-longrope",
]


def forward(decoder: Decoder, ids: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
    with torch.inference_mode():
        step = decoder.step(cache, ids)
        return decoder.logits(decoder.run(decoder.embed(ids), step, cache or PassStore(decoder.arch)))


@pytest.mark.parametrize("length", [24, 25, 63, 90])
@pytest.mark.parametrize("name", SCALED)
def test_beyond_the_trained_length(name: str, length: int, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    model, ids = tiny_model(name), tiny.random_ids(1, length)
    model.expected(ids[:, :2])  # transformers' dynamic frequencies are a state: a short pass resets it
    torch.testing.assert_close(forward(model.decoder, ids), model.expected(ids), **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in SCALED if name not in ("llama-dynamic", "phi3-longrope")])
def test_cached_beyond_the_trained_length(name: str, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
    model, ids = tiny_model(name), tiny.random_ids(1, 90)
    cache = model.decoder.new_cache(1, 90)
    logits = torch.cat([forward(model.decoder, part, cache) for part in ids.split([40, 1, 30, 19], 1)], 1)
    torch.testing.assert_close(logits, model.expected(ids), **TOLERANCE)


def test_dynamic_frequencies_follow_the_cache_as_in_transformers(
    tiny_model: Callable[[str], Any], tiny: ModuleType
) -> None:
    """Dynamic NTK rotates each key for the length it was written at, so cached and uncached differ, there as here."""
    model, ids = tiny_model("llama-dynamic"), tiny.random_ids(1, 40)
    renamed = "cache" in inspect.signature(model.reference.model.forward).parameters  # since transformers 5.2x
    keyword = "cache" if renamed else "past_key_values"
    ours, theirs = model.decoder.new_cache(1, 40), transformers.DynamicCache()
    model.expected(ids[:, :2])
    for part in ids.split([20, 1, 1, 8, 10], 1):
        with torch.inference_mode():
            expected = model.reference(part, use_cache=True, **{keyword: theirs}).logits
        torch.testing.assert_close(forward(model.decoder, part, ours), expected, **TOLERANCE)


class TestLongropeSwitch:
    """Past 24 tokens this model rotates every position otherwise; transformers' generate starts again there."""

    def test_long_from_the_start(self, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
        model, ids = tiny_model("phi3-longrope"), tiny.random_ids(1, 40)
        cache = model.decoder.new_cache(1, 40)
        logits = torch.cat([forward(model.decoder, part, cache) for part in ids.split([30, 1, 9], 1)], 1)
        expected = torch.cat([model.expected(ids[:, :30]), model.expected(ids)[:, 30:]], 1)
        torch.testing.assert_close(logits, expected, **TOLERANCE)

    def test_refuses_to_mix(self, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
        model, ids = tiny_model("phi3-longrope"), tiny.random_ids(1, 25)
        cache = model.decoder.new_cache(1, 40)
        forward(model.decoder, ids[:, :24], cache)
        with pytest.raises(RotationChangedError):
            model.decoder.step(cache, ids[:, 24:])
        cache.truncate(0)
        torch.testing.assert_close(forward(model.decoder, ids, cache), model.expected(ids), **TOLERANCE)

    def test_refuses_to_mix_after_a_rollback(self, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
        model, ids = tiny_model("phi3-longrope"), tiny.random_ids(1, 30)
        cache = model.decoder.new_cache(1, 40)
        forward(model.decoder, ids, cache)
        cache.truncate(20)
        with pytest.raises(RotationChangedError):
            model.decoder.step(cache, ids[:, 20:21])

    def test_rows_switch_on_their_own(self, tiny_model: Callable[[str], Any], tiny: ModuleType) -> None:
        """A short row is rotated as it would be alone, whatever stands beside it."""
        model, ids = tiny_model("phi3-longrope"), tiny.random_ids(2, 30)
        cache = model.decoder.new_cache(2, 40)
        with torch.inference_mode():
            step = model.decoder.step(cache, ids, [30, 10])
            logits = model.decoder.logits(model.decoder.run(model.decoder.embed(ids), step, cache))
        torch.testing.assert_close(logits[:1], model.expected(ids[:1]), **TOLERANCE)
        torch.testing.assert_close(logits[1:, :10], model.expected(ids[1:, :10]), **TOLERANCE)
