"""Exit rules as data: a threshold per block, blocks that stay dense in the river, and how both are found."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import FormatError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.describe import describe
from adapt_llm.runtime.exit_quality import ExitErrors, Files, measure, measure_errors
from adapt_llm.runtime.exit_rules import (
    AT_ONCE,
    NEVER,
    most_sensitive,
    sensitivities,
    sizes,
    thresholds_by_layer,
)
from adapt_llm.runtime.exits import ALWAYS, HELD, CosineExit, FixedExit, Route
from adapt_llm.runtime.loading import load_river, river_route
from adapt_llm.runtime.manifest import loads
from adapt_llm.runtime.methods import River
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.progress import SilentReporter

FP32 = SessionOptions(device="cpu", dtype="fp32")
IDS = torch.arange(2 * 12).view(2, 12) * 5 % 128


def ruled(bundle: Bundle, **changes: object) -> Bundle:
    """The bundle with other River settings, in memory."""
    river = bundle.manifest.method(River)
    assert river is not None
    changed = River.model_validate({**river.model_dump(), **changes})
    return Bundle(bundle.path, bundle.manifest.model_copy(update={"methods": (changed,)}), bundle.config)


@pytest.fixture(scope="module")
def opened(built: Path) -> Bundle:
    return Bundle.open(built)


@pytest.fixture(scope="module")
def files(opened: Bundle) -> Files:
    model = load_river(opened, FP32)
    return Files(model.decoder, opened.backbone, opened.river)


def stepwise(bundle: Bundle, ids: torch.Tensor, **options: object) -> torch.Tensor:
    """Logits [S, V] token by token through the cache, under the paper's rule: the first token may leave too."""
    model = load_river(bundle, SessionOptions(device="cpu", dtype="fp32", **options))
    model.held = 0
    cache = model.new_cache(1, ids.shape[1])
    with torch.inference_mode():
        return torch.stack([model.decode(token, cache).logits[0] for token in ids.split(1, 1)])


# -- rules as data -------------------------------------------------------------------------------------------------


def test_thresholds_are_those_of_all_blocks_but_the_last() -> None:
    assert CosineExit.by_layer((0.1, 0.2, 0.3)).thresholds == (0.1, 0.2, 0.3, ALWAYS)
    assert CosineExit.uniform(0.5, 4) == CosineExit((0.5, 0.5, 0.5, ALWAYS))


def test_a_route_ends_where_the_resident_blocks_do() -> None:
    before, places = torch.ones(1, 3, 2), torch.arange(3)[None]
    route = Route(CosineExit.uniform(1.0, 4), resident=2)
    assert route.leaves(1, before, before, places).tolist() == [[False] * 3]
    assert route.leaves(2, before, before, places).tolist() == [[True] * 3], "held ones too: there is no more backbone"


def test_a_route_is_the_bundles_rule(opened: Bundle) -> None:
    river = ruled(opened, thresholds=(0.9, 1.0, -1.0), dense_layers=(3,)).manifest.method(River)
    assert river is not None
    assert river_route(river, 4) == Route(CosineExit((0.9, 1.0, -1.0, ALWAYS)), frozenset({3}))
    assert river_route(river, 4, tau=0.5) == Route(CosineExit((0.5, 0.5, 0.5, ALWAYS)), frozenset({3}))
    assert river_route(river, 4, resident=2).resident == 2
    assert river_route(river, 4).held == HELD == 1


@pytest.mark.parametrize(
    "changes",
    [{"thresholds": (0.5,)}, {"dense_layers": (1,)}, {"dense_layers": (3, 2)}, {"thresholds": (0.5, 2.0, 0.5)}],
)
def test_settings_that_fit_no_model_are_refused(changes: dict[str, object], opened: Bundle) -> None:
    with pytest.raises(ValueError, match=r"thresholds|dense_layers"):
        ruled(opened, **changes)


