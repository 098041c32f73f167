"""A ready-made GPTQ checkpoint: its settings and its packed tensors.

Knows what AutoGPTQ, GPTQModel and optimum write beside the weights. Unpacks nothing; see `quant.layout`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import FormatError, UnsupportedError
from ..runtime.store import TensorStore, open_files, open_safetensors
from .source_directory import read_json, refuse_pickles, weight_files
from .source_identity import index_sha256, sha256_json

_FORMATS = (None, "gptq", "gptq_v2")


@dataclass(frozen=True)
class GptqSettings:
    """As the checkpoint states them; `group_size` -1 = one group per row.

    `checkpoint_format` "gptq" (v1) or "gptq_v2" may be wrong in files of the wild: for symmetric weights the stored
    zeros decide. `symmetric` and `checkpoint_format` are None where the file does not say.
    """

    bits: int
    group_size: int
    symmetric: bool | None
    desc_act: bool
    checkpoint_format: str | None


@dataclass(frozen=True)
class GptqCheckpoint:
    """`store` holds qweight, qzeros, scales, g_idx beside the tensors that were left alone."""

    name: str
    revision: str | None
    config: dict[str, Any]
    settings: GptqSettings
    store: TensorStore
    files: tuple[Path, ...]

    def fingerprint(self) -> str:
        """Changes when the checkpoint changes: headers, sizes and modification times, not all bytes."""
        stats = [(path.name, path.stat()) for path in self.files]
        stamps = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        return sha256_json([self.revision, asdict(self.settings), index_sha256(self.store, self.files), stamps])


def parse_settings(name: str, stated: dict[str, Any]) -> GptqSettings:
    """Read `quantization_config` or quantize_config.json. Raises `UnsupportedError` naming what is not read."""
    method = stated.get("quant_method") or "gptq"
    layout = stated.get("checkpoint_format") or stated.get("format")
    hint = "Only 4-bit GPTQ checkpoints in the AutoGPTQ / GPTQModel layout are read."
    if method != "gptq":
        raise UnsupportedError(f"{name} is quantised by {method}", hint)
    if stated.get("bits") != 4:
        raise UnsupportedError(f"{name} has {stated.get('bits', 'an unknown number of')} bits per weight", hint)
    if layout not in _FORMATS:
        raise UnsupportedError(f"{name} is stored in the {layout} layout", hint)
    if stated.get("dynamic"):
        raise UnsupportedError(f"{name} is quantised differently from module to module ('dynamic')", hint)
    group_size = stated.get("group_size", -1)
    if not isinstance(group_size, int) or (group_size != -1 and group_size <= 0):
        raise FormatError(f"{name} states a group size of {group_size!r}", "Download its config again.")
    symmetric = stated.get("sym")
    return GptqSettings(
        4, group_size, None if symmetric is None else bool(symmetric), bool(stated.get("desc_act")), layout
    )


def open_gptq_directory(folder: Path, *, name: str, revision: str | None = None) -> GptqCheckpoint:
    """Open a GPTQ checkpoint in a local directory. Reads headers only."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    stated = config.get("quantization_config")
    if not stated and (folder / "quantize_config.json").is_file():
        stated = read_json(folder / "quantize_config.json")
    if not isinstance(stated, dict) or not stated:
        hint = "--river-from takes a GPTQ checkpoint: a folder with quantization_config or quantize_config.json."
        raise UnsupportedError(f"{name} states no quantisation", hint)
    settings = parse_settings(name, stated)
    files = tuple(sorted(folder.glob("*.safetensors")))
    return GptqCheckpoint(name, revision, config, settings, _open_packed(folder, name), files)


def _open_packed(folder: Path, name: str) -> TensorStore:
    others = sorted(folder.glob("*.safetensors"))
    if not weight_files(folder) and len(others) == 1:
        return open_files(others)  # AutoGPTQ: gptq_model-4bit-128g.safetensors
    if not others and any(folder.glob("*.bin")):
        raise refuse_pickles(name)
    return open_safetensors(folder)
