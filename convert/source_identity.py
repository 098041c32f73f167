"""What every source model offers, and how one is told from another.

Knows no file format and no Hub; see `source.open_source` for the kinds there are.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..runtime.architecture import Architecture
from ..runtime.store import TensorStore


@dataclass(frozen=True)
class SourceIdentity:
    """Names a source for good: what a manifest can say without telling where it lay on this machine.

    `id` is the Hub id, or the name of the directory or file without its path; `revision` the Hub's commit hash.
    `config_sha256` is over config.json as it is; `index_sha256` over the names, shapes and dtypes of all tensors and
    the names and sizes of the weight files.
    """

    id: str
    revision: str | None
    config_sha256: str
    index_sha256: str


class Source(Protocol):
    """A model to convert: config, weights by name, and the files that go with it."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json; for a GGUF file, what it would be."""
        ...

    @property
    def generation_config(self) -> dict[str, Any] | None:
        """generation_config.json, if there is one."""
        ...

    @property
    def store(self) -> TensorStore:
        """The weights under their Hugging Face names."""
        ...

    @property
    def identity(self) -> SourceIdentity:
        """Which model this is."""
        ...

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files behind `store`; empty where the weights are made on read (GGUF)."""
        ...

    @property
    def architecture(self) -> Architecture:
        """Its geometry; the tensors, not the config, say whether the head is tied."""
        ...

    def text_files(self) -> dict[str, bytes | Path]:
        """tokenizer.json, tokenizer_config.json, chat_template.jinja, licences …: name -> content, or where it lies."""
        ...

    def fingerprint(self) -> str:
        """Changes when the input changes. Looks at sizes, modification times and tensor headers, not at all bytes."""
        ...


def sha256_json(value: object) -> str:
    """sha256 of a value's JSON, which is the same on every machine."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def index_sha256(store: TensorStore, files: Iterable[Path]) -> str:
    """sha256 over every tensor's name, shape and dtype, and every weight file's name and size."""
    infos = {name: store.info(name) for name in store.names()}
    tensors = {name: [list(info.shape), str(info.dtype)] for name, info in infos.items()}
    return sha256_json([tensors, [[file.name, file.stat().st_size] for file in files]])


def fingerprint(identity: SourceIdentity, files: Iterable[Path], texts: Mapping[str, bytes | Path]) -> str:
    """Of the identity, the weight files' sizes and modification times, and the contents of the small files."""
    stats = [(file.name, file.stat()) for file in files]
    stamps = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    contents = {name: text.read_bytes() if isinstance(text, Path) else text for name, text in texts.items()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    known = [identity.id, identity.revision, identity.config_sha256, identity.index_sha256]
    return sha256_json([known, stamps, digests])
