"""A bundle on disk: its manifest, geometry and tensor stores.

Opening reads the manifest and config.json and compares file sizes; tensors are opened when first asked for, and
memory-mapped. Importing this module does not import torch. Knows no methods' maths.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..errors import AccessError, FormatError, UsageError
from .manifest import MANIFEST_NAME, FileRecord, Manifest, read_manifest
from .methods import Rcla
from .progress import Reporter

if TYPE_CHECKING:
    from .architecture import Architecture
    from .store import TensorStore

BACKBONE = "model"
RIVER = "river"
ADAPTERS = "adapters"
JUNCTIONS = "junctions"
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. `cache_dir` is the Hub cache to look in for a backbone that is only referred to."""

    path: Path
    manifest: Manifest
    config: Mapping[str, Any]
    cache_dir: Path | None = field(default=None, compare=False)

    @classmethod
    def open(cls, path: Path, *, cache_dir: Path | None = None, reporter: Reporter | None = None) -> Self:
        """Open a folder as a bundle.

        Raises UsageError (no bundle there), FormatError (damaged or incomplete), UnsupportedError (made by a newer
        adapt).
        """
        check_is_bundle(path)
        manifest = read_manifest(path / MANIFEST_NAME, reporter=reporter)
        for name, record in manifest.files.items():
            check_size(path / name, record)
        return cls(path, manifest, _read_json(path / "config.json"), cache_dir)

    @cached_property
    def architecture(self) -> "Architecture":
        """Geometry of the backbone, with R-CLA's map. Raises UnsupportedError for a family that is not handled.

        The tensors say whether the head is tied; configs in the wild are wrong at times.
        """
        from .architecture import Architecture, architecture_of  # noqa: PLC0415 - a manifest is read without torch

        try:
            architecture = architecture_of(self.config, self.backbone)
        except AccessError:  # not fetched: the config is all there is
            architecture = Architecture.from_config(self.config)
        shared = self.manifest.method(Rcla)
        return architecture if shared is None else architecture.share(shared.sources)

    @cached_property
    def backbone_folder(self) -> Path:
        """Where the 16-bit weights are. Raises AccessError where they are referred to and not in the Hub cache."""
        if self.manifest.backbone.mode != "reference":
            return self.path
        folders = {self._cached(name, record).parent for name, record in self.manifest.backbone.files.items()}
        if len(folders) != 1:
            raise self._not_cached("its files lie in several folders")
        return folders.pop()

    @cached_property
    def backbone(self) -> "TensorStore":
        """The 16-bit weights, by Hugging Face name."""
        from .store import open_safetensors  # noqa: PLC0415

        return open_safetensors(self.backbone_folder)

    @cached_property
    def river(self) -> "TensorStore":
        """The exit layers' packed tensors. Raises FormatError where the bundle has none."""
        return self._part(RIVER, "exit layers", "river")

    @cached_property
    def adapters(self) -> "TensorStore":
        """The classifiers' weights. Raises FormatError where the bundle has none."""
        return self._part(ADAPTERS, "classifiers", "2dee")

    @cached_property
    def junctions(self) -> "TensorStore":
        """Norms, adapters and routers of the exits. Raises FormatError where the bundle has none."""
        return self._part(JUNCTIONS, "junctions", "nvium")

    def _part(self, stem: str, what: str, method: str) -> "TensorStore":
        from .store import open_files  # noqa: PLC0415

        paths = [self.path / name for name in self.weight_files(stem)]
        if not paths:
            raise FormatError(f"{self.path} has no {what}", f"Convert again with --method {method}.")
        return open_files(paths)

    @property
    def text_files(self) -> dict[str, Path]:
        """config.json, tokenizer files, template, licence…: name -> path."""
        return {name: self.path / name for name in self.manifest.files if not name.endswith(_WEIGHTS)}

    def weight_files(self, stem: str) -> dict[str, FileRecord]:
        """The safetensors files of one part (`BACKBONE`, `RIVER`, …): name -> record, sorted by name."""
        files = {**self.manifest.files, **self.manifest.backbone.files}
        return {name: files[name] for name in sorted(files) if name.startswith(stem) and name.endswith(".safetensors")}

    def weight_bytes(self, stem: str) -> int:
        """Bytes on disk of one part's safetensors files."""
        return sum(record.bytes for record in self.weight_files(stem).values())

    def _cached(self, name: str, record: FileRecord) -> Path:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - only bundles that refer to the Hub's cache

        base = self.manifest.base
        found = try_to_load_from_cache(base.id, name, cache_dir=self.cache_dir, revision=base.revision)
        if not isinstance(found, str) or not Path(found).exists():
            raise self._not_cached(f"{name} is missing")
        path = Path(found)
        check_size(path, record)
        # The cache names a large file's blob by its sha256, and checked that when it came.
        blob = path.resolve().name
        if len(blob) == len(record.sha256) and blob != record.sha256:
            raise self._not_cached(f"{name} is another file")
        return path

    def _not_cached(self, what: str) -> AccessError:
        base = self.manifest.base
        at = f" --revision {base.revision}" if base.revision else ""
        return AccessError(
            f"The backbone {base.id} of {self.path} is not in the Hub cache: {what}",
            f"Fetch it with `hf download {base.id}{at}`, or convert again with --backbone copy.",
        )


def check_is_bundle(path: Path) -> None:
    """Raise UsageError, saying what the path is, when it is no bundle."""
    if (path / MANIFEST_NAME).is_file():
        return
    first = f"Make a bundle of it first: `adapt convert {path} --method river`."
    if (path / "config.json").is_file():
        raise UsageError(f"{path} is a Hugging Face model, not a bundle", first)
    if path.suffix == ".gguf" and path.is_file():
        raise UsageError(f"{path} is a GGUF file, not a bundle", first)
    if not path.exists():
        raise UsageError(f"There is no bundle at {path}", "Make one with `adapt convert SOURCE --method river -o DIR`.")
    raise UsageError(f"{path} is not a bundle: it has no {MANIFEST_NAME}", first)


def check_size(path: Path, record: FileRecord) -> None:
    """Raise FormatError where a file is missing or has not the recorded size."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise FormatError(f"{path} is missing", "Fetch the bundle again.") from error
    if size != record.bytes:
        raise FormatError(f"{path} has {size} bytes, not {record.bytes}", "Fetch the bundle again.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}", "Fetch the bundle again.") from error
    if not isinstance(data, dict):
        raise FormatError(f"{path} is not a JSON object", "Fetch the bundle again.")
    return data
