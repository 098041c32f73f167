"""Damage of every kind in a bundle of every method: it opens as it should, or one line says what is wrong."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from adapt_llm.convert.writer import hash_file
from adapt_llm.errors import AdaptError, FormatError
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.bundle import ADAPTERS, BACKBONE, JUNCTIONS, RIVER, Bundle
from adapt_llm.runtime.config_types import FIELDS, ROPE
from adapt_llm.runtime.describe import describe
from adapt_llm.runtime.families import FAMILIES
from adapt_llm.runtime.manifest import MANIFEST_NAME, loads
from adapt_llm.runtime.methods import FixedLayer, LabelledRows, Nvium, Rcla, Thresholds, TwoDee
from adapt_llm.runtime.store import open_safetensors

SHA = "0" * 64
FIGURES = {"accuracy": 0.9, "macro_f1": 0.9, "work": 0.5, "mean_layers": 2.0, "mean_sentences": 1.5}
LAYER = FixedLayer(layer=3, **FIGURES)
POINT = Thresholds(tau_ignore=0.1, tau_acc=1.0, **FIGURES)
METHODS = {
    "rcla": Rcla(kv_sources=(1, 1, 3, 3)),
    "2dee": TwoDee(
        labels=("bad", "good"),
        hidden=8,
        least=2,
        most=40,
        max_tokens=64,
        depth=3,
        max_drop=0.02,
        frontier=(POINT,),
        one_d=(LAYER,),
        full=FixedLayer(layer=4, **FIGURES),
        chosen=POINT,
        chosen_one_d=LAYER,
        data=LabelledRows(name="rows.jsonl", sha256=SHA, rows=9, validation=3),
    ),
    "nvium": Nvium(junctions=(1, 3), router_width=16, trained="routers", beta=0.1),
}
PARTS = {"river": (BACKBONE, RIVER), "rcla": (BACKBONE,), "2dee": (BACKBONE, ADAPTERS), "nvium": (BACKBONE, JUNCTIONS)}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def sealed(folder: Path, manifest: Any) -> Path:
    """Write the manifest of what lies in a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST_NAME)
    files = {name: hash_file(folder / name) for name in names}
    (folder / MANIFEST_NAME).write_text(manifest.model_copy(update={"files": files}).dumps(), encoding="utf-8")
    return folder


def other_bundle(factory: ModuleType, folder: Path, method: str) -> Path:
    """A bundle of a method other than River, whose tensors are all zeros."""
    factory.model_folder(folder, shards=1)
    made = METHODS[method]
    arch = Architecture.from_config(factory.config())
    sealed(folder, factory.manifest(arch, required=(method,), methods=(made,), quality=None))
    bundle = Bundle.open(folder)
    for part in PARTS[method]:
        expected = bundle.expected(part)
        tensors = {name: torch.zeros(shape, dtype=min(dtypes, key=str)) for name, (dtypes, shape) in expected.items()}
        save_file(tensors, folder / f"{part}.safetensors")
    return sealed(folder, bundle.manifest)


