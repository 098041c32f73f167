"""The R-CLA recipe from a tiny model and a text to a bundle: trained, resumed, searched, refused, under River."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adapt_llm.convert import quantise, rcla_plan, rcla_training
from adapt_llm.convert.export import export
from adapt_llm.convert.kv_map import every
from adapt_llm.convert.loop_training import prepare
from adapt_llm.convert.processes import join
from adapt_llm.convert.rcla import build, plan
from adapt_llm.convert.rcla_request import RclaSettings
from adapt_llm.convert.rcla_training import Trainer
from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.river import build as build_river
from adapt_llm.convert.river import plan as plan_river
from adapt_llm.convert.river_request import RiverSettings
from adapt_llm.convert.trainable import Trainable
from adapt_llm.convert.training import train
from adapt_llm.convert.workspace import work_folder
from adapt_llm.errors import UnsupportedError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.describe import describe
from adapt_llm.runtime.exits import FixedExit
from adapt_llm.runtime.methods import Rcla
from adapt_llm.runtime.models import load_model, self_check
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.river import River
from adapt_llm.runtime.stack import run_layers
from adapt_llm.runtime.verify import verify

FP32 = SessionOptions(dtype="fp32", device="cpu")
SHORT = {"steps": 30, "sequence_length": 32, "batch_size": 4, "learning_rate": 3e-3, "checkpoint_every": 10}


class Listening(SilentReporter):
    def __init__(self, stop_at: str | None = None) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._stop_at = stop_at

    def note(self, text: str) -> None:
        self.notes.append(text)
        if self._stop_at is not None and text.startswith(self._stop_at):
            raise ConnectionAbortedError(self._stop_at)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "river.txt"
    lines = [f"The river leaves the mountains in the north, line {number % 7}.\n" for number in range(260)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def request_for(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("out")

    def make(name: str, *, untrained: bool = False, force: bool = False, **settings) -> ConvertRequest:
        given = settings if untrained else {**SHORT, "data": (text,), **settings}
        return ConvertRequest(
            source=str(tiny_llama),
            output=folder / name,
            settings=RclaSettings(**given),
            untrained=untrained,
            force=force,
            threads=1,
            device="cpu",
            dtype="fp32",
        )

    return make


def convert(request: ConvertRequest, reporter=None) -> Path:
    reporter = reporter or SilentReporter()
    return build(plan(request, reporter), reporter)


@pytest.fixture(scope="module")
def trained(request_for) -> Path:
    """A bundle in which the first of every two layers keeps its cache; read by several tests."""
    return convert(request_for("trained", share_every=2))


def bytes_of(bundle: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(bundle.iterdir())}


def points(bundle: Path) -> dict[int, tuple[float, float | None]]:
    settings = Bundle.open(bundle).manifest.method(Rcla)
    assert settings is not None
    return {point.keepers: (point.source, point.trained) for point in settings.retention}


def test_a_trained_bundle_is_whole_and_better_than_it_came(trained: Path) -> None:
    bundle = Bundle.open(trained)
    manifest, settings = bundle.manifest, bundle.manifest.method(Rcla)
    assert settings is not None
    assert settings.kv_sources == (1, 1, 3, 3)
    assert (settings.share_every, settings.cross_prob, manifest.trained) == (2, 0.6, True)
    assert settings.training is not None
    assert (settings.training.steps, settings.training.tokens) == (30, 30 * 4 * 32)
    assert manifest.required == ("rcla",)
    assert list(points(trained)) == [4, 2, 1]
    for before, after in points(trained).values():
        assert after < before / 4
    assert manifest.quality is not None
    assert manifest.quality.perplexity == points(trained)[2][1]
    assert manifest.quality.dense_perplexity == points(trained)[4][0]
    assert verify(trained, reporter=SilentReporter(), self_check=self_check).problems == ()


def test_a_model_that_teaches_itself(request_for, trained: Path) -> None:
    """Leaders drawn, and the plain passes' predictions imitated: better with all caches than by the paper's rule."""
    request = request_for("distilled", share_every=2, cross_prob=0.75, cross_draw="leaders", distill=1.0)
    planned, other = (plan(each, SilentReporter()) for each in (request, request_for("other", share_every=2)))
    assert planned.fingerprint() != other.fingerprint()
    assert planned.training.memory > other.training.memory
    path = convert(request)
    settings = Bundle.open(path).manifest.method(Rcla)
    assert settings is not None
    assert (settings.cross_draw, settings.distill, settings.plain_passes) == ("leaders", 1.0, 0.0)
    for after, (paper, (before, theirs)) in zip(points(path).values(), points(trained).items(), strict=True):
        assert after[1] < before / 4, paper
        assert paper < 4 or after[1] < theirs


@pytest.mark.parametrize(
    ("wrong", "match"), [({"cross_draw": "heads"}, "layers, leaders"), ({"distill": 0.0}, "positive")]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError) as caught:
        RclaSettings(**wrong)
    assert match in f"{caught.value} {caught.value.hint}"


def test_followers_are_in_neither_file_nor_memory_nor_cache(trained: Path) -> None:
    bundle = Bundle.open(trained)
    missing = {f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (1, 3) for name in "kv"}
    names = set(bundle.backbone.names())
    assert not missing & names
    assert {name.replace("layers.1", "layers.0").replace("layers.3", "layers.2") for name in missing} <= names
    model = load_model(bundle, FP32)
    assert isinstance(model, Dense)
    cache = model.new_cache(1, 100)
    figures = describe(bundle)["bytes"]
    assert len(cache.lengths) == 2
    assert cache.nbytes == 100 * 2 * figures["kv_per_token"]  # 4 bytes here, 2 in the figures
    assert figures["kv_per_token"] * 2 == figures["dense_kv_per_token"]
    assert [layer["kv_source"] for layer in describe(bundle)["layers"]] == [1, 1, 3, 3]


def test_a_bundle_answers_as_the_trained_model_does(request_for, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training under the map, scoring and cached generation are one function."""
    kept: list[Trainable] = []

    def spied(model: Trainable, *args, **kwargs):
        kept.append(model)
        return train(model, *args, **kwargs)

    monkeypatch.setattr(rcla_training, "train", spied)
    path = convert(request_for("same", share_every=4, steps=3))
    model, ids = load_model(Bundle.open(path), FP32), torch.randint(0, 250, (1, 20))
    with torch.inference_mode():
        trained = kept[0]
        for parameter in trained.parameters():  # as they were written
            parameter.copy_(parameter.bfloat16().float())
        wanted = trained.decoder.logits(trained.hidden(ids, sources=every(trained.arch, 4)))
        cache = model.new_cache(1, 20)
        parts = [model.prefill(ids[:, :13], cache).logits]
        parts += [model.decode(ids[:, at : at + 1], cache).logits for at in range(13, 20)]
    torch.testing.assert_close(torch.stack(parts, 1)[0], wanted[0, 12:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("moment", ["step 20/30", "Held-out perplexity"])
def test_an_interrupted_conversion_ends_in_the_same_bytes(moment: str, request_for, trained: Path) -> None:
    request = request_for(f"stopped{len(moment)}", share_every=2)
    with pytest.raises(ConnectionAbortedError):
        convert(request, Listening(stop_at=moment))
    assert not request.output.exists()
    resumed = Listening()
    more_memory = {"gradient_checkpointing": False, "checkpoint_every": 7}  # no part of what a bundle depends on
    path = convert(request_for(request.output.name, share_every=2, **more_memory), resumed)
    assert resumed.notes[0].startswith("Resuming")
    steps = [note for note in resumed.notes if note.startswith("step ")]
    assert [note.split()[1] for note in steps] == (["20/30", "30/30"] if moment.startswith("step") else [])
    assert bytes_of(path) == bytes_of(trained)


def test_changed_settings_never_resume(request_for) -> None:
    with pytest.raises(ConnectionAbortedError):
        convert(request_for("changed", share_every=2), Listening(stop_at="step 20/30"))
    with pytest.raises(UsageError, match="cross_prob"):
        convert(request_for("changed", share_every=2, cross_prob=0.3))
    with pytest.raises(UsageError, match="micro_batch was 4, is 2") as caught:  # as by default with two processes
        convert(request_for("changed", share_every=2, micro_batch=2))
    assert "--micro-batch 4" in (caught.value.hint or "")
    same = [
        plan(request_for("changed", share_every=2, **given), SilentReporter()) for given in ({}, {"micro_batch": 4})
    ]
    assert same[0].fingerprint() == same[1].fingerprint()


@pytest.mark.parametrize("other", [{"sequence_length": 16}, {"packed": False}, {"loss_on": "answers"}])
def test_a_checkpoint_knows_its_sequences(other: dict[str, Any], request_for, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": "Where does it rise? ", "completion": "In the mountains, and then it goes north."})
    rows.write_text(f"{row}\n" * 30, encoding="utf-8")
    name = "sequences-" + "-".join(other)
    with pytest.raises(ConnectionAbortedError):
        convert(request_for(name, data=(rows,)), Listening(stop_at="step 20/30"))
    request = request_for(name, data=(rows,), **other)
    folder, training = work_folder(request.output), plan(request, SilentReporter()).training
    data = prepare(training, folder, SilentReporter())
    with pytest.raises(UsageError, match=f"{next(iter(other))} was"):
        Trainer(training, folder, join("cpu")).run(data, SilentReporter())


def test_a_file_that_judges_instead_of_training_is_another_conversion(request_for, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text(encoding="utf-8").replace("river", "valley"), encoding="utf-8")
    made = [
        plan(request_for("either", **given), SilentReporter()).fingerprint()
        for given in ({"data": (text, other)}, {"data": (text,), "validation": other})
    ]
    assert made[0] != made[1]


def test_nothing_is_judged_by_what_was_trained_on(request_for, tmp_path: Path) -> None:
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"text": "The river leaves the mountains. " * 9}) + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="held out"):
        convert(request_for("judged", data=(data,)))


