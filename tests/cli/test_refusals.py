"""What cannot be, or says two things, is refused in one line that names what was typed, before any work."""

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapt_llm.cli import services
from adapt_llm.cli.app import Adapt
from adapt_llm.convert.recipes import SETTINGS, request
from adapt_llm.errors import UsageError
from adapt_llm.runtime.options import Sampling, SessionOptions

Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("open_session", "text_quality", "task_quality", "bench", "tune", "plan"):
        monkeypatch.setattr(services, name, lambda *_, **__: pytest.fail("the work was begun"))


def refused(adapt: Invoke, *args: object) -> str:
    code, out, err = adapt(*args)
    assert (code, out) == (2, "")
    assert err.startswith("adapt: error: ")
    assert err.count("\n") == 1
    return err


def floats() -> list[tuple[str, str]]:
    """Every option of every command that takes a number with a point, as (command, option)."""
    loader = Adapt(name="adapt")
    params = ((name, param) for name in Adapt.table for param in loader.load(name).params)
    return [(name, max(param.opts, key=len)) for name, param in params if is_float(param)]


def is_float(param: Any) -> bool:
    """Typer's versions keep an option's type in different places."""
    kept = getattr(param, "type_descriptor", None)
    return "float" in repr(getattr(param, "type", None) if kept is None else kept.annotation).lower()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("command", "option"), floats())
def test_no_number_is_no_number(adapt: Invoke, command: str, option: str, value: str) -> None:
    required = {"convert": ["--method", "river"]}.get(command, [])
    err = refused(adapt, command, "b", *required, f"{option}={value}")
    assert f"{option} {value} is not a finite number" in err or f"'{option}'" in err


def test_every_float_option_is_looked_at() -> None:
    assert len(floats()) > 20


@pytest.mark.parametrize("method", sorted(SETTINGS))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_number_in_a_request(method: str, value: float, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a", "label": "b"}\n', encoding="utf-8")
    given = {"river": {}, "2dee": {"data": data}}.get(method, {"data": (data,)})
    for name, default in vars(SETTINGS[method](**given)).items():
        hinted = SETTINGS[method].__dataclass_fields__[name].type
        if isinstance(default, float) or "float" in str(hinted):
            with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {value} is not a finite number"):
                request(method, {**given, name: value}, source="m", output=tmp_path / "o")


@pytest.mark.parametrize(
    "line",
    [
        "run b hi --raw --chat-template chatml",
        "run b hi --raw --system S",
        "run b -i IN --raw --chat-template chatml",
        "chat b --raw --chat-template chatml",
        "chat b --raw --system S",
        "run b hi --greedy --temperature 1",
        "run b -i IN --json --format csv",
        "run b hi --gpu-memory auto --resident 3",
        "convert m --method river --tau .9 --max-loss .1",
        "convert m --method river --river-from g --quantizer rtn",
        "convert m --method river --river-from g --symmetric",
        "convert m --method river --river-from g --group-size 64",
        "convert m --method 2dee --data IN --validation OTHER --validation-share .1",
    ],
)
def test_options_that_exclude_each_other(
    adapt: Invoke, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "open_session", lambda _path, settings, _reporter: SessionOptions(**settings))
    for name in ("IN", "OTHER"):
        (tmp_path / name).write_text('{"text": "a", "label": "b"}\n', encoding="utf-8")
    words = [str(tmp_path / word) if word in ("IN", "OTHER") else word for word in line.split()]
    err = refused(adapt, *words)
    options = [word for word in words if word.startswith("--") and word not in ("--data", "--method")]
    assert all(option in err for option in options)


@pytest.mark.parametrize("apart", ["--system", "--chat-template"])
@pytest.mark.parametrize("way", ["--prompts", "--tasks"])
def test_what_needs_a_template_in_eval(adapt: Invoke, way: str, apart: str, tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "a"}\n', encoding="utf-8")
    err = refused(adapt, "eval", "b", way, rows, apart, "chatml")
    assert f"{apart} is for prompts in a chat template. Add --apply-chat-template" in err


@pytest.mark.parametrize(
    ("line", "least"),
    [
        ("run b hi", -1),
        ("chat b", -1),
        ("eval b --prompts IN", -1),
        ("bench b", 0),
        ("tune b --text IN", 0),
        ("convert m --method nvium --data IN", 0),
        ("convert m --method 2dee --data IN", 0),
    ],
)
def test_seeds(adapt: Invoke, line: str, least: int) -> None:
    for seed in (least - 1, -100):
        err = refused(adapt, *line.split(), "--seed", seed)
        assert "'--seed'" in err


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("rcla", {"micro_batch": 17}, "--micro-batch 17 is more than --batch-size 16"),
        ("nvium", {"micro_batch": 5, "batch_size": 4}, "--micro-batch 5 is more than --batch-size 4"),
        ("rcla", {"validation": "data"}, "--validation .* is trained on"),
        ("nvium", {"validation": "data"}, "--validation .* is trained on"),
        ("2dee", {"validation": "data"}, "--validation .* is trained on"),
        ("2dee", {"language": "Korean"}, "--language Korean is no code of a language"),
        ("2dee", {"language": "x"}, "--language x is no code"),
        ("river", {"calibration": Path("/")}, "/ is a folder"),
    ],
)
def test_requests(method: str, settings: dict[str, object], said: str, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "a", "label": "b"}\n', encoding="utf-8")
    given = {"river": {}, "2dee": {"data": data}}.get(method, {"data": (data,)})
    given |= {name: tmp_path / "." / "d.jsonl" if value == "data" else value for name, value in settings.items()}
    with pytest.raises(UsageError, match=said):
        request(method, given, source="m", output=tmp_path / "o")


