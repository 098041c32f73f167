"""The folder where an output grows until it is whole.

    .NAME.adapt-work/        beside NAME, on the same file system
      lock                   held while a process works here; a dead process holds nothing
      state.json             the fingerprint: what this work is made from
      pieces/                finished steps (one file per exit layer, measured figures…)
      records/               sha256 and size of each finished file of the output
      bundle/                the output; renamed to NAME when whole
      replaced/              the old output, between two renames of --force

Every file is written under another name, synced and renamed, so what has its name is whole. Knows no models.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

from pydantic import ValidationError

from ..errors import FormatError, ResourceError, UsageError
from ..runtime.json_text import parse_json
from ..runtime.manifest import FileRecord
from .differences import differences
from .lock import FolderLock

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_PART = ".part"
TOKENS = "data"
"""Folder of the tokens of a training's texts, beside the others. Work of no weight: made anew where texts change."""


@contextmanager
def disk_errors(path: Path, advice: str) -> Iterator[None]:
    """Turn a full disk into ResourceError with `advice`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ResourceError(f"The disk is full: cannot write {path}", advice) from error


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when the context ends well, and not at all otherwise."""
    part = path.with_name(path.name + _PART)
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_output(output: Path, *, force: bool) -> None:
    """Raise UsageError where the output is a file, or a folder with something in it and not `force`."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(f"{output} exists and is not a folder", "Choose another with -o.")
    if output.is_dir() and any(output.iterdir()) and not force:
        raise UsageError(
            f"{output} is not empty", "Use --force to replace it once the new one is whole, or choose another with -o."
        )


REPLACEABLE = ("adapt.json", "config.json")
"""A folder that `--force` may replace holds one of these: a bundle or an exported model, not somebody's documents."""


def check_replaceable(output: Path, inputs: Iterable[Path]) -> None:
    """Raise UsageError where `--force` would remove what it must not.

    That is a folder that is neither a bundle nor a model, or one that holds an input or the current folder.
    """
    if not output.is_dir() or not any(output.iterdir()):
        return
    whole = output.resolve()
    for path in (Path.cwd(), *inputs):
        if path.exists() and path.resolve().is_relative_to(whole):
            raise UsageError(f"{output} holds {path}, which --force would remove", "Choose another folder with -o.")
    if not any((output / name).is_file() for name in REPLACEABLE):
        what = f"{output} is neither a bundle nor a model: --force does not replace it"
        raise UsageError(what, "Empty it yourself, or choose another folder with -o.")


def work_folder(output: Path) -> Path:
    """Where the work on `output` lies."""
    output = output.absolute()
    return output.with_name(f".{output.name}.adapt-work")


