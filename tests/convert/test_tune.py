"""Tuning a River bundle: what is measured, chosen and stored; what stops early; what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer as Tokens
from tokenizers import decoders, models, pre_tokenizers

from adapt_llm.convert import river_sweep, tune_record, tune_river
from adapt_llm.convert.river_sweep import Candidate, dense_blocks, frontier
from adapt_llm.convert.tune import tune
from adapt_llm.convert.tune_goal import choose
from adapt_llm.convert.tune_request import TuneRequest
from adapt_llm.convert.tune_text import read_halves
from adapt_llm.errors import AdaptError, FormatError, ResourceError, UnsupportedError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.loading import load_river, river_route
from adapt_llm.runtime.manifest import MANIFEST_NAME
from adapt_llm.runtime.methods import Rcla, River
from adapt_llm.runtime.models import self_check
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.quality import Quality
from adapt_llm.runtime.text import Tokenizer
from adapt_llm.runtime.text_quality import text_quality
from adapt_llm.runtime.tuned import BlockSpeed, Figures, TunedPoint
from adapt_llm.runtime.verify import verify

WORDS = ("the", "river", "leaves", "mountains", "and", "reaches", "a", "sea", "after", "three", "hundred", "miles")
TEXT = " ".join(WORDS[(7 * n * n + n) % len(WORDS)] for n in range(400))
FP32 = SessionOptions(device="cpu", dtype="fp32", threads=1)
SPEED = BlockSpeed(device="cpu", threads=1, dtype="float32", dense_block_ms=2.0, river_block_ms=1.0, rest_ms=1.0)


@pytest.fixture(scope="module")
def original(factory: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny River bundle to which every byte is a token."""
    folder = tmp_path_factory.mktemp("tune")
    model = factory.model_folder(folder / "model", vocab_size=264)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokens(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(model / "tokenizer.json"))
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return factory.bundle(model, folder / "river")


