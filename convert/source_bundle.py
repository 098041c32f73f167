"""A bundle as the source of another: its backbone, its methods, and where its weights lie.

Knows the bundle's files; which methods go on top of which is not its business.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.architecture import Architecture
from ..runtime.bundle import BACKBONE, Bundle
from ..runtime.progress import Reporter
from .source_directory import read_json
from .source_identity import SourceIdentity, fingerprint, index_sha256

if TYPE_CHECKING:
    from ..runtime.store import TensorStore


class BundleSource:
    """An opened bundle. Raises what `Bundle.open` raises."""

    def __init__(self, folder: Path, *, cache_dir: Path | None = None, reporter: Reporter | None = None) -> None:
        self.bundle = Bundle.open(folder, cache_dir=cache_dir, reporter=reporter)
        self.config: dict[str, Any] = dict(self.bundle.config)
        self.store: TensorStore = self.bundle.backbone
        self.weight_files = tuple(self.bundle.backbone_folder / name for name in self.bundle.weight_files(BACKBONE))
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else None
        base = self.bundle.manifest.base
        index = base.index_sha256 or index_sha256(self.store, self.weight_files)
        self.identity = SourceIdentity(base.id, base.revision, base.config_sha256, index)

    @property
    def architecture(self) -> Architecture:
        """See `Source.architecture`."""
        return self.bundle.architecture

    def text_files(self) -> dict[str, bytes | Path]:
        """See `Source.text_files`."""
        configs = ("config.json", "generation_config.json")
        return {name: path for name, path in self.bundle.text_files.items() if name not in configs}

    def fingerprint(self) -> str:
        """See `Source.fingerprint`."""
        manifest = self.bundle.path / "adapt.json"
        return fingerprint(self.identity, self.weight_files, {**self.text_files(), manifest.name: manifest})
