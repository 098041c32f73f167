"""`convert`, `inspect`, `verify` and `export`: what they ask of the rooms below, and exactly what they print."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from adapt_llm.cli import services
from adapt_llm.cli.charts import histogram, human_bytes
from adapt_llm.cli.convert import default_output
from adapt_llm.cli.inspect import layer_table, layer_text
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
FACTS = {
    "format_version": 1,
    "methods": [
        {
            "name": "river",
            "quantizer": "gptq",
            "bits": 4,
            "symmetric": False,
            "entry_layer": 2,
            "exit_layers": [2, 3, 4],
            "tau": 0.95,
            "tau_curve": [],
            "calibration": {"name": "wiki.txt", "sha256": "0" * 64, "tokens": 8192},
            "resident": None,
        }
    ],
    "base": {"id": "Qwen/Qwen2.5", "revision": "0123456789abcdef"},
    "family": "qwen2",
    "layers": [
        {"index": 1, "dense": True, "exit_layer": False, "kv_source": 1, "junction": None, "adapter": None},
        {"index": 2, "dense": True, "exit_layer": True, "kv_source": 2, "junction": None, "adapter": None},
        {"index": 3, "dense": False, "exit_layer": True, "kv_source": 3, "junction": None, "adapter": None},
        {"index": 4, "dense": False, "exit_layer": True, "kv_source": 4, "junction": None, "adapter": None},
    ],
    "bytes": {"backbone": 988 << 20, "river": 200 << 20, "junctions": 0, "total": 1188 << 20, "kv_per_token": 12288},
    "memory": {"resident": 2, "embeddings": 272 << 20, "total": 400 << 20},
    "backbone": "copy",
    "quality": QUALITY,
    "trained": True,
    "license": "apache-2.0",
    "libraries": {},
}

PAGE = """\
b: Qwen/Qwen2.5 @ 0123456789ab
  family    qwen2
  licence   apache-2.0
  backbone  copy
  format    1

river
  quantizer    gptq
  bits         4
  symmetric    no
  entry layer  2
  tau          0.95
  calibration  wiki.txt, 8192 tokens

layers
          1  dense
          2  dense + exit (4-bit)
        3-4  exit (4-bit)

bytes
  backbone      988.00 MiB
  river         200.00 MiB
  total         1.16 GiB
  kv per token  12.00 KiB

memory for weights
  dense blocks kept  2
  embeddings         272.00 MiB
  total              400.00 MiB

quality, measured at conversion on 8192 tokens of built-in.txt
  perplexity       25.9 (dense 25.36)
  KL from dense    0.0421
  same next token  90.0%
  mean depth       10.5
depth at which tokens left
          2  ████████████████████████████████  75.0%
          4  ███████████                       25.0%
