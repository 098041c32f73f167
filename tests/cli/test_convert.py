"""`adapt convert`: what it asks of the rooms below, what it refuses, and exactly what it prints."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_type_hints

import pytest

from adapt_llm.cli import services
from adapt_llm.cli.convert import default_output
from adapt_llm.cli.convert_loop import loop_options, lora_options, training_options
from adapt_llm.cli.convert_options import rcla_options
from adapt_llm.cli.convert_settings import READS, TRAINS
from adapt_llm.runtime.progress import Reporter

Invoke = Callable[..., tuple[int, str, str]]

QUALITY = {
    "tokens": 8192,
    "text": "built-in.txt",
    "dense_perplexity": 25.36,
    "perplexity": 25.9,
    "kl": 0.0421,
    "agreement": 0.9,
    "mean_depth": 10.5,
    "exit_histogram": [0, 3, 0, 1],
}


@dataclasses.dataclass
class FakePlan:
    request: object

    def lines(self) -> list[str]:
        return ["Source    tiny", "Needs     1 MiB"]

    def to_dict(self) -> dict[str, object]:
        return {"source": "tiny"}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    asked: list[SimpleNamespace] = []

    def plan(request: SimpleNamespace, reporter: Reporter) -> FakePlan:
        asked.append(request)
        return FakePlan(request)

    def build(planned: FakePlan, reporter: Reporter) -> Path:
        with reporter.task("Quantise", 2) as task:
            task.advance()
        return planned.request.output  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(services, "convert_request", SimpleNamespace)
    monkeypatch.setattr(services, "plan", plan)
    monkeypatch.setattr(services, "build", build)
    monkeypatch.setattr(services, "quality", lambda _path: QUALITY)
    return asked


def test_convert(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    code, out, err = adapt("convert", "org/Tiny-1B", "--method", "river")
    assert (code, out) == (0, "Tiny-1B-river\n")
    assert err == (
        "Source    tiny\nNeeds     1 MiB\n"
        "Self-check on 8192 tokens: perplexity 25.9 (dense 25.36), KL 0.0421, same next token 90.0%, mean depth 10.5\n"
        'Next: adapt run Tiny-1B-river "Hello"\n'
    )
    assert adapt("convert", "org/Tiny-1B", "--method", "river", "-q") == (0, "Tiny-1B-river\n", "")
    assert "adapt run 'with space' " in adapt("convert", "t", "--method", "river", "-o", "with space")[2]


def test_convert_says_what_labels_are_worth(
    adapt: Invoke, requests: list[SimpleNamespace], fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what a River bundle below it gave on a text."""
    args = ("convert", "m", "--method", "2dee", "--data", "rows.jsonl")
    for settings, two_d in (
        (fake.settings(), ", 2D 0.8800 with work 0.400"),
        (fake.settings(use="1d", chosen=None), ""),
    ):
        monkeypatch.setattr(services, "twodee", lambda _path, settings=settings: settings)
        assert adapt(*args)[2].splitlines()[2:] == [
            f"Accuracy on 20 validation rows: full 0.8900, 1D 0.8900 with work 0.667{two_d}",
            'Next: adapt run m-2dee "Hello"',
        ]


