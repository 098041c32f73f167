"""LoRA: nothing at the start, the same merged and not merged, only its own matrices trained."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapt_llm.convert.lora import LoraSettings, adapted, parameter_names
from adapt_llm.convert.stream import HashingFile, write_safetensors
from adapt_llm.convert.trainable import MemoryStore, Trainable, trained_entries
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tied", "phi3"])
def test_rounding_for_the_products_is_not_written(name: str, dtype: torch.dtype, tiny_model, tmp_path: Path) -> None:
    case = tiny_model(name)
    source = MemoryStore({key: case.store.read(key).to(dtype) * 1.001 for key in case.store.names()})
    settings = LoraSettings(rank=4, targets=("q", "v"))
    model = Trainable(case.arch, source, lora_settings=settings, frozen_dtype=torch.bfloat16)
    pairs = model.trained()
    with torch.no_grad():
        for key, parameter in pairs.items():
            if key.endswith("lora_up"):
                parameter.normal_(std=0.1)
    path = tmp_path / "out.safetensors"
    with path.open("wb") as file:
        write_safetensors(HashingFile(file), trained_entries(model, source))
    changed = {f"{matrix}.weight" for matrix in adapted(case.arch, settings.targets)}
    written = load_file(path)
    assert changed < written.keys() == set(case.arch.tensors())
    for key, tensor in written.items():
        wanted = source.read(key)
        if key in changed:
            down, up = (pairs[each] for each in parameter_names(key.removesuffix(".weight")))
            assert not torch.equal(tensor, wanted)
            wanted = (wanted.double() + settings.scale * up.double() @ down.double()).to(dtype)
        assert tensor.dtype == dtype
        rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6} if key in changed else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(tensor, wanted, **rounding, msg=key)


def test_a_fused_matrix_is_adapted_once(tiny_model) -> None:
    arch = tiny_model("phi3").arch
    assert len(adapted(arch, ("q", "k", "v"))) == arch.num_layers


@pytest.mark.parametrize("settings", [{"rank": 0}, {"alpha": -1.0}, {"targets": ("head",)}, {"targets": ()}])
def test_settings_that_mean_nothing_are_refused(settings: dict) -> None:
    with pytest.raises(UsageError):
        LoraSettings(**settings)