def _read_own(path: Path) -> Any:  # noqa: ANN401 - any JSON
    """A JSON file of the work folder. Raises FormatError where it is damaged: `whole_file` never leaves a part."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path} is damaged", "Use --no-resume to start afresh.") from error


class Workspace:
    """One process's hold on the work folder of `output`. A context manager: leaving it lets go, and keeps the work.

    `fingerprint` says what the work is made from (source, settings, data, versions), as JSON. Finished work with the
    same fingerprint is taken up again, unless `resume` is False; with another one it is refused, or thrown away with
    `force` or `resume` False. `resume` True insists on work to take up.

    Raises UsageError (output in the way, other work, another process), ResourceError (full disk).
    """

    def __init__(
        self, output: Path, fingerprint: Mapping[str, Any], *, force: bool = False, resume: bool | None = None
    ) -> None:
        self.output = output.absolute()
        self.folder = work_folder(output)
        self.bundle = self.folder / "bundle"
        self.resumed = False
        self._pieces = self.folder / "pieces"
        self._records = self.folder / "records"
        self._advice = (
            f"Free some and run the same command again: it goes on where it stopped (work kept in {self.folder})."
        )
        self._open(json.loads(json.dumps(fingerprint)), force=force, resume=resume)

    def _open(self, fingerprint: dict[str, Any], *, force: bool, resume: bool | None) -> None:
        with disk_errors(self.folder, self._advice):
            self._lock = _take(self.folder)
            try:
                self._recover()
                check_output(self.output, force=force)
                self._prepare(fingerprint, force=force, resume=resume)
            except BaseException:
                self._lock.release(remove_if_empty=True)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock.held and not self._holds_work() and not any(self._records.iterdir()):
            self._clear()  # nothing to go on from
            self._lock.release(remove_if_empty=True)
        self._lock.release()

    def _recover(self) -> None:
        """Put right what a kill in the middle of `publish` left."""
        replaced = self.folder / "replaced"
        if not self.bundle.exists() and self.output.exists():
            self._clear()  # the output had its name already
        elif replaced.is_dir():
            if self.output.is_dir() and any(self.output.iterdir()):
                what = f"{replaced} holds what was at {self.output}, and something else is there now"
                raise UsageError(what, "Move one of them away.")
            replaced.rename(self.output)

    def _prepare(self, fingerprint: dict[str, Any], *, force: bool, resume: bool | None) -> None:
        state = self.folder / "state.json"
        old = _read_own(state) if state.is_file() and resume is not False else None
        if resume is True and old is None:
            raise UsageError(f"There is no unfinished work on {self.output}", "Leave out --resume to start.")
        if old is not None and old != fingerprint and (resume or self._holds_work()):
            self._refuse_other_work(old, fingerprint, force=force, resume=resume)
        self.resumed = old == fingerprint
        if not self.resumed:
            self._clear()
        for folder in (self._pieces, self._records, self.bundle):
            folder.mkdir(exist_ok=True)
        with whole_file(state) as file:
            file.write(json.dumps(fingerprint, indent=2, sort_keys=True, ensure_ascii=False).encode("utf-8"))

    def _holds_work(self) -> bool:
        """Whether there is more than what any conversion makes anew in a moment: a piece, weights, a checkpoint."""
        cheap = {"bundle", "records", TOKENS}
        steps = (folder for folder in self.folder.iterdir() if folder.is_dir() and folder.name not in cheap)
        return any(any(folder.iterdir()) for folder in steps) or any(self._records.glob("*.safetensors.json"))

    def _refuse_other_work(self, old: dict[str, Any], new: dict[str, Any], *, force: bool, resume: bool | None) -> None:
        changes = "; ".join(differences(old, new))
        if resume is True:
            raise UsageError(f"Cannot resume: {changes}", "Use --no-resume to start afresh.")
        if not force:
            what = f"Unfinished work on {self.output} was made from something else: {changes}"
            raise UsageError(
                what, "Use --no-resume to throw it away and start afresh, or choose another folder with -o."
            )

    def _clear(self) -> None:
        """Remove everything but the lock; the state goes first, so that half-removed work is never taken up."""
        (self.folder / "state.json").unlink(missing_ok=True)
        for item in self.folder.iterdir():
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            elif item.name != FolderLock.NAME:
                item.unlink()

    # -- pieces: finished steps ------------------------------------------------------------------------------------

    def has(self, piece: str) -> bool:
        """Whether this step is finished."""
        return (self._pieces / piece).is_file()

    def piece(self, piece: str) -> Path:
        """Path of a finished piece."""
        return self._pieces / piece

    def spend(self, piece: str) -> None:
        """Free the bytes of a piece that is in the output now; the step stays finished."""
        with whole_file(self._pieces / piece):
            pass

    @contextmanager
    def new_piece(self, piece: str) -> Iterator[IO[bytes]]:
        """Write a piece; it is finished when the context ends well. ResourceError on a full disk."""
        with disk_errors(self._pieces / piece, self._advice), whole_file(self._pieces / piece) as file:
            yield file

    def write_note(self, piece: str, data: object) -> None:
        """Finish a step whose result is JSON. Floats come back exactly."""
        with self.new_piece(piece) as file:
            file.write(json.dumps(data, sort_keys=True, ensure_ascii=False).encode("utf-8"))

    def read_note(self, piece: str) -> Any:  # noqa: ANN401 - any JSON
        """What `write_note` wrote."""
        return _read_own(self.piece(piece))

    # -- the output ------------------------------------------------------------------------------------------------

    def placed(self, name: str) -> FileRecord | None:
        """The record of a file that is already whole in the output, or None: also where the record is damaged."""
        if not (self.bundle / name).is_file():
            return None
        try:
            return FileRecord.model_validate_json((self._records / f"{name}.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    @contextmanager
    def place(self, name: str) -> Iterator["Placing"]:
        """Put one file into the output: write `part`, then set `record`."""
        placing = Placing(self.bundle / (name + _PART))
        with disk_errors(self.bundle / name, self._advice):
            placing.part.unlink(missing_ok=True)
            yield placing
            if placing.record is None:
                raise FormatError(f"Nothing was written for {name}")
            with whole_file(self._records / f"{name}.json") as file:
                file.write(placing.record.model_dump_json().encode("utf-8"))
            placing.part.replace(self.bundle / name)
            sync_folder(self.bundle)

    def files(self) -> dict[str, FileRecord]:
        """Records of all finished files of the output."""
        names = sorted(path.name.removesuffix(".json") for path in self._records.glob("*.json"))
        return {name: record for name in names if (record := self.placed(name)) is not None}

    def publish(self) -> Path:
        """Give the output its name; an old one is removed once the new one has it. The work folder goes."""
        for part in self.bundle.glob(f"*{_PART}"):
            part.unlink()
        replaced = self.folder / "replaced"
        if replaced.exists():
            shutil.rmtree(replaced)
        if self.output.is_dir() and any(self.output.iterdir()):
            self.output.rename(replaced)
        self.bundle.rename(self.output)
        sync_folder(self.output.parent)
        self._clear()
        self._lock.release(remove_if_empty=True)
        return self.output


class Placing:
    """A file of the output that is being written: `part` is where, `record` what it turned out to be."""

    def __init__(self, part: Path) -> None:
        self.part = part
        self.record: FileRecord | None = None


def _take(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        what = f"Cannot write in {folder.parent}: {error.strerror}"
        raise UsageError(what, "Choose another folder with -o.") from error
