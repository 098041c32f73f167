"""torch's library is there before torch is imported, Python runs on meanwhile, and what is wrong changes nothing."""

import importlib.machinery
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from adapt_llm.cli import preload
from adapt_llm.cli.preload import torch_libraries, torch_preloading

SAY = """
import sys
def say():
    with open("/proc/self/maps", encoding="utf-8") as maps:
        print("mapped" if "/libtorch_cpu.so" in maps.read() else "not mapped", "torch" in sys.modules)
"""
"""A child's first lines: say whether the library is mapped, and whether torch is imported."""


@pytest.fixture(scope="module")
def bundle(bundle_factory: ModuleType, toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle_factory.bundle(toy_model, tmp_path_factory.mktemp("preload") / "toy-river")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch's libraries, as far as anyone can see: files that no loader takes. And no torch is imported."""
    libraries = tmp_path / "torch" / "lib"
    libraries.mkdir(parents=True)
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so", "libc10.so"):
        (libraries / name).write_bytes(b"no library")
    found = importlib.machinery.ModuleSpec("torch", None, origin=str(libraries.parent / "__init__.py"))
    monkeypatch.setattr(preload, "find_spec", lambda _: found)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("TORCH_USE_RTLD_GLOBAL", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return libraries


def child(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", SAY + script, *map(str, args)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def _preloads() -> None:
    """Skip where this machine's torch is none that is mapped ahead."""
    if child("from adapt_llm.cli.preload import torch_libraries\nprint(torch_libraries())").stdout == "None\n":
        pytest.skip("torch is not a CPU build for Linux")


@pytest.mark.usefixtures("_preloads")
def test_the_library_is_there_before_torch_and_torch_takes_it() -> None:
    script = (
        "from adapt_llm.cli.preload import torch_preloading\n"
        "say()\n"
        "with torch_preloading(): pass\n"
        "say()\n"
        "import torch\n"
        "print(int(torch.ones(3).sum()))\n"
        "with open('/proc/self/maps', encoding='utf-8') as maps:\n"
        "    print(len({line.split()[-1] for line in maps if '/libtorch_cpu.so' in line}))\n"
    )
    run = child(script)
    assert run.stdout.splitlines() == ["not mapped False", "mapped False", "3", "1"], run.stderr


@pytest.mark.usefixtures("_preloads")
def test_an_error_meanwhile_waits_for_the_thread() -> None:
    script = (
        "import threading\n"
        "from adapt_llm.cli.preload import torch_preloading\n"
        "try:\n"
        "    with torch_preloading(): raise ValueError\n"
        "except ValueError: say()\n"
        "print(threading.active_count())\n"
    )
    run = child(script)
    assert run.stdout.splitlines() == ["mapped False", "1"], run.stderr


@pytest.mark.usefixtures("_preloads")
@pytest.mark.parametrize("opening", ["open_session", "open_classifier"])
def test_opening_a_model_maps_it_while_the_tokenizer_is_read(bundle: Path, opening: str) -> None:
    script = (
        "from pathlib import Path\n"
        "from adapt_llm.cli import services\n"
        "def import_torch(*_):\n"
        "    say()\n"
        "    raise SystemExit(7)\n"
        "services.import_torch = import_torch\n"
        "from adapt_llm.runtime.text import Tokenizer\n"
        "load = Tokenizer.load\n"
        "def loaded(path):\n"
        "    print('tokenizer')\n"
        "    return load(path)\n"
        "Tokenizer.load = loaded\n"
        f"services.{opening}(Path(sys.argv[1]), {{}}, None)\n"
    )
    run = child(script, bundle)
    assert (run.returncode, run.stdout.splitlines()) == (7, ["tokenizer", "mapped False"]), run.stderr


@pytest.mark.parametrize(
    ("args", "code"), [(["--help"], 0), (["--version"], 0), (["run", "--help"], 0), (["run", "no-bundle", "Hi"], 2)]
)
def test_what_needs_no_torch_maps_nothing(args: list[str], code: int) -> None:
    script = (
        "import atexit, threading\n"
        "atexit.register(say)\n"
        "started = threading.Thread.start\n"
        "def start(thread):\n"
        "    print('a thread')\n"
        "    started(thread)\n"
        "threading.Thread.start = start\n"
        "from adapt_llm.cli.app import main\n"
        "main()\n"
    )
    run = child(script, *args)
    assert run.returncode == code
    assert run.stdout.splitlines()[-1] == "not mapped False"
    assert "a thread" not in run.stdout


@pytest.mark.usefixtures("_preloads")
def test_a_tokenizer_that_is_refused_ends_the_program_as_ever(unreadable_tokenizer: Path) -> None:
    script = "import atexit\natexit.register(say)\nfrom adapt_llm.cli.app import main\nmain()"
    run = child(script, "run", unreadable_tokenizer, "Hi")
    assert run.returncode == 1
    assert run.stdout == "mapped False\n"
    assert "cannot be read as a tokenizer" in run.stderr
    assert run.stderr.count("\n") == 1


def test_libraries_that_cannot_be_loaded_are_left_to_the_import(folder: Path) -> None:
    assert torch_libraries() == folder
    with torch_preloading():
        done = True
    assert done
    (folder / "libtorch_global_deps.so").unlink()
    with torch_preloading():
        done = False
    assert not done


@pytest.mark.usefixtures("_preloads")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_python_runs_on_meanwhile(tmp_path: Path) -> None:
    """The library is a pipe: the loader waits for bytes that only the other thread can write."""
    script = (
        "import os\n"
        "from pathlib import Path\n"
        "from adapt_llm.cli import preload\n"
        "folder = Path(sys.argv[1])\n"
        "(folder / 'libtorch_global_deps.so').symlink_to(preload.torch_libraries() / 'libtorch_global_deps.so')\n"
        "os.mkfifo(folder / 'libtorch_cpu.so')\n"
        "preload.torch_libraries = lambda: folder\n"
        "with preload.torch_preloading():\n"
        "    with (folder / 'libtorch_cpu.so').open('wb') as pipe: pipe.write(b'no library')\n"
        "    print('ran on')\n"
    )
    run = child(script, tmp_path)
    assert run.stdout == "ran on\n", run.stderr


def test_nothing_happens_where_torch_is_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert torch_libraries() is None
    before = threading.active_count()
    with torch_preloading():
        assert threading.active_count() == before


def test_nothing_happens_without_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "find_spec", lambda _: None)
    assert torch_libraries() is None
    monkeypatch.setattr(preload, "find_spec", lambda _: importlib.machinery.ModuleSpec("torch", None))
    assert torch_libraries() is None
    with torch_preloading():
        assert "torch" not in sys.modules


def test_nothing_happens_where_torch_looks_for_other_libraries_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libc10_cuda.so", "libc10_hip.so", "libc10_xpu.so"):
        (folder / name).touch()
        assert torch_libraries() is None
        (folder / name).unlink()
    assert torch_libraries() == folder
    monkeypatch.setenv("TORCH_USE_RTLD_GLOBAL", "1")
    assert torch_libraries() is None
    monkeypatch.delenv("TORCH_USE_RTLD_GLOBAL")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert torch_libraries() is None


def test_nothing_happens_without_the_library(folder: Path) -> None:
    (folder / "libtorch_cpu.so").unlink()
    assert torch_libraries() is None
