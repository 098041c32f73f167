"""`adapt eval --tasks`: a task of lm-evaluation-harness from a local file, offline; the page, the report, refusals."""

import ast
import importlib
import importlib.util
import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adapt_llm.cli import services
from adapt_llm.errors import UsageError
from adapt_llm.runtime import task_quality
from adapt_llm.runtime.conversation import GenerationOptions
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.scoring import Passage, Scorer, full_depth, reader_of
from adapt_llm.runtime.session import Session, open_session

ROOT = Path(__file__).resolve().parents[2]
Invoke = Callable[..., tuple[int, str, str]]
HARNESS = "adapt_llm.runtime.harness"
"""Imports lm_eval, so it is imported where that is installed."""
HAVE = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAVE, reason="needs lm-evaluation-harness: pip install 'adapt-llm[eval]'")
quiet = pytest.mark.filterwarnings("ignore::Warning")  # those of the harness and its libraries are not ours
ROWS = [
    {"question": "one and one", "choices": ["two", "too", "three"], "answer": 0},
    {"question": "the sky is", "choices": ["blue", "green", "red"], "answer": 1},
    {"question": "a river", "choices": ["flows", "flies", "sleeps"], "answer": 2},
    {"question": "so", "choices": ["a", "b", "c"], "answer": 0},
]
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs:
  cache_dir: {folder}/cache
  data_files:
    test: {folder}/rows.jsonl
test_split: test
"""
CHOICE = """\
output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 3.0
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list:
  - metric: byte_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
"""
WRITING = """\
output_type: generate_until
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["z"]
  max_gen_toks: 5
  do_sample: false
