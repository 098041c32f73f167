"""The 2D-EE recipe from a tiny model and toy rows to a bundle that classifies: whole, resumed, stacked, refused."""

import hashlib
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Tokens
from tokenizers import models

from adapt_llm.convert import features as features_module
from adapt_llm.convert import frozen_blocks, twodee, twodee_plan, twodee_rows
from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.river import build as build_river
from adapt_llm.convert.river import plan as plan_river
from adapt_llm.convert.river_request import RiverSettings
from adapt_llm.convert.twodee import build, plan
from adapt_llm.convert.twodee_request import TwoDeeSettings
from adapt_llm.convert.twodee_rows import default_prompt, has_token
from adapt_llm.errors import FormatError, UnsupportedError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.classify_loading import document_reader, load_classifier
from adapt_llm.runtime.methods import LabelledRows, TwoDee
from adapt_llm.runtime.models import self_check
from adapt_llm.runtime.operating_point import choose_layer, choose_thresholds
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.schedule import Full, OneD, Rule, TwoD
from adapt_llm.runtime.text import Tokenizer
from adapt_llm.runtime.verify import verify

GOOD = ("splendid", "wonderful", "excellent", "delightful")
BAD = ("boring", "dreadful", "miserable", "rubbish")
FILLER = ("the film was", "we saw it and it was", "all of it is", "her part in it seems")


def rows_of(seed: int, count: int) -> list[dict[str, str]]:
    """Texts of one to three sentences whose words give the label away."""
    draw = random.Random(seed)
    rows: list[dict[str, str]] = []
    for number in range(count):
        label = ("bad", "good")[number % 2]
        words = GOOD if label == "good" else BAD
        sentences = [f"So {draw.choice(FILLER)} {draw.choice(words)}." for _ in range(draw.randint(1, 3))]
        rows.append({"text": " ".join(sentences), "label": label})
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", rows_of(0, 160))


@pytest.fixture(scope="module")
def request_for(tiny_llama: Path, data: Path):
    def make(output: Path, source: Path = tiny_llama, **settings) -> ConvertRequest:
        asked = {"data": data, "prompt": "Label: ", "max_tokens": 100, "hidden": 16, "epochs": 12}
        asked |= {"learning_rate": 5e-3, "max_drop": 0.1, **settings}
        return ConvertRequest(source=str(source), output=output, settings=TwoDeeSettings(**asked), threads=1)

    return make


def convert(request: ConvertRequest) -> Path:
    return build(plan(request, SilentReporter()), SilentReporter())


