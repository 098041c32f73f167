"""Makes tests/bundle_factory.py a fixture: test folders are no packages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_FACTORY = Path(__file__).parents[1] / "bundle_factory.py"


@pytest.fixture(scope="session")
def factory() -> ModuleType:
    name = "bundle_factory"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _FACTORY)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def source(factory: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factory.model_folder(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="session")
def built(factory: ModuleType, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests read; those that change one copy it first."""
    return factory.bundle(source, tmp_path_factory.mktemp("built") / "tiny-river")
