"""The native draw: the token that float64 sums in torch give, at every length, temperature and edge."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapt_llm.quant.kernels import draw, native

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native module: {native.why_not()}")
ALMOST_ONE = math.nextafter(1.0, 0.0)
WIDTHS = pytest.mark.parametrize("wide", [True, False], ids=["vectors", "plain"])


def cumulative(logits: Tensor, temperature: float) -> Tensor:
    return ((logits.double() - logits.max()) / temperature).exp().cumsum(0)


@WIDTHS
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([1, 2, 15, 16, 17, 511, 512, 513, 1500, 4096]),
    st.sampled_from([0.05, 0.7, 1.0, 3.0, 40.0]),
    st.floats(0.0, ALMOST_ONE),
    st.integers(0, 1000),
)
def test_the_token_is_where_the_cumulative_law_passes_the_number(
    wide: bool, count: int, temperature: float, uniform: float, seed: int
) -> None:
    logits = 3 * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    logits[seed % count] = -math.inf if count > 1 else 0.0
    sums = cumulative(logits, temperature)
    wanted = uniform * float(sums[-1])
    token = draw.draw(logits, temperature, uniform, wide=wide)
    below = float(sums[token - 1]) if token else 0.0
    slack = 1e-12 * float(sums[-1])
    assert below - slack <= wanted <= float(sums[token]) + slack
    assert logits[token] > -math.inf


@WIDTHS
def test_the_same_tokens_as_by_torch(wide: bool) -> None:
    logits, numbers = 2 * torch.randn(9000), torch.rand(500, dtype=torch.float64)
    sums = cumulative(logits, 0.8)
    expected = torch.searchsorted(sums, numbers * sums[-1], right=True).tolist()
    assert [draw.draw(logits, 0.8, float(number), wide=wide) for number in numbers] == expected


@WIDTHS
@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 700), (ALMOST_ONE, 1300)])
def test_what_has_no_weight_is_never_drawn(wide: bool, uniform: float, expected: int) -> None:
    """At either end, in blocks of their own and inside one; 800 below is less than the smallest number."""
    logits = torch.full((2000,), -math.inf)
    logits[700], logits[1300], logits[1301], logits[100] = 1.0, 1.0, -800.0, -800.0
    assert draw.draw(logits, 1.0, uniform, wide=wide) == expected


@WIDTHS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 5, 600])
def test_logits_without_a_law(wide: bool, bad: float, at: int) -> None:
    logits = torch.full((700,), -math.inf) if bad == -math.inf else torch.zeros(700)
    logits[at] = bad
    assert draw.draw(logits, 1.0, 0.5, wide=wide) == -1


def test_what_fits() -> None:
    assert draw.fits(torch.zeros(3))
    assert not draw.fits(torch.zeros(0))
    assert not draw.fits(torch.zeros(1, 3))
    assert not draw.fits(torch.zeros(3).double())
    assert not draw.fits(torch.zeros(6)[::2])


@WIDTHS
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_the_first_of_the_greatest(wide: bool, data: st.DataObject) -> None:
    """Ties at any distance, infinities below; a NaN anywhere, or no finite maximum, is no token."""
    count = data.draw(st.sampled_from([1, 2, 15, 16, 17, 511, 512, 513, 1500, 4096]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(count, generator=generator)
    logits[torch.rand(count, generator=generator) < 0.3] = -math.inf
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
    logits[places] = 9.0
    assert draw.greatest(logits, wide=wide) == min(places)
    wrong = data.draw(st.integers(0, count - 1))
    for value in (math.nan, math.inf):
        spoilt = logits.clone()
        spoilt[wrong] = value
        assert draw.greatest(spoilt, wide=wide) == -1
    assert draw.greatest(torch.full((count,), -math.inf), wide=wide) == -1
