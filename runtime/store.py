"""Named tensors on disk: safetensors folders, memory-mapped, one tensor at a time.

Says exactly what is wrong with an incomplete folder. Knows no models.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ..errors import FormatError
from .json_text import parse_json
from .safetensors_file import DTYPES, SafetensorsFile, TensorInfo, read_header

__all__ = [
    "DTYPES",
    "RenamedStore",
    "SafetensorsFile",
    "ShardedStore",
    "TensorInfo",
    "TensorStore",
    "check_index",
    "check_tensors",
    "is_tied",
    "open_files",
    "open_safetensors",
    "read_header",
    "text_backbone",
    "weight_map",
]


class TensorStore(Protocol):
    """Tensors by name, read one at a time."""

    def names(self) -> Collection[str]:
        """Every name."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype; KeyError for an unknown name."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor. It may share a read-only mapping of the file: do not write to it."""
        ...

    def release(self, name: str) -> None:
        """The tensor is not needed for now: its pages may leave memory. What was read stays valid."""
        ...


class ShardedStore:
    """Several files under one set of names."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self._files = files

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._files.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`."""
        return self._files[name].info(name)

    def read(self, name: str) -> Tensor:
        """See `TensorStore.read`."""
        return self._files[name].read(name)

    def release(self, name: str) -> None:
        """See `TensorStore.release`."""
        self._files[name].release(name)

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor, "" for an unknown one."""
        return self._files[name].path.name if name in self._files else ""

    def files(self) -> list[str]:
        """Names of the files that hold tensors, sorted."""
        return sorted({file.path.name for file in self._files.values()})


class RenamedStore:
    """Some of another store's tensors under other names: `renamed` maps the new name to the stored one."""

    def __init__(self, store: TensorStore, renamed: Mapping[str, str]) -> None:
        self._store = store
        self._renamed = renamed

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._renamed.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`."""
        return self._store.info(self._renamed[name])

    def read(self, name: str) -> Tensor:
        """See `TensorStore.read`."""
        return self._store.read(self._renamed[name])

    def release(self, name: str) -> None:
        """See `TensorStore.release`."""
        self._store.release(self._renamed[name])


def open_safetensors(folder: Path) -> ShardedStore:
    """Open model.safetensors, or the shards that model.safetensors.index.json names, or every shard of the folder.

    Headers are read, data is not. Raises FormatError when a file is missing, cut short, or no safetensors file.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _open_indexed(folder, _read_index(index))
    single = folder / "model.safetensors"
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if single.is_file():
        if shards:  # one of the two is stale, and nothing says which
            what = f"{folder} has both {single.name} and {shards[0].name}, and no index that says which to take"
            raise FormatError(what, "Remove the stale one.")
        return open_files([single])
    if not shards:
        raise FormatError(f"{folder} has no model.safetensors", "Download the model's weights into it.")
    _check_complete(shards)
    return open_files(shards)


def check_index(index: Path, store: ShardedStore) -> None:
    """Raise FormatError where an index does not say which file holds which tensor: other programs go by it."""
    weights = _read_index(index)
    wrong = sorted(name for name in weights.keys() | store.names() if weights.get(name) != store.file_of(name))
    if wrong:
        raise FormatError(f"{index.name} does not say where {wrong[0]} is", "Fetch the bundle again.")


def open_files(paths: Collection[Path]) -> ShardedStore:
    """Open these files as one store; FormatError when two of them hold a tensor of one name."""
    files: dict[str, SafetensorsFile] = {}
    origin: dict[str, str] = {}
    for path in paths:
        file = SafetensorsFile(path)
        for name in file.names():
            if name in files:
                raise FormatError(f"{name} is in {origin[name]} and again in {path.name}", "Remove the stale file.")
            files[name], origin[name] = file, path.name
    return ShardedStore(files)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index: object = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path.name} is no index of shards", "Download it again.") from error
    return weight_map(index, path.name)


def weight_map(index: object, name: str) -> dict[str, str]:
    """Tensor -> shard, as the index called `name` says. Raises FormatError for anything but a table of names."""
    weights = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(weights, Mapping) or not all(shard and isinstance(shard, str) for shard in weights.values()):
        raise FormatError(f"{name} is no index of shards: its weight_map does not name files", "Download it again.")
    return dict(weights)


