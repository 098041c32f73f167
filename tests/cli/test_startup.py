"""What `adapt run` imports and when, how early a bad bundle is refused, and what the collector is spared."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from adapt_llm.cli.collector import import_torch, retire_collector, uncollected, uninterrupted

WITHOUT_TORCH = ("torch", "numpy", "jinja2", "psutil")
NOT_FOR_ONE_PROMPT = ("transformers", "huggingface_hub", "psutil", "sentencex", "prompt_toolkit", "rich.console")


@pytest.fixture(scope="module")
def bundle(bundle_factory: ModuleType, toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle_factory.bundle(toy_model, tmp_path_factory.mktemp("startup") / "toy-river")


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def imported(*args: object) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run the program; return what came of it, and the modules that were there as it ended."""
    script = (
        "import atexit, json, os, sys\n"
        "atexit.register(lambda: os.write(3, json.dumps(sorted(sys.modules)).encode()))\n"
        "from adapt_llm.cli.app import main\n"
        "main()\n"
    )
    reading, writing = os.pipe()
    command = ["bash", "-c", f'exec "$@" 3>&{writing}', "bash", sys.executable, "-W", "error", "-c", script]
    with os.fdopen(reading, encoding="utf-8") as names:
        run = subprocess.run(
            [*command, *map(str, args)],
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        os.close(writing)
        return run, set(json.load(names))


def test_one_prompt_imports_what_it_needs_and_no_more(bundle: Path) -> None:
    run, modules = imported("run", bundle, "Hi", "--max-tokens", "1", "--raw")
    assert run.returncode == 0, run.stderr
    assert "torch" in modules
    assert [name for name in NOT_FOR_ONE_PROMPT if name in modules] == []


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("tokenizer.json", b"{", "tokenizer.json has 1 bytes"),
        ("config.json", None, "config.json is missing"),
        ("adapt.json", b"{", "adapt.json is not JSON"),
    ],
)
@pytest.mark.parametrize("command", [["run"], ["chat"]])
def test_a_damaged_bundle_is_refused_before_torch(
    bundle: Path,
    damaged: Callable[[Path, str, bytes | None], Path],
    command: list[str],
    name: str,
    data: bytes | None,
    said: str,
) -> None:
    run, modules = imported(*command, damaged(bundle, name, data), *(["Hi"] if command == ["run"] else []))
    assert run.returncode == 1
    assert run.stderr.startswith("adapt: error: ")
    assert said in run.stderr
    assert run.stderr.count("\n") == 1
    assert [module for module in WITHOUT_TORCH if module in modules] == []


def test_a_tokenizer_that_cannot_be_read_is_refused_before_torch(unreadable_tokenizer: Path) -> None:
    run, modules = imported("run", unreadable_tokenizer, "Hi")
    assert run.returncode == 1
    assert "cannot be read as a tokenizer" in run.stderr
    assert "torch" not in modules


@pytest.mark.parametrize("option", [["--temperature", "-1"], ["--top-p", "0"], ["--tau", "2"], ["--draft", "3"]])
def test_values_that_cannot_be_are_refused_before_torch(bundle: Path, option: list[str]) -> None:
    run, modules = imported("run", bundle, "Hi", *option)
    assert run.returncode == 2
    assert run.stderr.startswith("adapt: error: ")
    assert "torch" not in modules


def test_ctrl_c_waits_for_the_import_and_is_not_lost() -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def pressed() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("imported")

    with pytest.raises(KeyboardInterrupt):
        pressed()
    assert done == ["imported"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_is_not_waited_for() -> None:
    twice = "signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT); print('still here')"
    script = f"import signal\nfrom adapt_llm.cli.collector import uninterrupted\nwith uninterrupted(): {twice}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (130, "")


def test_the_collector_rests_and_works_on(thawed: None) -> None:
    before = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        kept = [[] for _ in range(100)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_the_collector_is_left_as_it_was(thawed: None) -> None:
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="inside"), uncollected():
            raise RuntimeError("inside")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_where_torch_is_there_nothing_is_frozen() -> None:
    assert "torch" in sys.modules
    before = gc.get_freeze_count()
    import_torch()
    assert gc.get_freeze_count() == before
    assert gc.isenabled()


def test_the_end_leaves_nothing_to_look_through(thawed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    retire_collector()
    assert gc.get_freeze_count() > 1000


def test_the_end_is_silent_where_triton_was_imported() -> None:
    pytest.importorskip("triton")
    script = (
        "from adapt_llm.cli.collector import import_torch, retire_collector\n"
        "import_torch()\nimport torch._dynamo, triton\nretire_collector()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
