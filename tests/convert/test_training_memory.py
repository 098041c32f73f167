"""The planned memory is what autograd keeps, and not much more."""

import pytest
import torch

from adapt_llm.convert import twodee_lora
from adapt_llm.convert.lora import LoraSettings
from adapt_llm.convert.trainable import Trainable
from adapt_llm.convert.training_memory import activation_bytes, plan_memory


def kept(model: Trainable, ids: torch.Tensor) -> int:
    """Bytes that the backward pass of the blocks needs, parameters aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.hidden(ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "smollm3"])
def test_activations_are_planned(name: str, tiny, tiny_model) -> None:
    case = tiny_model(name)
    model = Trainable(case.arch, case.store)
    used = kept(model, tiny.random_ids(4, 32))
    planned = activation_bytes(case.arch, tokens=4 * 32, length=32)
    assert 0.9 * used < planned < 1.6 * used
    with_checkpoints = kept(Trainable(case.arch, case.store, checkpointing=True), tiny.random_ids(4, 32))
    assert with_checkpoints < activation_bytes(case.arch, tokens=4 * 32, length=32, checkpointing=True) < planned


def test_weights_count_four_times_and_frozen_ones_once(tiny_model) -> None:
    arch = tiny_model("llama").arch
    size = sum(torch.Size(shape).numel() for shape in arch.tensors().values())
    none = plan_memory(arch, tokens=0, length=0)
    lora = plan_memory(arch, tokens=0, length=0, lora=LoraSettings(rank=1), frozen_dtype=torch.bfloat16)
    assert none - lora > 16 * size - 2 * size - 16 * size / 10
    assert plan_memory(arch, tokens=0, length=0, precision="bf16") - none == 2 * size
    more = plan_memory(arch, tokens=64, length=32)
    assert more - none == activation_bytes(arch, tokens=64, length=32)


def test_fine_tuning_for_classification_keeps_what_is_planned(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = tiny_model("gemma2").arch
    needed = activation_bytes(arch, tokens=256, length=256)
    monkeypatch.setattr(twodee_lora, "_ACTIVATION_BYTES", needed)
    assert twodee_lora.keeps_activations(arch, 256)
    monkeypatch.setattr(twodee_lora, "_ACTIVATION_BYTES", needed - 1)
    assert not twodee_lora.keeps_activations(arch, 256)
