"""N-vium's static passes against the eager ones: tokens, depths, rows of each pass, over families and buckets."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from adapt_llm.runtime import static
from adapt_llm.runtime.captured import captured
from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.graphs import Graphs
from adapt_llm.runtime.nvium import Nvium
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.static_segments import SegmentGraphs

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "LEAST_BUCKET", 8)


@pytest.fixture(scope="module")
def mixtures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("static_mixtures", Path(__file__).with_name("nvium_models.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(tiny_model: Callable, mixtures: ModuleType) -> Callable[..., Nvium]:
    def make(name: str, *, graphs: bool, **options) -> Nvium:
        decoder = tiny_model(name).decoder
        points = tuple(range(1, decoder.arch.num_layers))
        tensors = mixtures.junction_tensors(decoder, points, biases=0.5)
        model = mixtures.model(decoder, points, tensors, **options)
        if graphs:
            model.graphs = SegmentGraphs(decoder, model.segments)
        return model

    return make


def run(model: Nvium, ids: torch.Tensor, count: int, cache=None) -> list:
    """Outputs of `count` tokens, each given the next id whatever was chosen; then of all that waits."""
    cache = cache or model.new_cache(1, 40)
    sampler = Sampler(Sampling(temperature=1.0, seed=3))
    with torch.inference_mode():
        outputs = [model.prefill(ids[:, :5], cache, sampler)]
        outputs += [model.decode(ids[:, at : at + 1], cache, sampler) for at in range(5, 5 + count)]
        model.flush(cache)
        outputs.append(model.decode(ids[:, :1], cache, sampler))
    return outputs


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-biases", "llama-dynamic", "mistral", "ministral3", "qwen3", "gemma2", "gemma3", "phi3-longrope"],
)
@pytest.mark.parametrize("most", [3, 64])
def test_tokens_depths_and_passes_are_the_eager_ones(name: str, most: int, made: Callable, tiny: ModuleType) -> None:
    ids, count = tiny.random_ids(1, 40), 17
    expected = run(made(name, graphs=False, max_deferred=most), ids, count)
    found = run(made(name, graphs=True, max_deferred=most), ids, count)
    assert [output.token for output in found] == [output.token for output in expected]
    assert [output.depth for output in found] == [output.depth for output in expected]
    assert [output.passes for output in found] == [output.passes for output in expected]
    assert len({output.depth for output in found}) > 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits, **TOLERANCE)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_a_prompt_past_the_length_where_rotations_change(name: str, made: Callable, tiny: ModuleType) -> None:
    """All of a stretch is rotated as its last token, which tables of single tokens do not do."""
    ids, outputs = tiny.random_ids(1, 40), []
    for graphs in (False, True):
        model = made(name, graphs=graphs)
        outputs.append(model.prefill(ids, model.new_cache(1, 41)))
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, **TOLERANCE)


def test_passes_come_in_few_shapes(made: Callable, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()

    def note(_self: Graphs, key: tuple[int, int, int], function: Callable) -> object:
        keys.add(key)
        return function()

    monkeypatch.setattr(Graphs, "run", note)
    outputs = run(made("llama", graphs=True, max_deferred=7), tiny.random_ids(1, 40), 17)
    assert {rows for _, rows, _ in keys} <= {1, 2, 4, 8}
    assert {bucket for _, _, bucket in keys} <= {8, 16, 32, 40}
    assert {size for output in outputs for size in output.passes} - {1, 2, 4, 8}, "no pass was padded"


def test_memory_is_lent_on(made: Callable, tiny: ModuleType) -> None:
    model, ids = made("llama", graphs=True), tiny.random_ids(1, 40)
    first = model.new_cache(1, 40)
    expected = [output.token for output in run(model, ids, 9, first)]
    place = first.buffers(0)[0].data_ptr()
    for _ in range(2):  # the second comes and goes while the first is in use
        assert model.new_cache(1, 40).buffers(0)[0].data_ptr() != place
    del first
    second = model.new_cache(1, 30)
    assert second.buffers(0)[0].data_ptr() == place
    assert [output.token for output in run(model, ids, 9, second)] == expected


def test_a_capture_that_fails_leaves_the_eager_passes(made: Callable, tiny: ModuleType, monkeypatch) -> None:
    ids = tiny.random_ids(1, 40)
    expected = [output.token for output in run(made("llama", graphs=False), ids, 9)]

    def fail(_self: object, _key: object, _function: object) -> None:
        raise RuntimeError("no capture")

    monkeypatch.setattr(Graphs, "run", fail)
    model = made("llama", graphs=True)
    assert [output.token for output in run(model, ids, 9)] == expected
    assert model.graphs.broken == "no capture"


def test_it_is_chosen_on_a_gpu(made: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama", graphs=False)
    assert captured(model) is model
    assert model.graphs is None
    monkeypatch.setattr("adapt_llm.runtime.captured.SegmentGraphs", lambda *_args: "graphs")
    monkeypatch.setattr(Decoder, "device", property(lambda _self: torch.device("cuda")))
    assert captured(model, wanted=False).graphs is None
    assert captured(model).graphs == "graphs"
