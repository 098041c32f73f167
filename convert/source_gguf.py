"""A GGUF file as a source: config, tokenizer and weights, dequantised to bfloat16 on read.

Knows how the parts of a GGUF file become the parts of a Hugging Face checkpoint; the parts themselves are in
`gguf_reader`, `gguf_names`, `gguf_config` and `gguf_tokenizer`.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import FormatError
from ..runtime.architecture import Architecture
from ..runtime.architecture import architecture_of as geometry_of
from ..runtime.progress import Reporter
from ..runtime.store import TensorInfo
from . import gguf_tokenizer
from .gguf_config import hf_config
from .gguf_metadata import architecture_of
from .gguf_names import hf_names, undo_for
from .gguf_reader import GgufFile, open_gguf
from .source_directory import check_config
from .source_identity import SourceIdentity, fingerprint, sha256_json

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_SAMPLED_ROWS = 64
# Two quantisations of one matrix correlate above 0.95 from 3 bits on; matrices trained apart stay far below.
_SAME_MATRIX = 0.9


class GgufStore:
    """The tensors of a GGUF file under Hugging Face names. `names`: Hugging Face name -> GGUF name."""

    def __init__(self, file: GgufFile, names: Mapping[str, str], config: Mapping[str, Any]) -> None:
        self._file = file
        self._names = names
        self._architecture = architecture_of(file)
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def names(self) -> Collection[str]:
        """See `TensorStore.names`."""
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        """See `TensorStore.info`. The dtype is that of `read`, not of the file."""
        return TensorInfo(self._file.tensors[self._names[name]].shape, torch.bfloat16)

    def read(self, name: str) -> torch.Tensor:
        """See `TensorStore.read`. Dequantises; the result is a copy."""
        stored = self._names[name]
        value = self._file.read(stored)
        undo = undo_for(self._architecture, stored, heads=self._heads, kv_heads=self._kv_heads)
        return (undo(value) if undo else value).to(torch.bfloat16).contiguous()

    def release(self, name: str) -> None:
        """See `TensorStore.release`."""
        self._file.release(self._names[name])


class GgufSource:
    """One GGUF file. Opening it reads the header, and a few rows of two matrices to see whether they are tied."""

    weight_files: tuple[Path, ...] = ()

    def __init__(self, path: Path, reporter: Reporter) -> None:
        file = open_gguf(path)
        names = hf_names(architecture_of(file), file.tensors)
        tied = _tie(file, names, reporter)
        self.config = hf_config(file, tied=tied)
        check_config(self.config, path.name)
        self.generation_config: dict[str, Any] | None = gguf_tokenizer.generation_config(file.metadata)
        self.store = GgufStore(file, names, self.config)
        self.identity = SourceIdentity(
            id=path.name,
            revision=None,
            config_sha256=sha256_json(self.config),
            index_sha256=_index(file),
        )
        self.reporter = reporter
        self._path, self._metadata = path, file.metadata

    @property
    def architecture(self) -> Architecture:
        """See `Source.architecture`."""
        return geometry_of(self.config, self.store)

    def text_files(self) -> dict[str, bytes | Path]:
        """See `Source.text_files`; raises what `gguf_tokenizer.text_files` raises."""
        return {**gguf_tokenizer.text_files(self._metadata, self.reporter), **_card(self._metadata)}

    def fingerprint(self) -> str:
        """See `Source.fingerprint`. The tokenizer is in the header, so the file's size and time cover it."""
        return fingerprint(self.identity, (self._path,), {})


def _card(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """A model card that states the licence, as Hugging Face checkpoints have it; nothing if the file does not say."""
    licence = str(metadata.get("general.license", ""))
    if not re.fullmatch(r"[\w.+-]+", licence):
        return {}
    name = str(metadata.get("general.name", "Model")).splitlines()[0]
    return {"README.md": f"---\nlicense: {licence}\n---\n\n# {name}\n".encode()}


def _index(file: GgufFile) -> str:
    tensors = {name: [list(tensor.shape), tensor.type.name] for name, tensor in file.tensors.items()}
    return sha256_json([tensors, [[file.path.name, file.path.stat().st_size]]])


def _tie(file: GgufFile, names: dict[str, str], reporter: Reporter) -> bool:
    """Whether embedding and head are one matrix; if so `names` keeps the better copy as the embedding.

    Quantisers store a tied matrix twice when they want the head in more bits than the embedding.
    """
    if _HEAD not in file.tensors:
        return True
    if _EMBEDDING not in file.tensors:
        raise FormatError(f"{file.path.name} has no tensor {_EMBEDDING}", "Download it again.")
    if not _same_matrix(file):
        return False
    embedding, head = file.tensors[_EMBEDDING], file.tensors[_HEAD]
    better, worse = (head, embedding) if head.bits_per_weight > embedding.bits_per_weight else (embedding, head)
    names["model.embed_tokens.weight"] = better.name
    del names["lm_head.weight"]
    reporter.note(
        f"{file.path.name} holds the tied embedding twice; "
        f"{better.name} ({better.type.name}) is kept, {worse.name} ({worse.type.name}) is not"
    )
    return True


def _same_matrix(file: GgufFile) -> bool:
    embedding, head = file.tensors[_EMBEDDING], file.tensors[_HEAD]
    if embedding.shape != head.shape:
        return False
    rows = np.unique(np.linspace(0, embedding.shape[0] - 1, _SAMPLED_ROWS).astype(np.int64))
    one, other = file.rows(_EMBEDDING, rows), file.rows(_HEAD, rows)
    if embedding.type == head.type:
        return bool(np.array_equal(one, other))
    return bool(np.corrcoef(one.ravel(), other.ravel())[0, 1] > _SAME_MATRIX)
