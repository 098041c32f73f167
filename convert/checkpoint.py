"""Training kept on disk: a folder per checkpoint, whole or absent, the newest one only.

    checkpoint-00000120/
      tensors.safetensors   weight/NAME, mean/NAME, square/NAME: parameters and AdamW's moments, as they are in memory
      state.json            what they belong to, the step, the history

Safetensors and JSON only. Knows no model and no data.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FormatError
from ..runtime.json_text import parse_json
from ..runtime.safetensors_file import SafetensorsFile
from .stream import HashingFile, of_tensor, write_safetensors
from .workspace import disk_errors, sync_folder, whole_file

_PREFIX, _PART = "checkpoint-", ".part"
_ADVICE = "Free some and run the same command again: it goes on from the last checkpoint."


class Checkpoint(NamedTuple):
    """Tensors by kind ("weight", "mean", "square") and name, and what `save` was given beside them."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    state: dict[str, Any]


def save(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint after `step` steps; older ones go once it is whole. ResourceError on a full disk."""
    target = folder / f"{_PREFIX}{step:08d}"
    part = folder / (target.name + _PART)
    with disk_errors(target, _ADVICE):
        _remove(part)
        part.mkdir(parents=True)
        entries = [of_tensor(f"{kind}/{name}", t) for kind, named in tensors.items() for name, t in named.items()]
        with whole_file(part / "tensors.safetensors") as file:
            write_safetensors(HashingFile(file), entries)
        with whole_file(part / "state.json") as file:
            file.write(json.dumps(state).encode("utf-8"))
        _remove(target)
        part.rename(target)
        sync_folder(folder)
    for old in folder.glob(f"{_PREFIX}*"):
        if old.name != target.name:
            _remove(old)
    return target


def load(folder: Path) -> Checkpoint | None:
    """The newest checkpoint, or None. Its tensors share the file: copy them. FormatError where it is damaged."""
    found = sorted(path for path in folder.glob(f"{_PREFIX}*") if path.suffix != _PART)
    if not found:
        return None
    path = found[-1]
    try:
        state = parse_json((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} is damaged", "Remove it to start again.") from error
    if not isinstance(state, dict):
        raise FormatError(f"{path} is damaged", "Remove it to start again.")
    file = SafetensorsFile(path / "tensors.safetensors")
    tensors: dict[str, dict[str, Tensor]] = {}
    for key in file.names():
        kind, _, name = key.partition("/")
        tensors.setdefault(kind, {})[name] = file.read(key)
    return Checkpoint(tensors, state)


def restore(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], saved: Checkpoint) -> None:
    """Put weights and moments back as they were. FormatError where they belong to another model."""
    steps = float(saved.state["updates"])
    weights = saved.tensors.get("weight", {})
    if weights.keys() != parameters.keys() or any(weights[n].shape != p.shape for n, p in parameters.items()):
        raise FormatError("The checkpoint belongs to another model", "Remove it to start again.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
            if steps:
                optimizer.state[parameter] = {
                    "step": torch.tensor(steps, device=parameter.device),  # where the fused kernel wants it
                    "exp_avg": torch.empty_like(parameter).copy_(saved.tensors["mean"][name]),
                    "exp_avg_sq": torch.empty_like(parameter).copy_(saved.tensors["square"][name]),
                }


def moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, Mapping[str, Tensor]]:
    """Weights and AdamW's moments by kind and name, for `save`. Not copies."""
    kinds: dict[str, Mapping[str, Tensor]] = {"weight": {name: p.detach() for name, p in parameters.items()}}
    states = {
        name: optimizer.state[parameter] for name, parameter in parameters.items() if parameter in optimizer.state
    }
    if states:
        kinds["mean"] = {name: state["exp_avg"] for name, state in states.items()}
        kinds["square"] = {name: state["exp_avg_sq"] for name, state in states.items()}
    return kinds


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