"""


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    asked: list[dict[str, object]] = []

    def describe(path: Path, **options: object) -> dict[str, object]:
        asked.append({"path": path, **options})
        return FACTS

    monkeypatch.setattr(services, "describe", describe)
    return asked


def test_inspect_page(adapt: Invoke, facts: list[dict[str, object]]) -> None:
    assert adapt("inspect", "b") == (0, PAGE, "")
    assert facts[0]["resident"] is None


def test_inspect_json(adapt: Invoke, facts: list[dict[str, object]]) -> None:
    code, out, err = adapt("inspect", "b", "--json", "--resident", "4", "--cache-dir", "c")
    assert (code, json.loads(out), err) == (0, FACTS, "")
    assert (facts[0]["resident"], facts[0]["cache_dir"]) == (4, Path("c"))


def test_inspect_says_untrained(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "describe", lambda *_a, **_k: {**FACTS, "trained": False, "quality": None})
    out = adapt("inspect", "b")[1]
    assert "trained   no: converted with --untrained" in out
    assert "quality, measured" not in out


def test_long_layer_lists_are_collapsed() -> None:
    layers = [{"index": n, "dense": n < 5, "exit_layer": n > 1, "kv_source": n} for n in range(1, 81)]
    assert list(layer_table(layers)) == [
        "          1  dense",
        "        2-4  dense + exit (4-bit)",
        "       5-80  exit (4-bit)",
    ]
    assert layer_text({"index": 4, "dense": True, "kv_source": 3, "adapter": {}, "junction": {"a": 1}}) == (
        "dense + keys and values of 3 + junction"
    )
    assert layer_text({"index": 4}) == "dropped"


def verdict(*problems: tuple[str, str]) -> dict[str, object]:
    found = [{"file": file, "what": what} for file, what in problems]
    return {"ok": not problems, "files": 7, "tensors": 290, "problems": found}


def test_verify_whole(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "verify", lambda *_a, **_k: verdict())
    assert adapt("verify", "b") == (0, "b: whole (7 files, 290 tensors)\n", "")
    assert adapt("verify", "b", "-q") == (0, "", "")
    code, out, err = adapt("verify", "b", "--json")
    assert (code, json.loads(out), err) == (0, verdict(), "")


def test_verify_finds_differences(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdict(("model.safetensors", "has another sha256"), ("river", "x is missing"))
    monkeypatch.setattr(services, "verify", lambda *_a, **_k: found)
    assert adapt("verify", "b") == (
        1,
        "model.safetensors: has another sha256\nriver: x is missing\n",
        "adapt: error: b differs from its manifest (2 problems). Fetch or convert it again\n",
    )
    code, out, err = adapt("verify", "b", "--json")
    assert (code, json.loads(out), err) == (1, found, "")


def test_export(adapt: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[object, ...]] = []

    def export(path: Path, form: str, output: Path, **options: object) -> Path:
        asked.append((path, form, output, options["force"]))
        return output

    monkeypatch.setattr(services, "export", export)
    assert adapt("export", "b", "--format", "gptq", "-o", tmp_path, "--overwrite") == (0, f"{tmp_path}\n", "")
    assert asked == [(Path("b"), "gptq", tmp_path, True)]
    assert adapt("export", "b", "--format", "gguf", "-o", "x")[0] == 2
    assert adapt("export", "b", "--format", "hf")[0] == 2


# --- convert


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


def test_dry_run(adapt: Invoke, requests: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "build", None)
    args = ["convert", "m", "--method", "river", "--dry-run"]
    assert adapt(*args) == (0, "Source    tiny\nNeeds     1 MiB\n", "")
    assert json.loads(adapt(*args, "--json")[1]) == {"source": "tiny"}


def test_convert_json(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    out = adapt("convert", "m", "--method", "river", "--json", "-o", "out", "-q")[1]
    assert json.loads(out) == {"bundle": "out", "plan": {"source": "tiny"}, "quality": QUALITY}


def test_convert_options(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    line = "--quantizer hqq --bits 4 --group_size 32 --symmetric --entry-layer 3 --tau .9 --max-loss .01"
    line += " --calibration c.txt --calibration-tokens 100 --river-from g/g --resident 5 --revision r --hf-token t"
    line += " --cache-dir c --offline --overwrite --no-resume --untrained --backbone link --device cuda:1 --dtype bf16"
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
            "max_loss": 0.01,
            "calibration": Path("c.txt"),
            "calibration_tokens": 100,
            "river_from": "g/g",
            "resident": 5,
        },
        "revision": "r",
        "token": "t",
        "cache_dir": Path("c"),
        "offline": True,
        "force": True,
        "resume": False,
        "dry_run": False,
        "untrained": True,
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
        ("river", ["--data", "d.txt"], "rcla and 2dee"),
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


def test_what_was_not_said_is_left_to_the_method(adapt: Invoke, requests: list[SimpleNamespace]) -> None:
    adapt(
        "convert", "m", "--method", "rcla", "--data", "a.txt", "--data", "b.txt", "--keep-layers", "1,3", "--lora", "8"
    )
    assert requests[0].settings == {"data": (Path("a.txt"), Path("b.txt")), "keep_layers": (1, 3), "lora": 8}
    adapt("convert", "m", "--method", "2dee", "--data", "a.jsonl", "--labels", "neg, pos")
    assert requests[1].settings == {"data": Path("a.jsonl"), "labels": ("neg", "pos")}


def test_default_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert default_output(".", "river") == Path("model-river")
    assert default_output("Qwen/Qwen2.5-0.5B", "river") == Path("Qwen2.5-0.5B-river")
    assert default_output("/a/b/tiny.Q8_0.gguf", "river") == Path("tiny.Q8_0-river")
    assert default_output("./somewhere/", "river") == Path("somewhere-river")


def test_histogram_bands() -> None:
    assert list(histogram([])) == []
    assert list(histogram([0, 0])) == []
    lines = list(histogram([1] * 80))
    assert len(lines) == 16
    assert lines[0].startswith("        1-5  ")
    assert sum(float(line.split()[-1].rstrip("%")) for line in lines) == pytest.approx(100, abs=1)


def test_human_bytes() -> None:
    assert [human_bytes(size) for size in (0, 1023, 1024, 7226000000)] == ["0 B", "1023 B", "1.00 KiB", "6.73 GiB"]
