"""A model that has a configuration and a tokenizer, and no weights yet: they are drawn when they are read.

Knows the folder's files as `source_directory` does; what is made of the model is not its business.
"""

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, UsageError
from ..runtime.architecture import Architecture
from ..runtime.safetensors_file import TensorInfo
from .source_directory import check_config, decoder_config, given_text_files, read_json
from .source_identity import SourceIdentity, fingerprint, index_sha256

STD = 0.02
"""Of every matrix (papers: N-vium, as in most language models)."""
_BACK = ("o_proj.weight", "down_proj.weight")
"""Matrices whose result is added to the residual stream: their sum over the layers keeps its size."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DrawnStore:
    """Random weights by name: normal matrices, plain norms, biases of 0. A `TensorStore`.

    A tensor depends on its name and the seed alone. `dtype` is what a bundle stores.
    """

    def __init__(self, arch: Architecture, seed: int, dtype: torch.dtype) -> None:
        self._shapes: Mapping[str, tuple[int, ...]] = arch.tensors()
        self._layers, self._offset = arch.num_layers, arch.norm_offset
        self._seed, self._dtype = seed, dtype

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._shapes.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`."""
        return TensorInfo(self._shapes[name], self._dtype)

    def read(self, name: str) -> Tensor:
        """See `TensorStore.read`."""
        shape = self._shapes[name]
        if len(shape) == 1:
            plain_norm = name.endswith("norm.weight") and not self._offset
            return torch.full(shape, 1.0 if plain_norm else 0.0, dtype=self._dtype)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        std = STD / math.sqrt(2 * self._layers) if name.endswith(_BACK) else STD
        return (torch.randn(shape, generator=generator) * std).to(self._dtype)

    def release(self, name: str) -> None:
        """See `TensorStore.release`."""


class ScratchSource:
    """The configuration and tokenizer of a folder; weights that lie there are not looked at. A `Source`."""

    def __init__(self, folder: Path, seed: int) -> None:
        path = folder / "config.json"
        stated = read_json(path)
        name = folder.resolve().name
        check_config(stated, name)
        self.config: dict[str, Any] = decoder_config(stated)
        self.architecture = Architecture.from_config(self.config)
        self.store = DrawnStore(self.architecture, seed, _dtype(self.config))
        self.weight_files: tuple[Path, ...] = ()
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else None
        config_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        self.identity = SourceIdentity(name, None, config_sha256, index_sha256(self.store, ()))
        self._folder = folder

    def text_files(self) -> dict[str, bytes | Path]:
        """See `Source.text_files`. Raises FormatError where there is no tokenizer.json."""
        files = given_text_files(self._folder)
        if "tokenizer.json" not in files:
            raise FormatError(f"{self.identity.id} has no tokenizer.json", "Put one beside config.json.")
        return files

    def fingerprint(self) -> str:
        """See `Source.fingerprint`."""
        return fingerprint(self.identity, (), self.text_files())


def open_scratch(source: str, seed: int) -> ScratchSource:
    """Open a local folder as a model without weights. Raises UsageError where it is none, FormatError for its files."""
    folder = Path(source).expanduser()
    if not (folder / "config.json").is_file():
        hint = "Make a folder with config.json and tokenizer.json in it; weights are not needed."
        raise UsageError(f"--from-scratch needs a local folder with a config.json, and {source} is none", hint)
    return ScratchSource(folder, seed)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    stated = config.get("dtype") or config.get("torch_dtype")
    return _DTYPES.get(str(stated), torch.bfloat16)
