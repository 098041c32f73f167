"""Junctions: their tensors, the start of training, gradients, reading from files; which places are possible."""

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from adapt_llm.errors import FormatError, UnsupportedError, UsageError
from adapt_llm.quant.kernels import native
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.junctions import (
    Junctions,
    equal_points,
    junction_tensors,
    load_junctions,
    log_weights,
    router_width,
    start,
    weights,
)
from adapt_llm.runtime.piggyback import segments
from adapt_llm.runtime.store import open_files

FACTORY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "bundle_factory.py")))
ARCH = Architecture.from_config(FACTORY.config())
GEMMA = Architecture.from_config(
    FACTORY.config(model_type="gemma2", query_pre_attn_scalar=16, sliding_window=8, hidden_activation="gelu")
)


def test_widths_of_routers_are_the_authors() -> None:
    """papers: N-vium, the widths that its configurations list."""
    assert [router_width(d) for d in (128, 256, 512, 768, 1536)] == [88, 176, 344, 512, 1016]


def test_equal_division() -> None:
    assert equal_points(24, 4) == (6, 12, 18)
    assert equal_points(24, 2) == (12,)
    assert equal_points(30, 4) == (8, 15, 22)
    assert equal_points(12, 1) == ()


@settings(deadline=None)
@given(st.lists(st.floats(-60, 60), min_size=1, max_size=7))
def test_weights_are_a_distribution(scores: list[float]) -> None:
    found = torch.stack(weights([torch.tensor(score) for score in scores]))
    rest, expected = 1.0, []
    for score in scores:
        leave = float(torch.tensor(score, dtype=torch.float64).sigmoid())
        expected.append(rest * leave)
        rest *= 1 - leave
    torch.testing.assert_close(found.double(), torch.tensor([*expected, rest]).double(), atol=1e-6, rtol=1e-4)


def test_weights_in_logs_stay_finite_where_probabilities_vanish() -> None:
    scores = [torch.tensor(-200.0), torch.tensor(300.0)]
    first, second, last = (float(value) for value in log_weights(scores))
    assert (first, second, last) == (-200.0, 0.0, -300.0)


@pytest.mark.parametrize("arch", [ARCH, GEMMA], ids=["llama", "gemma"])
def test_exits_begin_as_the_models_own(arch: Architecture) -> None:
    norm = torch.randn(arch.hidden_size)
    made = Junctions.of(arch, (1, 3), start(arch, (1, 3), norm, 0, early_bias=-4.0, final_adapter=True))
    h = torch.randn(2, 5, arch.hidden_size)
    factor = 1 + norm if arch.norm_offset else norm
    for junction in made:
        x, score = junction.read(h)
        expected = torch.nn.functional.rms_norm(h, (arch.hidden_size,), factor, arch.norm_eps)
        torch.testing.assert_close(x, expected, atol=1e-5, rtol=1e-5)
        assert score.shape == (2, 5)
        assert score.dtype is torch.float32
        assert -6 < float(score.mean()) < -2
    assert made.points == (1, 3)
    torch.testing.assert_close(made.adapt_final(h), h)


def test_scores_of_a_start_spread_like_the_authors() -> None:
    made = Junctions.of(ARCH, (2,), start(ARCH, (2,), torch.ones(64), 1))
    score = made[0].read(torch.randn(4000, 64))[1]
    assert abs(float(score.mean())) < 1.5
    assert 0.2 < float(score.std()) < 1.2  # the difference of two logits of std 0.4


def test_every_part_is_trained_through() -> None:
    tensors = start(ARCH, (1, 2), torch.ones(64), 2, final_adapter=True)
    tensors = {name: (t + 0.1 * torch.randn(t.shape)).requires_grad_() for name, t in tensors.items()}
    made = Junctions.of(ARCH, (1, 2), tensors)
    h = torch.randn(3, 64)
    read = [junction.read(h) for junction in made]
    mass = torch.stack(weights([score for _, score in read]))
    (sum(x.square().sum() for x, _ in read) + mass[1].sum() + made.adapt_final(h).square().sum()).backward()
    assert all(tensor.grad is not None and bool(tensor.grad.any()) for tensor in tensors.values())


@pytest.fixture
def stored(tmp_path: Path):
    tensors = start(ARCH, (2,), torch.ones(64), 0)

    def load(**changes: object):
        changed = {**tensors, **changes}
        file = tmp_path / "junctions.safetensors"
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
        options = {"width": router_width(64), "final_adapter": False, "device": "cpu", "dtype": torch.bfloat16}
        return load_junctions(ARCH, open_files([file]), (2,), **options)

    return load


def test_autocast_does_not_round_what_decides() -> None:
    """A zero product before the norm leaves the bias: whatever differs then is the norm's and the head's."""
    tensors = start(ARCH, (1,), torch.ones(64), 0)
    tensors["junctions.1.router.outer.weight"].zero_()
    tensors["junctions.1.router.outer.bias"] += torch.linspace(-1, 1, 64).bfloat16()
    found = []
    for trained in (False, True):
        held = {name: tensor.clone().requires_grad_(trained) for name, tensor in tensors.items()}
        router = Junctions.of(ARCH, (1,), held)[0].router
        with torch.autocast("cpu", torch.bfloat16, enabled=trained):
            found.append(router(torch.ones(2, 64)).detach())
    assert found[1].dtype is torch.float32
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-6)