def test_a_reader_that_does_not_know_the_rule_is_told(opened: Bundle) -> None:
    """A bundle with such a rule requires a feature; this version has it."""
    text = opened.manifest.model_copy(update={"required": ("river", "exit-rule")}).dumps()
    assert "exit-rule" in loads(text).required
    with pytest.raises(FormatError):
        loads(text.replace('"tau": 0.95', '"tau": 3', 1))


# -- blocks that stay dense ------------------------------------------------------------------------------------------


def test_all_blocks_staying_dense_is_the_dense_model(opened: Bundle) -> None:
    ids = IDS[:1]
    dense = stepwise(opened, ids, tau=1.0)
    assert torch.equal(stepwise(ruled(opened, dense_layers=(2, 3, 4)), ids, tau=-1.0), dense)
    assert not torch.allclose(stepwise(opened, ids, tau=-1.0), dense, atol=1e-2)


def test_a_block_that_stays_dense_is_the_backbones(opened: Bundle) -> None:
    """Leaving at once with block 3 dense: blocks 2 and 4 are exit layers, 3 is not."""
    model = load_river(opened, FP32)
    whole = load_river(ruled(opened, dense_layers=(3,)), FP32)
    decoder, ids = model.decoder, IDS[:1]
    with torch.inference_mode():
        h, step, store = decoder.embed(ids), decoder.step(None, ids), PassStore(decoder.arch)
        for block in (decoder.blocks[0], model.exits[1], decoder.blocks[2], model.exits[3]):
            h = block(h, step, store)
        expected = decoder.logits(h)[0]
        cache = whole.new_cache(1, ids.shape[1])
        whole.policy, whole.held = FixedExit(1), 0
        found = torch.stack([whole.decode(token, cache).logits[0] for token in ids.split(1, 1)])
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)


def test_blocks_past_the_resident_ones_stay_dense_too(opened: Bundle) -> None:
    """Block 4 is dropped from the backbone, and loaded because it stays dense."""
    stay = ruled(opened, dense_layers=(4,))
    assert torch.equal(stepwise(stay, IDS[:1], tau=-1.0, resident=1), stepwise(stay, IDS[:1], tau=-1.0))
    assert describe(stay, resident=1)["layers"][3]["dense"]
    assert describe(stay, resident=1)["memory"]["total"] > describe(opened, resident=1)["memory"]["total"]


@pytest.mark.parametrize("dense_layers", [(), (3,), (2, 4)])
@pytest.mark.parametrize("resident", [None, 2])
def test_measured_block_by_block_as_it_runs(
    dense_layers: tuple[int, ...], resident: int | None, opened: Bundle, files: Files
) -> None:
    stay = ruled(opened, dense_layers=dense_layers)
    river = stay.manifest.method(River)
    assert river is not None
    middle = float(_cosines(files)[0].median())
    ways = [FixedExit(4), river_route(river, 4, tau=middle, resident=resident)]
    quality = measure(files, IDS, ways, SilentReporter())[1]
    model = load_river(stay, SessionOptions(device="cpu", dtype="fp32", tau=middle, resident=resident))
    total, depths = 0.0, []
    with torch.inference_mode():
        for row in IDS:
            logits, left = model.decode_rows(row[None], model.new_cache(1, IDS.shape[1]))
            total += float(torch.nn.functional.cross_entropy(logits[0, :-1], row[1:], reduction="sum"))
            depths += left.flatten().tolist()
    assert quality.perplexity == pytest.approx(torch.tensor(total / (IDS.numel() - len(IDS))).exp().item(), rel=1e-4)
    assert quality.mean_depth == pytest.approx(sum(depths) / len(depths))
    assert len(set(depths)) > 1


# -- what leaving costs ----------------------------------------------------------------------------------------------


def _cosines(files: Files) -> torch.Tensor:
    return measure_errors(files, IDS, 2, SilentReporter()).cosines