@pytest.fixture(scope="session", params=sorted(PARTS))
def whole(
    request: pytest.FixtureRequest, factory: ModuleType, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    method = request.param
    folder = tmp_path_factory.mktemp("whole") / method
    return method, built if method == "river" else other_bundle(factory, folder, method)


@pytest.fixture
def copy(whole: tuple[str, Path], tmp_path: Path) -> tuple[str, Path]:
    shutil.copytree(whole[1], tmp_path / "copy", copy_function=os.link)
    return whole[0], tmp_path / "copy"


def replace(path: Path, content: bytes) -> None:
    """Write a file that may be a hard link to the sound one."""
    path.unlink()
    path.write_bytes(content)


def use(method: str, folder: Path) -> None:
    """All that is read of a bundle before its first token, but for the weights themselves."""
    bundle = Bundle.open(folder)
    describe(bundle)
    for part in PARTS[method]:
        getattr(bundle, "backbone" if part == BACKBONE else part)


def nodes(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from nodes(item, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: object) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


def one_line(act: Callable[[], object]) -> None:
    """What the action raises, if anything, is for people: with a remedy, on one line."""
    try:
        act()
    except AdaptError as error:
        found = error
    else:
        return
    assert found.hint
    assert "\n" not in found.message


DEEP = "[" * 200_000  # json gives up with a RecursionError


@pytest.mark.parametrize("name", [MANIFEST_NAME, "config.json"])
def test_json_nested_too_deeply(copy: tuple[str, Path], name: str) -> None:
    text = DEEP.encode()
    replace(copy[1] / name, text)
    if name == "config.json":
        resealed(copy[1], name, text)
    with pytest.raises(FormatError, match=f"{name}.*nested too deeply"):
        use(*copy)


def test_the_whole_ones_are_sound(whole: tuple[str, Path]) -> None:
    use(*whole)


@quick
@given(data=st.data())
def test_any_value_anywhere_in_the_manifest(
    whole: tuple[str, Path], copy: tuple[str, Path], data: st.DataObject
) -> None:
    manifest = json.loads((whole[1] / MANIFEST_NAME).read_text(encoding="utf-8"))
    path = data.draw(st.sampled_from(list(nodes(manifest))))
    text = json.dumps(put(manifest, path, data.draw(JSON)))
    one_line(lambda: loads(text))
    replace(copy[1] / MANIFEST_NAME, text.encode())
    one_line(lambda: use(*copy))


@pytest.mark.parametrize("name", [["river"], {"a": 1}, None, 3, True, "", "nosuch"])
def test_the_name_of_a_method(built: Path, name: object) -> None:
    manifest = json.loads((built / MANIFEST_NAME).read_text(encoding="utf-8"))
    manifest["methods"][0]["name"] = name
    with pytest.raises(FormatError, match="unknown method"):
        loads(json.dumps(manifest))


@quick
@given(data=st.data())
def test_any_value_anywhere_in_the_config(whole: tuple[str, Path], copy: tuple[str, Path], data: st.DataObject) -> None:
    config = json.loads((whole[1] / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}}
    config |= {"sliding_window": None, "layer_types": None, "head_dim": 16}
    path = data.draw(st.sampled_from([path for path in nodes(config) if path]))
    one_line(lambda: Architecture.from_config(put(config, path, data.draw(JSON))))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_value_for_any_field_in_every_family(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    config = {"model_type": family, "num_hidden_layers": 5, **dict.fromkeys(sizes, 64), **FAMILIES[family].defaults}
    config |= {"num_hidden_layers": 5, "num_attention_heads": 64}
    values = JSON | st.sampled_from([0, 1, 2, -1, 0.5, [], [0, 1], ["full_attention"], {}, {"rope_type": "longrope"}])
    inner = st.dictionaries(st.sampled_from(sorted(ROPE)), values, max_size=4)
    for name in data.draw(st.lists(st.sampled_from([*FIELDS, *sizes, "num_hidden_layers"]), min_size=1, max_size=3)):
        config[name] = data.draw(values | inner)
    one_line(lambda: Architecture.from_config(config))


@pytest.mark.parametrize("field", sorted({*FIELDS, *(name for each in FAMILIES.values() for name in each.defaults)}))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_null_for_any_field_in_every_family(family: str, field: str) -> None:
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    config = {"model_type": family, **dict.fromkeys(sizes, 64), **FAMILIES[family].defaults, "num_hidden_layers": 5}
    for switch in (False, True):
        changed = {**config, "use_sliding_window": switch, "no_rope_layers": None, field: None}
        one_line(lambda changed=changed: Architecture.from_config(changed))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(header: dict[str, Any], rest: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + rest


def packed(header: dict[str, Any], rest: bytes) -> tuple[dict[str, Any], bytes]:
    """The same tensors without the bytes of those that the header does not name."""
    made, data = {}, b""
    for name, item in header.items():
        begin, stop = item.get("data_offsets", (0, 0))
        place = {"data_offsets": [len(data), len(data) + stop - begin]} if name != "__metadata__" else {}
        made[name] = {**item, **place}
        data += rest[begin:stop]
    return made, data


def resealed(folder: Path, name: str, content: bytes) -> None:
    replace(folder / name, content)
    manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    manifest["files"][name] = hash_file(folder / name).model_dump()
    replace(folder / MANIFEST_NAME, json.dumps(manifest).encode())


SAME_SIZE = {"F16": "I16", "BF16": "I16", "F32": "I32", "I32": "F32"}
CHANGES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "missing": lambda header, name: header.pop(name),
    "renamed": lambda header, name: header.update({f"{name}.old": header.pop(name)}),
    "type": lambda header, name: header[name].update(dtype=SAME_SIZE[header[name]["dtype"]]),
    "shape": lambda header, name: header[name].update(shape=[*header[name]["shape"], 1]),
    "transposed": lambda header, name: header[name].update(shape=[1, *header[name]["shape"][::-1]]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_is_not_as_it_must_be_is_named_with_its_file(change: str, copy: tuple[str, Path]) -> None:
    method, folder = copy
    for path in sorted(folder.glob("*.safetensors")):
        header, rest = header_of(path)
        sound = path.read_bytes()
        tensors = [name for name in header if name != "__metadata__"]
        for name in tensors[:: max(1, len(tensors) // 4)]:
            damaged = json.loads(json.dumps(header))
            CHANGES[change](damaged, name)
            resealed(folder, path.name, with_header(*packed(damaged, rest)))
            with pytest.raises(FormatError) as error:
                use(method, folder)
            assert name in str(error.value)
            assert path.name in str(error.value) or "index" in str(error.value)
            assert error.value.hint
        resealed(folder, path.name, sound)
    use(method, folder)


@quick
@given(data=st.data())
def test_any_value_for_a_tensor_in_a_header(copy: tuple[str, Path], data: st.DataObject) -> None:
    method, folder = copy
    path = folder / data.draw(st.sampled_from(sorted(path.name for path in folder.glob("*.safetensors"))))
    header, rest = header_of(path)
    sound = path.read_bytes()
    where = data.draw(st.sampled_from([where for where in nodes(header) if where and where[0] != "__metadata__"]))
    resealed(folder, path.name, with_header(put(header, where, data.draw(JSON)), rest))
    one_line(lambda: use(method, folder))
    resealed(folder, path.name, sound)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "b"}}', DEEP]
)
def test_an_index_that_says_something_else(text: str, built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "copy")
    name = "river.safetensors.index.json"
    resealed(tmp_path / "copy", name, text.encode())
    with pytest.raises(FormatError, match=name):
        use("river", tmp_path / "copy")


def test_opening_reads_no_weights(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(built)
    monkeypatch.setattr("adapt_llm.runtime.safetensors_file._map", lambda path: pytest.fail(f"{path} is read"))
    assert bundle.river.names()
    assert bundle.backbone.names() == open_safetensors(built).names()
