"""A bundle on disk: its manifest, geometry and tensor stores.

Opening reads the manifest and config.json and compares file sizes; tensors are opened when first asked for, and
memory-mapped. Importing this module does not import torch. Knows no methods' maths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from ..errors import AccessError, FormatError, UsageError
from .json_text import parse_json
from .manifest import MANIFEST_NAME, REPAIR, FileRecord, Manifest, read_manifest
from .methods import Nvium, Rcla, River, TwoDee
from .progress import Reporter

if TYPE_CHECKING:
    from .architecture import Architecture
    from .store import ShardedStore, TensorStore
    from .tensors import Expected

BACKBONE = "model"
RIVER = "river"
ADAPTERS = "adapters"
JUNCTIONS = "junctions"
_PARTS = MappingProxyType(
    {RIVER: ("exit layers", "river"), ADAPTERS: ("classifiers", "2dee"), JUNCTIONS: ("junctions", "nvium")}
)
"""What a part is called, and the method that makes it."""
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. `cache_dir` is the Hub cache to look in for a backbone that is only referred to."""

    path: Path
    manifest: Manifest
    config: Mapping[str, Any]
    cache_dir: Path | None = field(default=None, compare=False)
    _stores: dict[str, "ShardedStore"] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        """Geometry of the backbone, with R-CLA's map.

        Raises UnsupportedError for a family that is not handled, FormatError where config.json is damaged, or the
        manifest speaks of another model. The tensors say whether the head is tied; configs in the wild are wrong at
        times.
        """
        from .architecture import Architecture, architecture_of  # noqa: PLC0415 - a manifest is read without torch

        try:
            architecture = architecture_of(self.config, self.stored(BACKBONE))
        except AccessError:  # not fetched: the config is all there is
            architecture = Architecture.from_config(self.config)
        for method in self.manifest.methods:
            if what := method.misfit(architecture.num_layers):
                raise FormatError(f"{MANIFEST_NAME} does not fit config.json: {what}", REPAIR)
        shared = self.manifest.method(Rcla)
        try:
            return architecture if shared is None else architecture.share(shared.sources)
        except UsageError as error:
            raise FormatError(f"{MANIFEST_NAME} does not fit config.json: {error.message}", REPAIR) from error

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
        """The 16-bit weights, by Hugging Face name. This and the other parts: all tensors are there, as they must be.

        Raises FormatError naming the file and the tensor that is not.
        """
        return self._checked(BACKBONE)

    @cached_property
    def river(self) -> "TensorStore":
        """The exit layers' packed tensors. Raises FormatError where the bundle has none, and as `backbone`."""
        return self._checked(RIVER)

    @cached_property
    def adapters(self) -> "TensorStore":
        """The classifiers' weights. Raises FormatError where the bundle has none, and as `backbone`."""
        return self._checked(ADAPTERS)

    @cached_property
    def junctions(self) -> "TensorStore":
        """Norms, adapters and routers of the exits. Raises FormatError where the bundle has none, and as `backbone`."""
        return self._checked(JUNCTIONS)

    def stored(self, part: str) -> "ShardedStore":
        """One part (`BACKBONE`, `RIVER`, …) as its files have it, whatever should be in them. Headers are read once."""
        store = self._stores.get(part)
        if store is None:
            store = self._stores[part] = self._open(part)
        return store

    def expected(self, part: str) -> "Expected":
        """Tensors that a part must hold; nothing for one that no method of the bundle has."""
        from . import tensors  # noqa: PLC0415 - torch

        arch, methods = self.architecture, self.manifest.method
        if part == BACKBONE:
            # Conversion writes into config.json whether there is a head of its own: one that is gone is missed.
            own_head = not type(arch).from_config(self.config).tied
            return tensors.backbone_tensors(replace(arch, tied=False) if own_head else arch)
        if part == RIVER and (river := methods(River)) is not None:
            return tensors.river_tensors(arch, river)
        if part == ADAPTERS and (classifiers := methods(TwoDee)) is not None:
            return tensors.adapter_tensors(arch, classifiers)
        if part == JUNCTIONS and (mixture := methods(Nvium)) is not None and mixture.has_tensors:
            return tensors.junctions_expected(arch, mixture)
        return {}

    def _checked(self, part: str) -> "TensorStore":
        from .tensors import check_present  # noqa: PLC0415 - torch

        store = self.stored(part)
        check_present(store, self.expected(part), part)
        self.check_index(part)
        return store

    def check_index(self, part: str) -> None:
        """Raise FormatError where the index of a part's files says something else than they do."""
        from .store import check_index  # noqa: PLC0415

        index = f"{part}.safetensors.index.json"
        if index in self.manifest.files:
            check_index(self.path / index, self.stored(part))

    def _open(self, part: str) -> "ShardedStore":
        from .store import open_files, open_safetensors  # noqa: PLC0415

        if part == BACKBONE:
            return open_safetensors(self.backbone_folder)
        paths = [self.path / name for name in self.weight_files(part)]
        if not paths:
            what, method = _PARTS[part]
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
        try:
            found = try_to_load_from_cache(base.id, name, cache_dir=self.cache_dir, revision=base.revision)
        except ValueError as error:
            raise FormatError(f"{MANIFEST_NAME}: base.id {base.id!r} is no name on the Hub", REPAIR) from error
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


def check_links(path: Path) -> None:
    """Raise UsageError naming the link, where a path is or goes through one that leads nowhere, or to itself."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink() and not part.exists():
            raise UsageError(f"{part} is a broken link, to {part.readlink()}", "Give the path of what it should be.")


def check_is_bundle(path: Path) -> None:
    """Raise UsageError, saying what the path is, when it is no bundle."""
    if (path / MANIFEST_NAME).is_file():
        return
    check_links(path)
    first = f"Make a bundle of it first: `adapt convert {path} --method river`."
    if (path / "config.json").is_file():
        raise UsageError(
            f"{path} is a Hugging Face model, not a bundle",
            f"{first} One that is quantised already (GPTQ) goes in with --river-from.",
        )
    if path.suffix == ".gguf" and path.is_file():
        raise UsageError(f"{path} is a GGUF file, not a bundle", first)
    if path.is_file() and (path.parent / MANIFEST_NAME).is_file():
        raise UsageError(f"{path} is a file of the bundle {path.parent}", f"Give the folder: {path.parent}")
    if not path.exists():
        raise UsageError(f"There is no bundle at {path}", "Make one with `adapt convert SOURCE --method river -o DIR`.")
    what = f"{path} is a file, not a bundle" if path.is_file() else f"{path} is not a bundle: it has no {MANIFEST_NAME}"
    raise UsageError(what, "Give the folder that `adapt convert` wrote.")


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
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}", REPAIR) from error
    if not isinstance(data, dict):
        raise FormatError(f"{path} is not a JSON object", REPAIR)
    return data
