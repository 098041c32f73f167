"""Opens the model to convert, whatever it comes as: a directory, a GGUF file, a bundle, or a Hub id.

Knows which kind a string means. The kinds themselves are in `source_directory`, `source_gguf` and `source_hub`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError
from ..runtime.architecture import Architecture
from ..runtime.bundle import check_links
from ..runtime.manifest import MANIFEST_NAME
from ..runtime.progress import Reporter, SilentReporter
from ..runtime.store import TensorStore, check_tensors
from .source_bundle import BundleSource
from .source_directory import DirectorySource, check_config, open_directory
from .source_gguf import GgufSource
from .source_gptq import GptqCheckpoint, GptqSettings, open_gptq_directory
from .source_identity import Source, SourceIdentity

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})

__all__ = ["GptqCheckpoint", "GptqSettings", "Source", "SourceIdentity", "open_gptq", "open_source"]


def open_source(
    source: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
) -> Source:
    """Open the model that `source` names and check that it has exactly the tensors its config asks for.

    Of a Hub model everything needed is fetched; of the others only headers are read. Raises `UsageError` for a path
    that does not exist, `AccessError` for the Hub's refusals, `UnsupportedError` and `FormatError` as the kinds do.
    """
    reporter = reporter or SilentReporter()
    path = local_path(source)
    opened: Source
    if path is None:
        opened = _open_hub(source, revision, token, cache_dir, offline=offline, reporter=reporter)
    elif (path / MANIFEST_NAME).is_file():
        opened = BundleSource(path, cache_dir=cache_dir, reporter=reporter)
    elif path.is_dir():
        opened = open_directory(path)
    else:
        opened = GgufSource(path, reporter)
    architecture = opened.architecture
    stated = Architecture.from_config(opened.config).tied
    for remark in check_tensors(opened.store, replace(architecture, tied=stated).tensors(), tied=stated):
        reporter.warn(remark)
    _check_dtypes(opened.store, architecture)
    return opened


def _check_dtypes(store: TensorStore, architecture: Architecture) -> None:
    """Refuse weights that mean something else than their numbers: integers and 8-bit floats have scales elsewhere."""
    for name in architecture.tensors().keys() & set(store.names()):
        dtype = store.info(name).dtype
        if dtype not in DTYPES:
            what = f"{name} is stored as {str(dtype).removeprefix('torch.')}"
            raise UnsupportedError(what, "Give a model with 16- or 32-bit floating-point weights.")


def open_gptq(
    source: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    reporter: Reporter | None = None,
) -> GptqCheckpoint:
    """Open ready-made 4-bit weights for `--river-from`, from a directory or the Hub.

    Raises `UnsupportedError` for another method, number of bits or layout, and otherwise what `open_source` raises.
    """
    path = local_path(source)
    if path is not None and not path.is_dir():
        raise UsageError(
            f"{source} is not a directory", "--river-from takes the folder of a GPTQ checkpoint or a Hub id."
        )
    if path is not None:
        return open_gptq_directory(path, name=path.resolve().name)
    from . import source_hub  # noqa: PLC0415 - huggingface_hub is not needed for local checkpoints

    model = source_hub.HubModel(source, revision, token, cache_dir, offline)
    folder, commit = source_hub.fetch(model, lambda _config: None, reporter or SilentReporter())
    return open_gptq_directory(folder, name=source, revision=commit)


def local_path(source: str) -> Path | None:
    """The path that `source` names; None if it can only be a Hub id.

    What exists is a path. What looks like one and does not exist is a `UsageError`, not something to ask the Hub for;
    so is a broken link.
    """
    path = Path(source).expanduser()
    if source and path.exists():
        return path
    check_links(path)
    looks_local = source.startswith((".", "/", "~", "\\")) or source.lower().endswith((".gguf", "/", ".safetensors"))
    if not source or looks_local or source.count("/") > 1 or "\\" in source:
        hint = "Give a directory, a .gguf file, or a Hub id such as org/name."
        raise UsageError(f"'{source}' does not exist", hint)
    return None


def _open_hub(
    source: str, revision: str | None, token: str | None, cache_dir: Path | None, *, offline: bool, reporter: Reporter
) -> Source:
    from . import source_hub  # noqa: PLC0415 - huggingface_hub is not needed for local sources

    def check(config: dict[str, Any]) -> None:
        check_config(config, source)

    model = source_hub.HubModel(source, revision, token, cache_dir, offline)
    folder, commit = source_hub.fetch(model, check, reporter)
    return DirectorySource(folder, name=source, revision=commit)
