"""The small native operations against float64, for every instruction set that works here."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapt_llm.quant.kernels import native, small

pytestmark = pytest.mark.skipif(not small.available(), reason=f"no native module: {native.why_not()}")
ISAS = small.instruction_sets() or ("none",)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(got: Tensor, expected: Tensor, *, noise: float = 0.0) -> None:
    """Within half a bf16 step, and `noise` of the largest value."""
    assert got.shape == expected.shape
    room = 2**-8 * expected.abs() + (2**-16 + noise) * expected.abs().max()
    assert ((got.double() - expected).abs() <= room).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("D", [1, 8, 9, 31, 64, 77, 576, 896])
@pytest.mark.parametrize("rows", [1, 3])
def test_rms_norm(isa: str, D: int, rows: int) -> None:
    x, factor = normal(1, rows, D, seed=D), torch.rand(D) + 0.5
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * factor.double()
    close(small.RowNorm(factor, 1e-5, isa=isa)(x), expected)


@pytest.mark.parametrize("N", [24, 20000])
def test_rows_are_shared_out_among_threads(N: int) -> None:
    """Many short rows, or few long ones: each as by itself."""
    rows = 700_000 // N
    x, up, factor = normal(1, rows, N), normal(1, rows, N, seed=1), torch.rand(N) + 0.5
    norm, gate = small.RowNorm(factor, 1e-5), small.Gate("silu")
    normed = torch.cat([norm(row) for row in x.split(1, 1)], 1)
    gated = torch.cat([gate(*pair) for pair in zip(x.split(1, 1), up.split(1, 1), strict=True)], 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(norm(x), normed)
        assert torch.equal(gate(x, up), gated)
    finally:
        torch.set_num_threads(before)


def test_the_norm_of_nothing_is_nothing() -> None:
    assert not small.RowNorm(torch.ones(40), 1e-6)(torch.zeros(1, 40, dtype=torch.bfloat16)).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", small.GATES)
@pytest.mark.parametrize(("rows", "N"), [(1, 1), (1, 1536), (3, 77), (2, 24)])
@pytest.mark.parametrize("together", [True, False])
def test_gate(isa: str, kind: str, rows: int, N: int, together: bool) -> None:
    both = normal(1, rows, 2 * N, seed=N) * 4
    gate, up = both.split(N, -1)
    if not together:
        gate, up = gate.contiguous(), up.contiguous()
    x = gate.double()
    active = torch.nn.functional.silu(x) if kind == "silu" else torch.nn.functional.gelu(x, approximate="tanh")
    close(small.Gate(kind, isa=isa)(gate, up), active * up.double())


@pytest.mark.parametrize("isa", ISAS)
def test_gates_of_any_size(isa: str) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, -88.0, -50.0, -1e-30, 0.0, 1e-30, 50.0, 100.0, 1e30, float("nan")])
    gate = gate.bfloat16().view(1, 1, -1)
    out = small.Gate("silu", isa=isa)(gate, torch.ones_like(gate))[0, 0]
    expected = torch.nn.functional.silu(gate.double())[0, 0]
    assert out[-1].isnan()
    torch.testing.assert_close(out[:-1].double(), expected[:-1], rtol=2**-8, atol=1e-30)


def attention(
    isa: str, *, groups: int, size: int, width: int, count: int, first: int, rotary: int, normed: bool, stores: bool
) -> None:
    """One token at position count - 1 of a cache with room for more, against float64."""
    heads, capacity, position = groups * size, count + 5, count - 1
    total = heads + (groups if stores else 0)
    x, value = normal(1, 1, total * width, seed=count), normal(1, 1, groups * width, seed=1)
    keys, values = normal(1, groups, capacity, width, seed=2), normal(1, groups, capacity, width, seed=3)
    cos, sin = normal(1, rotary, seed=4), normal(1, rotary, seed=5)
    factors = torch.rand(total, width) + 0.5 if normed else None
    before = keys.clone(), values.clone()
    call = small.TokenAttention(heads, groups, width, scale=width**-0.5, factors=factors, eps=1e-6, isa=isa)
    turn = (cos, sin) if rotary else (None, None)
    got = call(x, value if stores else None, *turn, keys, values, range(first, count), threads=2)

    wide = x.double().view(total, width)
    if factors is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * factors.double()
    turned = wide[:, :rotary] * cos.double() + wide[:, :rotary].roll(rotary // 2, -1) * sin.double()
    wide = torch.cat((turned, wide[:, rotary:]), -1)
    if stores:
        close(keys[0, :, position], wide[heads:], noise=2**-8 if normed else 0)
        assert torch.equal(values[0, :, position].flatten(), value.flatten())
        for now, then in zip((keys, values), before, strict=True):
            then[:, :, position] = now[:, :, position]
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    q = wide[:heads].view(groups, size, width)
    seen = slice(first, count)
    weights = (q @ keys[0, :, seen].double().transpose(1, 2) * width**-0.5).softmax(-1)
    expected = (weights @ values[0, :, seen].double()).view(1, 1, -1)
    close(got, expected, noise=0.01 if normed else 1e-5)  # queries are rounded once more behind a norm


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 64), width=st.integers(1, 200), seed=st.integers(0, 99), size=st.sampled_from([1e-6, 1.0, 1e6])
)
def test_cosines(rows: int, width: int, seed: int, size: float) -> None:
    x = normal(1, rows, width, seed=seed) * size
    y = (x + normal(1, rows, width, seed=seed + 1) * 0.1 * size).bfloat16()
    y[0, 0], x[0, -1] = 0, -y[0, -1]
    assert small.cosines_fit(x, y)
    expected = torch.cosine_similarity(x.double(), y.double(), dim=-1)
    torch.testing.assert_close(small.cosines(x, y).double(), expected, rtol=0, atol=1e-7)


def test_cosines_that_do_not_fit() -> None:
    x = normal(1, 65, 8)
    odd = (x, x), (x[:, :3], x[:, :4]), (x[:, :3].float(), x[:, :3].float()), (x[:, ::30], x[:, ::30])
    assert not any(small.cosines_fit(*pair) for pair in odd)
    assert not small.cosines_fit(x[:, :1].clone().requires_grad_(), x[:, :1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13])
@pytest.mark.parametrize("width", [8, 12, 64, 96, 256])
def test_attention(isa: str, size: int, width: int) -> None:
    attention(isa, groups=2, size=size, width=width, count=130, first=0, rotary=width, normed=False, stores=True)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_attention(data: st.DataObject) -> None:
    draw = data.draw
    width = 2 * draw(st.integers(4, 70), label="width / 2")
    count = draw(st.one_of(st.integers(1, 140), st.integers(500, 2000)), label="count")
    attention(
        draw(st.sampled_from(ISAS), label="isa"),
        groups=draw(st.integers(1, 4), label="groups"),
        size=draw(st.integers(1, 8), label="size"),
        width=width,
        count=count,
        first=draw(st.integers(0, count - 1), label="first"),
        rotary=2 * draw(st.integers(0, width // 2), label="rotary / 2"),
        normed=draw(st.booleans(), label="normed"),
        stores=draw(st.booleans(), label="stores"),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("start", [70, 509, 1022])
def test_tokens_in_a_row_are_tokens_one_by_one(isa: str, window: int | None, stores: bool, start: int) -> None:
    """To the last bit, over the edges of spans too; heads and values are parts of wider rows."""
    rows, groups, heads, width = 5, 2, 6, 24
    own = heads + (groups if stores else 0)
    both = normal(1, rows, (own + groups) * width)
    x, value = both.split_with_sizes([own * width, groups * width], -1)
    cos, sin = normal(rows, width, seed=4), normal(rows, width, seed=5)
    call = small.TokenAttention(heads, groups, width, scale=0.2, isa=isa)
    together, alone = (cache_of(groups, start + 10, width) for _ in range(2))
    first = 0 if window is None else max(0, start + 1 - window)
    got = call(x, value if stores else None, cos, sin, *together, range(first, start + rows), window)
    for row in range(rows):
        end = start + row + 1
        first = 0 if window is None else max(0, end - window)
        one = slice(row, row + 1)
        heads_of, value_of = x[:, one].contiguous(), value[:, one].contiguous() if stores else None
        out = call(heads_of, value_of, cos[one], sin[one], *alone, range(first, end))
        assert torch.equal(got[:, one], out)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("groups", [1, 3])
def test_threads_do_not_change_the_result(isa: str, groups: int) -> None:
    """Whoever comes first takes the next span; they are joined in their order."""
    cache, query = cache_of(groups, 3000, 32), normal(1, 1, groups * 2 * 32, seed=9)
    call = small.TokenAttention(2 * groups, groups, 32, scale=0.3, isa=isa)
    expected = call(query, None, None, None, *cache, range(2900), threads=1)
    for threads in (2, 3, 5) * 5:
        assert torch.equal(call(query, None, None, None, *cache, range(2900), threads=threads), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_scores_too_large_for_an_exponential(isa: str) -> None:
    """One key wins by far, early or late: no overflow, and what was summed before it fades."""
    count = 1200
    for winner in (0, 70, 199, 512, 1199):
        keys, values = torch.zeros(1, 1, count, 16), torch.randn(1, 1, count, 16)
        keys[0, 0, winner] = 1e3
        cache = keys.bfloat16(), values.bfloat16()
        query = torch.full((1, 1, 16), 1e3, dtype=torch.bfloat16)
        out = small.TokenAttention(1, 1, 16, scale=1.0, isa=isa)(query, None, None, None, *cache, range(count))
        assert torch.equal(out.flatten(), cache[1][0, 0, winner])


def test_a_wrong_instruction_set_is_not_used() -> None:
    """The check finds each operation that is wrong in one place."""
    library = native.library()
    scalar = library.isas["scalar"]
    expected = small._samples(library.module, scalar)
    assert small._agree(small._samples(library.module, scalar), expected)
    for name, place, change in [("rms_norm", 7, -1), ("gated", 8, -1), ("attend_rows", 16, 1), ("attend_rows", 17, -1)]:
        wrong: Any = type("Module", (), {n: getattr(library.module, n) for n in ("rms_norm", "gated", "attend_rows")})()
        right = getattr(library.module, name)

        def call(*arguments: Any, right: Any = right, place: int = place, change: int = change) -> None:
            changed = list(arguments)
            changed[place] += change
            right(*changed)

        setattr(wrong, name, call)
        assert not small._agree(small._samples(wrong, scalar), expected), name


def cache_of(groups: int, capacity: int, width: int) -> tuple[Tensor, Tensor]:
    return normal(1, groups, capacity, width), normal(1, groups, capacity, width)


@pytest.mark.parametrize(
    "call",
    [
        lambda: small.RowNorm(torch.ones(8), 1e-6)(torch.ones(1, 8)),
        lambda: small.RowNorm(torch.ones(8), 1e-6)(normal(1, 9)),
        lambda: small.RowNorm(torch.ones(8).bfloat16(), 1e-6),
        lambda: small.RowNorm(torch.ones(8), 1e-6, isa="none such"),
        lambda: small.Gate("silu")(normal(1, 1, 8), normal(1, 1, 9)),
        lambda: small.Gate("silu")(normal(1, 1, 8), torch.ones(1, 1, 8)),
        lambda: small.Gate("silu")(normal(1, 8, 2).transpose(1, 2), normal(1, 2, 8)),
        lambda: small.TokenAttention(3, 2, 8, scale=1.0),
        lambda: small.TokenAttention(2, 2, 8, scale=1.0)(normal(8), None, None, None, *cache_of(2, 4, 8), range(3)),
        lambda: small.TokenAttention(2, 2, 8, scale=1.0)(normal(16), None, None, None, *cache_of(2, 4, 8), range(5)),
        lambda: small.TokenAttention(2, 2, 8, scale=1.0)(normal(16), None, None, None, *cache_of(2, 4, 9), range(3)),
        lambda: small.TokenAttention(2, 2, 8, scale=1.0)(normal(16), None, None, None, *cache_of(2, 4, 8), range(3, 3)),
        lambda: small.TokenAttention(2, 2, 8, scale=1.0)(
            normal(16), None, normal(10), normal(10), *cache_of(2, 4, 8), range(3)
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|only|fit|usable|spaced|outside"):
        call()
