"""The package that is installed is the tree that is read: packages, wheel, import contract, size budget."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cli", "convert", "quant", "runtime")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_packages_list_is_the_tree() -> None:
    folders = {path.parent.relative_to(ROOT) for path in SOURCES}
    expected = {"adapt_llm"} | {".".join(("adapt_llm", *folder.parts)) for folder in folders}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == expected
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


def test_only_known_modules_lie_at_the_root() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_house_budget(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= 300, "split the file by what its parts know"
    assert ast.get_docstring(tree), "say in the first lines what the module is and what it must not know"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            start = node.body[0].lineno  # a command's options are data and stand in its signature
            assert node.end_lineno - start < 60, f"{node.name} is too long"


def test_no_pickle_and_no_remote_code() -> None:
    forbidden = ("import pickle", "torch.load(", "trust_remote_code=True", "eval(", "exec(")
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not [word for word in forbidden if f" {word}" in text or text.startswith(word)], path


@pytest.mark.slow
def test_wheel_installs_and_answers(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("adapt_llm-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if not name.startswith("adapt_llm")]
    assert {"adapt_llm/py.typed", "adapt_llm/convert/calibration.txt", "adapt_llm/cli/app.py"} <= set(names)
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    run = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, sys.argv.pop()); from adapt_llm.cli.app import main; main()",
    ]
    answer = subprocess.run([*run, "--version", str(target)], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert answer.stdout.split() == ["adapt", "0.1.0"]
