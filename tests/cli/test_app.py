"""The program around the commands: help, completion, errors, exit codes, and what is not imported."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adapt_llm import errors
from adapt_llm.cli import failures, services
from adapt_llm.cli.app import Adapt, app

COMMANDS = tuple(Adapt.table)
HEAVY = ("torch", "transformers", "huggingface_hub", "pydantic", "numpy", "rich.console", "prompt_toolkit", "jinja2")
PROGRAM = [sys.executable, "-m", "adapt_llm"]


def invoke(*args: str, input: str | bytes | None = None) -> tuple[int, str, str]:  # noqa: A002 - CliRunner's name
    result = CliRunner().invoke(app, list(args), input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def imported(*args: str, **environment: str) -> list[str]:
    """Return which heavy modules a command line pulls in."""
    code = (
        "import sys, adapt_llm.cli.app as a\n"
        f"sys.argv = ['adapt', *{args!r}]\n"
        "try:\n    a.main()\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', *[name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    return run.stdout.rstrip().split("\n")[-1].split()[1:]


@pytest.mark.parametrize(
    "args", [("--help",), ("--version",), ("run", "--help"), ("run", "x", "--nope"), ("help", "exit-codes")]
)
def test_nothing_heavy_for_help_and_usage(args: tuple[str, ...]) -> None:
    # Typer itself takes pydantic to read the arguments of a command, or rich to describe them, in some versions.
    allowed = {"rich.console"} if "--help" in args else {"pydantic"}
    allowed = allowed if len(args) > 1 else set()
    assert set(imported(*args)) <= allowed


def test_no_command_module_is_heavy() -> None:
    code = "import sys, importlib\n"
    code += "".join(f"importlib.import_module('adapt_llm.cli.{name}')\n" for name in COMMANDS)
    code += f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def completions(words: str) -> list[str]:
    position = str(len(words.split(" ")) - 1)
    environment = {"_ADAPT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": position}
    run = subprocess.run(PROGRAM, capture_output=True, text=True, env={**os.environ, **environment}, check=True)
    return run.stdout.split()


def test_completion() -> None:
    assert completions("adapt con") == ["convert"]
    assert completions("adapt convert m --quantizer ") == ["gptq", "hqq", "rtn"]
    assert completions("adapt convert m --method ") == ["river", "rcla", "2dee", "nvium"]
    assert "--max-tokens" in completions("adapt run b --max")
    assert completions("adapt run b --device c") == ["cpu", "cuda", "cuda:0"]
    assert completions("adapt run ./") == []  # nothing: the shell completes paths
    assert "exit-codes" in completions("adapt help ")


def test_completion_imports_nothing_heavy() -> None:
    environment = {"_ADAPT_COMPLETE": "complete_bash", "COMP_WORDS": "adapt run b --d", "COMP_CWORD": "3"}
    assert set(imported(**environment)) <= {"pydantic"}  # Typer's own


def test_completion_script_names_the_program() -> None:
    environment = {**os.environ, "_ADAPT_COMPLETE": "source_bash"}
    run = subprocess.run(PROGRAM, capture_output=True, text=True, env=environment, check=True)
    assert "_ADAPT_COMPLETE=complete_bash" in run.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_pages(name: str) -> None:
    code, out, err = invoke(name, "--help")
    assert (code, err) == (0, "")
    assert out == invoke(name, "-h")[1]
    assert out == invoke("help", name)[1]
    assert "Usage: adapt " + name in out
    assert "\nExamples:\n  adapt " in out


def test_root_help_lists_every_command() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert invoke() == (2, out, "")
    assert invoke("help")[1] == out


def test_version() -> None:
    code, out, err = invoke("--version")
    assert (code, err) == (0, "")
    assert out.startswith("adapt 0.")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["chta"], None),
        (["run"], None),
        (["verify", "x", "--jsn"], None),
        (["help", "nothing"], "no command or topic 'nothing'. Topics are exit-codes, environment"),
        (["convert", "m", "--method", "gzip"], "there is no method 'gzip'. Available: river, rcla, 2dee, nvium"),
        (["inspect", "x", "--resident", "0"], None),
        (["convert", "m", "--method", "river", "--quantizer", "awq"], None),
        (["convert", "m", "--method", "river", "--device", "tpu"], "--device tpu is not auto, cpu, cuda or cuda:N"),
        (["convert", "m", "--method", "river", "--dtype", "int8"], "--dtype int8 is not auto, bf16, fp16 or fp32"),
    ],
)
def test_usage_errors_are_one_line(args: list[str], line: str | None) -> None:
    code, out, err = invoke(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("adapt: error: ")
    if line is not None:
        assert err == f"adapt: error: {line}\n"


def test_choices_are_named_in_the_error() -> None:
    err = invoke("convert", "m", "--method", "river", "--quantizer", "awq")[2]
    assert all(name in err for name in ("--quantizer", "awq", "gptq", "hqq", "rtn"))


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["chta"], ["'chta'", "Did you mean 'chat'? Try 'adapt --help'"]),
        (["verify"], ["BUNDLE", "Try 'adapt verify --help'"]),
        (["verify", "x", "--jsn"], ["--jsn", "--json", "Try 'adapt verify --help'"]),
    ],
)
def test_usage_errors_say_where_to_look(args: list[str], parts: list[str]) -> None:
    err = invoke(*args)[2]  # the parser's words differ between versions of Typer
    assert all(part in err for part in parts)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def describe(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(services, "describe", describe)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.AdaptError("it broke", "Mend it"), 1, "it broke. Mend it"),
        (errors.AdaptError("it broke"), 1, "it broke"),
        (errors.FormatError("two\n lines.", "Fetch"), 1, "two lines. Fetch"),
        (errors.UnsupportedError("new"), 1, "new"),
        (errors.UsageError("wrong"), 2, "wrong"),
        (errors.AccessError("gated", "Ask"), 4, "gated. Ask"),
        (errors.ResourceError("full"), 5, "full"),
        (MemoryError(), 5, "not enough memory. Close other programs, or ask for less with --ctx-size"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 5, None),
        (OSError(errno.ENOSPC, "No space left on device"), 5, None),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), 5, None),
        (OSError(errno.EFBIG, "File too large"), 5, None),
        (PermissionError(errno.EACCES, "Permission denied", "out/x"), 1, "out/x: Permission denied"),
    ],
)
def test_known_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, line: str | None) -> None:
    failing(monkeypatch, error)
    exit_code, out, err = invoke("inspect", "b")
    assert (exit_code, out) == (code, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    if line is not None:
        assert err == f"adapt: error: {line}\n"


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert invoke("inspect", "b") == (130, "", "")


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, errors.FormatError("broken"))
    verbose = invoke("inspect", "b", "-v")
    assert verbose[0] == 1
    assert "Traceback" in verbose[2]
    assert verbose[2].endswith("adapt: error: broken\n")
    monkeypatch.setenv("ADAPT_DEBUG", "1")
    assert "Traceback" in invoke("inspect", "b")[2]
    monkeypatch.setenv("ADAPT_DEBUG", "0")
    assert "Traceback" not in invoke("inspect", "b")[2]


def test_unknown_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        invoke("inspect", "b")
    assert failures.known(RuntimeError("a defect")) is None
    assert failures.known(OSError("no errno")) is None


def test_torch_out_of_memory_is_known_by_name() -> None:
    kind = type("OutOfMemoryError", (RuntimeError,), {})
    known = failures.known(kind("CUDA out of memory"))
    assert known is not None
    assert known.exit_code == 5


def test_underscores_in_option_names_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}

    def describe(path: Path, **options: object) -> dict[str, object]:
        seen.update(options, path=path)
        raise errors.AdaptError("enough")

    monkeypatch.setattr(services, "describe", describe)
    invoke("inspect", "my_bundle", "--cache_dir", "a_b")
    assert (seen["path"], seen["cache_dir"]) == (Path("my_bundle"), Path("a_b"))


def test_every_topic() -> None:
    assert "130  stopped with Ctrl-C" in invoke("help", "exit-codes")[1]
    assert "HF_TOKEN" in invoke("help", "environment")[1]


def test_unicode_whatever_the_locale() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    run = subprocess.run([*PROGRAM, "help", "exit-codes"], capture_output=True, env=environment, check=True)
    assert "…" in run.stdout.decode("utf-8")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"{sys.executable} -m adapt_llm inspect {tmp_path} --log-file {log} {closed}; echo $?"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "2\n"  # no bundle there: the error had nowhere to go, least of all into the log
    assert "error" not in log.read_text(encoding="utf-8")


def test_reader_that_goes_away() -> None:
    script = f"{sys.executable} -m adapt_llm help exit-codes | true; echo ${{PIPESTATUS[0]}}"
    for _ in range(3):  # which of the two is faster is chance; neither may complain
        run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert run.stderr == ""
        assert run.stdout.strip() in {"0", "141"}
