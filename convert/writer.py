"""Files into a bundle, each whole, hashed and resumable: backbone, exit layers, text files, and the manifest last.

Every function may be killed and called again: what is finished is skipped, and the bytes come out the same.
Knows tensors as bytes; what is computed, and when, is the recipe's business.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from ..runtime.bundle import Bundle
from ..runtime.manifest import MANIFEST_NAME, Backbone, FileRecord, Manifest
from ..runtime.progress import Reporter
from .backbone import BackbonePlan
from .stream import (
    CHUNK,
    Entry,
    HashingFile,
    index_text,
    of_tensor,
    plan_shards,
    read_entries,
    shard_name,
    write_safetensors,
)
from .workspace import Workspace, whole_file

SHARD_BYTES = 1 << 30
_RIVER = "river"
_RIVER_PLAN = "river-shards.json"
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)
_CANNOT_RANGE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)

Advance = Callable[[float], None]


def write_piece(work: Workspace, piece: str, tensors: Mapping[str, Tensor]) -> None:
    """Finish a step whose result is tensors, as a safetensors file. ResourceError on a full disk."""
    with work.new_piece(piece) as file:
        write_safetensors(HashingFile(file), [of_tensor(name, tensor) for name, tensor in tensors.items()])


def read_piece(work: Workspace, piece: str) -> dict[str, Tensor]:
    """What `write_piece` wrote, until `place_river` has moved it into the bundle."""
    return load_file(work.piece(piece))


def place_bytes(work: Workspace, name: str, data: bytes) -> None:
    """Put a small file into the output."""
    if work.placed(name) is not None:
        return
    with work.place(name) as placing, _synced(placing.part) as file:
        file.write(data)
        placing.record = file.record


def place_safetensors(work: Workspace, name: str, entries: Sequence[Entry], advance: Advance) -> None:
    """Put a safetensors file into the output; memory holds one tensor at a time."""
    if work.placed(name) is not None:
        advance(sum(entry.nbytes for entry in entries))
        return
    with work.place(name) as placing, _synced(placing.part) as file:
        write_safetensors(file, entries, advance=advance)
        placing.record = file.record


def place_file(work: Workspace, name: str, source: Path, advance: Advance, *, link: bool = False) -> bool:
    """Put a copy of a file, or a hard link where that is asked for and possible, into the output.

    Returns whether it is a link. Progress counts the file's bytes once, as they are hashed.
    """
    source = source.resolve()
    if work.placed(name) is not None:
        advance(source.stat().st_size)
        return source.samefile(work.bundle / name)
    with work.place(name) as placing:
        linked = link and _link(source, placing.part)
        if not linked:
            _copy(source, placing.part)
        placing.record = hash_file(placing.part, advance)
    return linked


def place_text_files(work: Workspace, files: Mapping[str, bytes | Path]) -> None:
    """Put tokenizer, config, licence and the like into the output, under their names."""
    for name in sorted(files):
        data = files[name]
        place_bytes(work, name, data if isinstance(data, bytes) else data.read_bytes())


def place_configs(
    work: Workspace, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, *, tied: bool
) -> None:
    """Put config.json, with the tie of the head as the tensors have it, and generation_config.json into the output."""
    place_bytes(work, "config.json", json_bytes({**config, "tie_word_embeddings": tied}))
    if generation_config is not None:
        place_bytes(work, "generation_config.json", json_bytes(generation_config))


def json_bytes(data: object) -> bytes:
    """JSON as Hugging Face tools write it."""
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def place_backbone(work: Workspace, plan: BackbonePlan, reporter: Reporter) -> Backbone:
    """Copy, link, refer to or rewrite the backbone as planned. Returns what the manifest says of it."""
    title = {"reference": "Check the backbone", "link": "Link the backbone"}.get(plan.mode, "Write the backbone")
    with reporter.task(title, plan.nbytes) as task:
        if plan.mode == "reference":
            names = [*plan.files, *plan.index_files]
            return Backbone(mode="reference", files={path.name: _refer(work, path, task.advance) for path in names})
        if plan.entries:
            place_shards(work, "model", plan.entries, task.advance)
            return Backbone(mode="copy")
        linked = [place_file(work, path.name, path, task.advance, link=plan.mode == "link") for path in plan.files]
    if len(plan.files) > 1:
        shards = {path.name: read_entries(work.bundle / path.name) for path in plan.files}
        place_bytes(work, "model.safetensors.index.json", index_text(shards))
    if plan.mode == "link" and not all(linked):
        reporter.note("Hard links are not possible here: the backbone was copied.")
    return Backbone(mode="link" if all(linked) else "copy")


def place_river(work: Workspace, pieces: Sequence[str], reporter: Reporter) -> None:
    """Join the pieces (one safetensors file per exit layer, in the order given) into shards and their index.

    Pieces are spent as the shards that hold them get their names: at most one shard is on the disk twice.
    """
    if not work.has(_RIVER_PLAN):
        sizes = {piece: work.piece(piece).stat().st_size for piece in pieces}
        work.write_note(_RIVER_PLAN, plan_shards(sizes, SHARD_BYTES))
    shards: list[list[str]] = work.read_note(_RIVER_PLAN)
    placed: dict[str, list[Entry]] = {}
    with reporter.task("Write the exit layers", len(pieces)) as task:
        for number, members in enumerate(shards, start=1):
            name = shard_name(_RIVER, number, len(shards))
            if work.placed(name) is None:
                entries = [entry for piece in members for entry in read_entries(work.piece(piece))]
                place_safetensors(work, name, entries, _ignore)
            for piece in members:
                work.spend(piece)
                task.advance(1)
            placed[name] = read_entries(work.bundle / name)
    place_bytes(work, f"{_RIVER}.safetensors.index.json", index_text(placed))


def seal(work: Workspace, manifest: Manifest) -> Path:
    """Write the manifest with the records of all files, and give the output its name. Returns the output's path.

    Raises FormatError where the result is no bundle that opens (config.json missing, for one).
    """
    whole = Manifest.model_validate({**manifest.model_dump(mode="json"), "files": work.files()})
    with whole_file(work.bundle / MANIFEST_NAME) as file:
        file.write(whole.dumps().encode("utf-8"))
    Bundle.open(work.bundle)
    return work.publish()


def hash_file(path: Path, advance: Advance | None = None) -> FileRecord:
    """sha256 and size of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if advance is not None:
                advance(len(chunk))
    return FileRecord(sha256=digest.hexdigest(), bytes=size)


