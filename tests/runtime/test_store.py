"""Safetensors folders: sound ones read exactly and without a copy, each kind of damage named with a remedy."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adapt_llm.errors import FormatError
from adapt_llm.runtime.store import (
    RenamedStore,
    check_tensors,
    is_tied,
    open_files,
    open_safetensors,
    read_header,
    text_backbone,
)

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(5, dtype=torch.bfloat16),
    "c.codes": torch.arange(7, dtype=torch.int32),
    "d.flag": torch.tensor([True, False, True]),
    "e.none": torch.empty(0, 4),
}


def write_index(folder: Path, weights: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}), encoding="utf-8")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = list(TENSORS)
    weights: dict[str, str] = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in part}, tmp_path / shard)
        weights |= dict.fromkeys(part, shard)
    write_index(tmp_path, weights)
    return tmp_path


@pytest.mark.parametrize("kind", ["single", "sharded", "without-index"])
def test_reads_what_was_written(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("single" if kind == "single" else "sharded")
    if kind == "without-index":
        (folder / "model.safetensors.index.json").unlink()
    store = open_safetensors(folder)
    assert set(store.names()) == TENSORS.keys()
    for name, tensor in TENSORS.items():
        info = store.info(name)
        assert (info.shape, info.dtype, info.nbytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
        assert torch.equal(store.read(name), tensor)
        store.release(name)
        assert torch.equal(store.read(name), tensor)


def test_tensors_share_the_mapping(single: Path) -> None:
    store = open_safetensors(single)
    first, second = store.read("a.weight"), store.read("a.weight")
    assert first.data_ptr() == second.data_ptr()


def test_released_pages_leave_memory(tmp_path: Path) -> None:
    big = torch.ones(8 << 20, dtype=torch.float32)
    save_file({"big": big}, tmp_path / "model.safetensors")
    store = open_safetensors(tmp_path)
    read = store.read("big")

    def mapped() -> int:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").split("model.safetensors", 1)[1].splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    if not Path("/proc/self/smaps").is_file():
        pytest.skip("needs /proc")
    assert read.sum() == big.numel()
    assert mapped() > 30_000
    store.release("big")
    assert mapped() < 1_000
    assert read.sum() == big.numel()


def test_a_store_outlives_the_file_name(single: Path) -> None:
    tensor = open_safetensors(single).read("a.weight")
    (single / "model.safetensors").unlink()
    assert torch.equal(tensor, TENSORS["a.weight"])


def shorten(path: Path, size: int) -> None:
    with path.open("rb+") as file:
        file.truncate(size)


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n", encoding="utf-8")


def header(path: Path, text: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)


def described(**change: object) -> bytes:
    item = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change
    return json.dumps({"t": item}).encode()


def laid_out(*places: tuple[str, int, int], size: int) -> bytes:
    """A whole file of bytes (U8), each tensor where it is said to lie; a name may come twice."""
    items = (
        f'"{name}": {{"dtype": "U8", "shape": [{stop - begin}], "data_offsets": [{begin}, {stop}]}}'
        for name, begin, stop in places
    )
    text = f"{{{', '.join(items)}}}".encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


LAYOUTS = {
    "one range for two": ([("a", 0, 4), ("b", 0, 4)], 4, "damaged: a and b share bytes"),
    "ranges that overlap": ([("b", 2, 6), ("a", 0, 4)], 6, "damaged: a and b share bytes"),
    "an empty one inside another": ([("a", 0, 4), ("b", 2, 2)], 4, "damaged: a and b share bytes"),
    "a hole": ([("a", 0, 4), ("b", 6, 8)], 8, "damaged: 2 bytes between a and b belong to no tensor"),
    "a hole at the start": ([("a", 4, 8)], 8, "damaged: 4 bytes between its header and a belong to no tensor"),
    "stray bytes": ([("a", 0, 4)], 7, "damaged: 3 bytes behind its last tensor belong to none"),
    "nothing but stray bytes": ([], 7, "damaged: 7 bytes behind its last tensor"),
    "a name twice": ([("a", 0, 4), ("a", 4, 8)], 8, "damaged: its header has a twice"),
    "the same entry twice": ([("a", 0, 4), ("a", 0, 4)], 4, "damaged: its header has a twice"),
}


def in_layout(kind: str) -> Callable[[Path], None]:
    places, size, _ = LAYOUTS[kind]
    return lambda path: path.write_bytes(laid_out(*places, size=size)) and None


DEEP = "[" * 200_000  # json gives up with a RecursionError
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "pointer": (pointer, "git-lfs pointer.*git lfs pull"),
    "cut": (lambda path: shorten(path, path.stat().st_size - 1), r"cut short: \d+ bytes, its header says \d+.*again"),
    "cut in the header": (lambda path: shorten(path, 20), "cut short: 20 bytes, the header alone needs"),
    "nearly nothing": (lambda path: shorten(path, 3), "has 3 bytes"),
    "empty": (lambda path: shorten(path, 0), "has 0 bytes"),
    "garbage": (lambda path: path.write_bytes(b"\xff" * 64), "claims a header of"),
    "a web page": (lambda path: path.write_bytes(b"<!DOCTYPE html><html></html>" * 4), "claims a header of"),
    "no JSON": (lambda path: header(path, b"{nope}"), "not JSON"),
    "no table": (lambda path: header(path, b"[1, 2]"), "not a table"),
    "odd dtype": (lambda path: header(path, described(dtype="F4")), "describes t"),
    "odd shape": (lambda path: header(path, described(shape="x")), "describes t"),
    "no offsets": (lambda path: header(path, b'{"t": {"dtype": "F32", "shape": [2]}}'), "describes t"),
    "offsets against the shape": (lambda path: header(path, described(shape=[3])), "gives t 8 bytes.*needs 12"),
    "negative offsets": (lambda path: header(path, described(data_offsets=[-8, 0])), "gives t 8 bytes"),
    "nested too deeply": (lambda path: header(path, DEEP.encode()), "not JSON"),
    "a field twice": (lambda path: header(path, b'{"t": {"dtype": "U8", "dtype": "I8"}}'), "has dtype twice"),
    **{kind: (in_layout(kind), message) for kind, (_, _, message) in LAYOUTS.items()},
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, single: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(single / "model.safetensors")
    with pytest.raises(FormatError, match=message) as caught:
        open_safetensors(single)
    assert "model.safetensors" in caught.value.message
    assert "\n" not in str(caught.value)


# Of the same entry twice it takes the last.
@pytest.mark.parametrize("kind", sorted(LAYOUTS.keys() - {"the same entry twice"}))
def test_the_library_refuses_these_layouts_too(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    in_layout(kind)(path)
    with pytest.raises(SafetensorError):
        load_file(path)


SOUND = {
    "written with metadata": lambda path: save_file(TENSORS, path, {"format": "pt", "": "a"}),
    "nothing at all": lambda path: save_file({}, path),
    "metadata alone": lambda path: save_file({}, path, {"format": "pt"}),
    "empty ones": lambda path: save_file({name: torch.empty(0, 2) for name in "abc"}, path),
    "empty ones between": lambda path: path.write_bytes(
        laid_out(("z", 4, 4), ("b", 4, 8), ("y", 0, 0), ("a", 0, 4), ("x", 8, 8), size=8)
    ),
    "a header out of order": lambda path: path.write_bytes(laid_out(("b", 4, 8), ("a", 0, 4), size=8)),
    "a padded header": lambda path: header(path, b'{"__metadata__": {}}' + b" " * 13),
}


@pytest.mark.parametrize("kind", SOUND)
def test_what_the_library_reads_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    SOUND[kind](path)
    expected, store = load_file(path), open_files([path])
    assert set(store.names()) == expected.keys()
    assert all(torch.equal(store.read(name), tensor) for name, tensor in expected.items())


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_no_bytes_get_past_the_header_check(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError):
        open_files([path])


@given(text=st.text(max_size=100))
def test_headers_of_any_text(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "text.safetensors"
    header(path, text.encode("utf-8", "surrogatepass"))
    try:
        start, entries = read_header(path)
    except FormatError:
        return
    assert start == path.stat().st_size
    assert entries == json.loads(text)


class TestShards:
    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FormatError, match=r"model-00002-of-00002.safetensors is missing, the index names it"):
            open_safetensors(sharded)

    def test_missing_shard_without_index(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").unlink()
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FormatError, match="1 shards, their names say 2"):
            open_safetensors(sharded)

    @pytest.mark.parametrize("end", ["²", "٢", "x", "", "-2", "0x2"])
    def test_a_name_that_says_no_number(self, sharded: Path, end: str) -> None:
        (sharded / "model.safetensors.index.json").unlink()
        for number in (1, 2):
            shard = sharded / f"model-{number:05}-of-00002.safetensors"
            shard.rename(sharded / f"model-{number:05}-of-{end}.safetensors")
        with pytest.raises(FormatError, match="2 shards, their names say 0"):
            open_safetensors(sharded)

    def test_one_file_and_shards_without_an_index(self, sharded: Path) -> None:
        save_file(TENSORS, sharded / "model.safetensors")
        assert open_safetensors(sharded).files() == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        (sharded / "model.safetensors.index.json").unlink()
        with pytest.raises(FormatError, match=r"both model.safetensors and model-00001-of-00002.* Remove the stale"):
            open_safetensors(sharded)

    @pytest.mark.parametrize("weights", [None, 3, "model", ["a"], {"a": 1}, {"a": None}, {"a": ["s"]}, {"a": ""}])
    def test_an_index_that_names_no_files(self, sharded: Path, weights: object) -> None:
        index = sharded / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weights}), encoding="utf-8")
        with pytest.raises(FormatError, match=r"model.safetensors.index.json is no index of shards.*again"):
            open_safetensors(sharded)

    @pytest.mark.parametrize("text", ["", "[]", "3", "{}", DEEP, '{"weight_map": ' + '{"a":' * 200_000])
    def test_an_index_that_is_none(self, sharded: Path, text: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        with pytest.raises(FormatError, match=r"model.safetensors.index.json is no index of shards.*again"):
            open_safetensors(sharded)

    def test_tensor_that_its_shard_lacks(self, sharded: Path) -> None:
        write_index(sharded, {"z.weight": "model-00001-of-00002.safetensors"})
        with pytest.raises(FormatError, match=r"00001-of-00002.safetensors has no tensor z.weight"):
            open_safetensors(sharded)

    def test_tensor_twice(self, sharded: Path) -> None:
        save_file({name: TENSORS[name] for name in list(TENSORS)[1:]}, sharded / "model-00002-of-00002.safetensors")
        with pytest.raises(FormatError, match=r"b.weight is in model-00001.* again in model-00002"):
            open_safetensors(sharded)
        (sharded / "model.safetensors.index.json").unlink()
        with pytest.raises(FormatError, match=r"b.weight is in model-00001.* again in model-00002"):
            open_safetensors(sharded)

    def test_damaged_shard(self, sharded: Path) -> None:
        pointer(sharded / "model-00002-of-00002.safetensors")
        with pytest.raises(FormatError, match=r"model-00002-of-00002.safetensors is a git-lfs pointer"):
            open_safetensors(sharded)

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}', "version https://git-lfs"])
    def test_broken_index(self, sharded: Path, text: str) -> None:
        (sharded / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        with pytest.raises(FormatError, match="index"):
            open_safetensors(sharded)

    @pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd"])
    def test_index_that_leaves_its_folder(self, sharded: Path, shard: str) -> None:
        write_index(sharded, {"a.weight": shard})
        with pytest.raises(FormatError, match="outside"):
            open_safetensors(sharded)

    def test_no_weights(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"no model.safetensors"):
            open_safetensors(tmp_path)


EXPECTED = {"model.embed_tokens.weight": (4, 2), "model.norm.weight": (2,), "lm_head.weight": (4, 2)}
FITTING = {name: torch.ones(shape) for name, shape in EXPECTED.items()}


class TestCheckTensors:
    def check(self, tmp_path: Path, tensors: dict[str, torch.Tensor], *, tied: bool = False) -> list[str]:
        save_file(tensors, tmp_path / "model.safetensors")
        expected = {name: shape for name, shape in EXPECTED.items() if not (tied and "lm_head" in name)}
        return check_tensors(open_safetensors(tmp_path), expected, tied=tied)

    def test_all_there(self, tmp_path: Path) -> None:
        assert self.check(tmp_path, FITTING) == []

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"lacks model.norm.weight"):
            self.check(tmp_path, {name: tensor for name, tensor in FITTING.items() if "norm" not in name})

    def test_left_over(self, tmp_path: Path) -> None:
        extra = {f"model.layers.{index}.bias": torch.ones(1) for index in range(9)}
        with pytest.raises(FormatError, match=r"explain: model.layers.0.bias, .*layers.3.bias and 5 more"):
            self.check(tmp_path, {**FITTING, **extra})

    def test_misshapen(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"disagree about model.norm.weight \[3\], not \[2\]"):
            self.check(tmp_path, {**FITTING, "model.norm.weight": torch.ones(3)})

    def test_known_left_overs_do_no_harm(self, tmp_path: Path) -> None:
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        assert self.check(tmp_path, {**FITTING, **extra}) == []

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_head_may_be_there_or_not(self, tmp_path: Path, tied: bool) -> None:
        assert self.check(tmp_path, FITTING, tied=tied) == []

    def test_no_head_although_untied(self, tmp_path: Path) -> None:
        (note,) = self.check(tmp_path, {name: tensor for name, tensor in FITTING.items() if "lm_head" not in name})
        assert "lm_head" in note


@pytest.mark.parametrize(
    ("head", "tied", "expected"),
    [
        ("absent", True, True),
        ("absent", False, True),
        ("same", True, True),
        ("same", False, False),
        ("other", True, False),
    ],
)
def test_the_tensors_decide_whether_the_head_is_tied(tmp_path: Path, head: str, tied: bool, expected: bool) -> None:
    tensors = dict(FITTING)
    if head == "absent":
        del tensors["lm_head.weight"]
    elif head == "other":
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
    save_file(tensors, tmp_path / "model.safetensors")
    assert is_tied(open_safetensors(tmp_path), tied=tied) is expected


@pytest.mark.parametrize(
    ("prefix", "head"),
    [("language_model.model.", "language_model.lm_head.weight"), ("model.language_model.", "lm_head.weight")],
)
def test_the_decoder_among_other_towers(tmp_path: Path, prefix: str, head: str) -> None:
    tensors = {f"{prefix}norm.weight": torch.ones(2), head: torch.ones(3), "vision_tower.x": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    store = text_backbone(open_safetensors(tmp_path))
    assert isinstance(store, RenamedStore)
    assert set(store.names()) == {"model.norm.weight", "lm_head.weight"}
    assert store.read("lm_head.weight").shape == (3,)


def test_a_plain_model_is_left_as_it_is(single: Path) -> None:
    store = open_safetensors(single)
    assert text_backbone(store) is store
