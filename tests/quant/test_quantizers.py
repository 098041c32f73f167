"""Quantisers: grids, losses, determinism, and what they refuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import AdaptError, FormatError, UnsupportedError
from adapt_llm.quant.layout import pack, unpack
from adapt_llm.quant.quantizers import QUANTIZERS, Hessian
from adapt_llm.quant.quantizers.gptq import feedback_factor

NAMES = ("rtn", "hqq", "gptq")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(K, seed=1, tokens=512):
    """Inputs of a low-rank part plus noise, some features large, and their Hessian."""
    x = normal(tokens, K // 8, seed=seed) @ normal(K // 8, K, seed=seed + 1) + 0.3 * normal(tokens, K, seed=seed + 2)
    x = x * (1 + 4 * (torch.arange(K) % 17 == 0))
    hessian = Hessian()
    hessian.add(x)
    return hessian.finish()


def loss(weight, matrix, hessian):
    error = weight - matrix.dequantize()
    return float(((error @ hessian) * error).sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_a_matrix_comes_back_within_half_a_step_or_clipped(name, group_size):
    weight, hessian = normal(24, 256), correlated(256)
    matrix = QUANTIZERS[name](weight, group_size=group_size, hessian=hessian)
    assert matrix.shape == (24, 256)
    assert matrix.float_zeros == QUANTIZERS[name].float_zeros
    if not matrix.float_zeros:
        assert 1 <= int(matrix.zeros.min()) <= int(matrix.zeros.max()) <= 15
    read = unpack(pack(matrix), symmetric=False, checkpoint_format="gptq")
    assert torch.equal(read.dequantize(), matrix.dequantize())
    relative = (weight - matrix.dequantize()).norm() / weight.norm()
    assert relative < (0.25 if name == "gptq" else 0.17)


@pytest.mark.parametrize("name", ["rtn", "hqq"])
def test_codes_are_the_nearest_levels(name):
    weight = normal(8, 128)
    matrix = QUANTIZERS[name](weight, group_size=32)
    scales, zeros = (t.float().repeat_interleave(32, dim=1) for t in (matrix.scales, matrix.zeros))
    levels = (torch.arange(16.0) - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    nearest = (levels - weight.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((matrix.dequantize() - weight).abs(), nearest, atol=1e-6)


def test_weights_on_a_grid_are_reproduced_exactly():
    codes = torch.randint(0, 16, (16, 64), generator=torch.Generator().manual_seed(3))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = (codes - 8.0) * 0.0625
    for name in NAMES:
        matrix = QUANTIZERS[name](weight, group_size=32, hessian=torch.eye(64))
        assert torch.equal(matrix.dequantize(), weight), name


def test_gptq_beats_rounding_in_the_norm_it_minimises():
    weight, hessian = normal(64, 256), correlated(256)
    losses = {name: loss(weight, QUANTIZERS[name](weight, group_size=64, hessian=hessian), hessian) for name in NAMES}
    assert losses["gptq"] < 0.5 * losses["rtn"]
    assert losses["gptq"] < 0.5 * losses["hqq"]


def test_gptq_of_an_identity_hessian_is_rounding():
    weight = normal(16, 128)
    plain = QUANTIZERS["rtn"](weight, group_size=32, hessian=torch.eye(128))
    calibrated = QUANTIZERS["gptq"](weight, group_size=32, hessian=torch.eye(128))
    assert torch.equal(plain.codes, calibrated.codes)


def slow_gptq(weight, scales, zeros, hessian, group_size, damp=0.05):
    """Algorithm 1 of the GPTQ paper, column by column, with the inverse Hessian, in float64 and without blocks."""
    H = hessian.double().clone()
    H.diagonal().add_(damp * H.diagonal().mean())
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    upper = torch.linalg.cholesky(torch.linalg.inv(H[order][:, order]), upper=True)
    W = weight.double()[:, order].clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for i, k in enumerate(order.tolist()):
        scale, zero = scales[:, k // group_size].double(), zeros[:, k // group_size].double()
        level = (W[:, i] / scale + zero).round().clamp(0, 15)
        codes[:, k] = level.to(torch.uint8)
        error = (W[:, i] - (level - zero) * scale) / upper[i, i]
        W[:, i + 1 :] -= error.unsqueeze(1) * upper[i, i + 1 :]
    return codes


def test_gptq_is_the_published_algorithm():
    weight, hessian = normal(32, 320), correlated(320)
    matrix = QUANTIZERS["gptq"](weight, group_size=64, hessian=hessian)
    expected = slow_gptq(weight, matrix.scales, matrix.zeros, hessian, 64)
    # A value on the edge between two levels may fall either way, and then moves later ones.
    assert (matrix.codes == expected).float().mean() > 0.98


def test_dead_inputs_are_rounded_and_disturb_nothing():
    weight, hessian = normal(16, 128), correlated(128)
    hessian[5, :] = hessian[:, 5] = 0
    matrix = QUANTIZERS["gptq"](weight, group_size=32, hessian=hessian)
    step = matrix.scales[:, 0]
    inside = (matrix.codes[:, 5] > 0) & (matrix.codes[:, 5] < 15)
    assert inside.any()
    assert ((weight - matrix.dequantize())[:, 5].abs() <= step / 2 + 1e-6)[inside].all()
    assert torch.isfinite(QUANTIZERS["gptq"](weight, group_size=32, hessian=torch.zeros(128, 128)).dequantize()).all()


def test_damping_grows_until_the_hessian_factorises():
    hessian = torch.eye(64) + 1.02 * (torch.ones(64, 64) - torch.eye(64))  # eigenvalue -0.02: 5 % is enough
    hessian2 = torch.eye(64) + 1.5 * (torch.ones(64, 64) - torch.eye(64))  # eigenvalue -0.5: 5 % and 20 % are not
    for matrix in (hessian, hessian2):
        factor = feedback_factor(matrix, torch.arange(64))
        assert torch.isfinite(factor).all()
        assert torch.equal(factor, factor.tril())
    with pytest.raises(AdaptError, match="factorised"):
        feedback_factor(torch.eye(64) + 100.0 * (torch.ones(64, 64) - torch.eye(64)), torch.arange(64))


@pytest.mark.parametrize("name", ["rtn", "gptq"])
def test_symmetric_zeros_are_8(name):
    matrix = QUANTIZERS[name](normal(16, 128) + 0.2, group_size=32, hessian=correlated(128), symmetric=True)
    assert set(matrix.zeros.unique().tolist()) == {8}


def test_hqq_has_no_symmetric_form():
    with pytest.raises(UnsupportedError, match="symmetric"):
        QUANTIZERS["hqq"](normal(16, 128), group_size=32, symmetric=True)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_do_not_depend_on_run_or_threads(name):
    weight, hessian = normal(48, 384), correlated(384)
    threads = torch.get_num_threads()
    found = []
    for count in (1, 1) if name == "gptq" else (1, 2, 1):  # gptq: the BLAS may sum in another order
        torch.set_num_threads(count)
        found.append(pack(QUANTIZERS[name](weight, group_size=64, hessian=hessian)))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in other)


@settings(max_examples=30)
@given(st.sampled_from(NAMES), st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e4]), st.booleans(), st.integers(0, 9))
def test_every_scale_of_weights_survives(name, size, constant, seed):
    weight = torch.full((8, 64), size) if constant else size * normal(8, 64, seed=seed)
    matrix = QUANTIZERS[name](weight, group_size=32, hessian=torch.eye(64))
    pack(matrix)
    assert torch.isfinite(matrix.dequantize()).all()
    assert (matrix.dequantize() - weight).abs().max() <= max(0.6 * float(weight.abs().max()), 2.0**-20)


@pytest.mark.parametrize("name", NAMES)
def test_refusals(name):
    quantise = QUANTIZERS[name]
    with pytest.raises(ValueError, match="100 inputs"):
        quantise(normal(8, 100), group_size=64, hessian=torch.eye(100))
    with pytest.raises(FormatError, match="NaN"):
        quantise(torch.full((8, 64), torch.nan), group_size=32, hessian=torch.eye(64))
    with pytest.raises(ValueError, match="matrix"):
        quantise(normal(64), group_size=32, hessian=torch.eye(64))
    if quantise.calibrated:
        with pytest.raises(ValueError, match="Hessian"):
            quantise(normal(8, 64), group_size=32)


def test_the_input_is_not_written():
    weight, hessian = normal(16, 128), correlated(128)
    copies = weight.clone(), hessian.clone()
    for name in NAMES:
        QUANTIZERS[name](weight, group_size=32, hessian=hessian)
    assert torch.equal(weight, copies[0])
    assert torch.equal(hessian, copies[1])


def test_clipping_pays_where_it_is_searched():
    weight = normal(64, 512)
    groups = weight.view(64, -1, 128)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    unclipped = ((groups / scale + zero).round() - zero) * scale
    matrix = QUANTIZERS["rtn"](weight, group_size=128)
    assert (matrix.dequantize() - weight).norm() < 0.97 * (unclipped.view(64, 512) - weight).norm()


def test_hessian_is_the_mean_of_outer_products():
    x = normal(3, 50, 32)
    hessian = Hessian()
    hessian.add(x[0])
    hessian.add(x[1:].bfloat16())
    expected = torch.cat([x[0], x[1:].bfloat16().float().view(-1, 32)]).double()
    assert hessian.tokens == 150
    assert torch.allclose(hessian.finish().double(), expected.mT @ expected / 150, rtol=1e-4, atol=1e-5)


def test_hessian_without_tokens_or_with_nan():
    with pytest.raises(AdaptError, match="no calibration token"):
        Hessian().finish()
    hessian = Hessian()
    hessian.add(torch.full((2, 8), torch.inf))
    with pytest.raises(AdaptError, match="not finite"):
        hessian.finish()
