"""Self-distillation: the divergence and its gradient are torch's, and what learns is the crossed pass alone."""

import random

import pytest
import torch
from torch.nn.functional import kl_div

from adapt_llm.convert import self_distillation
from adapt_llm.convert.cross_layer import CrossLayer, draw_leaders
from adapt_llm.convert.self_distillation import imitation, kl_divergence
from adapt_llm.convert.sequences import Batch
from adapt_llm.convert.trainable import IGNORED, Trainable


def make_batch(tiny) -> Batch:
    ids = tiny.random_ids(2, 12)
    targets = torch.cat((ids[:, 1:], torch.full((2, 1), IGNORED)), 1)
    targets[0, 2:5] = IGNORED
    return Batch(ids, targets, (12, 12))


def gradients(model: Trainable, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.trained().items()}
    return {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [1, 7])
def test_divergence_and_gradient_are_those_of_torch(
    softcap: float | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_distillation, "LOGIT_BYTES", 4 * 11 * 2)  # two rows at a time
    torch.manual_seed(0)
    x, wanted = torch.randn(rows, 5, requires_grad=True), torch.randn(rows, 5)
    weight = torch.randn(11, 5, requires_grad=True)

    def log_softmax(h: torch.Tensor) -> torch.Tensor:
        logits = h @ weight.detach().T
        return torch.log_softmax(logits if softcap is None else softcap * torch.tanh(logits / softcap), -1)

    expected = kl_div(log_softmax(x), log_softmax(wanted), reduction="sum", log_target=True)
    (slope,) = torch.autograd.grad(expected, x)
    found = kl_divergence(x, wanted, weight, softcap=softcap)
    torch.testing.assert_close(found, expected)
    (3 * found).backward()
    torch.testing.assert_close(x.grad, 3 * slope, rtol=1e-4, atol=1e-5)
    assert weight.grad is None
    assert float(kl_divergence(wanted, wanted, weight, softcap=softcap).detach()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ["llama-tied", "gemma2", "qwen3"])
def test_the_text_is_learnt_plainly_and_the_crossed_pass_imitates(
    name: str, tiny, tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient are those of both passes, of which the plain one learns nothing from the other."""
    monkeypatch.setattr(self_distillation, "STEEPEST", 1e9)
    case, batch = tiny_model(name), make_batch(tiny)
    model, own = Trainable(case.arch, case.store), tuple(range(case.arch.num_layers))
    sources = draw_leaders(case.arch, 0.75, random.Random(1))
    assert sources != own
    loss, counted = CrossLayer(0.75, draw="leaders", distill=0.25)(model, batch, random.Random(1))
    assert counted == batch.counted
    rows = batch.targets != IGNORED

    def predicted(each: tuple[int, ...]) -> torch.Tensor:
        x = model.decoder.final_norm(model.hidden(batch.ids, batch.counts, each)[rows])
        logits, cap = x @ model.decoder.head.weight.detach().T, case.arch.logit_softcap
        return torch.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), -1)

    apart = kl_div(predicted(sources), predicted(own).detach(), reduction="sum", log_target=True)
    expected = model(batch.ids, batch.targets, batch.counts, own) + 0.25 * apart
    torch.testing.assert_close(loss, expected)
    found, wanted = gradients(model, loss), gradients(model, expected)
    assert found.keys() == wanted.keys()
    for key, grad in wanted.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-4, atol=1e-4, msg=key)


def test_where_nothing_crosses_the_text_alone_is_learnt(tiny, tiny_model) -> None:
    case, batch = tiny_model("llama"), make_batch(tiny)
    model = Trainable(case.arch, case.store)
    plain = model(batch.ids, batch.targets, batch.counts)
    for objective in (CrossLayer(0.0, draw="leaders", distill=0.5), CrossLayer(0.9, plain=1.0, distill=0.5)):
        assert torch.equal(objective(model, batch, random.Random(0))[0], plain)


def test_no_token_outweighs_the_others(tiny, tiny_model) -> None:
    """At every state a token's gradient, times the state's length, is at most the limit; what is below it stays."""
    case, batch = tiny_model("llama"), make_batch(tiny)
    model, own = Trainable(case.arch, case.store), tuple(range(case.arch.num_layers))
    rows = batch.targets != IGNORED
    wanted = 3 * torch.randn_like(model.hidden(batch.ids))

    def steepness(weight: float, *, limited: bool) -> list[torch.Tensor]:
        states = model.states(batch.ids, batch.counts, (0,) * len(own), after=own)
        for state in states:
            state.retain_grad()
        most = self_distillation.STEEPEST if limited else 1e9
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self_distillation, "STEEPEST", most)
            imitation(model, states, wanted, rows, weight).backward()
        return [(state.grad.norm(dim=-1) * state.detach().norm(dim=-1))[rows] for state in states]

    with pytest.MonkeyPatch.context() as patch:
        free = steepness(1.0, limited=False)
        middle = float(free[-1].median())
        patch.setattr(self_distillation, "STEEPEST", middle)
        bound, half = steepness(1.0, limited=True), steepness(0.5, limited=True)
    torch.testing.assert_close(bound[-1], free[-1].clamp(max=middle), rtol=1e-4, atol=1e-5)
    assert all(float(each.max()) <= middle * 1.0001 for each in bound)
    for one, other in zip(bound, half, strict=True):
        torch.testing.assert_close(other, one / 2, rtol=1e-3, atol=1e-5)
