"""The N-vium recipe from a tiny model, or none, and a text to a bundle: trained, resumed, stacked, refused."""

import hashlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapt_llm.convert import junction_training
from adapt_llm.convert.export import export
from adapt_llm.convert.nvium import build, plan
from adapt_llm.convert.nvium_request import NviumSettings
from adapt_llm.convert.rcla import build as build_rcla
from adapt_llm.convert.rcla import plan as plan_rcla
from adapt_llm.convert.rcla_request import RclaSettings
from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.river import build as build_river
from adapt_llm.convert.river import plan as plan_river
from adapt_llm.convert.river_request import RiverSettings
from adapt_llm.errors import UnsupportedError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.junctions import Junctions, start
from adapt_llm.runtime.methods import Nvium
from adapt_llm.runtime.models import load_model, self_check
from adapt_llm.runtime.nvium import Nvium as NviumModel
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.store import open_safetensors
from adapt_llm.runtime.text import Tokenizer
from adapt_llm.runtime.verify import verify

FP32 = SessionOptions(dtype="fp32", device="cpu")
SHORT = {"steps": 30, "sequence_length": 32, "batch_size": 4, "checkpoint_every": 10}
RATES = {"routers": 1e-2, "all": 3e-3, "scratch": 1e-2}


class Listening(SilentReporter):
    def __init__(self, stop_at: str | None = None) -> None:
        self.notes: list[str] = []
        self._stop_at = stop_at

    def note(self, text: str) -> None:
        self.notes.append(text)
        if self._stop_at is not None and text.startswith(self._stop_at):
            raise ConnectionAbortedError(self._stop_at)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "river.txt"
    lines = [f"The river leaves the mountains in the north, line {number % 7}.\n" for number in range(260)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def empty(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a tokenizer, and no weights; they are stored in float32."""
    folder = tmp_path_factory.mktemp("empty-llama")
    for path in tiny_llama.iterdir():
        if path.suffix == ".json" and "safetensors" not in path.name:
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": "float32", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def request_for(tiny_llama: Path, empty: Path, text: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("out")

    def make(name: str, trained: str = "routers", *, source: Path | None = None, **settings) -> ConvertRequest:
        scratch = trained == "scratch"
        how = {"from_scratch": True} if scratch else {"train": trained}
        given = {**SHORT, "data": (text,), "learning_rate": RATES[trained], **how, **settings}
        if "junctions" not in given:
            given.setdefault("exits", 2)
        return ConvertRequest(
            source=str(source or (empty if scratch else tiny_llama)),
            output=folder / name,
            settings=NviumSettings(**given),
            threads=1,
            device="cpu",
            dtype="fp32",
        )

    return make


def convert(request: ConvertRequest, reporter=None) -> Path:
    reporter = reporter or SilentReporter()
    return build(plan(request, reporter), reporter)


def bytes_of(bundle: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(bundle.iterdir())}


def settings_of(bundle: Path) -> Nvium:
    settings = Bundle.open(bundle).manifest.method(Nvium)
    assert settings is not None
    return settings


@pytest.fixture(scope="module")
def made(request_for) -> dict[str, Path]:
    """A bundle of each kind; read by several tests."""
    return {trained: convert(request_for(trained, trained)) for trained in RATES}


@pytest.mark.parametrize("trained", list(RATES))
def test_a_bundle_is_whole_and_says_what_it_is(trained: str, made: dict[str, Path]) -> None:
    path = made[trained]
    manifest, settings = Bundle.open(path).manifest, settings_of(path)
    assert manifest.required == ("nvium",)
    assert (settings.junctions, settings.trained, settings.blocks, settings.beta) == ((2,), trained, "dense", 0.15)
    assert settings.final_adapter == (trained != "routers")
    assert [each.layers for each in settings.exits] == [2, 4]
    assert sum(each.mass for each in settings.exits) == pytest.approx(1)
    assert settings.expected_depth == pytest.approx(0.5 * settings.exits[0].mass + settings.exits[1].mass)
    assert settings.training is not None
    assert settings.training.tokens == 30 * 4 * 32
    quality = manifest.quality
    assert quality is not None
    best = min(each.perplexity for each in settings.exits)
    assert quality.perplexity < 1.5 * best
    depths = [point.expected_depth for point in settings.trade_off]
    assert depths == sorted(depths, reverse=True)
    unmoved = next(point for point in settings.trade_off if point.bias == 0)
    assert unmoved.perplexity == pytest.approx(quality.perplexity)
    assert verify(path, reporter=SilentReporter(), self_check=self_check).problems == ()
    assert isinstance(load_model(Bundle.open(path), FP32), NviumModel)


def test_a_frozen_backbone_stays_as_it_came_and_dense_without_early_mass(
    made: dict[str, Path], tiny_llama: Path
) -> None:
    theirs, bundle = load_file(tiny_llama / "model.safetensors"), Bundle.open(made["routers"])
    assert all(torch.equal(bundle.backbone.read(name), theirs[name]) for name in bundle.backbone.names())
    settings = settings_of(made["routers"])
    quality = bundle.manifest.quality
    assert quality is not None
    assert quality.dense_perplexity == settings.exits[-1].perplexity
    assert settings.exits[0].perplexity < quality.dense_perplexity  # random as it came; the junction has learnt
    model = load_model(bundle, FP32)
    assert isinstance(model, NviumModel)
    ids = torch.randint(0, 250, (1, 20))
    for junction in model.junctions:
        weight, bias = junction.router._difference
        junction.router._difference = (weight * 0, bias * 0 - 200)
    dense = Dense(model.decoder)
    with torch.inference_mode():
        wanted = dense.score(ids, dense.new_cache(1, 20)).log_softmax(-1)
        torch.testing.assert_close(model.score(ids, model.new_cache(1, 20)), wanted, atol=1e-5, rtol=1e-5)


def test_exits_beside_a_frozen_backbone_begin_as_a_map_to_the_last_one(request_for, text: Path) -> None:
    path = convert(request_for("untaught", steps=8, learning_rate=1e-6))
    model = load_model(Bundle.open(path), FP32)
    assert isinstance(model, NviumModel)
    ids = Tokenizer.load(path).encode(text.read_text(encoding="utf-8")[:400])[:100]
    arch, norm = model.decoder.arch, Bundle.open(path).backbone.read("model.norm.weight")
    copied = NviumModel(model.decoder, Junctions.of(arch, (2,), start(arch, (2,), norm, 0)))
    with torch.inference_mode():
        (early, last), (plain, _) = (each.read(torch.tensor([ids])).states for each in (model, copied))
    assert float((early - last).square().sum()) < 0.6 * float((plain - last).square().sum())


@pytest.mark.parametrize("trained", ["all", "scratch"])
def test_training_all_weights_makes_them_better(trained: str, made: dict[str, Path]) -> None:
    quality = Bundle.open(made[trained]).manifest.quality
    assert quality is not None
    if trained == "all":
        assert quality.perplexity < quality.dense_perplexity / 4
    assert quality.perplexity < 30


def test_one_exit_from_scratch_is_a_plain_model(request_for) -> None:
    path = convert(request_for("dense", "scratch", exits=1))
    settings = settings_of(path)
    assert (settings.junctions, settings.final_adapter, settings.beta) == ((), False, 0)
    assert not (path / "junctions.safetensors").exists()
    quality = Bundle.open(path).manifest.quality
    assert quality is not None
    assert quality.perplexity == pytest.approx(quality.dense_perplexity)
    assert quality.perplexity < 30
    assert isinstance(load_model(Bundle.open(path), FP32), Dense)
    assert verify(path, reporter=SilentReporter(), self_check=self_check).problems == ()


def test_what_other_programs_cannot_run_is_not_exported(made: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="adapter before the head"):
        export(Bundle.open(made["all"]), "hf", tmp_path / "hf", reporter=SilentReporter())
    assert not (tmp_path / "hf").exists()
    folder = export(Bundle.open(made["routers"]), "hf", tmp_path / "hf", reporter=SilentReporter())
    assert not (folder / "junctions.safetensors").exists()


def test_weights_from_scratch_depend_on_the_seed_alone(request_for, empty: Path) -> None:
    first, again, other = (
        plan(request_for("drawn", "scratch", seed=seed), SilentReporter()).source.store for seed in (1, 1, 2)
    )
    for name in first.names():
        assert torch.equal(first.read(name), again.read(name))
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.read(name), other.read(name))
    assert not torch.equal(first.read(name), first.read(name.replace("up", "gate")))
    assert float(first.read(name).std()) == pytest.approx(0.02, rel=0.05)
    assert float(first.read(name.replace("up", "down")).std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert bool((first.read("model.norm.weight") == 1).all())


@pytest.mark.parametrize("moment", ["step 20/30", "Held-out text"])
@pytest.mark.parametrize("trained", ["routers", "scratch"])
def test_an_interrupted_conversion_ends_in_the_same_bytes(trained: str, moment: str, request_for) -> None:
    name = f"stopped-{trained}-{len(moment)}"
    whole = convert(request_for(f"whole-{trained}-{len(moment)}", trained, target_depth=0.6))
    with pytest.raises(ConnectionAbortedError):
        convert(request_for(name, trained, target_depth=0.6), Listening(stop_at=moment))
    resumed = Listening()
    path = convert(request_for(name, trained, target_depth=0.6, checkpoint_every=7), resumed)
    assert resumed.notes[0].startswith("Resuming")
    steps = [note.split()[1] for note in resumed.notes if note.startswith("step ")]
    assert steps == (["20/30", "30/30"] if moment.startswith("step") else [])
    assert bytes_of(path) == bytes_of(whole)


def test_states_are_read_once_however_often_it_stops(request_for, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(junction_training, "PIECE_TOKENS", 64)
    read: list[int] = []
    states_at = junction_training.states_at

    def counted(frame, batches, points, task=None):
        read.extend(sum(batch.counts) for batch in batches)
        if len(read) == 5:
            raise ConnectionAbortedError
        return states_at(frame, batches, points, task)

    monkeypatch.setattr(junction_training, "states_at", counted)
    request = request_for("streamed", steps=6)
    with pytest.raises(ConnectionAbortedError):
        convert(request)
    pieces = 6 * 4 * 32 // 64
    convert(request)
    assert len(read) == pieces + 1


def test_changed_settings_never_resume(request_for) -> None:
    """From the first checkpoint on; before it there is nothing that another command could spoil."""
    with pytest.raises(ConnectionAbortedError):
        convert(request_for("changed", "scratch", checkpoint_every=5), Listening(stop_at="step 10/30"))
    with pytest.raises(UsageError, match="beta"):
        convert(request_for("changed", "scratch", checkpoint_every=5, beta=0.3))


def test_two_processes_make_one_bundle(request_for, empty: Path, text: Path, tmp_path: Path) -> None:
    """The passes are shared and the depths added up, so that both steer alike, and as one process does."""
    options = ["--method", "nvium", "--from-scratch", "--exits", 2, "--target-depth", 0.6, "--data", text]
    options += ["--device", "cpu", "--dtype", "fp32", "--threads", 1, "--lr", RATES["scratch"], "--steps", 8]
    options += ["--sequence-length", 32, "--batch-size", 4, "--micro-batch", 2]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "adapt_llm"]
    line = [*start, "convert", empty, *options, "-o", tmp_path / "two"]
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [str(tmp_path / "two")]
    assert done.stderr.count("step 8/8") == 1
    alone = settings_of(convert(request_for("one", "scratch", target_depth=0.6, steps=8, micro_batch=2)))
    both = settings_of(tmp_path / "two")
    assert both.beta == pytest.approx(alone.beta, rel=1e-3)
    assert both.beta != 0.01
    for one, two in zip(alone.exits, both.exits, strict=True):
        assert two.perplexity == pytest.approx(one.perplexity, rel=1e-3)
        assert two.mass == pytest.approx(one.mass, rel=1e-3)


def test_on_four_bit_blocks(request_for, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    river = RiverSettings(quantizer="rtn", group_size=32, calibration=text, calibration_tokens=512)
    below = ConvertRequest(source=str(tiny_llama), output=tmp_path / "river", settings=river, threads=1, dtype="fp32")
    source = build_river(plan_river(below, SilentReporter()), SilentReporter())
    path = convert(request_for("on-river", source=source, junctions=(1, 3)))
    bundle, settings = Bundle.open(path), settings_of(path)
    assert [method.name for method in bundle.manifest.methods] == ["river", "nvium"]
    assert (settings.blocks, settings.junctions) == ("4bit", (1, 3))
    assert verify(path, reporter=SilentReporter(), self_check=self_check).problems == ()
    assert isinstance(load_model(bundle, FP32), NviumModel)
    with pytest.raises(UnsupportedError, match="4-bit exit layers"):
        plan(request_for("all-on-river", "all", source=source), SilentReporter())


def test_on_a_sharing_map_that_fits(request_for, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    shared = RclaSettings(share_every=2)
    below = ConvertRequest(
        source=str(tiny_llama), output=tmp_path / "rcla", settings=shared, untrained=True, threads=1, dtype="fp32"
    )
    source = build_rcla(plan_rcla(below, SilentReporter()), SilentReporter())
    path = convert(request_for("on-rcla", source=source, steps=5))
    assert [method.name for method in Bundle.open(path).manifest.methods] == ["rcla", "nvium"]
    assert verify(path, reporter=SilentReporter(), self_check=self_check).problems == ()
    with pytest.raises(UnsupportedError, match=r"Layer 2 reads .* of layer 1, from below the junction after layer 1"):
        plan(request_for("straddling", source=source, junctions=(1,)), SilentReporter())


def test_what_cannot_be_is_refused_before_any_work(request_for, tiny_llama: Path, made: dict[str, Path]) -> None:
    def refuse(match: str, trained: str = "routers", error: type[Exception] = UsageError, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            plan(request_for("refused", trained, **changes), SilentReporter())

    refuse("no text to train on", data=())
    refuse("named twice", exits=3, junctions=(1,))
    refuse("4 blocks", junctions=(1, 4))
    refuse("4 blocks", exits=5)
    refuse("rise from 1", junctions=(2, 1))
    refuse("leaves nothing to train", exits=1)
    refuse("negative", beta=-0.1)
    refuse("not a finite number", beta=math.inf)
    refuse("first exit's 0.5", target_depth=0.4)
    refuse("every token runs all blocks", "scratch", exits=1, target_depth=0.6)
    refuse("no share", target_depth=1.5)
    refuse("128 positions", sequence_length=129)
    refuse("does not go on top of it", error=UnsupportedError, source=made["routers"])
    refuse("local folder", "scratch", source=Path("nobody/nothing"))
    request = request_for("refused", "all")
    with pytest.raises(UsageError, match="--backbone link"):
        plan(ConvertRequest(**{**vars(request), "backbone": "link"}), SilentReporter())
    with pytest.raises(UsageError, match="--untrained"):
        plan(ConvertRequest(**{**vars(request), "untrained": True}), SilentReporter())
    assert open_safetensors(tiny_llama) is not None
