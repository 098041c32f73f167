"""GGUF files: every type against the `gguf` package, and what is refused."""

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.convert.gguf_reader import open_gguf
from adapt_llm.convert.source_gguf import GgufSource
from adapt_llm.errors import FormatError, UnsupportedError
from adapt_llm.runtime.progress import SilentReporter

WRITABLE = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.BF16, Type.F16, Type.F32]
# The package cannot quantise to these, but any bytes are sound codes as long as the scales are finite.
K_TYPES = {Type.Q2_K: 84, Type.Q3_K: 110, Type.Q4_K: 144, Type.Q5_K: 176, Type.Q6_K: 210}


def write(path: Path, fill: Callable[[GGUFWriter], None], architecture: str = "llama") -> Path:
    writer = GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype == torch.bfloat16 and torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_written_types(tmp_path: Path, kind: Type) -> None:
    values = np.random.default_rng(0).normal(size=(37, 96)).astype(np.float32)
    stored = quantize(values, kind)
    path = write(tmp_path / "m.gguf", lambda w: w.add_tensor("a.weight", stored, raw_dtype=kind))
    expected = torch.from_numpy(dequantize(stored, kind)).to(torch.bfloat16)
    file = open_gguf(path)
    assert file.tensors["a.weight"].shape == (37, 96)
    assert same(file.read("a.weight"), expected)
    error = (expected.float() - torch.from_numpy(values)).abs().max()
    assert error < (0.35 if kind.name.startswith("Q") else 0.02)


@pytest.mark.parametrize("kind", K_TYPES, ids=lambda kind: kind.name)
def test_k_types(tmp_path: Path, kind: Type) -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, size=(5, 2, K_TYPES[kind]), dtype=np.uint8)
    half = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    # The float16 scales are last in Q3_K and Q6_K, first in Q4_K and Q5_K, and after 80 bytes in Q2_K.
    places = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q6_K: (208,)}.get(kind, (0, 2))
    for place in places:
        blocks[..., place : place + 2] = half
    stored = blocks.reshape(5, -1)
    path = write(tmp_path / "m.gguf", lambda w: w.add_tensor("a.weight", stored, raw_dtype=kind))
    read = open_gguf(path).read("a.weight")
    assert read.shape == (5, 512)
    assert same(read, torch.from_numpy(dequantize(stored, kind)).to(torch.bfloat16))
    assert read.float().std() > 0


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapt_llm.convert.gguf_reader._PIECE", 200)
    stored = quantize(np.random.default_rng(0).normal(size=(33, 64)).astype(np.float32), Type.Q8_0)
    path = write(tmp_path / "m.gguf", lambda w: w.add_tensor("a", stored, raw_dtype=Type.Q8_0))
    assert same(open_gguf(path).read("a"), torch.from_numpy(dequantize(stored, Type.Q8_0)).to(torch.bfloat16))


def test_vectors_keep_their_precision(tmp_path: Path) -> None:
    values = np.array([1.0 + 2**-12, -3.0], dtype=np.float32)
    file = open_gguf(write(tmp_path / "m.gguf", lambda w: w.add_tensor("norm.weight", values)))
    assert torch.equal(file.read("norm.weight"), torch.from_numpy(values))