def test_losses_are_those_of_leaving_after_each_block(files: Files) -> None:
    found = measure_errors(files, IDS, 2, SilentReporter())
    ways = [FixedExit(4), *(Route(FixedExit(depth)) for depth in (1, 2, 3))]
    qualities = measure(files, IDS, ways, SilentReporter())
    assert found.losses.shape == (4, 20)
    assert found.cosines.shape == (3, 20)
    kls = [q.kl * 22 / 20 for q in (*qualities[1:], qualities[0])]  # the first token of each sequence loses nothing
    assert found.losses.mean(1).tolist() == pytest.approx(kls, abs=1e-5)
    paper = measure_errors(files, IDS, 2, SilentReporter(), held=0)
    assert paper.losses.shape == (4, 22)
    whole = measure(files, IDS, [FixedExit(4), FixedExit(1)], SilentReporter())[1]
    assert paper.losses[0].mean().item() == pytest.approx(whole.kl, abs=1e-5)
    later = measure_errors(files, IDS, 3, SilentReporter())
    assert torch.equal(later.losses[0], later.losses[1])
    torch.testing.assert_close(later.losses[1:], found.losses[1:])


def cost(errors: ExitErrors, thresholds: tuple[float, ...], price: float) -> float:
    """Loss and price of a rule, token by token, as `thresholds_by_layer` counts them."""
    layers, tokens = errors.losses.shape
    total = 0.0
    for token in range(tokens):
        left = next((at for at in range(layers - 1) if errors.cosines[at, token] > thresholds[at]), layers - 1)
        total += float(errors.losses[left, token]) + price * (left + 1)
    return total


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), price=st.floats(0, 2), layers=st.integers(2, 5), tokens=st.integers(1, 12))
def test_no_single_threshold_and_no_depth_is_cheaper(seed: int, price: float, layers: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand((layers, tokens), generator=generator).sort(0, descending=True).values
    losses[-1] = 0
    errors = ExitErrors(torch.rand((layers - 1, tokens), generator=generator), losses)
    found = thresholds_by_layer(errors, price, 2)
    best = cost(errors, found, price)
    for depth in range(1, layers + 1):
        fixed = tuple(AT_ONCE if layer >= depth else NEVER for layer in range(1, layers))
        assert best <= cost(errors, fixed, price) + 1e-4


def test_thresholds_follow_the_cosine_where_it_tells() -> None:
    """Above 0.5 leaving costs nothing, below it costs much: the cut lies between."""
    cosines = torch.tensor([[0.1, 0.2, 0.8, 0.9]])
    losses = torch.tensor([[5.0, 5.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert thresholds_by_layer(ExitErrors(cosines, losses), 0.1, 2) == (0.5,)
    assert thresholds_by_layer(ExitErrors(cosines, losses), 0.0, 2) == (NEVER,)
    assert thresholds_by_layer(ExitErrors(cosines, losses), 9.0, 2) == (AT_ONCE,)
    three = ExitErrors(cosines.expand(2, 4), torch.cat([losses[:1], losses]))
    assert thresholds_by_layer(three, 0.1, 3)[0] == NEVER  # block 1 has no exit behind it


def test_sensitive_blocks_are_those_that_lose_most() -> None:
    losses = torch.tensor([[0.9], [0.8], [0.3], [0.25], [0.0]])
    found = sensitivities(ExitErrors(torch.zeros(4, 1), losses), 2)
    assert list(found) == [2, 3, 4, 5]
    assert list(found.values()) == pytest.approx([0.1, 0.5, 0.05, 0.25])
    assert most_sensitive(found, 2) == {3, 5}
    assert most_sensitive({2: 0.5, 3: 0.5, 4: 0.5}, 2) == {2, 3}
    assert sizes(5, 2) == [1, 2, 3]
    assert sizes(30, 2) == [2, 4, 6, 8, 10, 14, 19, 23]
    assert sizes(2, 2) == []


def test_drafts_use_every_exit_layer(opened: Bundle) -> None:
    """Lossless, nothing is left to the river but guesses: blocks that stay dense would only slow them."""
    stay = ruled(opened, dense_layers=(3,))
    river = load_river(stay, SessionOptions(device="cpu", dtype="fp32", lossless=True))
    assert river.exits[2] is not river.decoder.blocks[2]
    assert load_river(stay, FP32).exits[2].qkv is not river.exits[2].qkv
