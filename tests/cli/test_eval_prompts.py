"""`adapt eval --prompts`: rows of completions for another program's checker, several of a prompt, and going on."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapt_llm.cli import services
from adapt_llm.cli.eval_prompts import CODE_STOPS

Invoke = Callable[..., tuple[int, str, str]]
TASKS = [
    {"task_id": "Code/0", "prompt": "def one():\n", "entry_point": "one", "test": "check", "canonical_solution": "1"},
    {"task_id": "Code/1", "prompt": "def two():\n", "entry_point": "two", "test": "check", "canonical_solution": "2"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(task) + "\n" for task in TASKS).encode()))
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, adapt: Invoke) -> list[Any]:
    """The choices with which options of generation were made."""
    calls: list[Any] = []
    make = services.generation_options

    def remember(choices: Any, *, row: int = 0) -> Any:
        calls.append((choices, row))
        return make(choices, row=row)

    monkeypatch.setattr(services, "generation_options", remember)
    return calls


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_rows_that_a_checker_takes(adapt: Invoke, asked: list[Any], prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "samples.jsonl"
    code, out, _ = adapt("eval", "b", "--prompts", prompts, "-o", output, "--code", "--stop", "END")
    assert (code, out) == (0, "")
    rows = read(output)
    assert [row["task_id"] for row in rows] == ["Code/0", "Code/1"]
    assert [row["prompt"] for row in rows] == [task["prompt"] for task in TASKS]
    assert rows[0]["completion"].split() == ["RAW", "def", "one():"]  # the prompt as it is, without a template
    assert set(rows[0]) == {
        *("task_id", "prompt", "row", "row_hash"),
        *("completion", "tokens", "finish_reason", "mean_depth"),
    }
    choices = asked[-1][0]
    assert choices.stop == ("END", *CODE_STOPS)
    assert choices.max_tokens == 512


def test_several_samples_differ_in_their_row(adapt: Invoke, asked: list[Any], prompts: Path) -> None:
    args = ("--prompts", prompts, "--samples", "3", "--temperature", "0.5", "--seed", "1", "--max-tokens", "2")
    code, out, _ = adapt("eval", "b", *args)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["task_id"] for row in rows] == ["Code/0"] * 3 + ["Code/1"] * 3
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row for _, row in asked if row] == [1, 2, 3, 4, 5, 6]
    assert all(row["tokens"] == 2 for row in rows)


def test_a_cut_output_is_continued(adapt: Invoke, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "samples.jsonl"
    args = ("eval", "b", "--prompts", prompts, "-o", output, "--samples", "2")
    assert adapt(*args)[0] == 0
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) * 2 // 3])
    assert "there already" in adapt(*args)[2]
    assert adapt(*args, "--resume")[0] == 0
    assert output.read_bytes() == whole


def test_chat_limit_and_stdin(adapt: Invoke) -> None:
    lines = "".join(json.dumps({"q": f"word{i}"}) + "\n" for i in range(3))
    args = ("--prompts", "-", "--field", "q", "--apply-chat-template", "--system", "be brief", "--limit", "2")
    code, out, _ = adapt("eval", "b", *args, stdin=lines)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(row["task_id"], row["completion"].split()) for row in rows] == [
        (1, ["be", "brief", "word0"]),
        (2, ["be", "brief", "word1"]),
    ]


def test_a_prompt_that_fails_is_a_row(adapt: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"task_id": "a", "prompt": "FAIL"}\n{"task_id": "b", "prompt": "fine"}\n', encoding="utf-8")
    code, out, _ = adapt("eval", "b", "--prompts", path)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 3
    assert rows[0]["task_id"] == "a"
    assert "does not fit" in rows[0]["error"]
    assert "completion" not in rows[0]
    assert rows[1]["completion"].split() == ["RAW", "fine"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--prompts", "no.jsonl"], "no.jsonl: no such file. Give a file of rows, or - for stdin"),
        (["--prompts", "p.jsonl", "--json"], "--json is for --text, --labels and --tasks. Leave it out"),
        (["--prompts", "p.jsonl", "--report", "r.md"], "--report is for --text, --labels and --tasks. Leave it out"),
        (
            ["--prompts", "p.jsonl", "--system", "s"],
            "--system is for prompts in a chat template. Add --apply-chat-template",
        ),
        (["--text", "t", "--samples", "2"], "--samples is for --prompts. Leave it out"),
    ],
)
def test_usage(adapt: Invoke, args: list[str], line: str) -> None:
    assert adapt("eval", "b", *args) == (2, "", f"adapt: error: {line}\n")


def test_a_bundle_that_classifies(adapt: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "twodee", lambda _: object())
    for way in ("--prompts", "--tasks"):
        code, _, err = adapt("eval", "b", way, "x")
        assert code == 2
        assert "b classifies" in err
