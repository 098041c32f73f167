"""Is a bundle what its manifest says: every file, every tensor, and what a self-check adds.

Collects all problems instead of stopping at the first. Knows no exit codes; prints nothing.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import AdaptError
from ..quant.layout import choose_group_size, packed_shapes
from .adapters import adapter_shapes
from .architecture import Architecture
from .bundle import Bundle, check_is_bundle
from .junctions import junction_tensors
from .manifest import MANIFEST_NAME, FileRecord, Manifest, read_manifest
from .methods import Nvium, River, TwoDee
from .progress import Reporter
from .store import TensorStore

SelfCheck = Callable[[Bundle], Sequence[str]]
"""Runs the bundle and returns what it finds wrong."""

_CHUNK = 8 << 20
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
Expected = Mapping[str, tuple[frozenset[torch.dtype], tuple[int, ...]]]


@dataclass(frozen=True)
class Problem:
    """Something that differs, and the file (or part) it is in."""

    file: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """What was looked at, and what was wrong with it."""

    files: int
    tensors: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Nothing differs."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The keys of `verify --json`."""
        return {
            "ok": self.ok,
            "files": self.files,
            "tensors": self.tensors,
            "problems": [asdict(problem) for problem in self.problems],
        }


def verify(
    path: Path, *, reporter: Reporter, self_check: SelfCheck | None = None, cache_dir: Path | None = None
) -> Verdict:
    """Check a bundle. Raises UsageError where the path is no bundle at all; all else is a problem in the verdict.

    Files come first; tensors are looked at when the files are there, and `self_check` runs when all else is right.
    """
    check_is_bundle(path)
    try:
        manifest = read_manifest(path / MANIFEST_NAME, reporter=reporter)
    except AdaptError as error:
        return Verdict(0, 0, (Problem(MANIFEST_NAME, str(error)),))
    problems = list(_files(path, manifest, reporter))
    tensors = 0
    if not any(problem.what in (_MISSING, _SHORT) for problem in problems):
        tensors, more = _opened(path, cache_dir, reporter, self_check if not problems else None)
        problems += more
    count = len(manifest.files) + len(manifest.backbone.files)
    return Verdict(count, tensors, tuple(problems))


_MISSING = "is missing"
_SHORT = "has another size than recorded"
_CHANGED = "has another sha256 than recorded"


def _files(path: Path, manifest: Manifest, reporter: Reporter) -> Iterator[Problem]:
    with reporter.task("Check the files", sum(record.bytes for record in manifest.files.values())) as task:
        for name, record in manifest.files.items():
            if what := _compare(path / name, record):
                yield Problem(name, what)
            task.advance(record.bytes)
    known = {MANIFEST_NAME, *manifest.files}
    found = (item.relative_to(path) for item in path.rglob("*") if not item.is_dir())
    # Hidden files (.gitattributes, the Hub's .cache) come with being stored somewhere; nothing here reads them.
    plain = (item.as_posix() for item in found if not any(part.startswith(".") for part in item.parts))
    for name in sorted(name for name in plain if name not in known):
        yield Problem(name, "is not in the manifest")


def _compare(path: Path, record: FileRecord) -> str:
    """What is wrong with a file, or nothing."""
    if not path.is_file():
        return _MISSING
    if path.stat().st_size != record.bytes:
        return _SHORT
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return "" if digest.hexdigest() == record.sha256 else _CHANGED


def _opened(
    path: Path, cache_dir: Path | None, reporter: Reporter, self_check: SelfCheck | None
) -> tuple[int, list[Problem]]:
    """Number of tensors, and the problems of everything that needs the bundle to be open."""
    part = MANIFEST_NAME
    try:
        bundle = Bundle.open(path, cache_dir=cache_dir)
        part = "config.json"
        architecture = bundle.architecture
        part = "backbone"
        problems = [*_referred(bundle, reporter), *_tensors(part, bundle.backbone, backbone_tensors(architecture))]
        tensors = len(bundle.backbone.names())
        if (river := bundle.manifest.method(River)) is not None:
            part = "river"
            problems += _tensors(part, bundle.river, river_tensors(architecture, river))
            tensors += len(bundle.river.names())
        if (classifiers := bundle.manifest.method(TwoDee)) is not None:
            part = "adapters"
            problems += _tensors(part, bundle.adapters, adapter_tensors(architecture, classifiers))
            tensors += len(bundle.adapters.names())
        mixture = bundle.manifest.method(Nvium)
        if mixture is not None and mixture.has_tensors:
            part = "junctions"
            problems += _tensors(part, bundle.junctions, junctions_expected(architecture, mixture))
            tensors += len(bundle.junctions.names())
        if self_check is not None and not problems:
            part = "self-check"
            problems += [Problem(part, what) for what in self_check(bundle)]
    except AdaptError as error:
        return 0, [Problem(part, str(error))]
    return tensors, problems


def _referred(bundle: Bundle, reporter: Reporter) -> Iterator[Problem]:
    files = bundle.manifest.backbone.files
    with reporter.task("Check the backbone", sum(record.bytes for record in files.values())) as task:
        for name, record in files.items():
            if what := _compare(bundle.backbone_folder / name, record):
                yield Problem(name, what)
            task.advance(record.bytes)


def backbone_tensors(architecture: Architecture) -> Expected:
    """What the backbone must hold: name -> (dtypes allowed, shape)."""
    return {name: (_FLOATS, shape) for name, shape in architecture.tensors().items()}


def river_tensors(architecture: Architecture, river: River) -> Expected:
    """What the exit layers must hold: name -> (dtypes allowed, shape)."""
    expected: dict[str, tuple[frozenset[torch.dtype], tuple[int, ...]]] = {}
    for layer in river.exit_layers:
        for name, (N, K) in architecture.block_matrices(layer - 1).items():
            size = choose_group_size(K, river.group_size)
            for suffix, (dtype, shape) in packed_shapes(N, K, size, river.float_zeros).items():
                expected[f"{name.removesuffix('weight')}{suffix}"] = (frozenset({dtype}), shape)
    return expected


def adapter_tensors(architecture: Architecture, settings: TwoDee) -> Expected:
    """What the classifiers must hold: name -> (dtypes allowed, shape)."""
    shapes = adapter_shapes(
        architecture.num_layers,
        inputs=architecture.hidden_size,
        width=settings.hidden,
        classes=len(settings.labels),
    )
    return {name: (frozenset({torch.float32}), shape) for name, shape in shapes.items()}


def junctions_expected(architecture: Architecture, settings: Nvium) -> Expected:
    """What the junctions must hold: name -> (dtypes allowed, shape)."""
    shapes = junction_tensors(
        architecture,
        len(settings.junctions),
        width=settings.router_width,
        final_adapter=settings.final_adapter,
    )
    return {name: (frozenset({torch.float32}), shape) for name, shape in shapes.items()}


def _tensors(part: str, store: TensorStore, expected: Expected) -> Iterator[Problem]:
    names = set(store.names())
    for name in sorted(expected.keys() - names):
        yield Problem(part, f"{name} is missing")
    for name in sorted(names - expected.keys()):
        yield Problem(part, f"{name} does not belong here")
    for name in sorted(expected.keys() & names):
        info, (dtypes, shape) = store.info(name), expected[name]
        if tuple(info.shape) != shape:
            yield Problem(part, f"{name} has shape {tuple(info.shape)}, not {shape}")
        elif info.dtype not in dtypes:
            allowed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            yield Problem(part, f"{name} is {str(info.dtype).removeprefix('torch.')}, not {allowed}")
