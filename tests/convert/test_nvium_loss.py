"""The mixture's loss against the plain formula, the routers' warm-up, and the controller of depth."""

import json
import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapt_llm.convert import mixture_loss as module
from adapt_llm.convert.depth_control import FIRST, HIGHEST, DepthControl, warm_up_term
from adapt_llm.convert.mixture_loss import mixture_loss
from adapt_llm.convert.nvium_judge import Measured
from adapt_llm.runtime.junctions import log_weights, weights

R, D, V, N = 13, 8, 17, 3


def inputs(exits: int = N) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    x = torch.randn(exits, R, D, dtype=torch.float64, requires_grad=True)
    scores = [torch.randn(R, dtype=torch.float64, requires_grad=True) for _ in range(N - 1)]
    head = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    return x, scores, head, torch.randint(0, V, (R,))


def plainly(x: Tensor, scores: list[Tensor], head: Tensor, targets: Tensor, last, cap, own) -> Tensor:
    """- sum over tokens of log sum over exits of p_k softmax(z_k)[target], as the paper has it, and the exits' own."""
    logits = x @ head.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    each = logits.softmax(-1).gather(-1, targets.expand(len(x), -1)[..., None])[..., 0]
    alone = -own * each.log().sum()
    each = each if last is None else torch.cat((each, last.exp()[None]))
    return alone - (torch.stack(weights(scores)) * each).sum(0).log().sum()


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("own", [0.0, 0.7])
def test_loss_and_gradients_are_those_of_the_plain_formula(
    cap: float | None, constant: bool, own: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGIT_BYTES", 4 * V * N * 5)  # several chunks, the last of them shorter
    x, scores, head, targets = inputs(N - 1 if constant else N)
    last = -torch.rand(R, dtype=torch.float64) * 4 if constant else None
    wanted = plainly(x, scores, head, targets, last, cap, own)
    inputs_of = (x, *scores, head)
    expected = torch.autograd.grad(wanted, inputs_of)
    loss, each = mixture_loss(x, torch.stack(log_weights(scores)), head, targets, last=last, softcap=cap, own=own)
    torch.testing.assert_close(loss, wanted, check_dtype=False, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(2 * loss, inputs_of), expected, strict=True):
        torch.testing.assert_close(mine, 2 * theirs, atol=1e-5, rtol=1e-4)
    assert each.shape == (N, R)
    if last is not None:
        torch.testing.assert_close(each[-1], last, check_dtype=False)


def test_a_frozen_head_and_mass_that_vanishes_do_no_harm() -> None:
    x, _, head, targets = inputs()
    scores = [torch.full((R,), value, dtype=torch.float64, requires_grad=True) for value in (-300.0, 300.0)]
    loss, _ = mixture_loss(x, torch.stack(log_weights(scores)), head.detach(), targets)
    loss.backward()
    alone = -(x[1].detach() @ head.detach().T).log_softmax(-1).gather(-1, targets[:, None]).sum()
    torch.testing.assert_close(loss.detach(), alone, check_dtype=False, atol=1e-5, rtol=1e-5)
    assert bool(x.grad.isfinite().all())
    assert head.grad is None


@pytest.mark.parametrize("exits", [2, 3, 5])
def test_warm_up_is_least_at_equal_masses(exits: int) -> None:
    equal = [torch.full((4,), -math.log(exits - k - 1)) for k in range(exits - 1)]
    for mass in weights(equal):
        torch.testing.assert_close(mass, torch.full((4,), 1 / exits))
    assert float(warm_up_term(equal)) == pytest.approx(0, abs=1e-12)
    moved = [score + 0.3 for score in equal]
    rates = [float(score[0].sigmoid()) for score in moved]
    wanted = 4 * sum((rate - 1 / (exits - k)) ** 2 for k, rate in enumerate(rates))
    assert float(warm_up_term(moved)) == pytest.approx(wanted, rel=1e-5)


def toy(
    target: float, steps: int, *, gain: float = 1.0, seed: int = 0, best: float = 1.0
) -> tuple[DepthControl, list[float]]:
    """Scores that Adam moves between what leaving costs (`best` is the depth of least loss) and what depth costs."""
    control = DepthControl(steps, beta=FIRST, target=target)
    score = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([score], lr=0.03, betas=(0.9, 0.95))  # as training has it
    noise, depths = random.Random(seed), []
    for step in range(steps):
        control.begin(step)
        depth = 1 - score.sigmoid() * 0.75
        loss = gain * (best - depth) ** 2
        price = warm_up_term([score]) if control.warming else control.beta * depth
        optimizer.zero_grad()
        (loss + price).backward()
        optimizer.step()
        control.add(loss, depth + noise.gauss(0, 0.01), 1)
        control.finish(control.sums())
        depths.append(float(depth.detach()))
    return control, depths


@pytest.mark.parametrize(("target", "gain"), [(0.5, 0.2), (0.8, 0.2), (0.8, 3.0)])
def test_the_controller_reaches_its_target(target: float, gain: float) -> None:
    """Whatever depth is worth: the price that does it differs fifteenfold."""
    _, depths = toy(target, 400, gain=gain)
    settled = depths[-40:]
    assert abs(sum(settled) / 40 - target) < 0.02
    assert max(settled) - min(settled) < 0.08


@settings(max_examples=40, deadline=None)
@given(
    target=st.floats(0.4, 0.9),
    steps=st.sampled_from([150, 300, 600]),
    slope=st.floats(math.log(0.3), math.log(3)).map(math.exp),
    centre=st.floats(-4, 5.5),
    lag=st.floats(0.02, 0.06),
    step_of=st.sampled_from([(512, 0.06), (512, 0.02), (4096, 0.02), (4096, 0.005), (32768, 0.02), (32768, 0.005)]),
    seed=st.integers(0, 1000),
)
def test_the_controller_settles_whatever_the_model_answers(
    target: float, steps: int, slope: float, centre: float, lag: float, step_of: tuple[int, float], seed: int
) -> None:
    """A model whose depth follows asinh(beta / 0.01), steeply or not, sooner or later.

    Steps measure it with noise, those of many tokens with less. One that answers at once and steeply may swing for
    long: the swing passes for noise (docs/nvium.md).
    """
    tokens, noise = step_of
    needed = centre - math.log((target - 0.25) / (1 - target)) / slope
    assume(needed < math.asinh(HIGHEST / 0.01) - 0.5)
    control, draws = DepthControl(steps, beta=FIRST, target=target), random.Random(seed)
    depth, depths = 0.6, []
    for step in range(steps):
        control.begin(step)
        control.add(torch.tensor(3.0 * tokens), torch.tensor(tokens * (depth + draws.gauss(0, noise))), tokens)
        control.finish(control.sums())
        price = math.asinh(control.beta / 0.01)
        wanted = 0.6 if control.warming else 1 - 0.75 / (1 + math.exp(-slope * (price - centre)))
        depth += (wanted - depth) / max(1.0, lag * steps)
        depths.append(depth)
    settled = depths[-(steps // 5) :]
    assert abs(sum(settled) / len(settled) - target) < 0.03
    assert max(settled) - min(settled) < 0.08 + 4 * noise


@pytest.mark.parametrize("gain", [0.2, 3.0])
def test_the_controller_pays_for_depth_where_the_model_would_leave_early(gain: float) -> None:
    control, depths = toy(0.6, 400, gain=gain, best=0.35)
    assert abs(sum(depths[-40:]) / 40 - 0.6) < 0.02
    assert control.beta == pytest.approx(-2 * gain * 0.25, rel=0.3)  # where both slopes cancel


def test_a_steered_price_has_a_bound_and_comes_back_from_it() -> None:
    control = DepthControl(200, beta=FIRST, target=0.6)
    found = []
    for step in range(200):
        control.begin(step)
        control.add(torch.tensor(1.0), torch.tensor(0.3 if step < 100 else 0.9), 1)
        control.finish(control.sums())
        found.append(control.beta)
    assert found[99] == pytest.approx(-HIGHEST)
    assert found[-1] == pytest.approx(HIGHEST)


def test_a_given_beta_stays() -> None:
    control = DepthControl(10, beta=0.3)
    for step in range(10):
        control.begin(step)
        control.add(torch.tensor(1.0), torch.tensor(0.9), 1)
        control.finish(control.sums())
    assert control.beta == 0.3
    assert not control.warming


def test_the_controller_goes_on_where_it_was() -> None:
    def run(control: DepthControl, steps: range) -> list[float]:
        betas = []
        for step in steps:
            control.begin(step)
            control.add(torch.tensor(3.0), torch.tensor(1.2 + 0.2 * math.sin(step)), 2)
            control.finish(control.sums())
            betas.append(control.beta)
        return betas

    whole = run(DepthControl(60, beta=FIRST, target=0.6), range(60))
    first = DepthControl(60, beta=FIRST, target=0.6)
    begun = run(first, range(31))
    second = DepthControl(60, beta=FIRST, target=0.6)
    second.restore(json.loads(json.dumps(first.state())))
    assert begun + run(second, range(31, 60)) == whole
    assert len(set(whole)) > 40


@pytest.mark.parametrize(("asked", "found", "warned"), [(0.8, 0.405, True), (0.8, 0.76, False), (None, 0.4, False)])
def test_a_depth_far_from_what_was_asked_is_said(asked: float | None, found: float, warned: bool) -> None:
    measured = Measured(9, 20.0, 21.0, (21.0,), (1.0,), found, 0.1, 0.9)
    assert ("40.5% of the blocks, 80.0% were asked for" in measured.missed(asked)) is warned
    assert bool(measured.missed(asked)) is warned
