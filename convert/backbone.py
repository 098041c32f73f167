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
from ..runtime.store import HEAD, TensorStore
from .stream import Entry, entries_by_name, lazy

BackboneMode = Literal["copy", "link", "reference"]
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
    wanted = {name: shape for name, shape in expected.items() if not (tied and name == HEAD)}
    shards = sorted(files, key=lambda path: path.name)
    stored = entries_by_name(shards)
    right = bool(shards) and _is_right(stored, wanted)
    if mode == "reference" and not (right and all(_in_hub_cache(path, revision) for path in shards)):
        what = "--backbone reference needs a model from the Hub whose safetensors files are used as they are"
        raise UsageError(what, "Use --backbone copy.")
    if right:
        index = shards[0].with_name("model.safetensors.index.json")
        size = sum(path.stat().st_size for path in shards)
        return BackbonePlan(mode, tuple(shards), (index,) if index.is_file() else (), (), size)
    entries = tuple(
        stored[name] if name in stored else _entry(store, name, shape, None if shards else dtype)
        for name, shape in wanted.items()
    )
    return BackbonePlan("copy", (), (), entries, sum(entry.nbytes for entry in entries))


def _is_right(stored: Mapping[str, Entry], wanted: Mapping[str, tuple[int, ...]]) -> bool:
    shapes = {name: entry.shape for name, entry in stored.items()}
    return shapes == wanted and all(entry.dtype in _KEPT for entry in stored.values())


def _in_hub_cache(path: Path, revision: str | None) -> bool:
    return revision is not None and path.parent.name == revision and path.parent.parent.name == "snapshots"


def _entry(store: TensorStore, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Entry:
    return lazy(name, dtype or store.info(name).dtype, shape, partial(store.read, name))
