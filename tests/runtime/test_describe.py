"""inspect's data: stable keys, sizes that add up, and the paper's memory table."""

import dataclasses
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from adapt_llm.errors import UsageError
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.describe import describe, licence, resident_memory
from adapt_llm.runtime.store import open_safetensors
from adapt_llm.runtime.tensors import river_tensors

GIB = 1 << 30

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}


def test_the_stable_keys(built: Path) -> None:
    data = describe(Bundle.open(built))
    assert {"format_version", "methods", "base", "layers", "bytes", "quality", "trained"} <= data.keys()
    assert data["methods"][0]["name"] == "river"
    assert {"id", "revision"} <= data["base"].keys()
    assert data["layers"][0] == {
        "index": 1, "dense": True, "exit_layer": False, "kv_source": 1, "junction": None, "adapter": None,
    }  # fmt: skip
    assert [layer["exit_layer"] for layer in data["layers"]] == [False, True, True, True]
    sizes = data["bytes"]
    assert sizes["total"] == sizes["backbone"] + sizes["river"] + sizes["junctions"] + sizes["adapters"]
    assert sizes["backbone"] == sum(path.stat().st_size for path in built.glob("model-*.safetensors"))
    assert sizes["river"] == sum(path.stat().st_size for path in built.glob("river-*.safetensors"))
    assert sizes["kv_per_token"] == sizes["dense_kv_per_token"] == 4 * 2 * 2 * 16 * 2
    assert data["license"] == "apache-2.0"


def test_all_resident_is_every_stored_byte(built: Path, source: Path) -> None:
    bundle, store = Bundle.open(built), open_safetensors(source)
    dense = sum(store.info(name).nbytes for name in store.names())
    packed = sum(bundle.river.info(n).nbytes for n in bundle.river.names() if not n.endswith("g_idx"))
    assert describe(bundle)["memory"]["total"] == dense + packed


@pytest.mark.parametrize("group_size", [128, 64])
def test_table_6_of_the_paper(factory: ModuleType, group_size: int) -> None:
    """4 dense blocks and 31 exit layers of an 8B: 6.73 GiB at exactly 4 bits, some more with scales and zeros."""
    arch = Architecture.from_config(factory.config(**LLAMA_8B))
    memory = resident_memory(arch, factory.river_settings(arch, group_size=group_size), 4)
    assert 6.73 < memory.total / GIB < 6.73 * 1.1
    codes = sum(N * K for N, K in arch.block_matrices(0).values()) // 2
    exact = memory.embeddings + memory.head + memory.dense_blocks + memory.final_norm + 31 * codes
    assert exact / GIB == pytest.approx(6.73, abs=0.005)


def test_the_dense_8b(factory: ModuleType) -> None:
    arch = Architecture.from_config(factory.config(**LLAMA_8B))
    assert resident_memory(arch, None).total / GIB == pytest.approx(14.96, abs=0.005)


def test_less_is_resident_when_fewer_blocks_are(factory: ModuleType) -> None:
    arch = Architecture.from_config(factory.config(attention_bias=True))
    river = factory.river_settings(arch)
    totals = [resident_memory(arch, river, count).total for count in (1, 2, 3, 4)]
    assert totals == sorted(totals)
    assert all(low < high for low, high in itertools.pairwise(totals))
    saved = totals[3] - totals[2]
    matrices = sum(N * K for N, K in arch.block_matrices(0).values())
    assert saved == 2 * matrices  # norms and biases stay: the exit layer uses them


def test_resident_must_fit(built: Path) -> None:
    bundle = Bundle.open(built)
    for count in (0, 5):
        with pytest.raises(UsageError, match="1 to 4"):
            describe(bundle, resident=count)
    assert [layer["dense"] for layer in describe(bundle, resident=2)["layers"]] == [True, True, False, False]


def test_a_shared_cache_counts_keepers_only(factory: ModuleType, built: Path) -> None:
    bundle = Bundle.open(built)
    shared = bundle.architecture.share([0, 0, 2, 2])
    bundle = dataclasses.replace(bundle)
    bundle.__dict__["architecture"] = shared
    data = describe(bundle)
    assert data["bytes"]["kv_per_token"] * 2 == data["bytes"]["dense_kv_per_token"]
    assert [layer["kv_source"] for layer in data["layers"]] == [1, 1, 3, 3]


def test_packed_bytes_match_the_tensors(factory: ModuleType) -> None:
    arch = Architecture.from_config(factory.config())
    river = factory.river_settings(arch)
    stored = 0
    for name, (dtypes, shape) in river_tensors(arch, river).items():
        size = next(iter(dtypes)).itemsize
        for length in shape:
            size *= length
        stored += 0 if name.endswith("g_idx") else size
    assert resident_memory(arch, river).exit_layers == stored


def test_the_licence_without_a_model_card(tmp_path: Path) -> None:
    file = tmp_path / "LICENSE"
    file.write_text("\n  LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\nmore\n", encoding="utf-8")
    assert licence({"LICENSE": file}) == "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT"
    assert licence({}) is None