def test_the_plan_compares_caches_where_they_differ(request_for) -> None:
    def cache(share_every: int) -> str:
        lines = plan(request_for("planned", share_every=share_every), SilentReporter()).lines()
        return next(line for line in lines if line.startswith("Cache"))

    assert "instead of" in cache(2)
    assert "instead of" not in cache(1)


def test_processes_of_one_machine_share_its_memory(request_for, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for("shared", micro_batch=1)
    alone = plan(request, SilentReporter()).memory
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(rcla_plan, "check_memory", lambda *_, **__: None)
    assert plan(request, SilentReporter()).memory > 2 * alone


def test_a_searched_map_is_measured_beside_the_even_one(request_for) -> None:
    heard = Listening()
    path = convert(request_for("searched", keep_ratio=0.5, steps=5), heard)
    settings = Bundle.open(path).manifest.method(Rcla)
    assert settings is not None
    assert settings.keep_ratio == 0.5
    assert settings.share_every is None
    assert len(set(settings.kv_sources)) == 2
    maps = {point.kv_sources for point in settings.retention}
    assert {settings.kv_sources, (1, 1, 3, 3)} <= maps
    assert any("keep a cache" in note for note in heard.notes)
    assert verify(path, reporter=SilentReporter(), self_check=self_check).ok


def test_lora_is_merged(request_for) -> None:
    path = convert(request_for("lora", keep_layers=(1, 4), lora=4, learning_rate=1e-2, steps=10))
    settings = Bundle.open(path).manifest.method(Rcla)
    assert settings is not None
    assert settings.kv_sources == (1, 1, 1, 4)
    assert settings.training is not None
    assert settings.training.lora_rank == 4
    assert not any("lora" in name for name in Bundle.open(path).backbone.names())
    assert points(path)[2][1] < points(path)[2][0]
    assert verify(path, reporter=SilentReporter(), self_check=self_check).ok


def test_answers_of_rows_that_are_not_packed(request_for, tmp_path: Path) -> None:
    """Rows of unequal length, each a sequence of its own; only completions are learnt and judged."""
    rows = [{"prompt": f"What is {n} and {n}? ", "completion": "It is " + "so " * (n % 5 + 1)} for n in range(80)]
    data, held_out = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[:7]), encoding="utf-8")
    path = convert(
        request_for(
            "answers", data=(data,), validation=held_out, packed=False, loss_on="answers", steps=20, share_every=2
        )
    )
    manifest = Bundle.open(path).manifest
    answers = sum(len(row["completion"]) for row in rows[:7])
    eos = 7
    assert manifest.quality.tokens == answers + eos - cut_off(rows[:7])
    assert manifest.method(Rcla).training.data.name == "rows.jsonl"
    assert manifest.quality.text == "held.jsonl"
    assert points(path)[2][1] < points(path)[2][0] / 4


