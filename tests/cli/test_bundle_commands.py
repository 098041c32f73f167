"""`inspect`, `verify` and `export`: what they ask of the rooms below, and exactly what they print."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from adapt_llm.cli import services
from adapt_llm.cli.charts import histogram, human_bytes
from adapt_llm.cli.inspect import layer_table, layer_text

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


def test_histogram_bands() -> None:
    assert list(histogram([])) == []
    assert list(histogram([0, 0])) == []
    lines = list(histogram([1] * 80))
    assert len(lines) == 16
    assert lines[0].startswith("        1-5  ")
    assert sum(float(line.split()[-1].rstrip("%")) for line in lines) == pytest.approx(100, abs=1)


def test_human_bytes() -> None:
    assert [human_bytes(size) for size in (0, 1023, 1024, 7226000000)] == ["0 B", "1023 B", "1.00 KiB", "6.73 GiB"]
