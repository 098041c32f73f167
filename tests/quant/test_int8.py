"""The 8-bit product against float64, for every instruction set that works here, and as a linear."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapt_llm.quant.int8 import Int8Linear
from adapt_llm.quant.kernels import native8
from adapt_llm.quant.kernels.native8 import Int8Matrix, int8_matmul

pytestmark = pytest.mark.skipif(not native8.available(), reason="no native module, or its 8-bit product fails")
ISAS = native8.instruction_sets() or ("none",)
TOLERANCE = 3e-3  # bf16 rounds each output by up to 0.4 %


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_codes_are_within_half_a_step_of_the_weight() -> None:
    weight = normal(40, 64)
    weight[3] = 0
    matrix = Int8Matrix.of(weight)
    assert int(matrix.codes.abs().max()) == 127
    assert ((matrix.rows(0, 40) - weight.float()).abs() <= matrix.scales[:, None] * 0.5001).all()
    assert (matrix.rows(3, 4) == 0).all()
    assert matrix.nbytes == 40 * 64 + 4 * 40


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("M", [1, 2, 3, 8, 17])
@pytest.mark.parametrize(("N", "K"), [(64, 96), (37, 896), (1, 16), (133, 576), (5000, 208)])
def test_product(isa: str, M: int, N: int, K: int) -> None:
    matrix, x = Int8Matrix.of(normal(N, K, seed=N)), normal(M, K, seed=M)
    assert error(int8_matmul(x, matrix, isa=isa), x.double() @ matrix.rows(0, N).double().T) < TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_gets_the_same_bits_alone_and_beside_others(isa: str) -> None:
    matrix, x = Int8Matrix.of(normal(1000, 896)), normal(9, 896, seed=1)
    alone = torch.cat([int8_matmul(row, matrix, isa=isa) for row in x.split(1)])
    assert torch.equal(int8_matmul(x, matrix, isa=isa), alone)
    assert torch.equal(int8_matmul(x, matrix, isa=isa, threads=2), alone)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_and_values_of_very_different_size(data: st.DataObject) -> None:
    """x is integers of one unit for 128 inputs: what is lost is at most 2^-15 of the largest of them."""
    M, N, K = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40)), 16 * data.draw(st.integers(1, 40))
    isa, threads = data.draw(st.sampled_from(ISAS)), data.draw(st.integers(1, 3))
    matrix = Int8Matrix.of(normal(N, K, seed=N))
    spread = data.draw(st.integers(0, 40))
    x = (normal(M, K, seed=M) * (torch.rand(K, generator=torch.Generator().manual_seed(K)) * spread).exp2()).bfloat16()
    weights = matrix.rows(0, N).double()
    expected, size = x.double() @ weights.T, x.double().abs() @ weights.abs().T
    lost = x.double().abs().amax(1, keepdim=True) * weights.abs().sum(1) * 2**-15
    got = int8_matmul(x, matrix, isa=isa, threads=threads).double()
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 2**-16 * size + lost).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_non_finite_inputs_stay_in_their_row(isa: str, wrong: float) -> None:
    matrix, x = Int8Matrix.of(normal(40, 208)), normal(3, 208, seed=1)
    expected = int8_matmul(x, matrix, isa=isa)
    x[1, 150] = wrong
    got = int8_matmul(x, matrix, isa=isa)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_integers_do_not_overflow(isa: str) -> None:
    matrix = Int8Matrix.of(torch.full((3, 4096), -2.0))
    x = torch.full((1, 4096), 1.9921875, dtype=torch.bfloat16)
    assert int8_matmul(x, matrix, isa=isa).tolist() == [[-16320.0] * 3]


def test_wrong_arguments_are_refused() -> None:
    matrix = Int8Matrix.of(normal(8, 32))
    for x in (normal(1, 16), normal(1, 32).float(), normal(32), normal(32, 2).T):
        with pytest.raises(ValueError, match="x "):
            int8_matmul(x, matrix)
    with pytest.raises(ValueError, match="instruction set"):
        int8_matmul(normal(1, 32), matrix, isa="none")
    with pytest.raises(ValueError, match="multiple of 16"):
        Int8Matrix.of(normal(8, 24))


def test_a_linear_of_few_and_of_many_rows() -> None:
    weight = normal(300, 64)
    linear = Int8Linear(weight)
    expected = Int8Matrix.of(weight).rows(0, 300).double().T
    for shape in ((1, 1, 64), (3, 64), (2, 200, 64)):
        x = normal(*shape, seed=len(shape))
        out = linear(x)
        assert (out.dtype, out.shape) == (torch.bfloat16, (*shape[:-1], 300))
        assert error(out, x.double() @ expected) < 5e-3
    assert (linear.in_features, linear.out_features) == (64, 300)
    assert linear.nbytes < weight.nbytes * 0.6
    assert Int8Linear.why_not(weight) == ""
    assert "16-bit" in Int8Linear.why_not(weight.float())
    assert "multiple" in Int8Linear.why_not(normal(8, 24))
