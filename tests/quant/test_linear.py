"""Every product agrees with x @ W.T + b, whatever path it takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import UnsupportedError
from adapt_llm.quant import dense as dense_module
from adapt_llm.quant import linear as linear_module
from adapt_llm.quant import probe as probe_module
from adapt_llm.quant.forms import Compact, Native
from adapt_llm.quant.kernels import native
from adapt_llm.quant.layout import Int4Matrix, resolve_group_size, round_scale, round_zero
from adapt_llm.quant.linear import DenseLinear, Int4Linear, Kernels, needs_fp32, probe

CPU = torch.device("cpu")


def make(N, K, group_size, *, seed=0, float_zeros=False, g_idx=None):
    generator = torch.Generator().manual_seed(seed)
    G = K // resolve_group_size(K, group_size)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = round_scale(torch.rand(N, G, generator=generator) * 0.1 + 0.01)
    zeros = torch.randint(1, 16, (N, G), dtype=torch.uint8, generator=generator)
    if float_zeros:
        zeros = round_zero(torch.rand(N, G, generator=generator) * 15)
    return Int4Matrix(codes, scales, zeros, K // G, g_idx)


def check(product, x, weight, bias):
    out = product(x)
    expected = x.double() @ weight.double().mT + (0 if bias is None else bias.double())
    assert out.dtype == x.dtype
    assert out.shape == expected.shape
    if expected.numel():
        limit = 1e-5 if x.dtype is torch.float32 else 0.012
        assert (out.double() - expected).abs().max() <= limit * expected.abs().max()


def values(*shape, dtype, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["native", "aten_cpu", "none"])
def kernels(request, monkeypatch):
    """Every way to multiply a few rows on this machine."""
    if request.param == "native" and not native.available():
        pytest.skip(native.why_not())
    rows = {"native": native.most_int4_rows(), "aten_cpu": 4, "none": 0}[request.param]
    found = Kernels(None if request.param == "none" else request.param, rows)
    monkeypatch.setattr(linear_module, "probe", lambda _: found)
    return request.param


ROWS = [(1,), (1, 1), (2, 3), (4,), (5,), (2, 9), (0,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("N", "K", "group_size"), [(64, 128, 32), (24, 576, 64), (37, 96, 32), (16, 256, -1)])
def test_int4_agrees_with_its_dequantised_weight(kernels, dtype, biased, N, K, group_size):
    matrix = make(N, K, group_size)
    bias = values(N, dtype=dtype) if biased else None
    product = Int4Linear([matrix], bias, CPU, dtype)
    for rows in ROWS:
        check(product, values(*rows, K, dtype=dtype), matrix.dequantize(), bias)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([8, 32, 64, 128, -1]),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_fused_matrices_agree_for_any_shape(outputs, groups, group_size, rows, float_zeros, dtype):
    K = groups * max(group_size, 16)
    matrices = [make(N, K, group_size, seed=i, float_zeros=float_zeros) for i, N in enumerate(outputs)]
    weight = torch.cat([matrix.dequantize() for matrix in matrices])
    product = Int4Linear(matrices, None, CPU, dtype)
    check(product, values(rows, K, dtype=dtype), weight, None)
    assert (product.out_features, product.in_features) == weight.shape


def test_act_order_groups(kernels):
    g_idx = (torch.randperm(128, generator=torch.Generator().manual_seed(2)) // 32).to(torch.int32)
    matrices = [make(16, 128, 32, seed=i, g_idx=g_idx) for i in range(2)]
    weight = torch.cat([matrix.dequantize() for matrix in matrices])
    bias = values(32, dtype=torch.bfloat16)
    product = Int4Linear(matrices, bias, CPU, torch.bfloat16)
    for rows in (1, 30):
        check(product, values(rows, 128, dtype=torch.bfloat16), weight, bias)


def test_matrices_with_different_groups_share_an_input(kernels):
    g_idx = (torch.randperm(128, generator=torch.Generator().manual_seed(2)) // 32).to(torch.int32)
    matrices = [make(16, 128, 32, g_idx=g_idx), make(24, 128, 64, float_zeros=True), make(16, 128, 32)]
    weight = torch.cat([matrix.dequantize() for matrix in matrices])
    bias = values(56, dtype=torch.bfloat16)
    product = Int4Linear(matrices, bias, CPU, torch.bfloat16)
    for rows in (1, 30):
        check(product, values(rows, 128, dtype=torch.bfloat16), weight, bias)
    assert product.nbytes > 0


def test_refusals():
    with pytest.raises(ValueError, match="share one input"):
        Int4Linear([make(16, 64, 32), make(16, 128, 32)], None, CPU, torch.float32)
    uneven = torch.zeros(64, dtype=torch.int32)
    uneven[0] = 1
    with pytest.raises(UnsupportedError, match="unequal"):
        Int4Linear([make(16, 64, 32, g_idx=uneven)], None, CPU, torch.float32).prepare()


def test_nbytes_is_near_the_stored_size(kernels):
    matrix = make(256, 512, 64)
    product = Int4Linear([matrix], None, CPU, torch.bfloat16)
    before = product.nbytes
    product.prepare()
    assert before == matrix.codes.nbytes + matrix.scales.nbytes + matrix.zeros.nbytes
    bits = 8 * product.nbytes / (256 * 512)
    assert 4.3 < bits <= {"native": 4.6, "none": 4.6, "aten_cpu": 9.0}[kernels]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 4),
    st.sampled_from([8, 32, 64, 128, 192, 256]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_forms_give_their_rows_back(N, groups, group_size, float_zeros, coarse, data):
    matrix = make(N, groups * group_size, group_size, float_zeros=float_zeros)
    if not coarse:  # scales of a foreign file: exact in fp16 only
        matrix = Int4Matrix(matrix.codes, (matrix.scales * 1.001).half().float(), matrix.zeros, group_size)
    start = data.draw(st.integers(0, N - 1))
    stop = data.draw(st.integers(start + 1, N))
    expected = matrix.dequantize()[start:stop]
    assert torch.equal(Compact.of(matrix, CPU).rows(start, stop), expected)
    assert torch.equal(Native.of(matrix).rows(start, stop), expected)


def test_many_rows_are_cut_into_chunks(monkeypatch):
    monkeypatch.setattr(dense_module, "CHUNK_BYTES", 4 * 128 * 24)
    matrix = make(64, 128, 32)
    bias = values(64, dtype=torch.bfloat16)
    x = values(40, 128, dtype=torch.bfloat16)
    check(Int4Linear([matrix], bias, CPU, torch.bfloat16), x, matrix.dequantize(), bias)
    check(DenseLinear(matrix.dequantize(torch.bfloat16), bias), x, matrix.dequantize(torch.bfloat16), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("with_native", [False, True])
def test_dense_agrees(monkeypatch, dtype, biased, with_native):
    if not with_native:
        monkeypatch.setattr(native, "available", lambda: False)
    weight = values(72, 96, dtype=dtype, seed=4)
    bias = values(72, dtype=dtype) if biased else None
    product = DenseLinear(weight, bias)
    for rows in ROWS:
        check(product, values(*rows, 96, dtype=dtype), weight, bias)
    assert product.nbytes == weight.nbytes + (bias.nbytes if bias is not None else 0)


def test_dense_takes_inputs_and_weights_that_are_not_contiguous():
    weight = values(96, 72, dtype=torch.bfloat16).t()
    x = values(96, 3, dtype=torch.bfloat16).t()
    check(DenseLinear(weight), x, weight, None)
    check(DenseLinear(weight.contiguous()), x, weight, None)


def test_dense_keeps_the_weight_it_was_given():
    weight = values(16, 32, dtype=torch.bfloat16)
    product = DenseLinear(weight)
    assert product.weight.data_ptr() == weight.data_ptr()


def test_probe_is_cached_and_refuses_a_product_that_lies(monkeypatch):
    assert probe(CPU) is probe(CPU)
    if native.available():
        assert probe(CPU) == Kernels("native", native.most_int4_rows())
    real = probe_module.aten_product
    monkeypatch.setattr(probe_module, "aten_product", lambda kernel: lambda *a: 1.1 * real(kernel)(*a))
    assert not probe_module._works("aten_cpu", CPU)
    monkeypatch.setattr(probe_module, "aten_product", real)
    assert probe_module._works("aten_cpu", CPU)
    monkeypatch.setattr(probe_module, "_aten", lambda name: getattr(torch.ops.aten, name + "_is_missing"))
    assert not probe_module._works("aten_cpu", CPU)


def test_fp32_is_asked_for_only_on_processors():
    assert not needs_fp32(CPU, torch.float32)
    assert not needs_fp32(torch.device("cuda"), torch.bfloat16)
