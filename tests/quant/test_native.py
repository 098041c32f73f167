"""The native products against float64, for every instruction set that works here."""

import ctypes
import mmap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapt_llm.quant.kernels import native, packing

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native module: {native.why_not()}")
ISAS = native.instruction_sets() or ("none",)
TOLERANCE = 3e-3  # relative L2 error: bf16 rounds each output by up to 0.4 %, 0.17 % in the mean


def normal(*shape: int, seed: int = 0, mean: float = 0.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + mean).bfloat16()


def int4(N: int, K: int, group: int, *, exact: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, zeros; `exact` ones are bf16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    scales = torch.rand(N, K // group, generator=generator) * 0.1 + 0.01
    zeros = torch.rand(N, K // group, generator=generator) * 20 - 2
    return (codes, scales.bfloat16().float(), zeros.round()) if exact else (codes, scales, zeros)


def dequantized(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    group = codes.shape[1] // scales.shape[1]
    wide = [p.double().repeat_interleave(group, dim=1) for p in (scales, zeros)]
    return (codes.double() - wide[1]) * wide[0]


def in_float32(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The same, each step rounded as float32 is."""
    grouped = codes.view(*scales.shape, -1).float()
    return ((grouped - zeros[..., None]) * scales[..., None]).view(codes.shape)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("M", range(1, 18))
@pytest.mark.parametrize(("N", "K"), [(64, 96), (37, 896), (5, 30), (1, 1), (33, 2600)])
def test_bf16(isa: str, M: int, N: int, K: int) -> None:
    x, w = normal(M, K, seed=M), normal(N, K, seed=N)
    assert error(native.bf16_matmul(x, w, isa=isa), x.double() @ w.double().T) < TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("N", "K"), [(64, 96), (37, 896), (5, 30), (33, 2600), (40, 4864)])
def test_a_row_gets_the_same_bits_alone_and_beside_others(isa: str, N: int, K: int) -> None:
    """What lossless drafts rest on: a token verified among others is the token decoded by itself."""
    x, w, bias = normal(16, K, seed=1), normal(N, K, seed=N), normal(N, seed=2)
    alone = torch.cat([native.bf16_matmul(row, w, bias, isa=isa) for row in x.split(1)])
    for M in range(2, 17):
        assert torch.equal(native.bf16_matmul(x[:M], w, bias, isa=isa), alone[:M]), M


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("M", range(1, 18))
@pytest.mark.parametrize(("N", "K", "group"), [(48, 128, 32), (37, 320, 64), (16, 384, 128), (21, 120, 24), (5, 8, 8)])
@pytest.mark.parametrize("exact", [True, False])
def test_int4(isa: str, M: int, N: int, K: int, group: int, exact: bool) -> None:
    codes, scales, zeros = int4(N, K, group, exact=exact, seed=M)
    packed = packing.pack_int4(codes, scales, zeros, group)
    assert packed.wide is not exact
    x = normal(M, K, seed=N, mean=1.0)
    got = native.int4_matmul(x, packed, isa=isa)
    assert error(got, x.double() @ dequantized(codes, scales, zeros).T) < TOLERANCE


MANY = [17, 24, 25, 57, 400]  # rows: 3, 3, 4, 8 and twice 25 vectors of eight, in panels of three and of two


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("M", MANY)
@pytest.mark.parametrize(("N", "K"), [(64, 96), (37, 896), (5, 30), (1, 1), (130, 521)])
def test_many_rows(isa: str, M: int, N: int, K: int) -> None:
    x, w, bias = normal(M, K, seed=M), normal(N, K, seed=N), normal(N, seed=2)
    close(native.bf16_matmul(x, w, bias, isa=isa), x, w, bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("M", MANY)
@pytest.mark.parametrize(("N", "K", "group"), [(48, 128, 32), (37, 320, 64), (21, 120, 24), (5, 8, 8), (130, 560, 40)])
@pytest.mark.parametrize("exact", [True, False])
def test_many_rows_of_int4(isa: str, M: int, N: int, K: int, group: int, exact: bool) -> None:
    codes, scales, zeros = int4(N, K, group, exact=exact, seed=M)
    x, bias = normal(M, K, seed=N, mean=1.0), normal(N, seed=2)
    got = native.int4_matmul(x, packing.pack_int4(codes, scales, zeros, group), bias, isa=isa)
    close(got, x, dequantized(codes, scales, zeros), bias, rounding(isa, M))


@pytest.mark.skipif(native.most_rows() == native.FEW_ROWS, reason="many rows have no product of their own here")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_gets_the_same_bits_beside_any_number_of_many(threads: int) -> None:
    """However rows are cut into panels and blocks, and whoever multiplies them."""
    x, w = normal(500, 700, seed=1), normal(200, 700, seed=2)
    alone = native.bf16_matmul(x, w, threads=1)
    for M in (17, 64, 385, 499):
        assert torch.equal(native.bf16_matmul(x[:M], w, threads=threads), alone[:M]), M


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_of_int4_gets_the_same_bits_beside_any_number_of_many(threads: int) -> None:
    x, packed = normal(500, 704, seed=1), packing.pack_int4(*int4(200, 704, 64, exact=True), 64)
    alone = native.int4_matmul(x, packed, threads=1)
    for M in (17, 64, 385, 499):
        assert torch.equal(native.int4_matmul(x[:M], packed, threads=threads), alone[:M]), M


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("N", "K", "group"), [(48, 128, 32), (37, 320, 64), (21, 120, 24)])
def test_a_weight_is_rounded_to_the_nearest(isa: str, N: int, K: int, group: int) -> None:
    """Each row of x picks one input: what comes out are the weights, which are exact in fp32, as bf16 numbers."""
    codes, scales, zeros = int4(N, K, group, exact=True)
    picks = torch.eye(K, dtype=torch.bfloat16)
    got = native.int4_matmul(picks, packing.pack_int4(codes, scales, zeros, group), isa=isa)
    assert torch.equal(got.T, dequantized(codes, scales, zeros).float().bfloat16())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("K", [136, 1024, 4864])
def test_one_group_per_row(isa: str, K: int) -> None:
    codes, scales, zeros = int4(20, K, K, exact=True)
    x = normal(2, K, mean=1.0)
    got = native.int4_matmul(x, packing.pack_int4(codes, scales, zeros, -1), isa=isa)
    assert error(got, x.double() @ dequantized(codes, scales, zeros).T) < TOLERANCE


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    group = 8 * data.draw(st.integers(1, 24), label="group / 8")
    M, N = data.draw(st.integers(1, 60), label="M"), data.draw(st.integers(1, 80), label="N")
    K = group * data.draw(st.integers(1, 6), label="groups")
    isa, threads = data.draw(st.sampled_from(ISAS)), data.draw(st.integers(1, 3), label="threads")
    exact, seed = data.draw(st.booleans(), label="exact"), data.draw(st.integers(0, 1000))
    codes, scales, zeros = int4(N, K, group, exact=exact, seed=seed)
    x, w, bias = normal(M, K, seed=seed), normal(N, K, seed=seed + 1), normal(N, seed=seed + 2)
    got = native.int4_matmul(x, packing.pack_int4(codes, scales, zeros, group), bias, threads=threads, isa=isa)
    close(got, x, dequantized(codes, scales, zeros), bias, rounding(isa, M))
    close(native.bf16_matmul(x, w, bias, threads=threads, isa=isa), x, w, bias)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_module_packs_as_torch_does(data: st.DataObject) -> None:
    """Byte for byte, also rows of padding; with several threads where there is much to do."""
    group, groups = 8 * data.draw(st.integers(1, 24)), data.draw(st.integers(1, 5))
    N, exact = data.draw(st.sampled_from([1, 5, 16, 37, 700])), data.draw(st.booleans())
    matrix = int4(N, group * groups, group, exact=exact)
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    try:
        found, expected = native.pack(*matrix, group), packing.pack_int4(*matrix, group)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.data, expected.data)
    assert (found.groups, found.wide) == (expected.groups, expected.wide)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rows_can_be_read_back(data: st.DataObject) -> None:
    """Not a bit is lost, whether scales and zeros fit bf16 or not; a row that is not there is refused."""
    N, groups = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 4))
    group = 8 * data.draw(st.integers(1, 20))
    codes, scales, zeros = int4(N, groups * group, group, exact=data.draw(st.booleans()))
    packed = packing.pack_int4(codes, scales, zeros, group)
    start = data.draw(st.integers(0, N))
    stop = data.draw(st.integers(start, N))
    assert torch.equal(native.dequantize(packed, start, stop), in_float32(codes, scales, zeros)[start:stop])
    with pytest.raises(ValueError, match=f"{N} rows"):
        native.dequantize(packed, start, N + 1)


def test_a_large_matrix_is_read_back_by_several_threads() -> None:
    codes, scales, zeros = int4(700, 512, 64, exact=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = native.dequantize(packing.pack_int4(codes, scales, zeros, 64), 3, 699)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, in_float32(codes, scales, zeros)[3:699])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_values_of_very_different_size_beside_each_other(data: st.DataObject) -> None:
    """x is integers of one unit for a group: what is lost is at most 2^-15 of the group's largest value."""
    group, groups = 8 * data.draw(st.integers(1, 16)), data.draw(st.integers(1, 3))
    K, isa = group * groups, data.draw(st.sampled_from(ISAS))
    exponents = st.lists(st.integers(-120, 100), min_size=K, max_size=K)
    x = (normal(2, K) * torch.tensor(data.draw(exponents)).exp2()).bfloat16()
    codes, scales, zeros = int4(24, K, group, exact=True)
    weights = dequantized(codes, scales, zeros)
    got = native.int4_matmul(x, packing.pack_int4(codes, scales, zeros, group), isa=isa).double()
    expected, size = x.double() @ weights.T, x.double().abs() @ weights.abs().T
    largest = x.double().abs().view(2, groups, group).amax(-1)
    # Codes and zeros are up to 15 and 18 units of the scale, and may cancel where the weight is small.
    lost = largest @ (scales.double() * 33 * group).T * 2**-15
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 2**-16 * size + lost).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [8, 32, 128])
@pytest.mark.parametrize("size", [2.0**-130, 2.0**-112, 1.0, 1.9921875, 2.0**114])
def test_sums_of_the_largest_integers_do_not_overflow(isa: str, group: int, size: float) -> None:
    codes = torch.full((16, 2 * group), 15, dtype=torch.uint8)
    scales, zeros = torch.full((16, 2), 0.5), torch.zeros(16, 2)
    x = torch.full((1, 2 * group), -size, dtype=torch.bfloat16)
    got = native.int4_matmul(x, packing.pack_int4(codes, scales, zeros, group), isa=isa)
    expected = torch.full((1, 16), -float(x[0, 0].abs()) * 15.0 * group, dtype=torch.float64)
    assert ((got.double() - expected).abs() <= 2**-8 * expected.abs() + 2**-126 * group * 16).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("M", [5, 21])
def test_non_finite_inputs_stay_in_their_row(isa: str, wrong: float, M: int) -> None:
    codes, scales, zeros = int4(20, 96, 32, exact=True)
    packed = packing.pack_int4(codes, scales, zeros, 32)
    x = normal(M, 96)
    expected = native.int4_matmul(x, packed, isa=isa)
    x[2, 40] = wrong
    got = native.int4_matmul(x, packed, isa=isa)
    others = [m for m in range(M) if m != 2]
    assert not got[2].isfinite().any()
    assert torch.equal(got[others], expected[others])


def rounding(isa: str, M: int) -> float:
    """How far a 4-bit weight is from what its product takes, relative: for many rows AMX makes a bf16 number of it."""
    return 2**-8 if isa == "amx" and M > 16 else 0.0


def close(got: Tensor, x: Tensor, w: Tensor, bias: Tensor, rounded: float = 0.0) -> None:
    """Each output within half a bf16 step and 2^-16, and `rounded`, of the sum of its terms' sizes: they may cancel."""
    expected = x.double() @ w.double().T + bias.double()
    size = x.double().abs() @ w.double().abs().T + bias.double().abs()
    assert ((got.double() - expected).abs() <= 2**-8 * expected.abs() + (2**-16 + rounded) * size).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("M", [1, 8, 11])
def test_threads_do_not_change_the_result(threads: int, M: int) -> None:
    x, w = normal(M, 896), normal(1024, 896, seed=1)
    codes, scales, zeros = int4(1008, 896, 32, exact=True)
    packed = packing.pack_int4(codes, scales, zeros, 32)
    for _ in range(20):
        assert torch.equal(native.bf16_matmul(x, w, threads=threads), native.bf16_matmul(x, w, threads=1))
        assert torch.equal(native.int4_matmul(x, packed, threads=threads), native.int4_matmul(x, packed, threads=1))


@pytest.mark.parametrize("isa", ISAS)
def test_zero_rows_and_columns_of_x_give_zero(isa: str) -> None:
    codes, scales, zeros = int4(16, 64, 32, exact=True)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert not native.int4_matmul(x, packing.pack_int4(codes, scales, zeros, 32), isa=isa).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("M", [2, 40])
def test_several_matrices_at_once(isa: str, M: int) -> None:
    x = normal(M, 896)
    weights = [normal(N, 896, seed=N) for N in (896, 128, 130)]
    biases = [normal(896), None, normal(130)]
    together = native.bf16_matmuls(x, weights, biases, threads=2, isa=isa)
    parts = together.split([w.shape[0] for w in weights], -1)
    for w, bias, out in zip(weights, biases, parts, strict=True):
        assert torch.equal(out, native.bf16_matmul(x, w, bias, threads=1, isa=isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("M", [1, 17])
def test_non_finite_weights_stay_in_their_row(isa: str, M: int) -> None:
    w = normal(6, 40)
    w[1, 39], w[3, 0] = float("nan"), float("inf")
    for out in native.bf16_matmul(torch.ones(M, 40, dtype=torch.bfloat16), w, isa=isa):
        assert out.isnan().nonzero().flatten().tolist() == [1]
        assert out.isinf().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("K", [40, 64, 72])
@pytest.mark.parametrize("M", [3, 19, 24])
def test_nothing_is_read_past_the_end(isa: str, K: int, M: int) -> None:
    """Weights end where the mapped memory ends: reading one byte more kills the process."""
    w = at_the_end(normal(7, K))
    x = at_the_end(normal(M, K, seed=1))
    assert error(native.bf16_matmul(x, w, isa=isa), x.double() @ w.double().T) < TOLERANCE
    packed = packing.pack_int4(*int4(9, K, 8, exact=True), 8)
    moved = packing.PackedInt4(at_the_end(packed.data), 9, K, packed.groups, packed.wide)
    assert torch.equal(native.int4_matmul(x, moved, isa=isa), native.int4_matmul(x, packed, isa=isa))


def at_the_end(tensor: Tensor) -> Tensor:
    """A copy in the last bytes before a page that may not be read."""
    page = mmap.PAGESIZE
    size = -(-tensor.nbytes // page) * page
    whole = torch.frombuffer(mmap.mmap(-1, size + page), dtype=torch.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.data_ptr() + size), page, 0) == 0
    view = whole[size - tensor.nbytes : size].view(tensor.dtype).view(tensor.shape)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize(
    "call",
    [
        lambda: native.bf16_matmul(torch.ones(1, 8), normal(4, 8)),
        lambda: native.bf16_matmul(normal(1, 16)[:, ::2], normal(4, 8)),
        lambda: native.bf16_matmul(normal(1, 8), normal(8, 4).T),
        lambda: native.bf16_matmul(normal(1, 8), normal(4, 9)),
        lambda: native.bf16_matmul(normal(1, 0), normal(4, 0)),
        lambda: native.bf16_matmul(normal(1, 8), normal(4, 8), normal(5)),
        lambda: native.bf16_matmul(normal(1, 8), normal(4, 8), isa="none such"),
        lambda: native.int4_matmul(normal(1, 16), packing.pack_int4(*int4(4, 8, 8, exact=True), 8)),
        lambda: packing.pack_int4(*int4(4, 12, 12, exact=True), 12),
        lambda: packing.pack_int4(*int4(4, 16, 8, exact=True), 16),
    ],
)
def test_wrong_arguments_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be packed|columns|usable"):
        call()


def test_no_rows() -> None:
    assert native.bf16_matmul(normal(0, 8), normal(4, 8)).shape == (0, 4)
    assert native.bf16_matmul(normal(2, 8), normal(0, 8)).shape == (2, 0)
    assert native.int4_matmul(normal(0, 8), packing.pack_int4(*int4(4, 8, 8, exact=True), 8)).shape == (0, 4)