def place_shards(work: Workspace, stem: str, entries: Sequence[Entry], advance: Advance) -> None:
    """Put tensors into numbered safetensors files of at most SHARD_BYTES, in the order given, and their index."""
    by_name = {entry.name: entry for entry in entries}
    plan = plan_shards({entry.name: entry.nbytes for entry in entries}, SHARD_BYTES)
    shards = {
        shard_name(stem, number, len(plan)): [by_name[name] for name in names]
        for number, names in enumerate(plan, start=1)
    }
    for name, members in shards.items():
        place_safetensors(work, name, members, advance)
    place_bytes(work, f"{stem}.safetensors.index.json", index_text(shards))


def _refer(work: Workspace, path: Path, advance: Advance) -> FileRecord:
    """The record of a file that stays where it is; hashed once however often the work is resumed."""
    note = f"reference-{path.name}.json"
    if not work.has(note):
        work.write_note(note, hash_file(path, advance).model_dump())
    return FileRecord.model_validate(work.read_note(note))


class _synced:  # noqa: N801 - reads as a function where it is used
    """A new file that is hashed while it is written, and on the disk when the context ends well."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")

    def __enter__(self) -> HashingFile:
        return HashingFile(self._file)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return False
    return True


def _copy(source: Path, target: Path) -> None:
    """Copy inside the kernel where it can (shared blocks on file systems that have them), else through memory."""
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        if not _copy_in_kernel(reader.fileno(), writer.fileno()):
            for chunk in iter(partial(reader.read, CHUNK), b""):
                writer.write(chunk)
        os.fsync(writer.fileno())


def _copy_in_kernel(reader: int, writer: int) -> bool:
    """False where the kernel refuses the first piece: nothing is written then."""
    if not hasattr(os, "copy_file_range"):
        return False
    started = False
    while True:
        try:
            count = os.copy_file_range(reader, writer, CHUNK * 8)
        except OSError as error:
            if started or error.errno not in _CANNOT_RANGE:
                raise
            return False
        if count == 0:
            return started
        started = True


def _ignore(_: float) -> None:
    pass