@pytest.fixture
def request_for(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Requests for a copy of the bundle, whose blocks take as long as SPEED says."""
    monkeypatch.setattr(tune_river, "measure_blocks", lambda *_: SPEED)
    monkeypatch.setattr(tune_river, "measure_greedy", lambda *_: 6.0)
    copy = shutil.copytree(original, tmp_path / "river")

    def make(**changes: object) -> TuneRequest:
        fields = {"bundle": copy, "text": original.parent / "text.txt", "limit_tokens": 512, "options": FP32}
        return TuneRequest(**{**fields, "max_loss": 1e9, **changes})

    return make


def settings_in(folder: Path) -> River:
    found = Bundle.open(folder).manifest.method(River)
    assert found is not None
    return found


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        def measured(*_args: object, **_options: object) -> None:
            raise AssertionError("something was measured")

        monkeypatch.setattr(tune_river, "sweep", measured)
        monkeypatch.setattr(tune_river, "measure_blocks", measured)

    return refuse


# -- from measuring to running ---------------------------------------------------------------------------------------


def test_a_point_is_chosen_stored_and_run(request_for) -> None:
    request = request_for(min_speed=1.2, max_loss=None)
    before = {path.name: path.read_bytes() for path in request.bundle.iterdir()}
    found = tune(request, SilentReporter())
    assert found.measured
    assert found.stored
    point = found.tuned.point
    assert point is not None
    assert point.speedup >= 1.2
    better = [other for other in found.tuned.frontier if other.speedup >= 1.2]
    assert point.chosen_on.kl == min(other.chosen_on.kl for other in better)
    stored = settings_in(request.bundle)
    assert {name: getattr(stored, name) for name in point.settings} == point.settings
    after = {path.name: path.read_bytes() for path in request.bundle.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {MANIFEST_NAME}
    assert after.keys() == before.keys()
    bundle = Bundle.open(request.bundle)
    assert ("exit-rule" in bundle.manifest.required) == (stored.thresholds is not None or bool(stored.dense_layers))
    model = load_river(bundle, FP32)
    assert model.policy == river_route(stored, 4).policy
    stay = stored.dense_layers
    assert [model.exits[layer - 1] is model.decoder.blocks[layer - 1] for layer in stay] == [True] * len(stay)


@pytest.mark.parametrize(
    "rule",
    [
        Candidate.of("by block", thresholds=(-1.0, 0.5, 1.0)),
        Candidate.of("two", tau=-1.0, dense_layers=frozenset({2, 4})),
        Candidate.of("paper", tau=0.5),
    ],
)
def test_every_kind_of_rule_is_whole_after_it_was_stored(rule: Candidate, request_for, monkeypatch) -> None:
    monkeypatch.setattr(river_sweep, "candidates", lambda *_: [*_dense_and_floor(), rule])
    monkeypatch.setattr(tune_river, "choose", lambda points, *_: _named(points, rule.name))
    monkeypatch.setattr(river_sweep, "frontier", lambda *_, **__: [0, 1, 2])
    request = request_for()
    found = tune(request, SilentReporter())
    assert found.stored
    assert verify(request.bundle, reporter=SilentReporter(), self_check=self_check).ok
    bundle, point = Bundle.open(request.bundle), found.tuned.point
    assert point is not None
    assert bundle.manifest.quality is not None
    assert bundle.manifest.quality.kl == pytest.approx(point.held_out.kl, rel=1e-5)
    assert bundle.manifest.tuned is not None
    assert bundle.manifest.tuned.point == bundle.manifest.tuned.frontier[[0, 1, 2][_place(found.tuned.frontier, rule)]]


def _dense_and_floor() -> list[Candidate]:
    return [Candidate.of(river_sweep.DENSE, tau=1.0), Candidate.of(river_sweep.FLOOR, tau=-1.0)]


def _named(points, name: str) -> TunedPoint:
    return next(point for point in points if point.name == name)


def _place(points, rule: Candidate) -> int:
    return [point.name for point in points].index(rule.name)


def test_figures_are_those_of_eval_on_the_other_half(request_for) -> None:
    """What tune says of a half is what `eval --text` says of the same tokens."""
    request = request_for(min_speed=1.3, max_loss=None)
    found = tune(request, SilentReporter()).tuned
    bundle = Bundle.open(request.bundle)
    tokenizer = Tokenizer.load(request.bundle)
    halves = read_halves(request, tokenizer, max_positions=256, vocab_size=264)
    text = tokenizer.decode(halves.report.flatten().tolist())
    options = replace(FP32, ctx_size=halves.report.shape[1])
    quality = text_quality(bundle, text, options, limit=None, reporter=SilentReporter())
    point = found.point
    assert point is not None
    assert quality.perplexity == pytest.approx(point.held_out.perplexity, rel=1e-4)
    assert quality.kl == pytest.approx(point.held_out.kl, rel=1e-3, abs=1e-6)
    assert tuple(quality.exit_histogram) == point.held_out.exit_histogram


# -- again -----------------------------------------------------------------------------------------------------------


def test_the_same_again_measures_nothing_and_writes_nothing(request_for, no_measuring) -> None:
    request = request_for(max_loss=0.05)
    first = tune(request, SilentReporter())
    file = request.bundle / MANIFEST_NAME
    written, text = file.stat().st_mtime_ns, file.read_text(encoding="utf-8")
    no_measuring()
    second = tune(request, SilentReporter())
    assert (second.measured, second.stored) == (False, False)
    assert second.tuned.chosen == first.tuned.chosen
    assert (file.stat().st_mtime_ns, file.read_text(encoding="utf-8")) == (written, text)


def test_another_goal_is_answered_from_what_is_stored(request_for, no_measuring) -> None:
    tune(request_for(max_loss=0.0), SilentReporter())
    no_measuring()
    found = tune(request_for(max_loss=1e9), SilentReporter())
    assert (found.measured, found.stored) == (False, True)
    assert found.tuned.chosen == max(found.tuned.frontier, key=lambda point: point.speedup).name


@pytest.mark.parametrize("change", [{"seed": 1}, {"limit_tokens": 384}, {"again": True}, {"text": "other"}])
def test_what_changed_is_measured_again(change: dict[str, object], request_for, tmp_path: Path) -> None:
    tune(request_for(), SilentReporter())
    if "text" in change:
        change = {"text": tmp_path / "other.txt"}
        (tmp_path / "other.txt").write_text(TEXT[::-1], encoding="utf-8")
    assert tune(request_for(**change), SilentReporter()).measured


def test_two_runs_with_one_seed_store_the_same(request_for, original: Path, tmp_path: Path) -> None:
    other = shutil.copytree(original, tmp_path / "other")
    first, second = request_for(max_loss=0.1, seed=3), request_for(max_loss=0.1, seed=3, bundle=other)
    for request in (first, second):
        tune(request, SilentReporter())
    texts = [(request.bundle / MANIFEST_NAME).read_text(encoding="utf-8") for request in (first, second)]
    assert texts[0] == texts[1]


def test_a_dry_run_stores_nothing(request_for) -> None:
    request = request_for(store=False)
    before = (request.bundle / MANIFEST_NAME).read_bytes()
    found = tune(request, SilentReporter())
    assert found.measured
    assert not found.stored
    assert (request.bundle / MANIFEST_NAME).read_bytes() == before


def test_a_tuned_bundle_is_tuned_from_its_weights(request_for) -> None:
    """Blocks that stay dense are no part of what is measured next."""
    first = tune(request_for(), SilentReporter()).tuned
    again = tune(request_for(again=True), SilentReporter()).tuned
    assert [point.chosen_on for point in again.frontier] == [point.chosen_on for point in first.frontier]


def test_stopped_while_writing_the_old_manifest_stays(request_for, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for()
    before = (request.bundle / MANIFEST_NAME).read_bytes()

    def full(_path: Path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tune_record, "whole_file", full)
    with pytest.raises(ResourceError, match="disk is full"):
        tune(request, SilentReporter())
    assert (request.bundle / MANIFEST_NAME).read_bytes() == before


def test_blocks_that_there_are_not_are_refused_before_anything_is_measured(request_for, no_measuring) -> None:
    no_measuring()
    with pytest.raises(UsageError, match="--resident 1 to 4"):
        tune(request_for(options=replace(FP32, resident=5)), SilentReporter())


@pytest.mark.parametrize("goal", ["max_loss", "min_speed", "max_drop"])
@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_a_goal_that_is_no_number_is_refused(goal: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not possible"):
        TuneRequest(tmp_path, text=tmp_path / "t.txt", **{goal: value})


@pytest.mark.parametrize(("data", "error", "hint"), [(None, UsageError, "--text"), (b"\xff\xfe", FormatError, "UTF-8")])
def test_a_text_that_cannot_be_read(
    request_for, tmp_path: Path, data: bytes | None, error: type[AdaptError], hint: str
) -> None:
    if data is not None:
        (tmp_path / "t.txt").write_bytes(data)
    with pytest.raises(error, match=hint):
        tune(request_for(text=tmp_path / "t.txt"), SilentReporter())


def test_a_bundle_that_keeps_few_blocks_is_tuned_for_them(request_for) -> None:
    request = request_for(options=replace(FP32, resident=2), max_loss=1e9)
    found = tune(request, SilentReporter()).tuned
    assert settings_in(request.bundle).resident == 2
    assert found.chosen != river_sweep.DENSE
    others = [point for point in found.frontier if point.name != river_sweep.DENSE]
    assert all(sum(point.held_out.exit_histogram[2:]) == 0 for point in others)


# -- small parts -----------------------------------------------------------------------------------------------------


def test_halves_are_disjoint_and_depend_on_the_seed(request_for, original: Path) -> None:
    tokenizer = Tokenizer.load(original)

    def halves(**changes: object):
        return read_halves(request_for(**changes), tokenizer, max_positions=256, vocab_size=264)

    first, same, other = halves(), halves(), halves(seed=1)
    assert torch.equal(first.choose, same.choose)
    assert not torch.equal(first.choose, other.choose)
    assert first.used.tokens == first.choose.numel() + first.report.numel() == 512
    rows = {tuple(row) for row in (*first.choose.tolist(), *first.report.tolist())}
    assert rows == {tuple(row) for row in (*other.choose.tolist(), *other.report.tolist())}


def test_dense_blocks_are_those_climbed_and_those_that_stay() -> None:
    quality = Quality(1.0, 0.0, 1.0, 2.0, [5, 0, 5, 0])
    assert dense_blocks(quality, {"dense_layers": ()}) == 2
    assert dense_blocks(quality, {"dense_layers": (2, 4)}) == (5 * 3 + 5 * 4) / 10


def test_the_frontier_holds_what_nothing_beats() -> None:
    costs, kls = [5.0, 1.0, 2.0, 2.0, 3.0], [0.0, 0.9, 0.5, 0.6, 0.5]
    assert frontier(costs, kls) == [0, 1, 2]
    assert frontier(costs, kls, always=(4,)) == [0, 1, 2, 4]


def point(name: str, speedup: float, kl: float, loss: float) -> TunedPoint:
    figures = Figures(perplexity=10.0, loss=loss, kl=kl, agreement=0.9, mean_depth=2.0)
    return TunedPoint(name=name, settings={}, dense_blocks=2.0, speedup=speedup, chosen_on=figures, held_out=figures)


def test_choosing() -> None:
    points = [point("slow", 1.0, 0.0, 0.0), point("middle", 1.3, 0.02, 0.01), point("fast", 1.6, 0.2, 0.1)]
    assert choose(points, "max_loss", 0.05).name == "middle"
    assert choose(points, "max_loss", 0.0).name == "slow"
    assert choose(points, "min_speed", 1.2).name == "middle"
    with pytest.raises(UsageError, match=r"1\.60"):
        choose(points, "min_speed", 2.0)
    with pytest.raises(UsageError, match=r"'middle' loses 0\.01"):
        choose(points[1:], "max_loss", 0.001)


def test_the_speed_of_a_setting_follows_from_its_blocks() -> None:
    assert SPEED.token_ms(4, 4) == 9
    assert SPEED.speedup(1, 4) == 9 / 6


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": None}, "nothing to tune on"),
        ({"labels": Path("rows.jsonl")}, "exclude each other"),
        ({"min_speed": 1.5}, "exclude each other"),
        ({"max_loss": None, "max_drop": 0.1}, "--max-drop is for --labels"),
        ({"max_loss": -1.0}, "--max-loss -1 is not possible"),
    ],
)
def test_requests_that_make_no_sense(fields: dict[str, object], message: str, request_for) -> None:
    with pytest.raises(UsageError, match=message):
        request_for(**fields)


def test_what_cannot_be_tuned_says_so(request_for, tmp_path: Path) -> None:
    request = request_for()
    short = tmp_path / "short.txt"
    short.write_text("the river", encoding="utf-8")
    with pytest.raises(UsageError, match="too short"):
        tune(replace(request, text=short), SilentReporter())
    (tmp_path / "latin.txt").write_bytes(b"\xe9" * 1000)
    with pytest.raises(FormatError, match="UTF-8"):
        tune(replace(request, text=tmp_path / "latin.txt"), SilentReporter())
    with pytest.raises(UsageError, match="has no labels"):
        tune(replace(request, text=None, labels=short, max_loss=None), SilentReporter())
    path = request.bundle / MANIFEST_NAME
    data = json.loads(path.read_text(encoding="utf-8"))
    data["methods"] = [Rcla(kv_sources=(1, 1, 3, 3)).model_dump(mode="json")]
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="coarser"):
        tune(request, SilentReporter())