@pytest.fixture(scope="module")
def made(request_for, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests read."""
    return convert(request_for(tmp_path_factory.mktemp("made") / "toy"))


def bytes_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def settings_in(folder: Path) -> TwoDee:
    found = Bundle.open(folder).manifest.method(TwoDee)
    assert found is not None
    return found


def classified(folder: Path, rows: list[dict[str, str]], mode) -> list:
    bundle = Bundle.open(folder)
    settings = settings_in(folder)
    reader = document_reader(settings, Tokenizer.load(folder))
    classifier = load_classifier(bundle, SessionOptions(device="cpu", dtype="fp32"))
    return list(classifier.classify([reader.read(row["text"]) for row in rows], mode))


def test_a_bundle_classifies_new_texts(made: Path) -> None:
    settings = settings_in(made)
    rows = rows_of(1, 60)
    labels = [settings.labels.index(row["label"]) for row in rows]
    assert settings.chosen is not None
    two_d = TwoD(Rule(settings.chosen.tau_ignore, settings.chosen.tau_acc), settings.depth)
    for mode in (Full(), OneD(settings.chosen_one_d.layer), two_d):
        answers = [verdict.label for verdict in classified(made, rows, mode)]
        assert np.mean(np.array(answers) == labels) > 0.75


def test_figures_of_the_manifest_are_those_of_running_the_validation_rows(request_for, tmp_path: Path) -> None:
    train, held = rows_of(0, 120), rows_of(2, 48)
    request = request_for(
        tmp_path / "out",
        data=write_rows(tmp_path / "a.jsonl", train),
        validation=write_rows(tmp_path / "b.jsonl", held),
    )
    folder = convert(request)
    settings = settings_in(folder)
    digests = [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a.jsonl", "b.jsonl")]
    assert settings.data == LabelledRows(name="a.jsonl", sha256=digests[0], rows=settings.data.rows, validation=0)
    assert 0 < settings.data.rows <= len(train)
    assert settings.validation_data == LabelledRows(name="b.jsonl", sha256=digests[1], rows=48, validation=48)
    labels = np.array([settings.labels.index(row["label"]) for row in held])
    sentences = np.array([verdict.sentences for verdict in classified(folder, held, Full())])
    points = [*settings.frontier[:: max(1, len(settings.frontier) // 3)], settings.full, settings.one_d[1]]
    for point in points:
        mode = (
            OneD(point.layer)
            if hasattr(point, "layer")
            else TwoD(Rule(point.tau_ignore, point.tau_acc), settings.depth)
        )
        verdicts = classified(folder, held, mode)
        # States are stored in bf16, so that a row on the edge may fall to the other side.
        accuracy = np.mean([verdict.label for verdict in verdicts] == labels)
        work = sum(verdict.work * count for verdict, count in zip(verdicts, sentences, strict=True)) / sentences.sum()
        assert accuracy == pytest.approx(point.accuracy, abs=1.5 / len(held))
        assert work == pytest.approx(point.work, abs=0.02)


def test_the_choice_is_the_cheapest_that_keeps_what_was_asked(made: Path) -> None:
    settings = settings_in(made)
    best = max(point.accuracy for point in settings.one_d)
    assert settings.chosen is not None
    assert settings.chosen.steady >= best - settings.max_drop - 1e-6
    assert choose_thresholds(settings, settings.max_drop) == settings.chosen
    assert choose_layer(settings, settings.max_drop) == settings.chosen_one_d
    assert [point.layer for point in settings.one_d] == [1, 2, 3, 4]
    cheap, dear = choose_thresholds(settings, 1.0), choose_thresholds(settings, 0.0)
    assert cheap is not None
    assert dear is None or cheap.work <= settings.chosen.work <= dear.work
    work = [point.work for point in settings.frontier]
    assert work == sorted(work)


def test_a_bundle_verifies_and_a_damaged_one_does_not(made: Path, tmp_path: Path) -> None:
    assert verify(made, reporter=SilentReporter(), self_check=self_check).ok
    manifest = json.loads((made / "adapt.json").read_text(encoding="utf-8"))
    assert len(manifest["self_check"]["scores"]) == 2
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in made.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    manifest["self_check"]["scores"] = [1 - score for score in manifest["self_check"]["scores"]]
    (copy / "adapt.json").write_text(json.dumps(manifest), encoding="utf-8")
    verdict = verify(copy, reporter=SilentReporter(), self_check=self_check)
    assert [problem.file for problem in verdict.problems] == ["self-check"]
    manifest["methods"][0]["hidden"] = 32
    (copy / "adapt.json").write_text(json.dumps(manifest), encoding="utf-8")
    verdict = verify(copy, reporter=SilentReporter())
    assert "has shape" in verdict.problems[0].what
    with pytest.raises(FormatError):
        load_classifier(Bundle.open(copy), SessionOptions(device="cpu"))


class KilledError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("step", ["features", "fit", "judge", "check"])
def test_killed_and_resumed_gives_the_same_bytes(
    step: str, made: Path, request_for, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(tmp_path / "toy")
    calls = 0

    def killed(*_args, **_kwargs):
        nonlocal calls
        calls += 1
        if step != "features" or calls == 3:
            raise KilledError
        return write_piece(*_args, **_kwargs)

    write_piece = features_module.write_piece
    where, name = {
        "features": (features_module, "write_piece"),
        "fit": (twodee, "fit"),
        "judge": (twodee, "measure"),
        "check": (twodee, "check_scores"),
    }[step]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, killed)
        with pytest.raises(KilledError):
            convert(request)
    assert not request.output.exists()
    read: list[int] = []
    pooled = features_module.Encoder.pooled
    monkeypatch.setattr(
        features_module.Encoder, "pooled", lambda self, pieces: read.append(len(pieces)) or pooled(self, pieces)
    )
    assert bytes_of(convert(request)) == bytes_of(made)
    assert len(read) == (3 if step == "features" else 0)


def test_a_model_that_is_not_kept_in_memory_gives_the_same_bundle(
    made: Path, request_for, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request_for(tmp_path / "toy")
    kept = plan(asked, SilentReporter())
    assert kept.keeps_blocks(kept.dtype, kept.device)
    blocks = [sum(map(math.prod, kept.arch.block_tensors(layer).values())) for layer in range(4)]
    whole = kept.memory
    monkeypatch.setattr(frozen_blocks, "RUN_WHOLE", 4 * sum(blocks) - 1)
    monkeypatch.setattr(twodee_plan, "TOGETHER_BYTES", 0)
    read = plan(asked, SilentReporter())
    assert not read.keeps_blocks(read.dtype, read.device)
    assert whole - read.memory == 4 * (sum(blocks) - 2 * max(blocks))
    folder = build(read, SilentReporter())
    found, expected = (json.loads((path / "adapt.json").read_text(encoding="utf-8")) for path in (folder, made))
    checks = [manifest.pop("self_check") for manifest in (found, expected)]
    assert found == expected
    assert checks[0]["scores"] == checks[1]["scores"]
    assert checks[0]["dense_nll"] == pytest.approx(checks[1]["dense_nll"], rel=0.01)
    assert {name: value for name, value in bytes_of(folder).items() if name != "adapt.json"} == {
        name: value for name, value in bytes_of(made).items() if name != "adapt.json"
    }


def test_a_row_without_a_token_is_left_out_and_named(
    request_for, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twodee_rows, "has_token", lambda _, text: "nothing" not in text)
    lines = data.read_text(encoding="utf-8").splitlines()
    lines.insert(2, json.dumps({"text": "nothing here", "label": "good"}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    told: list[str] = []
    reporter = SilentReporter()
    monkeypatch.setattr(reporter, "warn", told.append, raising=False)
    made = plan(request_for(tmp_path / "out", data=rows), reporter)
    assert told == ["1 rows of rows.jsonl were left out; row 3: the text has no token."]
    assert made.to_dict()["rows"] == {"train": 128, "validation": 32, "skipped": 1}
    write_rows(rows, [{"text": "nothing here", "label": "good"}, *rows_of(0, 50)])
    with pytest.raises(FormatError, match="the first in row 1: the text has no token"):
        plan(request_for(tmp_path / "out", data=rows), SilentReporter())


def test_what_has_a_token() -> None:
    tokenizer = Tokens(models.BPE({"g": 0, "o": 1, "d": 2}, []))
    texts = ("a good one", "ill", ("ill", "good"), "ill " * 40 + "good")
    assert [has_token(tokenizer, text) for text in texts] == [True, False, True, True]


def test_texts_are_cut_at_a_short_models_positions(request_for, tiny_llama: Path, tmp_path: Path) -> None:
    short = shutil.copytree(tiny_llama, tmp_path / "short")
    config = json.loads((short / "config.json").read_text(encoding="utf-8"))
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}), encoding="utf-8")
    told: list[str] = []
    reporter = SilentReporter()
    reporter.note = told.append  # pyright: ignore[reportAttributeAccessIssue]
    default = TwoDeeSettings.max_tokens
    assert plan(request_for(tmp_path / "out", source=short, max_tokens=default), reporter).max_tokens == 64
    assert told == ["Texts are cut at the model's 64 positions, less those of the prompt."]
    with pytest.raises(UsageError, match="--max-tokens 65 is more than the model's 64 positions"):
        plan(request_for(tmp_path / "out", source=short, max_tokens=65), reporter)


def test_a_river_bundle_below(request_for, tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    river = ConvertRequest(
        source=str(tiny_llama),
        output=tmp_path / "river",
        settings=RiverSettings(quantizer="rtn", group_size=32, calibration=text, calibration_tokens=512),
        threads=1,
    )
    below = build_river(plan_river(river, SilentReporter()), SilentReporter())
    with pytest.raises(UnsupportedError, match="4-bit"):
        plan(request_for(tmp_path / "tuned", source=below, lora=2), SilentReporter())
    folder = convert(request_for(tmp_path / "both", source=below))
    manifest = Bundle.open(folder).manifest
    assert [method.name for method in manifest.methods] == ["river", "2dee"]
    assert set(manifest.required) == {"river", "2dee"}
    assert settings_in(folder).blocks == "4bit"
    assert (folder / "adapt.json").read_text(encoding="utf-8").count(str(tmp_path)) == 0
    assert verify(folder, reporter=SilentReporter(), self_check=self_check).ok
    rows = rows_of(1, 20)
    labels = [settings_in(folder).labels.index(row["label"]) for row in rows]
    assert np.mean([verdict.label for verdict in classified(folder, rows, Full())] == np.array(labels)) > 0.7


def test_what_cannot_be_is_refused_before_anything_is_written(request_for, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="untrained"):
        plan(replace(request_for(tmp_path / "out"), untrained=True), SilentReporter())
    with pytest.raises(UsageError, match="max-tokens"):
        plan(request_for(tmp_path / "out", max_tokens=4000), SilentReporter())
    with pytest.raises(UsageError, match="--labels has an empty name"):
        request_for(tmp_path / "out", labels=("good", "bad", ""))
    one = write_rows(tmp_path / "one.jsonl", [{"text": "a text", "label": "same"}] * 9)
    with pytest.raises(FormatError, match="only the label"):
        plan(request_for(tmp_path / "out", data=one), SilentReporter())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.jsonl"]


def test_the_plan_says_what_it_will_do(request_for, tmp_path: Path) -> None:
    made = plan(request_for(tmp_path / "out"), SilentReporter())
    text = "\n".join(made.lines())
    assert "128 to train on + 32 to choose thresholds on: bad 64 + 16, good 64 + 16" in text
    assert made.to_dict()["rows"] == {"train": 128, "validation": 32, "skipped": 0}
    assert 0.5 < made.tokens / sum(len(text) / 4 for text in made.texts) < 1.5


def test_the_prompt_names_the_labels() -> None:
    assert default_prompt(("a", "b", "c")) == "Classify the following text as a, b or c.\n\nText:\n"
    assert default_prompt([str(number) for number in range(30)]) == "Classify the following text.\n\nText:\n"