def test_json_says_what_labels_are_worth(
    adapt: Invoke, requests: list[SimpleNamespace], fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("convert", "m", "--method", "2dee", "--data", "rows.jsonl", "--json", "-q")
    own = fake.settings().data.model_copy(update={"validation": 44})
    monkeypatch.setattr(services, "twodee", lambda _: fake.settings(validation_data=own))
    for below in (None, QUALITY):
        monkeypatch.setattr(services, "quality", lambda _, below=below: below)
        quality = json.loads(adapt(*args)[1])["quality"]
        assert (quality["rows"], quality["use"]) == (44, "2d")
        assert quality["dense"]["accuracy"] == 0.89
        assert (quality["one_d"]["layer"], quality["one_d"]["work"]) == (4, pytest.approx(4 / 6))
        assert (quality["two_d"]["tau_ignore"], quality["two_d"]["work"]) == (0.4, 0.4)
        assert quality.get("kl") == (None if below is None else QUALITY["kl"])


def test_dry_run(adapt: Invoke, requests: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "build", None)
    args = ["convert", "m", "--method", "river", "--dry-run"]
    assert adapt(*args) == (0, "Source    tiny\nNeeds     1 MiB\n", "")
    assert json.loads(adapt(*args, "--json")[1]) == {"source": "tiny"}


def test_convert_json(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    out = adapt("convert", "m", "--method", "river", "--json", "-o", "out", "-q")[1]
    assert json.loads(out) == {"bundle": "out", "plan": {"source": "tiny"}, "quality": QUALITY}


def test_convert_options(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    line = "--quantizer hqq --bits 4 --group_size 32 --symmetric --entry-layer 3 --tau .9"
    line += " --calibration c.txt --calibration-tokens 100 --resident 5 --revision r --hf-token t"
    line += " --cache-dir c --offline --overwrite --no-resume --backbone link --device cuda:1 --dtype bf16"
    adapt("convert", "m", "--method", "river", "-o", "out", *line.split(), "--threads", "2")
    assert vars(requests[0]) == {
        "source": "m",
        "output": Path("out"),
        "method": "river",
        "settings": {
            "quantizer": "hqq",
            "bits": 4,
            "group_size": 32,
            "symmetric": True,
            "entry_layer": 3,
            "tau": 0.9,
            "max_loss": 0.1,
            "calibration": Path("c.txt"),
            "calibration_tokens": 100,
            "river_from": None,
            "resident": 5,
        },
        "revision": "r",
        "token": "t",
        "cache_dir": Path("c"),
        "offline": True,
        "force": True,
        "resume": False,
        "dry_run": False,
        "untrained": False,
        "backbone": "link",
        "device": "cuda:1",
        "dtype": "bf16",
        "threads": 2,
    }
    adapt("convert", "m", "--method", "river")
    assert requests[1].resume is None


def test_convert_defaults_are_those_of_the_request(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    from adapt_llm.convert.recipes import request  # noqa: PLC0415 - torch

    adapt("convert", "m", "--method", "river")
    asked = vars(requests[0])
    expected = request("river", {}, source="m", output=Path("m-river"))
    for item in dataclasses.fields(expected.settings):
        assert asked["settings"].pop(item.name) == getattr(expected.settings, item.name), item.name
    assert asked.pop("settings") == {}
    assert asked.pop("method") == expected.method
    for item in dataclasses.fields(expected):
        if item.name != "settings":
            assert asked.pop(item.name) == getattr(expected, item.name), item.name
    assert asked == {}


@pytest.mark.parametrize(
    ("method", "option", "owner"),
    [
        ("rcla", ["--tau", "0.5"], "river"),
        ("2dee", ["--share-every", "4"], "rcla"),
        ("river", ["--data", "d.txt"], "rcla, 2dee and nvium"),
        ("2dee", ["--steps", "5"], "rcla and nvium"),
        ("nvium", ["--lora", "8"], "rcla and 2dee"),
        ("rcla", ["--from-scratch"], "nvium"),
        ("rcla", ["--max-drop", "0.1"], "2dee"),
    ],
)
def test_options_of_another_method_are_refused_by_name(
    adapt: Invoke, requests: list[SimpleNamespace], method: str, option: list[str], owner: str
) -> None:
    code, _, err = adapt("convert", "m", "--method", method, *option)
    assert code == 2
    assert f"{option[0]} is for {owner}, not for {method}" in err
    assert not requests


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("river", "--untrained is for rcla, not for river. Leave it out"),
        ("2dee --data d.jsonl", "--untrained is for rcla, not for 2dee. Leave it out"),
        ("rcla --steps 5", "--steps does nothing with --untrained. Leave one of them out"),
        ("rcla --data d.txt --lora 8", "--lora does nothing with --untrained. Leave one of them out"),
        ("rcla --lr 1e-4", "--learning-rate does nothing with --untrained. Leave one of them out"),
        (
            "rcla --no-gradient-checkpointing",
            "--no-gradient-checkpointing does nothing with --untrained. Leave one of them out",
        ),
        ("rcla --seed 1", "--seed does nothing with --untrained. Name texts with --data, or leave it out"),
        (
            "rcla --validation d.txt",
            "--validation does nothing with --untrained. Name texts with --data, or leave it out",
        ),
    ],
)
def test_without_training_what_does_nothing_is_refused(
    adapt: Invoke, requests: list[SimpleNamespace], line: str, said: str
) -> None:
    assert adapt("convert", "m", "--untrained", "--method", *line.split()) == (2, "", f"adapt: error: {said}\n")
    assert not requests


def test_without_training_data_still_judges(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    line = "--data d.txt --validation v.txt --sequence-length 64 --loss-on answers --no-packed --seed 3 --keep-ratio .5"
    adapt("convert", "m", "--untrained", "--method", "rcla", *line.split())
    adapt("convert", "m", "--untrained", "--method", "rcla", "--share-every", "2")
    assert [(request.untrained, len(request.settings)) for request in requests] == [(True, 7), (True, 1)]


def test_every_option_of_training_is_known_to_do_nothing_without_it() -> None:
    """A new one has to be put somewhere."""
    groups = (training_options, lora_options, loop_options, rcla_options)
    options = {name for group in groups for name in get_type_hints(group)} - {"return"}
    maps = {"share_every", "keep_layers", "keep_ratio"}
    assert options == {*TRAINS, *READS, *maps, "data"}


def test_what_was_not_said_is_left_to_the_method(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    adapt(
        "convert", "m", "--method", "rcla", "--data", "a.txt", "--data", "b.txt", "--keep-layers", "1,3", "--lora", "8"
    )
    assert requests[0].settings == {"data": (Path("a.txt"), Path("b.txt")), "keep_layers": (1, 3), "lora": 8}
    adapt("convert", "m", "--method", "2dee", "--data", "a.jsonl", "--labels", "neg, pos")
    assert requests[1].settings == {"data": Path("a.jsonl"), "labels": ("neg", "pos")}
    adapt(
        "convert", "m", "--method", "nvium", "--data", "a.txt", "--junctions", "2,5", "--from-scratch", "--steps", "9"
    )
    wanted = {"data": (Path("a.txt"),), "junctions": (2, 5), "from_scratch": True, "steps": 9}
    assert requests[2].settings == wanted


def test_default_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert default_output(".", "river") == Path("model-river")
    assert default_output("Qwen/Qwen2.5-0.5B", "river") == Path("Qwen2.5-0.5B-river")
    assert default_output("/a/b/tiny.Q8_0.gguf", "river") == Path("tiny.Q8_0-river")
    assert default_output("./somewhere/", "river") == Path("somewhere-river")
