"""The program with a session that has no model: in this process, or as another one."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from adapt_llm.cli import services
from adapt_llm.cli.app import app

SCRIPT = Path(__file__).with_name("fake_session.py")
CLASSIFIER = Path(__file__).with_name("fake_classifier.py")
Invoke = Callable[..., tuple[int, str, str]]


def _load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def bundle_factory() -> ModuleType:
    return _load(Path(__file__).parents[1] / "bundle_factory.py")


@pytest.fixture(scope="session")
def toy_model(bundle_factory: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random model of four blocks to which every byte is a token."""
    model = bundle_factory.model_folder(tmp_path_factory.mktemp("toy") / "model", vocab_size=264)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(model / "tokenizer.json"))
    return model


@pytest.fixture
def fakes() -> ModuleType:
    return _load(SCRIPT)


@pytest.fixture
def adapt(monkeypatch: pytest.MonkeyPatch, fakes: ModuleType) -> Invoke:
    """Run a command line; returns exit code, stdout and stderr."""
    for name, fake in fakes.PATCHES.items():
        monkeypatch.setattr(services, name, fake)

    def invoke(*args: object, stdin: str | bytes | None = None) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[Path, str, bytes | None], Path]:
    """Copy a bundle with other bytes in one of its files, or without that file; the others are links."""

    def copy(bundle: Path, name: str, data: bytes | None) -> Path:
        folder = tmp_path / "damaged"
        folder.mkdir()
        for file in bundle.iterdir():
            if file.name != name:
                os.link(file, folder / file.name)
        if data is not None:
            (folder / name).write_bytes(data)
        return folder

    return copy


@pytest.fixture
def unreadable_tokenizer(bundle: Path, damaged: Callable[[Path, str, bytes | None], Path]) -> Path:
    """Return a bundle whose tokenizer is no tokenizer, of the size that the manifest says."""
    return damaged(bundle, "tokenizer.json", b"[" * (bundle / "tokenizer.json").stat().st_size)


@pytest.fixture
def program() -> list[str]:
    """Return the beginning of a command line that runs the program in another process."""
    return [sys.executable, str(SCRIPT)]


@pytest.fixture
def fake() -> ModuleType:
    """Return the module of the classifier without a model."""
    return _load(CLASSIFIER)


@pytest.fixture
def opened(fake: ModuleType) -> Any:
    return fake.open_classifier(Path("b"), {}, None)


@pytest.fixture
def classify(adapt: Invoke, fake: ModuleType, opened: Any, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """`adapt` with that classifier; `opened` is the one that it uses."""
    for name, value in fake.PATCHES.items():
        monkeypatch.setattr(services, name, value)
    monkeypatch.setattr(services, "open_classifier", lambda *_: opened)
    return adapt


@pytest.fixture
def classify_program() -> list[str]:
    """Return `program` with that classifier."""
    return [sys.executable, str(CLASSIFIER)]