def cut_off(rows: list[dict[str, str]]) -> int:
    """Answer bytes (each a token) and ends beyond the 33rd token of a row."""
    return sum(max(0, len(row["prompt"] + row["completion"]) + 1 - 33) for row in rows)


def test_without_training_a_bundle_says_so_whenever_it_runs(request_for, tiny_llama: Path) -> None:
    path = convert(request_for("untrained", untrained=True, share_every=2))
    manifest = Bundle.open(path).manifest
    assert not manifest.trained
    assert {point.trained for point in manifest.method(Rcla).retention} == {None}
    heard = Listening()
    load_model(Bundle.open(path), FP32, heard)
    assert len(heard.warnings) == 1
    assert "without the training" in heard.warnings[0]
    reference, own = Bundle.open(path).backbone, json.loads((path / "config.json").read_text(encoding="utf-8"))
    theirs = json.loads((tiny_llama / "config.json").read_text(encoding="utf-8"))
    assert own == {**theirs, "tie_word_embeddings": own["tie_word_embeddings"]}
    assert reference.info("model.norm.weight").dtype == torch.bfloat16


def test_all_layers_kept_and_untrained_is_the_model_itself(request_for, tiny_llama: Path) -> None:
    path = convert(request_for("all", untrained=True, share_every=1))
    from safetensors.torch import load_file  # noqa: PLC0415 - beside its one use

    theirs = load_file(tiny_llama / "model.safetensors")
    store = Bundle.open(path).backbone
    assert all(torch.equal(store.read(name), theirs[name]) for name in store.names())
    assert points(path)[4][0] == Bundle.open(path).manifest.quality.perplexity
    export(Bundle.open(path), "hf", path.with_name("exported"), reporter=SilentReporter())


