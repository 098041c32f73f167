"""Local checkpoints: what is opened, what is refused, and what a path is."""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from adapt_llm.convert.source import local_path, open_gptq, open_source
from adapt_llm.errors import AdaptError, FormatError, UnsupportedError, UsageError

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small sharded checkpoint with a tokenizer and a licence."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **CONFIG))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "tiny", max_shard_size="20KB")
    path = tmp_path / "tiny"
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (path / "LICENSE.txt").write_text("Apache", encoding="utf-8")
    (path / "NOTICE").write_text("by us", encoding="utf-8")
    (path / "pytorch_model.bin").write_bytes(b"a pickle beside the safetensors does no harm")
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_a_sharded_checkpoint(folder: Path) -> None:
    source = open_source(str(folder))
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert list(source.weight_files) == shards
    stored = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert set(source.store.names()) == set(stored)
    assert all(torch.equal(source.store.read(name), value) for name, value in stored.items())
    assert source.config == json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert source.generation_config is not None
    assert sorted(source.text_files()) == ["LICENSE.txt", "NOTICE", "tokenizer.json"]


def test_the_identity_tells_no_path_and_holds_still(folder: Path) -> None:
    identity = open_source(str(folder)).identity
    assert (identity.id, identity.revision) == ("tiny", None)
    assert str(folder.parent) not in repr(identity)
    os.utime(folder / "config.json")
    assert open_source(str(folder) + "/.").identity == identity


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda folder: edit(folder / "config.json", lambda config: config.update(bos_token_id=3)),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text("{ }", encoding="utf-8"),
    "time of a shard": lambda folder: os.utime(next(folder.glob("model-*.safetensors")), (1, 1)),
    "licence": lambda folder: (folder / "NOTICE").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_sees(folder: Path, change: str) -> None:
    before = open_source(str(folder)).fingerprint()
    assert open_source(str(folder)).fingerprint() == before
    CHANGES[change](folder)
    assert open_source(str(folder)).fingerprint() != before


def test_a_changed_dtype_is_another_index(folder: Path) -> None:
    before = open_source(str(folder)).identity
    for shard in folder.glob("model-*.safetensors"):
        save_file({name: value.half() for name, value in load_file(shard).items()}, shard)
    after = open_source(str(folder)).identity
    assert after.config_sha256 == before.config_sha256
    assert after.index_sha256 != before.index_sha256