@pytest.mark.parametrize("language", ["en", "ko", "yue", "zh-Hant", "pt_BR"])
def test_languages(language: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{}\n", encoding="utf-8")
    settings = {"data": tmp_path / "d.jsonl", "language": language}
    assert request("2dee", settings, source="m", output=tmp_path / "o").settings.language == language


@pytest.mark.parametrize("field", ["threads", "ctx_size", "resident", "max_deferred", "draft"])
def test_values_are_named_as_options(field: str) -> None:
    with pytest.raises(UsageError, match=f"^--{field.replace('_', '-')} 0 is not possible"):
        SessionOptions(**{field: 0})


def test_finite_comes_first() -> None:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} nan is not a finite number"):
            Sampling(**{name: math.nan})


def test_a_switch_is_named_as_it_was_typed(classify: Invoke) -> None:
    for switch in ("--no-cuda-graphs", "--no-piggyback"):
        err = refused(classify, "run", "b", "hi", switch)
        assert err.startswith(f"adapt: error: {switch} is for bundles that generate")


def test_arguments_after_rows_are_files(adapt: Invoke, tmp_path: Path) -> None:
    rows = tmp_path / "in.txt"
    rows.write_text("a\n", encoding="utf-8")
    assert "hi: no such file. After -i, arguments are more input files" in refused(adapt, "run", "b", "-i", rows, "hi")


@pytest.mark.parametrize("command", [("inspect",), ("run",), ("verify",), ("export", "--format", "hf", "-o", "out")])
def test_a_file_of_a_bundle_is_no_bundle(
    adapt: Invoke, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for name in ("adapt.json", "config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
        err = refused(adapt, command[0], tmp_path / name, *command[1:])
        assert f"{tmp_path / name} is a file of the bundle {tmp_path}. Give the folder" in err


@pytest.mark.parametrize("kind", ["folder", "missing"])
def test_a_log_file_that_cannot_be(adapt: Invoke, kind: str, tmp_path: Path) -> None:
    where = tmp_path if kind == "folder" else tmp_path / "no" / "log.txt"
    err = refused(adapt, "run", "b", "hi", "--log-file", where)
    assert {"folder": "is a folder", "missing": "There is no folder"}[kind] in err


@pytest.mark.parametrize("columns", [36, 40, 48])
def test_help_is_as_narrow_as_the_terminal(program: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (["run", "--help"], ["convert", "--help"], ["--help"]):
        out = subprocess.run([*program, *words], capture_output=True, text=True, check=True).stdout
        wide = [line for line in out.split("\nExamples:")[0].splitlines() if len(line) > columns]
        assert [line for line in wide if not line.lstrip().startswith("-") and "Usage" not in line] == []
