"""Exits before training: the linear map from a junction's states to the final ones, as a norm and an adapter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm

from adapt_llm.convert.exit_fit import TOKENS, TOKENS_A_WIDTH, fit_exits, fit_tokens
from adapt_llm.errors import FormatError
from adapt_llm.runtime.attention import RMSNorm
from adapt_llm.runtime.junctions import Adapter

EPS = 1e-5


def exit_of(fitted: dict[str, Tensor], number: int, h: Tensor) -> Tensor:
    """What the head multiplies at a junction."""
    norm, up, down = (fitted[f"junctions.{number}.{name}.weight"] for name in ("norm", "adapter.up", "adapter.down"))
    return Adapter(up, down)(RMSNorm(norm, EPS, offset=False)(h))


def drawn(hidden: int, seed: int, tokens: int = 4000) -> tuple[Tensor, Tensor]:
    """States with a few huge dimensions, as models have them, and a head."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=generator) @ torch.randn(hidden, hidden, generator=generator)
    h[:, 0] *= 100
    return h, torch.randn(5 * hidden, hidden, generator=generator)


@settings(max_examples=12, deadline=None)
@given(hidden=st.integers(4, 33), share=st.floats(0.1, 1), seed=st.integers(0, 1000))
def test_a_linear_map_of_half_rank_is_found(hidden: int, share: float, seed: int) -> None:
    """A diagonal and half as many directions as there are dimensions: as much as an adapter can pass on exactly."""
    h, head = drawn(hidden, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    rank = max(1, int(share * (hidden // 2)))
    x = rms_norm(h, (hidden,), None, EPS)
    y = x @ torch.randn(hidden, rank, generator=generator) @ torch.randn(rank, hidden, generator=generator)
    fitted = fit_exits({}, [(h[None, :2000], y[:2000]), (h[None, 2000:], y[2000:])], head, EPS)
    error = (exit_of(fitted, 1, h) - y) @ head.T
    assert float(error.square().sum()) < 0.02 * float((y @ head.T).square().sum())


def test_each_junction_has_its_own_map_and_the_rest_of_it_stays() -> None:
    h, head = drawn(16, 0)
    y = rms_norm(h, (16,), None, EPS)
    start = {"junctions.1.router.inner.weight": torch.ones(3, 16), "junctions.1.norm.weight": torch.zeros(16)}
    fitted = fit_exits(start, [(torch.stack((h, h.flip(1))), y)], head, EPS)
    assert fitted["junctions.1.router.inner.weight"] is start["junctions.1.router.inner.weight"]
    assert not torch.equal(fitted["junctions.1.norm.weight"], fitted["junctions.2.norm.weight"])
    for number, states in ((1, h), (2, h.flip(1))):
        error = (exit_of(fitted, number, states) - y) @ head.T
        assert float(error.square().sum()) < 0.05 * float((y @ head.T).square().sum())


@pytest.mark.parametrize("tokens", [3, 40])
def test_few_tokens_and_empty_dimensions_do_no_harm(tokens: int) -> None:
    h, head = drawn(16, 3, tokens)
    h[:, 5] = 0
    y = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1))
    fitted = fit_exits({}, [(h[None], y)], head, EPS)
    assert all(bool(tensor.isfinite().all()) for tensor in fitted.values())
    assert float(exit_of(fitted, 1, h).square().mean()) < 4 * float(y.square().mean())


def test_no_tokens_change_nothing() -> None:
    h, head = drawn(16, 0, 4)
    start = {"junctions.1.norm.weight": torch.ones(16)}
    assert fit_exits(start, [(h[None, :0], h[:0])], head, EPS) == start


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_states_that_are_not_finite_are_told(value: float) -> None:
    h, head = drawn(16, 0, 40)
    y = h.clone()
    y[7, 3] = value
    with pytest.raises(FormatError, match="junction 1 are not finite"):
        fit_exits({}, [(h[None], y)], head, EPS)


def test_tokens_of_a_fit() -> None:
    assert fit_tokens(64) == TOKENS
    assert fit_tokens(1 << 20) == TOKENS_A_WIDTH << 20
