"""Fixtures of every room: tiny models against transformers, real models where they are, no network, no colour."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]


class Models:
    """Real models: folders by name under ADAPT_MODELS or .models. A missing one skips the test, saying so."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            pytest.skip(f"needs {path}: run `python tests/fetch_models.py`, or set ADAPT_MODELS")
        return path


def _load(path: Path) -> ModuleType:
    """Test folders are no packages: a helper module is loaded by its path, once."""
    name = f"adapt_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_configure() -> None:
    """Let Ctrl-C reach the programs that tests start: a shell's background jobs are begun with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def models() -> Models:
    return Models(Path(os.environ.get("ADAPT_MODELS") or REPOSITORY / ".models"))


@pytest.fixture(scope="session")
def interpreted() -> Callable[[Path], None]:
    """Run a file of tests with Triton's interpreter, in a process of its own; none may fail or be skipped."""

    def run(file: Path) -> None:
        found = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
        assert " passed" in found.stdout
        assert "skipped" not in found.stdout

    return run


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """tests/oracle/tiny.py: the families, and how a tiny random model of each is made."""
    return _load(REPOSITORY / "tests" / "oracle" / "tiny.py")


@pytest.fixture(scope="session")
def tiny_model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    """Name of a case in tiny.CASES -> TinyModel (folder, transformers' model, our decoder), made once."""
    made: dict[str, object] = {}

    def get(name: str) -> object:
        if name not in made:
            made[name] = tiny.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(params=[1, 3], ids=["one thread", "a team"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch's threads, which native calls use, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a connection fails the test."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a socket was opened offline")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Random tensors are the same in every run, and a test leaves the generator as it found it."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
