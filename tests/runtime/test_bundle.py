"""Opening a bundle, and saying what a folder is when it is none."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapt_llm.errors import AccessError, FormatError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.store import open_safetensors

REVISION = "1234567890abcdef1234567890abcdef12345678"


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "copy")


def test_stores_give_the_tensors(factory: ModuleType, built: Path, source: Path) -> None:
    bundle, before = Bundle.open(built), open_safetensors(source)
    assert set(bundle.backbone.names()) == set(before.names())
    for name in before.names():
        assert torch.equal(bundle.backbone.read(name), before.read(name))
    for layer in (2, 3, 4):
        for name, tensor in factory.exit_layer(bundle.architecture, layer):
            assert torch.equal(bundle.river.read(name), tensor)
    assert set(bundle.text_files) == {"config.json", "tokenizer.json", "README.md"}


def test_a_plain_model_is_told_apart(source: Path) -> None:
    with pytest.raises(UsageError, match=r"Hugging Face model, not a bundle.*adapt convert"):
        Bundle.open(source)


def test_other_things_are_told_apart(tmp_path: Path) -> None:
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    plain = tmp_path / "README.md"
    plain.touch()
    for path, what in (
        (gguf, "GGUF file"),
        (plain, "is a file, not a bundle"),
        (tmp_path / "none", "There is no bundle"),
        (tmp_path, "has no adapt.json"),
    ):
        with pytest.raises(UsageError, match=what):
            Bundle.open(path)


def test_a_missing_or_short_file_is_named(copy: Path) -> None:
    (copy / "river-00001-of-00001.safetensors").write_bytes(b"short")
    with pytest.raises(FormatError, match=r"river-00001-of-00001.safetensors has 5 bytes"):
        Bundle.open(copy)
    (copy / "tokenizer.json").unlink()
    (copy / "river-00001-of-00001.safetensors").unlink()
    with pytest.raises(FormatError, match="is missing"):
        Bundle.open(copy)


def hub_cache(source: Path, cache: Path) -> Path:
    """The source as the Hub cache would hold it."""
    snapshot = cache / "models--example--tiny" / "snapshots" / REVISION
    shutil.copytree(source, snapshot)
    refs = cache / "models--example--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(REVISION, encoding="utf-8")
    return snapshot


def test_a_reference_is_found_in_the_hub_cache(factory: ModuleType, source: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(source, tmp_path / "cache")
    out = factory.bundle(snapshot, tmp_path / "out", mode="reference", revision=REVISION)
    assert not list(out.glob("model*"))
    bundle = Bundle.open(out, cache_dir=tmp_path / "cache")
    name = "model.layers.2.mlp.up_proj.weight"
    assert torch.equal(bundle.backbone.read(name), open_safetensors(source).read(name))
    with pytest.raises(AccessError, match=f"hf download example/tiny --revision {REVISION}"):
        _ = Bundle.open(out, cache_dir=tmp_path / "elsewhere").backbone
    assert not Bundle.open(out, cache_dir=tmp_path / "elsewhere").architecture.tied
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(b"other")
    with pytest.raises(FormatError, match="has 5 bytes"):
        _ = Bundle.open(out, cache_dir=tmp_path / "cache").backbone


def test_a_link_shares_the_file(factory: ModuleType, source: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(source, tmp_path / "mine")
    out = factory.bundle(mine, tmp_path / "out", mode="link")
    name = "model-00001-of-00002.safetensors"
    assert (mine / name).samefile(out / name)
    assert Bundle.open(out).manifest.backbone.mode == "link"


def test_a_tied_head_is_stored_once(factory: ModuleType, tmp_path: Path) -> None:
    source = factory.model_folder(tmp_path / "tied", tie_word_embeddings=True, extra_head=True)
    bundle = Bundle.open(factory.bundle(source, tmp_path / "out"))
    assert bundle.architecture.tied
    assert "lm_head.weight" not in bundle.backbone.names()
    name = "model.embed_tokens.weight"
    assert torch.equal(bundle.backbone.read(name), open_safetensors(source).read(name))


def test_the_tensors_decide_about_the_tie(factory: ModuleType, source: Path, tmp_path: Path) -> None:
    """A config that asks for a head, tensors without one."""
    out = shutil.copytree(
        factory.bundle(factory.model_folder(tmp_path / "m", shards=1), tmp_path / "out"), tmp_path / "o"
    )
    tensors = load_file(out / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, out / "model.safetensors")
    data = json.loads((out / "adapt.json").read_text(encoding="utf-8"))
    data["files"]["model.safetensors"]["bytes"] = (out / "model.safetensors").stat().st_size
    (out / "adapt.json").write_text(json.dumps(data), encoding="utf-8")
    assert Bundle.open(out).architecture.tied


def test_the_manifest_needs_no_torch(built: Path) -> None:
    code = (
        "import sys, pathlib; from adapt_llm.runtime.bundle import Bundle; "
        f"b = Bundle.open(pathlib.Path({str(built)!r})); print(b.manifest.base.id); "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "example/tiny"


@pytest.mark.parametrize("name", ["loop", "dangling", "loop/inside", "dangling/inside"])
def test_a_broken_link_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    with pytest.raises(UsageError, match=rf"{name.removesuffix('/inside')} is a broken link, to (loop|gone)"):
        Bundle.open(tmp_path / name)


def test_config_that_is_no_object(copy: Path) -> None:
    size = (copy / "config.json").stat().st_size
    (copy / "config.json").write_text(json.dumps("x" * (size - 2)), encoding="utf-8")
    with pytest.raises(FormatError, match=r"config.json is not a JSON object"):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["a b", "a/b/c", "../x", "x" * 200])
def test_a_reference_to_what_is_no_name_on_the_hub(
    factory: ModuleType, source: Path, tmp_path: Path, name: str
) -> None:
    snapshot = hub_cache(source, tmp_path / "cache")
    out = factory.bundle(snapshot, tmp_path / "out", mode="reference", revision=REVISION)
    data = json.loads((out / "adapt.json").read_text(encoding="utf-8"))
    data["base"]["id"] = name
    (out / "adapt.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FormatError, match="no name on the Hub"):
        _ = Bundle.open(out).backbone_folder
