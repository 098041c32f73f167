"""LoRA: nothing at the start, the same merged and not merged, only its own matrices trained."""

import pytest
import torch

from adapt_llm.convert.lora import LoraSettings, adapted
from adapt_llm.convert.trainable import MemoryStore, Trainable
from adapt_llm.errors import UsageError
from adapt_llm.runtime.decoder import load_decoder


def make(case, **settings) -> Trainable:
    model = Trainable(case.arch, case.store, lora_settings=LoraSettings(rank=4, **settings))
    with torch.no_grad():
        for name, parameter in model.trained().items():
            if name.endswith("lora_up"):
                parameter.normal_(std=0.1)
    return model


def test_it_starts_as_the_model_it_adapts(tiny, tiny_model) -> None:
    case = tiny_model("llama")
    ids = tiny.random_ids(2, 9)
    model = Trainable(case.arch, case.store, lora_settings=LoraSettings(rank=4))
    torch.testing.assert_close(model.decoder.logits(model.hidden(ids)), case.expected(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "gemma2", "phi3"])
def test_merged_is_unmerged(name: str, tiny, tiny_model) -> None:
    case = tiny_model(name)
    ids = tiny.random_ids(2, 9)
    model = make(case)
    with torch.no_grad():
        unmerged = model.decoder.logits(model.hidden(ids))
        merged = load_decoder(case.arch, MemoryStore(model.state()), device="cpu", dtype=torch.float32)
        found = Trainable(case.arch, MemoryStore(model.state())).hidden(ids)
    torch.testing.assert_close(merged.logits(found), unmerged, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(unmerged, case.expected(ids), atol=1e-2)


def test_only_lora_is_trained(tiny, tiny_model) -> None:
    case = tiny_model("llama")
    model = make(case, targets=("q", "down"))
    ids = tiny.random_ids(2, 9)
    model(ids, ids).backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name.replace(".", "/") for name in model.trained()}
    assert len(model.trained()) == 2 * 2 * case.arch.num_layers


def test_frozen_weights_may_be_bf16(tiny, tiny_model) -> None:
    case = tiny_model("llama")
    settings = LoraSettings(rank=4)
    model = Trainable(case.arch, case.store, lora_settings=settings, frozen_dtype=torch.bfloat16)
    ids = tiny.random_ids(2, 9)
    loss = model(ids, ids)
    loss.backward()
    torch.testing.assert_close(loss, Trainable(case.arch, case.store)(ids, ids), rtol=0.05, atol=0)
    assert all(p.grad.dtype is torch.float32 for p in model.trained().values())
    assert {t.dtype for t in model.state().values()} == {torch.bfloat16}


def test_a_fused_matrix_is_adapted_once(tiny_model) -> None:
    arch = tiny_model("phi3").arch
    assert len(adapted(arch, ("q", "k", "v"))) == arch.num_layers


@pytest.mark.parametrize("settings", [{"rank": 0}, {"alpha": -1.0}, {"targets": ("head",)}, {"targets": ()}])
def test_settings_that_mean_nothing_are_refused(settings: dict) -> None:
    with pytest.raises(UsageError):
        LoraSettings(**settings)
