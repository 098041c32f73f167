"""The GPTQ tensor layout, held against a slow reader written from its description."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapt_llm.errors import FormatError, UnsupportedError
from adapt_llm.quant.layout import (
    Int4Matrix,
    choose_group_size,
    pack,
    packed_shapes,
    resolve_group_size,
    round_scale,
    round_zero,
    unpack,
)


def make(N, K, group_size, *, seed=0, float_zeros=False, act_order=False, low=1):
    generator = torch.Generator().manual_seed(seed)
    size = resolve_group_size(K, group_size)
    G = K // size
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = round_scale(torch.rand(N, G, generator=generator) * 0.1)
    zeros = torch.randint(low, 16, (N, G), dtype=torch.uint8, generator=generator)
    if float_zeros:
        zeros = round_zero(torch.rand(N, G, generator=generator) * 15)
    g_idx = (torch.randperm(K, generator=generator) // size).to(torch.int32) if act_order else None
    return Int4Matrix(codes, scales, zeros, size, g_idx)


def slow_weight(tensors, *, stored_minus_one):
    """W[n][k], nibble by nibble, in Python numbers."""
    qweight, scales, g_idx = tensors["qweight"].tolist(), tensors["scales"].tolist(), tensors["g_idx"].tolist()
    K, N = len(g_idx), len(scales[0])
    weight = torch.empty(N, K, dtype=torch.float64)
    for n in range(N):
        for k in range(K):
            g = g_idx[k]
            if "zeros" in tensors:
                zero = float(tensors["zeros"][g, n])
            else:
                zero = ((int(tensors["qzeros"][g, n // 8]) >> 4 * (n % 8)) & 15) + stored_minus_one
            weight[n, k] = (((qweight[k // 8][n] >> 4 * (k % 8)) & 15) - zero) * scales[g][n]
    return weight


def same(a, b):
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)
    assert torch.equal(a.zeros, b.zeros)
    assert a.zeros.dtype == b.zeros.dtype
    assert a.group_size == b.group_size
    assert (a.g_idx is None) == (b.g_idx is None)
    assert a.g_idx is None or torch.equal(a.g_idx, b.g_idx)


SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([32, 64, 128, -1])).map(
    lambda t: (8 * t[0], t[1] * max(t[2], 8), t[2])
)


@given(SHAPES, st.booleans(), st.booleans(), st.integers(0, 99))
def test_pack_and_unpack_lose_nothing(shape, float_zeros, act_order, seed):
    matrix = make(*shape, seed=seed, float_zeros=float_zeros, act_order=act_order)
    if matrix.g_idx is not None and torch.equal(matrix.g_idx.long(), torch.arange(shape[1]) // matrix.group_size):
        return
    tensors = pack(matrix)
    expected = packed_shapes(*shape, float_zeros)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == expected
    read = unpack(tensors, symmetric=False, checkpoint_format="gptq")
    same(read, matrix)
    again = pack(read)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("float_zeros", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
def test_the_slow_reader_agrees(float_zeros, act_order):
    matrix = make(16, 64, 32, float_zeros=float_zeros, act_order=act_order)
    expected = slow_weight(pack(matrix), stored_minus_one=1)
    assert torch.allclose(matrix.dequantize().double(), expected, rtol=1e-6, atol=0)
    assert torch.allclose(unpack(pack(matrix)).dequantize().double(), expected, rtol=1e-6, atol=0)


def as_v2(tensors):
    return {**tensors, "qzeros": tensors["qzeros"] + 0x11111111}


def test_v2_stores_the_zero_itself():
    matrix = make(16, 64, 32)
    tensors = as_v2(pack(matrix))
    same(unpack(tensors, symmetric=False, checkpoint_format="gptq_v2"), matrix)
    assert torch.allclose(matrix.dequantize().double(), slow_weight(tensors, stored_minus_one=0), rtol=1e-6, atol=0)


def test_v2_may_hold_a_zero_of_0_which_v1_refuses():
    matrix = make(16, 64, 32, low=0)
    matrix.zeros[0, 0] = 0
    with pytest.raises(ValueError, match="1 to 15"):
        pack(matrix)
    shifted = Int4Matrix(matrix.codes, matrix.scales, matrix.zeros.clamp(min=1), 32)
    tensors = as_v2(pack(shifted))
    tensors["qzeros"][0, 0] &= ~15
    assert int(unpack(tensors, symmetric=False, checkpoint_format="gptq_v2").zeros[0, 0]) == 0


@pytest.mark.parametrize("label", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("symmetric", [True, None])
@pytest.mark.parametrize("v2", [False, True])
def test_symmetric_files_are_told_apart_by_value(label, symmetric, v2):
    matrix = make(16, 64, 32)
    matrix.zeros.fill_(8)
    tensors = as_v2(pack(matrix)) if v2 else pack(matrix)
    assert set(tensors["qzeros"].unique().tolist()) == {(0x88888888 - 2**32) if v2 else 0x77777777}
    same(unpack(tensors, symmetric=symmetric, checkpoint_format=label), matrix)


def test_asymmetric_files_are_told_apart_by_label():
    matrix = make(16, 64, 32)
    matrix.zeros.fill_(8)
    read = unpack(pack(matrix), symmetric=False, checkpoint_format="gptq_v2")
    assert set(read.zeros.unique().tolist()) == {7}


def test_other_labels_are_refused():
    with pytest.raises(UnsupportedError, match="marlin"):
        unpack(pack(make(16, 64, 32)), symmetric=False, checkpoint_format="marlin")


@pytest.mark.parametrize(("N", "K", "group_size"), [(12, 64, 32), (16, 60, 30), (16, 100, 64), (16, 64, 0)])
def test_shapes_that_do_not_fit_are_named(N, K, group_size):
    with pytest.raises(ValueError, match=str(K)):
        packed_shapes(N, K, group_size, False)


def test_damaged_tensors():
    tensors = pack(make(16, 64, 32))
    with pytest.raises(FormatError, match="lacks qzeros"):
        unpack({k: v for k, v in tensors.items() if k != "qzeros"})
    with pytest.raises(FormatError, match="qzeros has shape"):
        unpack({**tensors, "qzeros": tensors["qzeros"][:, :1]})
    with pytest.raises(FormatError, match="g_idx points outside"):
        unpack({**tensors, "g_idx": tensors["g_idx"] + 1})
    with pytest.raises(ValueError, match="64 inputs"):
        unpack({**tensors, "scales": tensors["scales"].repeat(3, 1)[:3]})


def test_g_idx_may_be_missing():
    tensors = pack(make(16, 64, 32))
    assert unpack({k: v for k, v in tensors.items() if k != "g_idx"}).g_idx is None


def test_inexact_scales_are_not_rounded_silently():
    matrix = make(16, 64, 32)
    matrix.scales[0, 0] = 0.1
    with pytest.raises(ValueError, match="exact"):
        pack(matrix)


@given(st.floats(0, 2.0**100, width=32))
def test_round_scale_is_exact_in_both_halves_and_never_zero(value):
    scale = round_scale(torch.tensor([value]))
    assert scale > 0
    assert torch.equal(scale.half().float(), scale)
    assert torch.equal(scale.bfloat16().float(), scale)
    if 2.0**-14 <= value <= 65280:
        assert abs(float(scale) - value) <= value * 2.0**-8


@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_round_zero_is_exact_in_both_halves(value):
    zero = round_zero(torch.tensor([value]))
    assert torch.equal(zero.half().float(), zero)
    assert torch.equal(zero.bfloat16().float(), zero)


def test_bits_per_weight_are_the_stored_bytes():
    for float_zeros in (False, True):
        matrix = make(16, 128, 32, float_zeros=float_zeros)
        stored = sum(t.nbytes for name, t in pack(matrix).items() if name != "g_idx")
        assert matrix.bits_per_weight == pytest.approx(8 * stored / (16 * 128))


def test_choose_group_size():
    assert choose_group_size(896, 128) == 128
    assert choose_group_size(576, 128) == 64
    assert choose_group_size(96, 64) == 32
    assert choose_group_size(100, -1) == -1
    with pytest.raises(ValueError, match="100"):
        choose_group_size(100, 128)