def test_code_of_the_model_is_ignored_where_the_type_is_known(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')", encoding="utf-8")
    edit(folder / "config.json", lambda config: config.update(auto_map={"AutoModelForCausalLM": "evil.Model"}))
    assert open_source(str(folder)).config["model_type"] == "llama"


def _pickles_only(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def _pointer(folder: Path) -> None:
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid x\n", encoding="utf-8")


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def _without_norm(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    edit(index, lambda value: value["weight_map"].pop("model.norm.weight"))
    for shard in folder.glob("model-*.safetensors"):
        kept = {name: value for name, value in load_file(shard).items() if name != "model.norm.weight"}
        save_file(kept, shard)


def _config(**change: object) -> Callable[[Path], object]:
    return lambda folder: edit(folder / "config.json", lambda config: config.update(change))


DEEP = "[" * 200_000  # json gives up with a RecursionError
INDEX = "model.safetensors.index.json"


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def _index(weights: object) -> Callable[[Path], object]:
    return _text(INDEX, json.dumps({"weight_map": weights}))


def _one_file_more(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"model.norm.weight": torch.ones(32)}, folder / "model.safetensors")


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
REFUSALS: list[tuple[str, Callable[[Path], object], type[AdaptError], str]] = [
    ("pickles", _pickles_only, UnsupportedError, r"pickles only.*safe_serialization"),
    ("pointer", _pointer, FormatError, r"config\.json is a git-lfs pointer"),
    ("no json", lambda folder: (folder / "config.json").write_text("{"), FormatError, r"config\.json is not JSON"),
    ("a list", lambda folder: (folder / "config.json").write_text("[]"), FormatError, r"not a JSON object"),
    ("adapter", _adapter, UnsupportedError, r"PEFT adapter.*merge"),
    ("empty", lambda folder: (folder / "config.json").unlink(), FormatError, r"no config\.json"),
    ("quantised", _config(quantization_config={"quant_method": "awq"}), UnsupportedError, r"quantised \(awq\).*16-bit"),
    ("remote code", _config(model_type="odd", auto_map={"AutoConfig": "x.Y"}), UnsupportedError, r"'odd'.*never run"),
    ("unknown", _config(model_type="odd"), UnsupportedError, r"'odd'.*Known"),
    ("shape", _config(intermediate_size=64), FormatError, r"disagree about .*mlp"),
    ("layers", _config(num_hidden_layers=3), FormatError, r"lacks model\.layers\.2"),
    ("norm", _without_norm, FormatError, r"lacks model\.norm\.weight"),
    ("deep config", _text("config.json", DEEP), FormatError, r"config\.json is not JSON"),
    ("deep index", _text(INDEX, DEEP), FormatError, r"index\.json is not JSON"),
    ("deep settings", _text("generation_config.json", DEEP), FormatError, r"generation_config\.json is not JSON"),
    ("numbers for files", _index({"a": 1, "b": 2}), FormatError, r"index\.json is no index of shards"),
    ("a list for files", _index(["a"]), FormatError, r"index\.json is no index of shards"),
    ("lists for files", _index({"a": ["b"]}), FormatError, r"index\.json is no index of shards"),
    ("no files", _index(None), FormatError, r"index\.json is no index of shards"),
    ("two sets", _one_file_more, FormatError, r"both model\.safetensors and model-00001-of-.*Remove the stale"),
    *(
        (f"{name} {value}", _config(**{name: value}), FormatError, rf"config\.json has {name} = ")
        for name in SIZES
        for value in (0, -1, 1 << 40, "4", None)
        if (name, value) not in {("rms_norm_eps", 1 << 40), ("num_key_value_heads", None)}
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS]
)
def test_what_is_refused(folder: Path, change: Callable[[Path], object], error: type[AdaptError], message: str) -> None:
    change(folder)
    with pytest.raises(error, match=message) as caught:
        open_source(str(folder))
    assert "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text", ["./nothing", "/nowhere/model", "model.gguf", "a/b/c", "~/nothing-here", "dir/", "", "a\\b"]
)
def test_a_path_that_does_not_exist_is_not_asked_for_on_the_hub(text: str, offline: None) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        open_source(text)


@pytest.mark.parametrize("name", ["loop", "org/loop", "dangling", "loop/model", "dangling/model"])
def test_a_broken_link_is_not_asked_for_on_the_hub(
    name: str, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    link = tmp_path / name.removesuffix("/model")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("nowhere" if "dangling" in name else link.name)
    for open_one in (open_source, open_gptq):
        with pytest.raises(UsageError, match=rf"{link.name} is a broken link, to \w+"):
            open_one(name)


def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_path("org/name") == Path("org/name")
    assert local_path("org/other") is None
    assert local_path("gpt2") is None


def _no_transformers(name: str) -> ModuleType:
    raise ModuleNotFoundError(f"No module named '{name}'")


def test_an_old_tokenizer_needs_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    source = open_source(str(folder))
    monkeypatch.setattr(importlib, "import_module", _no_transformers)
    with pytest.raises(UnsupportedError, match=r"no tokenizer\.json.*slow-tokenizers"):
        source.text_files()


def test_an_old_tokenizer_is_converted(folder: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}', encoding="utf-8")
    made = open_source(str(folder)).text_files()["tokenizer.json"]
    assert isinstance(made, bytes)
    assert json.loads(made)["model"]["vocab"] == vocabulary
    assert [entry["content"] for entry in json.loads(made)["added_tokens"]] == ["<|endoftext|>"]


def test_no_tokenizer_at_all(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FormatError, match=r"no tokenizer\.json"):
        open_source(str(folder)).text_files()


def test_the_decoder_of_a_model_with_more_towers(folder: Path) -> None:
    """As Gemma 3 stores it: the decoder under language_model., its config under text_config."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    sizes = {**CONFIG, "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 8, "tie_word_embeddings": True}
    config = transformers.AutoConfig.for_model("gemma3_text", **sizes)
    state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    del state["lm_head.weight"]
    towers = {f"language_model.{name}": value.clone() for name, value in state.items()}
    save_file({**towers, "vision_tower.weight": torch.ones(2)}, folder / "model.safetensors")
    outer = {"model_type": "gemma3", "text_config": config.to_dict(), "vision_config": {}, "eos_token_id": [1, 106]}
    (folder / "config.json").write_text(json.dumps(outer), encoding="utf-8")
    source = open_source(str(folder))
    assert set(source.store.names()) == set(state)
    assert (source.config["model_type"], source.config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert "vision_config" not in source.config


SETTINGS = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, "quant_method": "gptq"}


def _gptq(folder: Path, settings: dict[str, Any], *, own_file: bool) -> str:
    for path in folder.glob("model*"):
        path.unlink()
    save_file(
        {"model.layers.0.mlp.up_proj.qweight": torch.ones(4, 32, dtype=torch.int32)},
        folder / "gptq_model-4bit-32g.safetensors",
    )
    if own_file:
        (folder / "quantize_config.json").write_text(json.dumps(settings), encoding="utf-8")
    else:
        edit(folder / "config.json", lambda config: config.update(quantization_config=settings))
    return str(folder)


@pytest.mark.parametrize("own_file", [True, False])
def test_a_gptq_checkpoint(folder: Path, *, own_file: bool) -> None:
    opened = open_gptq(_gptq(folder, {**SETTINGS, "checkpoint_format": "gptq_v2", "sym": False}, own_file=own_file))
    settings = opened.settings
    assert (settings.bits, settings.group_size, settings.symmetric, settings.desc_act) == (4, 32, False, False)
    assert settings.checkpoint_format == "gptq_v2"
    assert list(opened.store.names()) == ["model.layers.0.mlp.up_proj.qweight"]
    assert opened.name == "tiny"


def test_an_old_gptq_file_says_less(folder: Path) -> None:
    settings = open_gptq(_gptq(folder, {"bits": 4}, own_file=True)).settings
    assert (settings.group_size, settings.symmetric, settings.checkpoint_format) == (-1, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quantised by awq"),
        ({"bits": 8}, "has 8 bits"),
        ({"checkpoint_format": "marlin"}, "marlin layout"),
        ({"dynamic": {"-:.*mlp": {}}}, "module to module"),
    ],
)
def test_other_quantised_checkpoints_are_refused_by_name(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        open_gptq(_gptq(folder, {**SETTINGS, **change}, own_file=False))


def test_river_from_a_plain_checkpoint(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="states no quantisation"):
        open_gptq(str(folder))
    with pytest.raises(UsageError, match="not a directory"):
        open_gptq(str(folder / "config.json"))