def test_what_cannot_be_is_refused_before_any_work(request_for, tiny_llama: Path, trained: Path, text: Path) -> None:
    def refuse(match: str, error: type[Exception] = UsageError, **changes) -> None:
        request = ConvertRequest(**{**vars(request_for("refused", share_every=2)), **changes})
        with pytest.raises(error, match=match):
            plan(request, SilentReporter())
        assert not request.output.exists()

    refuse("no text to train on", settings=RclaSettings(share_every=2))
    refuse("--backbone link", backbone="link")
    refuse("no layer 9", settings=RclaSettings(keep_layers=(1, 9), data=(text,), sequence_length=32))
    refuse("128 positions", settings=RclaSettings(data=(text,)))
    refuse("fp16", dtype="fp16")
    refuse("does not go on top of it", UnsupportedError, source=str(trained))


def test_no_other_program_runs_a_shared_cache(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="2 of 4 layers"):
        export(Bundle.open(trained), "hf", tmp_path / "out", reporter=SilentReporter())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantizer", ["gptq", "rtn"])
def test_river_on_top_follows_the_map(quantizer: str, trained: Path, text: Path, tmp_path: Path) -> None:
    """Exits forced after block k = a dense model under the map whose later blocks are the dequantised copies."""
    settings = RiverSettings(quantizer=quantizer, group_size=32, calibration=text, calibration_tokens=512)
    request = ConvertRequest(source=str(trained), output=tmp_path / "both", settings=settings, threads=1, dtype="fp32")
    path = build_river(plan_river(request, SilentReporter()), SilentReporter())
    bundle = Bundle.open(path)
    assert [method.name for method in bundle.manifest.methods] == ["rcla", "river"]
    assert set(bundle.manifest.required) == {"rcla", "river"}
    assert not any("layers.1.self_attn.k_proj" in name for name in bundle.river.names())
    assert verify(path, reporter=SilentReporter(), self_check=self_check).problems == ()
    assert describe(bundle)["bytes"]["kv_per_token"] * 2 == describe(bundle)["bytes"]["dense_kv_per_token"]
    model, ids = load_model(bundle, FP32), torch.randint(0, 250, (1, 20))
    assert isinstance(model, River)
    with torch.inference_mode():
        for depth in (1, 2, 4):
            decoder = model.decoder
            h, step, store = decoder.embed(ids), decoder.step(None, ids), PassStore(decoder.arch)
            blocks = [*decoder.blocks[:depth], *list(model.exits[depth:])]
            wanted = decoder.logits(run_layers(blocks, h, step, store, range(len(blocks))))
            river = River(decoder, model.exits, FixedExit(depth))
            cache = river.new_cache(1, 20)
            got = [river.prefill(ids[:, :9], cache).logits]
            got += [river.decode(ids[:, at : at + 1], cache).logits for at in range(9, 20)]
            torch.testing.assert_close(torch.stack(got, 1)[0], wanted[0, 8:], atol=1e-4, rtol=1e-4)
            assert cache.nbytes == 2 * 2 * 2 * 20 * 16 * 4