def test_reading_keeps_in_float32_what_decides(stored) -> None:
    x, score = stored()[0].read(torch.randn(1, 1, 64).bfloat16())
    assert x.dtype is torch.bfloat16
    assert score.dtype is torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"junctions.1.norm.weight": None}, "lack junctions.1.norm.weight"),
        ({"junctions.2.norm.weight": torch.ones(64)}, "one too many: junctions.2.norm.weight"),
        ({"junctions.1.router.head.bias": torch.zeros(3)}, r"shape \(3,\), not \(2,\)"),
        ({"junctions.1.router.head.bias": torch.tensor([0.0, float("nan")])}, "no numbers"),
    ],
)
def test_damaged_junctions_are_refused(stored, changes: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        stored(**changes)


def test_every_tensor_is_named_once() -> None:
    shapes = junction_tensors(ARCH, 2, width=48, final_adapter=True)
    assert len(shapes) == 2 * 10 + 2
    assert shapes.keys() == start(ARCH, (1, 2), torch.ones(64), 0, final_adapter=True).keys()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-1, 6), max_size=4))
def test_only_rising_points_inside_the_stack_make_segments(points: list[int]) -> None:
    fits = all(a < b for a, b in zip([0, *points], [*points, 4], strict=True))
    if fits:
        assert [layer for blocks in segments(ARCH, points) for layer in blocks] == [0, 1, 2, 3]
        return
    with pytest.raises(UsageError, match="Junctions cannot lie after blocks"):
        segments(ARCH, points)


def test_a_junction_inside_a_group_of_shared_caches_is_refused() -> None:
    arch = ARCH.share((0, 0, 2, 2))
    assert len(segments(arch, (2,))) == 2
    with pytest.raises(UnsupportedError, match="Layer 4 reads the keys and values of layer 3, from below the junction"):
        segments(arch, (3,))


def mixed_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of a junction in which every part shows; what decides stays in float32."""
    tensors = start(ARCH, (1,), torch.ones(ARCH.hidden_size), 0, early_bias=-0.7)
    tensors["junctions.1.router.norm.weight"] += torch.randn(ARCH.hidden_size)
    tensors["junctions.1.norm.weight"] += 0.1 * torch.randn(ARCH.hidden_size)
    tensors["junctions.1.adapter.down.weight"] += 0.1 * torch.randn(ARCH.hidden_size, ARCH.hidden_size)
    for name in ("inner", "outer"):
        tensors[f"junctions.1.router.{name}.bias"] += 0.1 * torch.randn(
            tensors[f"junctions.1.router.{name}.bias"].shape
        )
    exact = ("router.norm.weight", "router.head.weight", "router.head.bias")
    return {name: each if name.endswith(exact) else each.to(dtype) for name, each in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_router_says_the_same_in_training_when_running_and_as_numbers(dtype: torch.dtype, rows: int) -> None:
    tensors = mixed_tensors(dtype)
    trained = {name: each.clone().requires_grad_() for name, each in tensors.items()}
    h = torch.randn(rows, ARCH.hidden_size, dtype=dtype)
    learning, junctions = Junctions.of(ARCH, (1,), trained)[0], Junctions.of(ARCH, (1,), tensors)
    junction, (shifted,) = junctions[0], junctions.shifted(1.5)
    x = junction.norm(h)
    atol, rtol = (1e-5, 1e-4) if dtype is torch.float32 else (0.1, 0.05)
    torch.testing.assert_close(junction.router(x), learning.router(x).detach(), atol=atol, rtol=rtol)
    for one, added in ((junction, 0.0), (shifted, 1.5)):
        normed, scores = one.look(h)
        assert torch.equal(normed, x)
        torch.testing.assert_close(torch.tensor(scores), junction.router(x) + added, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        trained["junctions.1.router.head.weight"].mul_(2)  # a step of the optimiser
        torch.testing.assert_close(torch.tensor(learning.look(h)[1]), learning.router(learning.norm(h)))


@pytest.mark.skipif(not native.available(), reason="no native module")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 16, 17])
def test_native_exits_give_what_their_parts_give(rows: int, threads: int) -> None:
    (junction,) = Junctions.of(ARCH, (1,), mixed_tensors(torch.bfloat16))
    parts = copy.copy(junction.adapter)
    parts._few = None
    h = torch.randn(rows, ARCH.hidden_size).bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, scores = junction.look(h)
        adapted, expected = junction.adapter(x), parts(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(x, junction.norm(h))
    assert torch.equal(adapted, expected)
    assert not torch.equal(adapted, x)
    torch.testing.assert_close(torch.tensor(scores), junction.router(x), atol=1e-4, rtol=1e-4)