def _open_indexed(folder: Path, weights: Mapping[str, str]) -> ShardedStore:
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weights.values())):
        if Path(shard).name != shard:
            raise FormatError(
                f"The index of {folder.name} points outside its folder: {shard}", "Do not use this model."
            )
        if not (folder / shard).is_file():
            raise FormatError(f"{shard} is missing, the index names it", "Download the model again.")
        shards[shard] = SafetensorsFile(folder / shard)
    for name, shard in weights.items():
        if name not in shards[shard].names():
            raise FormatError(f"{shard} has no tensor {name}, the index puts it there", "Download the shard again.")
    _refuse_duplicates(shards, weights)
    return ShardedStore({name: shards[shard] for name, shard in weights.items()})


def _refuse_duplicates(shards: Mapping[str, SafetensorsFile], weights: Mapping[str, str]) -> None:
    for name, shard in _stored(shards):
        if weights.get(name, shard) != shard:
            raise FormatError(f"{name} is in {weights[name]} and again in {shard}", "Download the model again.")


def _stored(shards: Mapping[str, SafetensorsFile]) -> Iterator[tuple[str, str]]:
    for shard, file in shards.items():
        for name in file.names():
            yield name, shard


def _check_complete(paths: Collection[Path]) -> None:
    """Shards without an index: their names say how many there should be."""
    ends = [path.stem.rsplit("-of-", 1)[1] for path in paths]
    expected = {int(end) for end in ends if end.isascii() and end.isdecimal()}
    if expected != {len(paths)}:
        raise FormatError(f"{len(paths)} shards, their names say {max(expected, default=0)}", "Download the rest.")


# What older exporters stored beside the weights and nothing reads: rotation tables, masks, scales of a quantised cache.
HARMLESS = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".self_attn.k_scale",
    ".self_attn.v_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHOWN = 4  # names in a message; the rest is counted


def check_tensors(store: TensorStore, expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> list[str]:
    """Raise FormatError when a tensor is missing, left over, or misshapen, naming the first few.

    `expected` is `Architecture.tensors()`. The tensors, not the config's `tied`, decide whether there is a head of its
    own (see `is_tied`). Returns what the user should know, one sentence each.
    """
    names = {name for name in store.names() if not name.endswith(HARMLESS)}
    allowed = dict(expected)
    if EMBEDDING in expected:
        allowed[HEAD] = expected[EMBEDDING]
    problems = [
        ("The model lacks", sorted(expected.keys() - names - {HEAD})),
        ("The model has tensors that its config does not explain:", sorted(names - allowed.keys())),
        ("The config and the tensors disagree about", _misshapen(store, allowed, names)),
    ]
    for what, found in problems:
        if found:
            rest = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise FormatError(
                f"{what} {', '.join(found[:SHOWN])}{rest}", "Download the model again, or check its config.json."
            )
    if HEAD in expected and HEAD not in names and not tied:
        return ["config.json asks for a head of its own, there is no lm_head.weight: the embedding serves as head."]
    return []


def _misshapen(store: TensorStore, expected: Mapping[str, tuple[int, ...]], names: Collection[str]) -> list[str]:
    shapes = {name: store.info(name).shape for name in sorted(expected.keys() & names)}
    return [
        f"{name} {list(shape)}, not {list(expected[name])}" for name, shape in shapes.items() if shape != expected[name]
    ]


def is_tied(store: TensorStore, *, tied: bool) -> bool:
    """Whether the head is the embedding. The tensors decide, since configs in the wild are wrong at times.

    No lm_head: tied. An lm_head although the config says `tied`: tied only where it holds the same numbers.
    """
    if HEAD not in store.names():
        return True
    if not tied or EMBEDDING not in store.names():
        return False
    return store.info(HEAD) == store.info(EMBEDDING) and bool(store.read(HEAD).equal(store.read(EMBEDDING)))


def text_backbone(store: TensorStore) -> TensorStore:
    """The decoder of a model with other towers under its plain names; any other store as it is."""
    names = store.names()
    for prefix, stem in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        renamed = {stem + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        if renamed:
            head = next((name for name in (HEAD, f"language_model.{HEAD}") if name in names), None)
            return RenamedStore(store, renamed if head is None else {**renamed, HEAD: head})
    return store