def test_a_released_tensor_can_be_read_again(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    file = open_gguf(write(tmp_path / "m.gguf", lambda w: w.add_tensor("a", values)))
    first = file.read("a")
    file.release("a")
    assert same(first, torch.from_numpy(values).bfloat16())
    assert same(first, file.read("a"))


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_string("s", "ü한")
        writer.add_bool("b", val=True)
        writer.add_float32("f", 0.5)
        writer.add_int64("i", -7)
        writer.add_array("strings", ["a", "", "▁"])
        writer.add_array("numbers", [1, -2, 3])
        writer.add_array("floats", [0.5, -1.5])

    data = open_gguf(write(tmp_path / "m.gguf", fill)).metadata
    assert (data["s"], data["b"], data["f"], data["i"]) == ("ü한", True, 0.5, -7)
    assert (data["strings"], data["numbers"], data["floats"]) == (["a", "", "▁"], [1, -2, 3], [0.5, -1.5])


def small(path: Path) -> Path:
    def fill(writer: GGUFWriter) -> None:
        writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
        writer.add_tensor("a.weight", np.ones((4, 32), dtype=np.float32))

    return write(path, fill)


@settings(max_examples=40)
@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_always_refused(tmp_path_factory: pytest.TempPathFactory, keep: float) -> None:
    path = small(tmp_path_factory.mktemp("cut") / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(FormatError, match=r"truncated|empty|not a GGUF") as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=80)
@given(position=st.integers(8, 200), byte=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int
) -> None:
    path = small(tmp_path_factory.mktemp("damaged") / "m.gguf")
    content = bytearray(path.read_bytes())
    content[min(position, len(content) - 1)] = byte
    path.write_bytes(content)
    with contextlib.suppress(FormatError, UnsupportedError):
        assert set(open_gguf(path).tensors) <= {"a.weight"} or position > 24


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "git-lfs pointer"),
        (b"PK\x03\x04 a zip file", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(("version", "message"), [(1, "version 1"), (9, "version 9"), (0x03000000, "big-endian")])
def test_other_versions(tmp_path: Path, version: int, message: str) -> None:
    path = small(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
    with pytest.raises(UnsupportedError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(("kind", "label"), [(Type.I32, "I32"), (Type.Q8_K, "Q8_K")])
def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path, kind: Type, label: str) -> None:
    stored = np.zeros((2, 292), dtype=np.uint8) if kind == Type.Q8_K else np.zeros((2, 32), dtype=np.int32)
    path = write(tmp_path / "m.gguf", lambda w: w.add_tensor("odd.weight", stored, raw_dtype=kind))
    with pytest.raises(UnsupportedError, match=rf"odd\.weight has type {label}"):
        open_gguf(path)


def two(path: Path, offsets: tuple[int, int]) -> Path:
    """Two tensors of 512 bytes, said to begin at these places."""

    def fill(writer: GGUFWriter) -> None:
        for name in ("a.weight", "b.weight"):
            writer.add_tensor(name, np.ones((4, 32), dtype=np.float32))

    content = bytearray(write(path, fill).read_bytes())
    for name, offset in zip((b"a.weight", b"b.weight"), offsets, strict=True):
        place = content.index(name) + len(name) + 4 + 2 * 8 + 4
        content[place : place + 8] = struct.pack("<Q", offset)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("offsets", [(0, 512), (512, 0)])
def test_tensors_may_lie_in_any_order(tmp_path: Path, offsets: tuple[int, int]) -> None:
    file = open_gguf(two(tmp_path / "m.gguf", offsets))
    assert all(file.read(name).eq(1).all() for name in ("a.weight", "b.weight"))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((0, 0), "tensors a.weight and b.weight share bytes"),
        ((0, 480), "tensors a.weight and b.weight share bytes"),
        ((32, 0), "tensors b.weight and a.weight share bytes"),
        ((0, 511), "tensor b.weight is not aligned to 32 bytes"),
        ((4, 512), "tensor a.weight is not aligned to 32 bytes"),
    ],
)
def test_tensors_that_lie_where_they_cannot(tmp_path: Path, offsets: tuple[int, int], message: str) -> None:
    with pytest.raises(FormatError, match=rf"m\.gguf is damaged: {message}.*again"):
        open_gguf(two(tmp_path / "m.gguf", offsets))


@pytest.mark.parametrize("rows", [0, 2**63, 2**64 - 1])
def test_sizes_beyond_reason_are_damage(tmp_path: Path, rows: int) -> None:
    path = small(tmp_path / "m.gguf")
    content = path.read_bytes()
    place = content.index(b"a.weight") + len(b"a.weight") + 4 + 8
    path.write_bytes(content[:place] + struct.pack("<Q", rows) + content[place + 8 :])
    with pytest.raises(FormatError, match=r"damaged|truncated"):
        open_gguf(path)


def test_a_type_from_the_future_is_named_by_its_number(tmp_path: Path) -> None:
    path = small(tmp_path / "m.gguf")
    content = path.read_bytes()
    place = content.index(b"a.weight") + len(b"a.weight") + 4 + 2 * 8
    path.write_bytes(content[:place] + struct.pack("<I", 999) + content[place + 4 :])
    with pytest.raises(UnsupportedError, match=r"a\.weight has type number 999"):
        open_gguf(path)


def test_one_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-00002.gguf", lambda w: w.add_uint16("split.count", 2))
    with pytest.raises(UnsupportedError, match=r"part of a split file.*gguf-split --merge"):
        open_gguf(path)


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lambda _w: None, architecture="mamba")
    with pytest.raises(UnsupportedError, match="architecture 'mamba'"):
        GgufSource(path, SilentReporter())
