"""What is done with the 16-bit weights: taken over as they are, referred to, or written anew.

Decides and adds up; `writer` does it. Knows tensor names and shapes, no methods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ..errors import UsageError
from ..runtime.store import TensorStore
from .stream import Entry, lazy, read_entries

BackboneMode = Literal["copy", "link", "reference"]
_TIED_HEAD = "lm_head.weight"
_KEPT = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class BackbonePlan:
    """`files` are taken over as they are, or `entries` are written into new shards; `nbytes` is what is worked on."""

    mode: BackboneMode
    files: tuple[Path, ...]
    index_files: tuple[Path, ...]
    entries: tuple[Entry, ...]
    nbytes: int

    @property
    def disk(self) -> int:
        """Bytes of disk that it takes at most."""
        return 0 if self.mode == "reference" else self.nbytes


def plan_backbone(
    *,
    files: Sequence[Path],
    store: TensorStore,
    expected: Mapping[str, tuple[int, ...]],
    tied: bool,
    mode: BackboneMode,
    revision: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> BackbonePlan:
    """Decide. `files`: the source's safetensors shards (none for a GGUF); `expected`: the architecture's tensors.

    Shards that hold exactly the expected tensors are taken over as they are. Anything else is written anew: in its own
    dtype where shards hold too much (a second copy of a tied head), in `dtype` where there are none.
    Raises UsageError where `reference` is asked for and the backbone is not a Hub model's as it is.
    """
    wanted = {name: shape for name, shape in expected.items() if not (tied and name == _TIED_HEAD)}
    shards = sorted(files, key=lambda path: path.name)
    right = bool(shards) and _is_right(shards, wanted)
    if mode == "reference" and not (right and all(_in_hub_cache(path, revision) for path in shards)):
        what = "--backbone reference needs a model from the Hub whose safetensors files are used as they are"
        raise UsageError(what, "Use --backbone copy.")
    if right:
        index = shards[0].with_name("model.safetensors.index.json")
        size = sum(path.stat().st_size for path in shards)
        return BackbonePlan(mode, tuple(shards), (index,) if index.is_file() else (), (), size)
    keep = dtype if not shards else None
    entries = tuple(_entry(store, name, shape, keep) for name, shape in wanted.items())
    return BackbonePlan("copy", (), (), entries, sum(entry.nbytes for entry in entries))


def _is_right(shards: Sequence[Path], wanted: Mapping[str, tuple[int, ...]]) -> bool:
    found = [entry for path in shards for entry in read_entries(path)]
    names = {entry.name: entry.shape for entry in found}
    return len(names) == len(found) and names == wanted and all(entry.dtype in _KEPT for entry in found)


def _in_hub_cache(path: Path, revision: str | None) -> bool:
    return revision is not None and path.parent.name == revision and path.parent.parent.name == "snapshots"


def _entry(store: TensorStore, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Entry:
    return lazy(name, dtype or store.info(name).dtype, shape, partial(store.read, name))
