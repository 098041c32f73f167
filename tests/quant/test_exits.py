"""An exit's two native calls: against single operations bit by bit, and against float64; threads, arguments."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from adapt_llm.quant.kernels import exits, native, small

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native module: {native.why_not()}")
EPS = 1e-5
SHAPES = [(24, 16), (200, 136), (576, 384)]  # the last one wakes a team


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).bfloat16()


def matrices(width: int, inner: int) -> list[Tensor]:
    return [normal(inner, width, scale=width**-0.5), normal(width, inner, scale=inner**-0.5)]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize(("width", "inner"), SHAPES)
def test_the_adapter_is_what_its_parts_give(width: int, inner: int, rows: int) -> None:
    first, second = matrices(width, inner)
    x = normal(1, rows, width)
    got = exits.Adapter(exits.Pair((first, second)))(x)
    middle = silu(native.bf16_matmul(x[0], first))
    assert torch.equal(got, x + native.bf16_matmul(middle, second))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize(("width", "inner"), SHAPES)
def test_a_look_is_what_its_parts_give(width: int, inner: int, rows: int) -> None:
    """torch's GELU has another error function: three bf16 numbers of all are rounded otherwise."""
    first, second = matrices(width, inner)
    biases, h = [normal(inner), normal(width)], normal(rows, width, scale=3.0)
    factor, head = torch.rand(width) + 0.5, torch.randn(width)
    normed, scores = exits.Look(exits.Pair((first, second), biases), factor, head, EPS)(h, 0.25)
    assert torch.equal(normed, small.RowNorm(factor, EPS)(h))
    u = native.bf16_matmul(gelu(native.bf16_matmul(normed, first, biases[0])), second, biases[1]).double()
    expected = (u @ head.double()) * (u.square().mean(-1) + EPS).rsqrt() + 0.25
    torch.testing.assert_close(torch.tensor(scores).double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("isa", native.instruction_sets() if native.available() else ())
def test_every_instruction_set(isa: str) -> None:
    weights, biases, h = matrices(200, 136), [normal(136), normal(200)], normal(3, 200)
    factor, head = torch.rand(200), torch.randn(200) * 200**-0.5
    found = []
    for name in (isa, "scalar"):
        pair = exits.Pair(weights, biases, isa=name)
        x, scores = exits.Look(pair, factor, head, EPS, isa=name)(h, 0.0)
        found.append((exits.Adapter(pair)(x).float(), torch.tensor(scores)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=0.03 * float(other.abs().max()), rtol=0.0)


def test_a_row_is_what_it_is_alone() -> None:
    weights, biases, h = matrices(200, 136), [normal(136), normal(200)], normal(5, 200)
    look = exits.Look(exits.Pair(weights, biases), torch.rand(200), torch.randn(200), EPS)
    x, scores = look(h, 0.0)
    for row in range(5):
        alone, (score,) = look(h[row : row + 1], 0.0)
        assert torch.equal(alone[0], x[row])
        assert score == scores[row]


def test_what_fits() -> None:
    pair = exits.Pair(matrices(24, 16))
    assert pair.fits(normal(exits.MOST_ROWS, 24))
    assert not pair.fits(normal(exits.MOST_ROWS + 1, 24))
    assert not pair.fits(normal(0, 24))
    assert not pair.fits(normal(2, 24).float())
    assert not pair.fits(normal(2, 48)[:, ::2])
    assert not pair.fits(normal(2, 24).requires_grad_())


def test_other_tensors_are_refused() -> None:
    first, second = matrices(24, 16)
    for weights, biases in [
        ((first, first), ()),
        ((first, second.float()), ()),
        ((first, second), (normal(24), normal(24))),
    ]:
        with pytest.raises(ValueError, match=r"matri"):
            exits.Pair(weights, biases)
    pair = exits.Pair((first, second))
    with pytest.raises(ValueError, match="float32"):
        exits.Look(pair, torch.rand(24).double(), torch.rand(24), EPS)
    with pytest.raises(ValueError, match=r"\[K\]"):
        exits.Look(pair, torch.rand(24), torch.rand(23), EPS)
    assert exits.Pair.of((first.float(), second.float())) is None
    assert exits.Pair.of((first.requires_grad_(), second)) is None


def test_too_many_rows_are_refused_by_the_module() -> None:
    pair = exits.Pair(matrices(24, 16), [normal(16), normal(24)])
    with pytest.raises(ValueError, match="at most 16"):
        exits.Look(pair, torch.rand(24), torch.rand(24), EPS)(normal(17, 24), 0.0)
