"""Tuning an N-vium bundle: a bias on its routers, measured on one half of a text, stored, and run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from adapt_llm.cli.inspect_nvium import figures
from adapt_llm.convert import tune_nvium
from adapt_llm.convert.nvium import build, plan
from adapt_llm.convert.nvium_judge import Measured
from adapt_llm.convert.nvium_request import NviumSettings
from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.tune import tune
from adapt_llm.convert.tune_request import TuneRequest
from adapt_llm.errors import UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.methods import Nvium
from adapt_llm.runtime.models import load_model, self_check
from adapt_llm.runtime.nvium import Nvium as Mixture
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.verify import verify

FP32 = SessionOptions(device="cpu", dtype="fp32", threads=1)


@pytest.fixture(scope="module")
def original(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune-nvium")
    lines = [f"The river leaves the mountains in the north, line {number % 7}.\n" for number in range(200)]
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    settings = NviumSettings(
        data=(folder / "text.txt",), steps=4, sequence_length=32, batch_size=4, junctions=(1, 2), train="routers"
    )
    request = ConvertRequest(source=str(tiny_llama), output=folder / "toy", settings=settings, threads=1)
    return build(plan(request, SilentReporter()), SilentReporter())


@pytest.fixture
def request_for(original: Path, tmp_path: Path):
    copy = shutil.copytree(original, tmp_path / "toy")

    def make(**changes: object) -> TuneRequest:
        fields = {"bundle": copy, "text": original.parent / "text.txt", "limit_tokens": 512, "options": FP32}
        return TuneRequest(**{**fields, "max_loss": 1e9, **changes})

    return make


def settings_in(folder: Path) -> Nvium:
    found = Bundle.open(folder).manifest.method(Nvium)
    assert found is not None
    return found


def test_loss_counts_from_the_better_of_mixture_and_last_exit(request_for) -> None:
    for point in tune(request_for(store=False), SilentReporter()).tuned.frontier:
        plain = point.settings["router_bias"] == 0
        assert point.chosen_on.loss >= 0 or not plain, "the mixture as it was trained is never a gain"
    measured = Measured(10, 20.0, 50.0, (60.0, 50.0), (0.5, 0.5), 0.6, 0.1, 0.5)
    assert tune_nvium._figures((0.0, 0.6, 20.0), measured, 4).loss == 0
    assert tune_nvium._figures((4.0, 0.3, 24.0), measured, 4).loss == pytest.approx(0.2)
    frozen = replace(measured, dense_perplexity=10.0)
    assert tune_nvium._figures((0.0, 0.6, 20.0), frozen, 4).loss == pytest.approx(1.0)


def test_a_bias_is_chosen_stored_and_run(request_for, original: Path) -> None:
    request = request_for()
    found = tune(request, SilentReporter())
    assert found.stored
    depths = {point.settings["router_bias"]: point.dense_blocks for point in found.tuned.frontier}
    assert [depths[bias] for bias in sorted(depths)] == sorted(depths.values(), reverse=True)
    stored = settings_in(request.bundle)
    assert stored.router_bias == max(depths), "the fastest, as any loss was allowed"
    bundle = Bundle.open(request.bundle)
    assert bundle.manifest.quality is not None
    held_out = found.tuned.frontier[-1].held_out
    assert bundle.manifest.quality.perplexity == pytest.approx(held_out.perplexity, rel=1e-4)
    assert bundle.manifest.quality.mean_depth == pytest.approx(held_out.mean_depth, rel=1e-4)
    assert verify(request.bundle, reporter=SilentReporter(), self_check=self_check).ok
    plain, biased = (load_model(Bundle.open(path), FP32) for path in (original, request.bundle))
    assert isinstance(plain, Mixture)
    assert isinstance(biased, Mixture)
    h = plain.decoder.embed(plain.decoder.embedding.new_zeros((1, 3)).long())
    moved = biased.junctions[0].read(h)[1] - plain.junctions[0].read(h)[1]
    assert moved.tolist() == [pytest.approx([stored.router_bias] * 3, abs=1e-4)]


def test_masses_and_depth_in_the_manifest_are_those_of_the_chosen_bias(request_for, original: Path) -> None:
    request = request_for()
    found = tune(request, SilentReporter())
    before, now = settings_in(original), settings_in(request.bundle)
    assert now.exits[0].mass > before.exits[0].mass + 0.02, "a bias above 0 lets more tokens leave at the first"
    layers = Bundle.open(request.bundle).architecture.num_layers
    depth = sum(each.mass * each.layers for each in now.exits)
    assert depth == pytest.approx(found.tuned.frontier[-1].held_out.mean_depth, rel=1e-3)
    assert now.expected_depth == pytest.approx(depth / layers, rel=1e-3)
    shown = "\n".join(figures(now.model_dump()))
    assert f"{now.exits[0].mass:.1%}" in shown
    assert f"{now.router_bias:+g} *" in shown


def test_the_same_again_and_another_goal_measure_nothing(request_for) -> None:
    tune(request_for(), SilentReporter())
    again = tune(request_for(), SilentReporter())
    assert (again.measured, again.stored) == (False, False)
    other = tune(request_for(max_loss=None, min_speed=1.0), SilentReporter())
    assert (other.measured, other.stored) == (False, True)
    best = min(other.tuned.frontier, key=lambda point: point.chosen_on.loss)
    assert settings_in(request_for().bundle).router_bias == best.settings["router_bias"]
    measured = tune(request_for(again=True, store=False), SilentReporter())
    for now, then in zip(measured.tuned.frontier, other.tuned.frontier, strict=True):
        assert now.chosen_on.perplexity == pytest.approx(then.chosen_on.perplexity, rel=1e-4), "measured without a bias"


def test_what_does_not_fit_is_refused(request_for) -> None:
    request = request_for()
    with pytest.raises(UsageError, match="has no labels"):
        tune(replace(request, text=None, labels=request.text, max_loss=None), SilentReporter())
    with pytest.raises(UsageError, match="times as fast"):
        tune(request_for(max_loss=None, min_speed=50.0), SilentReporter())
