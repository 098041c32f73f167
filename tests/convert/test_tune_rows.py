"""Tuning a 2D-EE bundle on labelled rows: thresholds chosen anew on one half, the classifiers left as they are."""

import json
import random
import shutil
from pathlib import Path

import pytest

from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.tune import tune
from adapt_llm.convert.tune_request import TuneRequest
from adapt_llm.convert.twodee import build, plan
from adapt_llm.convert.twodee_request import TwoDeeSettings
from adapt_llm.errors import UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.classify_loading import document_reader, load_classifier
from adapt_llm.runtime.manifest import MANIFEST_NAME
from adapt_llm.runtime.methods import TwoDee
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.schedule import Full
from adapt_llm.runtime.text import Tokenizer
from adapt_llm.runtime.verify import verify

WORDS = {"good": ("splendid", "wonderful", "excellent"), "bad": ("boring", "dreadful", "rubbish")}
FP32 = SessionOptions(device="cpu", dtype="fp32", threads=1)


def rows(path: Path, seed: int, count: int) -> Path:
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        label = ("bad", "good")[number % 2]
        sentences = [f"So all of it is {draw.choice(WORDS[label])}." for _ in range(draw.randint(1, 3))]
        lines.append(json.dumps({"text": " ".join(sentences), "label": label}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def original(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    settings = TwoDeeSettings(
        data=rows(folder / "train.jsonl", 0, 80), prompt="", max_tokens=100, hidden=16, epochs=8, learning_rate=5e-3
    )
    request = ConvertRequest(source=str(tiny_llama), output=folder / "toy", settings=settings, threads=1)
    return build(plan(request, SilentReporter()), SilentReporter())


@pytest.fixture
def request_for(original: Path, tmp_path: Path):
    copy = shutil.copytree(original, tmp_path / "toy")
    labels = rows(tmp_path / "held.jsonl", 5, 40)

    def make(**changes: object) -> TuneRequest:
        return TuneRequest(**{"bundle": copy, "labels": labels, "max_drop": 0.1, "options": FP32, **changes})

    return make


def settings_in(folder: Path) -> TwoDee:
    found = Bundle.open(folder).manifest.method(TwoDee)
    assert found is not None
    return found


def test_thresholds_are_chosen_on_one_half_and_reported_on_the_other(request_for, original: Path) -> None:
    request = request_for()
    before = settings_in(original)
    found = tune(request, SilentReporter())
    after = settings_in(request.bundle)
    assert found.stored
    assert after.validation_data is not None
    assert (after.validation_data.rows, after.validation_data.validation) == (20, 20)
    assert after.max_drop == 0.1
    assert (after.labels, after.hidden, after.readout, after.data) == (
        before.labels,
        before.hidden,
        before.readout,
        before.data,
    )
    assert {"full", "1d"} <= found.tuned.held_out.keys()
    assert found.tuned.held_out["full"].work == 1
    changed = [
        path.name for path in original.iterdir() if path.read_bytes() != (request.bundle / path.name).read_bytes()
    ]
    assert changed == [MANIFEST_NAME]
    assert verify(request.bundle, reporter=SilentReporter()).ok


def test_figures_are_those_of_the_running_classifier(request_for) -> None:
    request = request_for()
    found = tune(request, SilentReporter()).tuned
    settings = settings_in(request.bundle)
    assert request.labels is not None
    lines = [json.loads(line) for line in request.labels.read_text(encoding="utf-8").splitlines()]
    reader = document_reader(settings, Tokenizer.load(request.bundle))
    classifier = load_classifier(Bundle.open(request.bundle), FP32)
    answers = list(classifier.classify([reader.read(line["text"]) for line in lines], Full()))
    right = sum(settings.labels[a.label] == line["label"] for a, line in zip(answers, lines, strict=True))
    both = 20 * (found.held_out["full"].accuracy + settings.full.accuracy)
    assert both == pytest.approx(right)


def test_the_same_again_measures_nothing(request_for) -> None:
    tune(request_for(), SilentReporter())
    again = tune(request_for(), SilentReporter())
    assert (again.measured, again.stored) == (False, False)
    assert tune(request_for(seed=1), SilentReporter()).measured
    assert tune(request_for(max_drop=0.2, store=False), SilentReporter()).measured
    lines = request_for().labels.read_text("utf-8").splitlines()
    both = "".join(json.dumps({**json.loads(line), "mine": "good"}) + "\n" for line in lines)
    request_for().labels.write_text(both, encoding="utf-8")
    tune(request_for(), SilentReporter())
    assert tune(request_for(label_field="mine", store=False), SilentReporter()).measured, "other labels"


def test_what_does_not_fit_is_refused(request_for, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="classifies"):
        tune(TuneRequest(request_for().bundle, text=tmp_path / "t.txt"), SilentReporter())
    with pytest.raises(UsageError, match="--min-speed"):
        tune(request_for(max_drop=None, min_speed=2.0), SilentReporter())
    with pytest.raises(UsageError, match="labelled rows"):
        tune(request_for(labels=rows(tmp_path / "few.jsonl", 0, 4)), SilentReporter())