filter_list:
  - name: first
    filter:
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def toy(bundle_factory: ModuleType, toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a River bundle to which every byte is a token."""
    folder = bundle_factory.bundle(toy_model, tmp_path_factory.mktemp("toy-river") / "toy")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "!"}', encoding="utf-8")
    return folder


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    for name, rest in {"toy_choice": CHOICE, "toy_rolling": ROLLING, "toy_writing": WRITING}.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, folder=folder) + rest, encoding="utf-8")
    return folder


def session(toy: Path) -> Session:
    return open_session(toy, SessionOptions(device="cpu", dtype="fp32", tau=0.5))


def choices(scorer: Scorer, tokens: Any) -> float:
    """Accuracy by the definition: the continuation with the highest log-likelihood."""
    right = 0
    for row in ROWS:
        start = tokens.encode(f"Q: {row['question']}\nA:")
        passages = [Passage((*start, *tokens.encode(f" {choice}")), len(start)) for choice in row["choices"]]
        scores = [score.log_prob for score in scorer.score(passages)]
        right += scores.index(max(scores)) == row["answer"]
    return right / len(ROWS)


@needs_harness
@quiet
@pytest.mark.usefixtures("offline")
def test_tasks_from_a_folder(adapt: Invoke, toy: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(toy)
    monkeypatch.setattr(services, "open_session", lambda *_: opened)
    names, report = "toy_choice,toy_rolling,toy_writing", tasks / "r.md"
    args = ("--tasks", names, "--include-path", tasks, "--full-depth", "--report", report, "--seed", "7", "--json")
    code, out, err = adapt("eval", toy, *args, "-q")
    assert (code, err) == (0, "")
    found = json.loads(out)
    read, dense = reader_of(opened.model), reader_of(full_depth(opened.model))
    scorer = Scorer(read)
    assert found["tasks"]["toy_choice"]["metrics"]["acc"]["value"] == choices(scorer, opened.tokenizer)
    full = found["full_depth"]["tasks"]
    assert full["toy_choice"]["metrics"]["acc"]["value"] == choices(Scorer(dense), opened.tokenizer)
    texts = [row["question"] for row in ROWS]
    total = sum(
        scorer.score([Passage((ord("!") - 33, *opened.tokenizer.encode(text)), 1)])[0].log_prob for text in texts
    )
    expected = math.exp(-total / sum(map(len, texts)))
    assert found["tasks"]["toy_rolling"]["metrics"]["byte_perplexity"]["value"] == pytest.approx(expected, rel=1e-4)
    assert found["mean_depth"] < 4 == found["full_depth"]["mean_depth"]
    assert found["mean_depth"] == pytest.approx(
        sum(depth * n for depth, n in enumerate(scorer.depths.tolist(), 1)) / int(scorer.depths.sum())
    )
    assert (found["seed"], found["limit"], found["few_shot"]) == (7, None, None)
    assert found["tasks"]["toy_choice"]["samples"] == 4
    page = report.read_text("utf-8")
    assert page.startswith("# toy: toy_choice, toy_rolling, toy_writing\n\n`adapt eval ")
    assert f"lm-evaluation-harness {found['harness']}" in page
    assert "Every seed is 7." in page
    assert "| task | metric | rows | exit rule | full depth |" in page
    assert "toy_choice 3" in page


@needs_harness
@quiet
@pytest.mark.usefixtures("offline")
def test_texts_are_those_of_run(toy: Path, tasks: Path) -> None:
    harness = importlib.import_module(HARNESS)
    opened = session(toy)
    prompt = "Q: a river\nA:"
    options = GenerationOptions(max_tokens=6, stop=("k",))
    expected = "".join(record.text for record in opened.complete(prompt, options, raw=True))

    class Request:
        args = (prompt, {"until": ["k"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0})

    assert harness.AdaptLM.of(opened).generate_until([Request()]) == [expected]


@needs_harness
@quiet
def test_the_model_from_arguments(toy: Path) -> None:
    """As the harness's own program makes it, from text."""
    harness = importlib.import_module(HARNESS)

    arguments = f"bundle={toy},tau=0.5,dtype=fp32,ctx_size=8"
    model = harness.AdaptLM.create_from_arg_string(
        arguments, {"batch_size": 2, "device": "cpu", "max_batch_size": None}
    )
    assert (model.max_length, model.batch_size, model.eot_token_id) == (8, 2, ord("!") - 33)
    passage = model._passage([1] * 20, [2, 3])
    assert (len(passage.ids), passage.first) == (9, 7)
    with pytest.raises(UsageError, match="holds 8"):
        model._passage([1], [2] * 9)
    with pytest.raises(UsageError, match="num_beams"):
        harness.generation({"until": "x", "num_beams": 4}, 0, 1)
    sampled = harness.generation({"until": "x", "do_sample": True, "top_p": 0.9, "max_new_tokens": 3}, 5, 2)
    assert (sampled.sampling.temperature, sampled.sampling.top_p, sampled.sampling.seed) == (1.0, 0.9, 5)
    assert (sampled.max_tokens, sampled.stop, sampled.row) == (3, ("x",), 2)


@needs_harness
@quiet
@pytest.mark.slow  # the harness reads thousands of task files
@pytest.mark.usefixtures("offline")
def test_what_the_harness_does_not_know(adapt: Invoke, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "open_session", lambda *_: session(toy))
    code, out, err = adapt("eval", toy, "--tasks", "no_such_task_at_all")
    assert (code, out) == (2, "")
    assert err.startswith("adapt: error: lm-evaluation-harness knows no task no_such_task_at_all.")


def test_the_entry_point_names_a_class_that_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["adapt"].partition(":")
    source = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
    assert module == HARNESS
    assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    assert any(requirement.startswith("lm-eval") for requirement in project["optional-dependencies"]["eval"])


def test_without_the_harness(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_quality.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(services, "open_session", None)  # it is said before a model is loaded
    code, out, err = adapt("eval", "b", "--tasks", "arc_easy")
    assert (code, out) == (1, "")
    assert err == "adapt: error: --tasks needs lm-evaluation-harness. Install it: pip install 'adapt-llm[eval]'\n"


def figure(value: float, stderr: float | None = None) -> dict[str, Any]:
    return {"value": value, "stderr": stderr, "higher_is_better": True}


def result(**changes: Any) -> dict[str, Any]:
    task = {"samples": 20, "few_shot": 0, "version": 1.0, "metrics": {"acc": figure(0.5, 0.01), "f1": figure(0.25)}}
    fields: dict[str, Any] = {"tasks": {"t": task}, "layers": 4, "mean_depth": 2.5, "exit_histogram": [0, 5, 5, 0]}
    fields |= {"full_depth": None, "few_shot": 5, "limit": 20, "seed": 1234, "chat_template": False, "harness": "9.9"}
    return {**fields, **changes}


def test_page(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(services, "task_quality", lambda _path, request, *_: asked.append(request) or result())
    code, out, err = adapt("eval", "b", "--tasks", " t , u", "--limit", "20", "--num-fewshot", "5", "--batch-size", "3")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[:3] == [["task", "metric", "rows", "value"], ["t", "acc", "20", "0.5000", "±", "0.0100"], lines[2]]
    assert lines[2] == ["t", "f1", "20", "0.2500"]
    assert "mean depth 2.5 of 4, of the tokens that were scored" in out
    request = asked[0]
    assert (request.names, request.limit, request.few_shot, request.batch_size) == (("t", "u"), 20, 5, 3)
    full = {"tasks": {"t": {"metrics": {"acc": figure(0.75), "f1": figure(1)}}}}
    monkeypatch.setattr(services, "task_quality", lambda *_: result(full_depth=full))
    out = adapt("eval", "b", "--tasks", "t", "--full-depth")[1]
    assert out.splitlines()[0].split() == ["task", "metric", "rows", "exit", "rule", "full", "depth"]
    assert out.splitlines()[1].split()[-1] == "0.7500"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--tasks", ","], "--tasks names no task. For example --tasks arc_easy,hellaswag"),
        (["--tasks", "t", "--include-path", "no"], "no is no folder. --include-path takes the folder of your tasks"),
        (["--tasks", "t", "--seed", "-1"], "--seed -1 is not a seed of tasks. Give a number from 0 to 4294967295"),
        (["--tasks", "t", "--limit-tokens", "5"], "--limit-tokens is for --text. Leave it out"),
        (["--tasks", "t", "--temperature", "1"], "--temperature is for --prompts. Leave it out"),
        (["--text", "t", "--num-fewshot", "1"], "--num-fewshot is for --tasks. Leave it out"),
        (["--text", "t", "--seed", "1"], "--seed is for --tasks and --prompts. Leave it out"),
    ],
)
def test_usage(adapt: Invoke, args: list[str], line: str) -> None:
    assert adapt("eval", "b", *args) == (2, "", f"adapt: error: {line}\n")
