"""The Triton products in Triton's interpreter, against the dequantised weights in fp32. Run by test_triton.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from adapt_llm.quant.flagged import FlaggedLinear
from adapt_llm.quant.gpu.products import Tile, flagged_product, int4_product
from adapt_llm.quant.layout import Int4Matrix
from adapt_llm.quant.linear import DenseLinear, Int4Linear
from adapt_llm.quant.planes import Planes

CPU = torch.device("cpu")
SMALL = Tile(block_n=16, words=16, block_k=32, warps=1, stages=1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@pytest.fixture(autouse=True)
def dot_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter keeps bf16 as uint16 and multiplies the bits in `dot`: widen them first."""
    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, d, *others: plain(self, widened(a), widened(b), d, *others),
    )


def matrix(N: int, K: int, group_size: int, *, float_zeros: bool, seed: int = 0) -> Int4Matrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(N, K // group_size, generator=generator) + 0.1).bfloat16().float()
    zeros = torch.randint(1, 16, scales.shape, dtype=torch.uint8, generator=generator)
    return Int4Matrix(codes, scales, zeros.float() + 0.37 if float_zeros else zeros, group_size)


def close(out: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """Within rounding of the dtype, relative to the sum of absolute terms (outputs may cancel)."""
    assert out.shape == expected.shape
    assert ((out.float() - expected).abs() <= TOLERANCE[out.dtype] * (size + 1e-3)).all()


shapes = st.tuples(st.integers(1, 20), st.integers(1, 6), st.sampled_from([3, 8, 16, 24, 32, 48, 64, 128, 144]))


@settings(max_examples=16, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    shape=shapes,
    rows=st.sampled_from([1, 1, 2, 5, 16]),
    float_zeros=st.booleans(),
    has_bias=st.booleans(),
    has_order=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_of_the_dequantised_matrix(
    shape: tuple[int, int, int], rows: int, float_zeros, has_bias, has_order, dtype, seed
) -> None:
    N, groups, group_size = shape
    K = group_size * min(groups, max(1, 160 // group_size))
    source = matrix(N, K, group_size, float_zeros=float_zeros, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, K, generator=generator).to(dtype)
    bias = torch.randn(N, generator=generator).to(dtype) if has_bias else None
    order = torch.randperm(K, generator=generator) if has_order else None
    planes = Planes.of(source, CPU)
    weight = source.dequantize()
    torch.testing.assert_close(planes.rows(0, N), weight, rtol=1e-6, atol=1e-6)
    taken = (x if order is None else x[:, order]).float()
    added = 0 if bias is None else bias.float()
    size = taken.abs() @ weight.abs().T
    close(int4_product(x, planes, bias=bias, order=order, tile=SMALL), taken @ weight.T + added, size)
    dense = torch.randn(N, K, generator=generator).to(dtype)
    for flag in (0, 1):
        out = flagged_product(
            torch.tensor([flag], dtype=torch.int32), x, dense, planes, bias=bias, order=order, tile=SMALL
        )
        expected = taken @ weight.T if flag else x.float() @ dense.float().T
        close(out, expected + added, size if flag else x.float().abs() @ dense.float().abs().T)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_tiles_that_are_launched(rows: int) -> None:
    source = matrix(24, 640, 128, float_zeros=False)
    x = torch.randn(rows, 640).bfloat16()
    weight = source.dequantize()
    close(int4_product(x, Planes.of(source, CPU)), x.float() @ weight.T, x.float().abs() @ weight.abs().T)


def test_a_product_into_columns_of_a_wider_result() -> None:
    source, x, dense = matrix(8, 64, 32, float_zeros=False), torch.randn(3, 64), torch.randn(8, 64)
    wide = torch.full((3, 24), 7.0)
    flag = torch.zeros(1, dtype=torch.int32)
    flagged_product(flag, x, dense, Planes.of(source, CPU), out=wide[:, 8:16], tile=SMALL)
    torch.testing.assert_close(wide[:, 8:16], x @ dense.T, rtol=1e-5, atol=1e-5)
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 16:] == 7).all()


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="17 rows"):
        int4_product(torch.zeros(17, 32), Planes.of(matrix(8, 32, 32, float_zeros=False), CPU))


def test_a_broken_flag_would_show() -> None:
    """The two sides differ, so a kernel that always took one would fail the test above."""
    source, x = matrix(8, 64, 32, float_zeros=False), torch.randn(1, 64)
    planes, dense = Planes.of(source, CPU), torch.randn(8, 64)
    off, on = (
        flagged_product(torch.tensor([flag], dtype=torch.int32), x, dense, planes, tile=SMALL) for flag in (0, 1)
    )
    assert not torch.allclose(off, on)


def linears(group_sizes: tuple[int, ...], *, shuffled: bool) -> tuple[Int4Linear, list[Int4Matrix]]:
    parts = []
    g_idx = torch.randperm(96).to(torch.int32) // 32
    for number, group_size in enumerate(group_sizes):
        part = matrix(8, 96, group_size, float_zeros=False, seed=number)
        parts.append(replace(part, g_idx=g_idx) if shuffled else part)
    return Int4Linear(parts, torch.randn(8 * len(parts)), CPU, torch.float32), parts


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(("group_sizes", "shuffled"), [((32, 32), False), ((32, 16), False), ((32, 32), True)])
def test_a_linear_takes_the_way_that_the_flag_says(group_sizes: tuple[int, ...], shuffled: bool, ready: bool) -> None:
    """Matrices fused, side by side and with sorted inputs; packed before for another kernel or not."""
    river, parts = linears(group_sizes, shuffled=shuffled)
    if ready:
        river.prepare()
    bias = river._bias
    dense = DenseLinear(torch.randn(16, 96), bias)
    x = torch.randn(1, 2, 96)
    weight = torch.cat([part.dequantize() for part in parts])
    flag = torch.zeros(1, dtype=torch.int32)
    both = FlaggedLinear(dense, river, flag, interpreted=True)
    torch.testing.assert_close(both(x), x @ dense.weight.T + bias, rtol=1e-4, atol=1e-4)
    flag.fill_(1)
    torch.testing.assert_close(both(x), x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(river(x), x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    many = torch.randn(17, 96)
    torch.testing.assert_close(river(many), many @ weight.T + bias, rtol=1e-4, atol=1e-4)
    assert both.nbytes == dense.nbytes + river.nbytes
