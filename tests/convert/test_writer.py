"""Outputs are whole or absent: resuming after kills, other work, other processes, full disks."""

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from adapt_llm.convert import workspace as w
from adapt_llm.convert import writer
from adapt_llm.convert.backbone import plan_backbone
from adapt_llm.convert.preflight import check_disk, check_memory, human
from adapt_llm.convert.request import ConvertRequest
from adapt_llm.convert.river_request import RiverSettings
from adapt_llm.convert.stream import HashingFile, lazy, of_tensor, plan_shards, read_entries, write_safetensors
from adapt_llm.errors import FormatError, ResourceError, UsageError
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.store import open_files, open_safetensors
from adapt_llm.runtime.verify import verify

PRINT = {"source": {"sha256": "aa"}, "settings": {"bits": 4}}
_CHILD = Path(__file__).with_name("convert_child.py")


# -- streaming safetensors ------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.int64, torch.bool]
tensors = st.dictionaries(
    st.text(min_size=1, max_size=12),
    st.builds(
        lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from(DTYPES),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=6,
).filter(lambda table: "__metadata__" not in table)


def write(path: Path, table: dict[str, torch.Tensor]) -> HashingFile:
    with path.open("wb") as file:
        hashing = HashingFile(file)
        write_safetensors(hashing, [of_tensor(name, tensor) for name, tensor in table.items()])
    return hashing


@settings(deadline=None, max_examples=60)
@given(table=tensors)
def test_the_safetensors_library_reads_what_is_written(
    table: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    path = folder / "x.safetensors"
    record = write(path, table).record
    assert record == writer.hash_file(path)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(table)
        for name, tensor in table.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype
    again = folder / "y.safetensors"
    write(again, dict(reversed(table.items())))
    assert again.read_bytes() == path.read_bytes()
    copy = folder / "z.safetensors"
    with copy.open("wb") as file:
        write_safetensors(HashingFile(file), read_entries(path))
    assert copy.read_bytes() == path.read_bytes()


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    write(tmp_path / "x", {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5), "c": torch.ones(1).bfloat16()})
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, info in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            size = {"U8": 1, "F32": 4, "BF16": 2}[info["dtype"]]
            assert (8 + length + info["data_offsets"][0]) % size == 0


def test_a_large_tensor_is_converted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapt_llm.convert.stream.CHUNK", 64)
    weight = torch.randn(37, 11)
    with (tmp_path / "x").open("wb") as file:
        write_safetensors(HashingFile(file), [lazy("w", torch.bfloat16, (37, 11), lambda: weight)])
    assert torch.equal(open_files([tmp_path / "x"]).read("w"), weight.bfloat16())


def test_a_loader_that_gives_another_shape_is_an_error(tmp_path: Path) -> None:
    entry = lazy("w", torch.float32, (2, 2), lambda: torch.zeros(4))
    with (tmp_path / "x").open("wb") as file, pytest.raises(FormatError, match=r"w has shape \(4,\)"):
        write_safetensors(HashingFile(file), [entry])


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x", {"a": torch.ones(100)})
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:-1])
    with pytest.raises(FormatError, match="cut short"):
        read_entries(tmp_path / "x")


@given(sizes=st.lists(st.integers(0, 50), max_size=30), limit=st.integers(1, 60))
def test_shards_keep_order_and_limit(sizes: list[int], limit: int) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    shards = plan_shards(named, limit)
    assert [name for shard in shards for name in shard] == list(named)
    assert all(len(shard) == 1 or sum(named[name] for name in shard) <= limit for shard in shards)


# -- the workspace --------------------------------------------------------------------------------------------------


