"""A trainable model: loss and gradients of transformers, whatever is recomputed, shared or left out."""

import pytest
import torch
from torch.nn.functional import cross_entropy as reference_loss

from adapt_llm.convert import cross_entropy as chunked
from adapt_llm.convert.lora import LoraSettings
from adapt_llm.convert.trainable import IGNORED, Trainable

FAMILIES = ("llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3")
LENGTH = 12


def make_targets(ids: torch.Tensor) -> torch.Tensor:
    """What comes next, with some tokens that do not count."""
    targets = torch.cat((ids[:, 1:], torch.full((len(ids), 1), IGNORED)), 1)
    targets[0, 2:5] = IGNORED
    return targets


def gradients(model: Trainable, **given) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = given.pop("ids")
    model(ids, make_targets(ids), **given).backward()
    return {name: parameter.grad for name, parameter in model.trained().items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(name: str, tiny, tiny_model) -> None:
    case = tiny_model(name)
    ids = tiny.random_ids(2, LENGTH)
    targets = make_targets(ids)
    model = Trainable(case.arch, case.store)
    case.reference.zero_grad()
    logits = case.reference(ids, use_cache=False).logits
    expected = reference_loss(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    expected.backward()
    loss = model(ids, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    loss.backward()
    for key, parameter in case.reference.named_parameters():
        torch.testing.assert_close(model.trained()[key].grad, parameter.grad, rtol=2e-4, atol=2e-4, msg=key)
    case.reference.zero_grad()


def test_every_parameter_is_named_once(tiny_model) -> None:
    case = tiny_model("llama-tied")
    model = Trainable(case.arch, case.store)
    assert set(model.trained()) == set(case.arch.tensors())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in case.reference.parameters())
    assert model.decoder.head.weight is model.decoder.embedding


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("sources", [None, [0, 0, 1, 0]])
@pytest.mark.parametrize(("bf16", "lora"), [(False, None), (True, None), (False, LoraSettings(rank=4))])
def test_checkpointing_changes_no_bit(
    name: str, sources: list[int] | None, lora: LoraSettings | None, bf16: bool, tiny, tiny_model
) -> None:
    """So that it is no part of what a result depends on."""
    case = tiny_model(name)
    chosen = sources and sources[: case.arch.num_layers]
    ids = tiny.random_ids(2, LENGTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        kept, again = (
            gradients(Trainable(case.arch, case.store, lora_settings=lora, checkpointing=on), ids=ids, sources=chosen)
            for on in (False, True)
        )
    assert kept.keys() == again.keys()
    for key, grad in kept.items():
        assert grad is again[key] is None or torch.equal(grad, again[key]), key


def test_a_layer_reads_the_keys_of_its_source(tiny, tiny_model) -> None:
    """What training calls a map is the map that runs."""
    case = tiny_model("qwen3")
    ids = tiny.random_ids(2, LENGTH)
    model = Trainable(case.arch, case.store)
    with torch.no_grad():
        shared = Trainable(case.arch.share([0, 0, 0]), case.store).hidden(ids)
        torch.testing.assert_close(model.hidden(ids, sources=[0, 0, 0]), shared)
        assert not torch.allclose(model.hidden(ids), shared)
    grads = gradients(model, ids=ids, sources=[0, 0, 1])
    assert grads["model.layers.1.self_attn.k_proj.weight"].abs().sum() > 0  # layer 2 reads them
    assert grads["model.layers.2.self_attn.v_proj.weight"] is None  # nobody does
    assert grads["model.layers.2.self_attn.k_proj.weight"].abs().sum() == 0  # made in one product with the query


@pytest.mark.parametrize("name", ["llama", "phi3-longrope", "llama-dynamic"])
def test_padding_is_not_seen(name: str, tiny, tiny_model) -> None:
    case = tiny_model(name)
    model = Trainable(case.arch, case.store)
    ids = tiny.random_ids(2, 30)
    targets = make_targets(ids)
    targets[1, 9:] = IGNORED
    with torch.no_grad():
        both = model(ids, targets, counts=[30, 10])
        alone = model(ids[:1], targets[:1]) + model(ids[1:, :10], targets[1:, :10])
    torch.testing.assert_close(both, alone)


def test_states_are_taken_after_blocks(tiny, tiny_model) -> None:
    case = tiny_model("llama")
    model = Trainable(case.arch, case.store)
    ids = tiny.random_ids(1, LENGTH)
    first, last = model.states(ids, after=[0, 2])
    torch.testing.assert_close(last, model.hidden(ids))
    assert not torch.allclose(first, last)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunks_of_logits_add_up(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "LOGIT_BYTES", 4 * 50 * 3)  # three rows at a time
    x, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(0, 50, (10,))
    logits = x @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = reference_loss(logits, targets, reduction="sum")
    wanted = torch.autograd.grad(0.5 * expected, (x, weight))
    loss = chunked.cross_entropy(x, weight, targets, softcap=softcap)
    torch.testing.assert_close(loss, expected)
    for found, grad in zip(torch.autograd.grad(0.5 * loss, (x, weight)), wanted, strict=True):
        torch.testing.assert_close(found, grad)


def test_nothing_counted_is_no_loss() -> None:
    x, weight = torch.randn(0, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    loss = chunked.cross_entropy(x, weight, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss == 0
    assert weight.grad.abs().sum() == 0


def test_bf16_autocast_is_near_float32(tiny, tiny_model) -> None:
    case = tiny_model("llama")
    ids = tiny.random_ids(2, LENGTH)
    model = Trainable(case.arch, case.store)
    exact = model(ids, make_targets(ids))
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(ids, make_targets(ids))
    rough.backward()
    assert rough.dtype is torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