@pytest.mark.parametrize("layer", [1, 2])
def test_calibration_goes_on_with_the_keys_and_values_of_leaders(
    layer: int, trained: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between a leader and its follower, or between two groups, River quantises on to the same bytes."""
    settings = RiverSettings(group_size=32, calibration=text, calibration_tokens=512, tau=0.9)

    def convert_to(name: str) -> Path:
        request = ConvertRequest(source=str(trained), output=tmp_path / name, settings=settings, threads=1)
        return build_river(plan_river(request, SilentReporter()), SilentReporter())

    whole, release = convert_to("whole"), quantise.release

    def stop(store, arch, index: int) -> None:
        if index == layer:
            raise ConnectionAbortedError
        release(store, arch, index)

    with monkeypatch.context() as patch:
        patch.setattr(quantise, "release", stop)
        with pytest.raises(ConnectionAbortedError):
            convert_to("stopped")
    assert bytes_of(convert_to("stopped")) == bytes_of(whole)


def test_two_processes_make_one_bundle(request_for, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    """One writes and speaks; the passes are shared, so that the weights are those of one process but for rounding."""
    options = [
        "--method",
        "rcla",
        "--data",
        text,
        "--share-every",
        2,
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--steps",
        6,
    ]
    options += ["--sequence-length", 32, "--batch-size", 4, "--micro-batch", 2, "--lr", 3e-3, "--threads", 1]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "adapt_llm"]
    line = [*start, "convert", tiny_llama, *options, "-o", tmp_path / "two"]
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [str(tmp_path / "two")]
    assert done.stderr.count("step 6/6") == 1
    alone = convert(request_for("one", share_every=2, steps=6, micro_batch=2))
    assert points(tmp_path / "two") == {
        keepers: pytest.approx(each, rel=1e-3) for keepers, each in points(alone).items()
    }
    assert verify(tmp_path / "two", reporter=SilentReporter(), self_check=self_check).ok


def test_options_of_other_methods_are_refused(trained: Path) -> None:
    for given in ({"tau": 0.5}, {"resident": 2}, {"prefill": "exit"}, {"offload": "stream"}):
        with pytest.raises(UsageError, match="River bundles"):
            load_model(Bundle.open(trained), SessionOptions(device="cpu", **given))