def test_nothing_has_the_name_until_all_is_there(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    with w.Workspace(output, PRINT) as work:
        writer.place_bytes(work, "a", b"1")
        assert not output.exists()
        assert work.publish() == output
    assert (output / "a").read_bytes() == b"1"
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_matching_work_is_taken_up(tmp_path: Path) -> None:
    with w.Workspace(tmp_path / "out", PRINT) as work:
        assert not work.resumed
        work.write_note("kl", {"kl": 0.1 + 0.2})
    with w.Workspace(tmp_path / "out", PRINT, resume=True) as work:
        assert work.resumed
        assert work.has("kl")
        assert work.read_note("kl") == {"kl": 0.1 + 0.2}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sha256": 1}', "\x00\xff"])
def test_a_file_whose_record_is_damaged_is_written_again(tmp_path: Path, text: str) -> None:
    with w.Workspace(tmp_path / "out", PRINT) as work:
        writer.place_bytes(work, "a", b"1")
        (work.folder / "records" / "a.json").write_text(text, encoding="latin-1")
        assert work.placed("a") is None
        assert not work.files()
        writer.place_bytes(work, "a", b"1")
        assert list(work.files()) == ["a"]


def test_work_that_came_to_nothing_is_in_nobodys_way(tmp_path: Path) -> None:
    """Configurations and tokens are made in a moment: the corrected command needs no permission to drop them."""
    with w.Workspace(tmp_path / "out", {"data": "empty"}) as work:
        writer.place_bytes(work, "config.json", b"{}")
        (work.folder / w.TOKENS).mkdir()
        (work.folder / w.TOKENS / "data.json").write_bytes(b"{}")
    with w.Workspace(tmp_path / "out", {"data": "better"}) as work:
        assert not work.resumed
        assert not work.files()
        assert not (work.folder / w.TOKENS).exists()


@pytest.mark.parametrize("what", ["pieces/a", "training/checkpoint-1", "records/model.safetensors.json"])
def test_work_worth_an_hour_is_asked_about(tmp_path: Path, what: str) -> None:
    with w.Workspace(tmp_path / "out", {"data": "a"}) as work:
        (work.folder / what).parent.mkdir(exist_ok=True)
        (work.folder / what).write_bytes(b"{}")
    with pytest.raises(UsageError, match='data was "a", is "b"'):
        w.Workspace(tmp_path / "out", {"data": "b"})


def test_other_work_is_refused_and_the_change_named(tmp_path: Path) -> None:
    other = {"source": {"sha256": "bb"}, "settings": {"bits": 4}, "program": "2"}
    with w.Workspace(tmp_path / "out", PRINT) as work:
        work.write_note("kl", 1)
    for resume in (None, True):
        with pytest.raises(UsageError, match=r'program was null, is "2"; source.sha256 was "aa", is "bb".*--no-resume'):
            w.Workspace(tmp_path / "out", other, resume=resume)
    with w.Workspace(tmp_path / "out", PRINT) as work:
        assert work.has("kl")  # a refusal loses nothing


@pytest.mark.parametrize("how", [{"resume": False}, {"force": True}])
def test_other_work_is_thrown_away_when_asked(tmp_path: Path, how: dict[str, bool]) -> None:
    with w.Workspace(tmp_path / "out", PRINT) as work:
        work.write_note("kl", 1)
        writer.place_bytes(work, "a", b"1")
    with w.Workspace(tmp_path / "out", {"x": 1}, **how) as work:
        assert not work.resumed
        assert not work.has("kl")
        assert not work.files()


def test_no_resume_throws_matching_work_away(tmp_path: Path) -> None:
    with w.Workspace(tmp_path / "out", PRINT) as work:
        work.write_note("kl", 1)
    with w.Workspace(tmp_path / "out", PRINT, resume=False) as work:
        assert not work.has("kl")


def test_resume_needs_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no unfinished work"):
        w.Workspace(tmp_path / "out", PRINT, resume=True)
    assert not list(tmp_path.iterdir())


def test_a_non_empty_output_is_refused_untouched(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with w.Workspace(output, PRINT) as work:  # an empty folder is no obstacle
        writer.place_bytes(work, "a", b"1")
        work.publish()
    with pytest.raises(UsageError, match=r"not empty.*--force"):
        w.Workspace(output, PRINT)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (output / "a").read_bytes() == b"1"
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="not a folder"):
        w.Workspace(file, PRINT, force=True)


def test_force_replaces_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "old").touch()
    with w.Workspace(output, PRINT, force=True) as work:
        writer.place_bytes(work, "new", b"1")
        assert (output / "old").exists()
        work.publish()
    assert [path.name for path in output.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_in_the_middle_of_replacing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """The rename after `renames` successful ones never happens: old or new is there, and a second try finishes."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "old").touch()
    rename, done = Path.rename, []

    def dying(self: Path, target: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(1)
        return rename(self, target)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with w.Workspace(output, PRINT, force=True) as work, monkeypatch.context() as patch:
        writer.place_bytes(work, "new", b"1")
        patch.setattr(Path, "rename", dying)
        patch.setattr(w.Workspace, "_clear", die)
        with pytest.raises(KeyboardInterrupt):
            work.publish()
    holders = [output, work.folder / "replaced", work.bundle]
    assert any((holder / "old").exists() for holder in holders) or renames == 2
    assert any((holder / "new").exists() for holder in holders)
    with w.Workspace(output, PRINT, force=True) as work:
        assert (output / ("new" if renames == 2 else "old")).exists()
        writer.place_bytes(work, "new", b"1")
        work.publish()
    assert [path.name for path in output.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_put_aside_is_never_thrown_away(tmp_path: Path) -> None:
    """A machine stopped between the two renames, then somebody wrote a new output by hand."""
    output = tmp_path / "out"
    with w.Workspace(output, PRINT) as work:
        work.write_note("kl", 1)
    (work.folder / "replaced").mkdir()
    (work.folder / "replaced" / "old").touch()
    output.mkdir()
    (output / "mine").touch()
    with pytest.raises(UsageError, match="Move one of them away"):
        w.Workspace(output, PRINT, force=True, resume=False)
    (output / "mine").unlink()
    with pytest.raises(UsageError, match="not empty"):
        w.Workspace(output, PRINT)
    assert (output / "old").exists()


def test_a_start_that_finishes_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), w.Workspace(tmp_path / "out", PRINT):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with w.Workspace(tmp_path / "out", PRINT) as work:
        with pytest.raises(UsageError, match=f"Process {os.getpid()} is at work in"):
            w.Workspace(tmp_path / "out", PRINT)
        assert work.folder.exists()
    with w.Workspace(tmp_path / "out", PRINT):
        pass


def test_a_lock_on_a_removed_file_guards_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the holder may finish and remove the folder: the lock is taken again."""
    folder, flock, calls = tmp_path / "work", fcntl.flock, []

    def racing(handle: int, flags: int) -> None:
        calls.append(1)
        if len(calls) == 1:
            shutil.rmtree(folder)
        flock(handle, flags)

    monkeypatch.setattr("fcntl.flock", racing)
    lock = w.FolderLock(folder)
    assert len(calls) == 2
    with pytest.raises(UsageError):
        w.FolderLock(folder)
    lock.release(remove_if_empty=True)
    assert not folder.exists()


@pytest.mark.parametrize("step", ["piece", "place"])
def test_a_full_disk_keeps_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def act(work: w.Workspace) -> None:
        if step == "piece":
            writer.write_piece(work, "p", {"a": torch.ones(3)})
        else:
            writer.place_bytes(work, "a", b"1")

    with w.Workspace(tmp_path / "out", PRINT) as work:
        work.write_note("done", 1)
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(ResourceError, match=r"disk is full.*goes on where it stopped") as caught:
                act(work)
        assert caught.value.exit_code == 5
        assert not work.has("p")
        assert work.placed("a") is None
    with w.Workspace(tmp_path / "out", PRINT) as work:
        assert work.has("done")
        act(work)
        work.publish()


def test_a_folder_that_forbids_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(UsageError, match=r"Cannot write in .*Permission denied"):
        w.Workspace(tmp_path / "out", PRINT)


# -- whole conversions ----------------------------------------------------------------------------------------------


def test_two_conversions_give_the_same_bytes(factory: ModuleType, source: Path, built: Path, tmp_path: Path) -> None:
    assert factory.contents(factory.bundle(source, tmp_path / "again")) == factory.contents(built)


def test_source_shards_are_taken_over_as_they_are(built: Path, source: Path) -> None:
    for path in source.glob("model-*.safetensors"):
        assert (built / path.name).read_bytes() == path.read_bytes()


def test_copying_without_the_kernels_help(
    factory: ModuleType, source: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.copy_file_range", no)
    assert factory.contents(factory.bundle(source, tmp_path / "again")) == factory.contents(built)


def test_links_fall_back_to_copies(
    factory: ModuleType, source: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notes(SilentReporter):
        texts: list[str] = []  # noqa: RUF012 - one test

        def note(self, text: str) -> None:
            self.texts.append(text)

    def no(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", no)
    out = factory.bundle(source, tmp_path / "again", mode="link", reporter=Notes())
    assert factory.contents(out) == factory.contents(built)
    assert "copied" in Notes.texts[0]


def test_several_river_shards(
    factory: ModuleType, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 50_000)
    out = factory.bundle(source, tmp_path / "out")
    assert (
        sorted(path.name for path in out.glob("river-*"))
        == [
            "river-00001-of-00002.safetensors",
            "river-00002-of-00002.safetensors",
        ]
        or len(list(out.glob("river-*-of-00003.safetensors"))) == 3
    )
    assert verify(out, reporter=SilentReporter()).ok
    index = json.loads((out / "river.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"].values()) == {path.name for path in out.glob("river-*.safetensors")}


@pytest.mark.parametrize(
    "changes",
    [{"shards": 1}, {"tie_word_embeddings": True}, {"shards": 3, "extra_head": True, "tie_word_embeddings": True}],
)
def test_every_kind_of_source_gives_a_sound_bundle(factory: ModuleType, tmp_path: Path, changes: dict) -> None:
    out = factory.bundle(factory.model_folder(tmp_path / "source", **changes), tmp_path / "out")
    assert verify(out, reporter=SilentReporter()).ok


def test_a_source_without_shards_is_written_in_bf16(factory: ModuleType, source: Path, tmp_path: Path) -> None:
    """What a GGUF gives: a store that dequantises, and no files."""
    arch, store = Architecture.from_config(factory.config()), open_safetensors(source)

    class Floats:
        names = store.names
        info = store.info

        def read(self, name: str) -> torch.Tensor:
            return store.read(name).float() + 1e-4

    plan = plan_backbone(files=[], store=Floats(), expected=arch.tensors(), tied=False, mode="link")
    with w.Workspace(tmp_path / "out", PRINT) as work:
        assert writer.place_backbone(work, plan, SilentReporter()).mode == "copy"
        work.publish()
    written = open_safetensors(tmp_path / "out")
    assert set(written.names()) == set(arch.tensors())
    for name in written.names():
        assert torch.equal(written.read(name), (store.read(name).float() + 1e-4).bfloat16())


def test_a_bundle_that_would_not_open_is_not_published(factory: ModuleType, tmp_path: Path) -> None:
    arch = Architecture.from_config(factory.config())
    with w.Workspace(tmp_path / "out", PRINT) as work, pytest.raises(FormatError, match=r"config\.json"):
        writer.seal(work, factory.manifest(arch))
    assert not (tmp_path / "out").exists()


def test_the_config_records_the_tie(factory: ModuleType, tmp_path: Path) -> None:
    with w.Workspace(tmp_path / "out", PRINT) as work:
        writer.place_configs(work, factory.config(), {"eos_token_id": [1, 2]}, tied=True)
        work.publish()
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is True
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text(encoding="utf-8"))
    assert saved == {"eos_token_id": [1, 2]}


def test_reference_needs_a_hub_model(factory: ModuleType, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--backbone copy"):
        factory.bundle(source, tmp_path / "out", mode="reference", revision="0" * 40)
    assert not list(tmp_path.iterdir())


# -- kill -9 --------------------------------------------------------------------------------------------------------


class Convert:
    """Starts conversions in processes of their own, forked from a server that has the imports done already."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["adapt_llm.convert.writer", "adapt_llm.runtime.manifest"])

    def __call__(
        self,
        source: Path,
        output: Path,
        *,
        force: bool = False,
        die_at: int | None = None,
        kill_after: float | None = None,
    ) -> bool:
        """Whether the conversion ended by itself, and well; it may have been killed, but must not have failed."""
        told = {"SOURCE": str(source), "OUTPUT": str(output), "FORCE": force, "DIE_AT": die_at}
        child = self._context.Process(target=runpy.run_path, args=(str(_CHILD), told, "<run_path>"))
        child.start()
        if kill_after is not None:
            time.sleep(kill_after)
            child.kill()
        child.join(60)
        assert child.exitcode in (0, -signal.SIGKILL)
        return child.exitcode == 0


@pytest.fixture(scope="module")
def convert(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Convert:
    run = Convert()
    run(source, tmp_path_factory.mktemp("warm") / "out")
    return run


@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_file_operation(
    factory: ModuleType, convert: Convert, source: Path, built: Path, tmp_path: Path, seed: int
) -> None:
    """Killed at a random operation, resumed and killed again until it is through: the bytes are the same."""
    output, drawn = tmp_path / "out", random.Random(seed)
    kills = 0
    while not output.exists():
        assert not [path for path in tmp_path.iterdir() if path.name != w.work_folder(output).name]
        if not convert(source, output, die_at=drawn.randint(1, 60 + 40 * kills)):
            kills += 1
    assert kills > 0
    if w.work_folder(output).exists():  # killed while tidying up
        with pytest.raises(UsageError, match="not empty"):
            w.Workspace(output, PRINT)
    assert factory.contents(output) == factory.contents(built)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_time(
    factory: ModuleType, convert: Convert, source: Path, built: Path, tmp_path: Path, seed: int
) -> None:
    output = tmp_path / "out"
    convert(source, output, kill_after=random.Random(seed).uniform(0.05, 0.5))
    if not output.exists():
        assert convert(source, output)
    assert factory.contents(output) == factory.contents(built)


@pytest.mark.parametrize("seed", range(4))
def test_killed_while_replacing(
    factory: ModuleType, convert: Convert, source: Path, built: Path, tmp_path: Path, seed: int
) -> None:
    """With --force the old output is there, or recoverable, until the new one is."""
    output, drawn = tmp_path / "out", random.Random(seed)
    output.mkdir()
    (output / "old").touch()
    while not convert(source, output, force=True, die_at=drawn.randint(100, 400)):
        holders = (output, w.work_folder(output) / "replaced")
        assert any((holder / "old").exists() or (holder / "adapt.json").exists() for holder in holders)
    assert factory.contents(output) == factory.contents(built)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# -- before any work ------------------------------------------------------------------------------------------------


def test_too_little_disk_or_memory_is_told_with_the_shortfall(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(ResourceError, match=r"Not enough disk .* short"):
        check_disk(tmp_path / "not" / "there" / "yet", free + (1 << 40))
    with pytest.raises(ResourceError, match=r"3\.00 GiB needed, 1\.00 GiB available, 2\.00 GiB short"):
        check_memory(3 << 30, available=1 << 30)
    check_disk(tmp_path, 1)
    check_memory(1)
    assert human(512) == "512 bytes"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"quantizer": "awq"}, "--quantizer awq"),
        ({"bits": 3}, "--bits 3"),
        ({"group_size": 48}, "--group-size 48"),
        ({"entry_layer": 1}, "--entry-layer 1"),
        ({"tau": 1.5}, "--tau"),
        ({"max_loss": -0.1}, "--max-loss"),
        ({"max_loss": float("inf")}, "--max-loss"),
        ({"calibration": Path("nowhere.txt")}, "nowhere.txt"),
        ({"calibration_tokens": 0}, "--calibration-tokens"),
        ({"quantizer": "hqq", "symmetric": True}, "symmetric"),
        ({"river_from": "x/y", "group_size": 64}, "--group-size"),
        ({"entry_layer": 5, "resident": 3}, "--resident 3"),
    ],
)
def test_settings_that_cannot_be(changes: dict, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        RiverSettings(**changes)


@pytest.mark.parametrize("changes", [{"backbone": "symlink"}, {"dtype": "int4"}, {"threads": 0}])
def test_requests_that_cannot_be(changes: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        ConvertRequest(source="x/y", output=Path("out"), settings=RiverSettings(), **changes)


def test_the_output_is_not_the_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="output is the source"):
        ConvertRequest(source=str(tmp_path), output=tmp_path / ".", settings=RiverSettings())


def test_the_fingerprint_sees_what_changes_bytes_and_nothing_else() -> None:
    plain = ConvertRequest(source="x/y", output=Path("out"), settings=RiverSettings())
    same = ConvertRequest(
        source="x/y",
        output=Path("else"),
        settings=RiverSettings(),
        token="hf_secret",
        force=True,
        resume=True,
        offline=True,
    )
    assert plain.fingerprint() == same.fingerprint()
    assert "hf_secret" not in repr(same)
    for other in (RiverSettings(tau=0.9), RiverSettings(group_size=32), RiverSettings(quantizer="rtn")):
        assert ConvertRequest(source="x/y", output=Path("out"), settings=other).fingerprint() != plain.fingerprint()
    fields = {field.name for field in dataclasses.fields(RiverSettings)} - {"calibration"}
    assert set(plain.fingerprint()["river"]) == fields


@pytest.mark.parametrize("text", ["", "{", "\ufeff", "[" * 200_000])
def test_damaged_notes_are_named(tmp_path: Path, text: str) -> None:
    with w.Workspace(tmp_path / "out", PRINT) as work:
        work.write_note("kl", 1)
        work.piece("kl").write_text(text, encoding="utf-8")
        with pytest.raises(FormatError, match=r"pieces/kl is damaged.*--no-resume"):
            work.read_note("kl")
        state = work.folder / "state.json"
    state.write_text(text, encoding="utf-8")
    for resume in (None, True):
        with pytest.raises(FormatError, match=r"state\.json is damaged.*--no-resume"):
            w.Workspace(tmp_path / "out", PRINT, resume=resume)
    with w.Workspace(tmp_path / "out", PRINT, resume=False) as work:
        assert not work.has("kl")
