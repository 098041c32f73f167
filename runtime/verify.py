"""Is a bundle what its manifest says: every file, every tensor, and what a self-check adds.

Collects all problems instead of stopping at the first. Knows no exit codes; prints nothing.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import AdaptError
from .bundle import ADAPTERS, BACKBONE, JUNCTIONS, RIVER, Bundle, check_is_bundle
from .manifest import MANIFEST_NAME, FileRecord, Manifest, read_manifest
from .progress import Reporter
from .store import ShardedStore, TensorStore
from .tensors import Expected, differences

SelfCheck = Callable[[Bundle], Sequence[str]]
"""Runs the bundle and returns what it finds wrong."""

_CHUNK = 8 << 20
_PARTS = MappingProxyType({BACKBONE: "backbone", RIVER: "river", ADAPTERS: "adapters", JUNCTIONS: "junctions"})
"""What the weight files of a part are called where something is wrong with them."""


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
    part, tensors = MANIFEST_NAME, 0
    try:
        bundle = Bundle.open(path, cache_dir=cache_dir)
        part = "config.json"
        _ = bundle.architecture
        part = "backbone"
        problems = list(_referred(bundle, reporter))
        for stem, part in _PARTS.items():
            expected = bundle.expected(stem)
            if expected:
                store = bundle.stored(stem)
                found = _tensors(part, store, expected) or _index(bundle, stem, part)
                if stem != BACKBONE and not found:  # the self-check runs all of the backbone, not every exit layer
                    found = list(_not_finite(store))
                problems += found
                tensors += len(store.names())
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


def _tensors(part: str, store: TensorStore, expected: Expected) -> list[Problem]:
    foreign = [Problem(part, f"{name} does not belong here") for name in sorted(set(store.names()) - expected.keys())]
    return [*foreign, *(Problem(part, f"{name} {what}") for name, what in differences(store, expected))]


def _not_finite(store: ShardedStore) -> Iterator[Problem]:
    """Scales, classifiers and the like that no computation could have meant, one tensor in memory at a time."""
    for name in sorted(store.names()):
        if store.info(name).dtype.is_floating_point:
            if not bool(store.read(name).isfinite().all()):
                yield Problem(store.file_of(name), f"tensor {name} holds numbers that are not finite")
            store.release(name)


def _index(bundle: Bundle, stem: str, part: str) -> list[Problem]:
    try:
        bundle.check_index(stem)
    except AdaptError as error:
        return [Problem(part, str(error))]
    return []
