"""What export writes reads back as the same matrices, and is an ordinary checkpoint."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch

from adapt_llm.convert.export import export
from adapt_llm.errors import UnsupportedError, UsageError
from adapt_llm.quant.layout import pack, unpack
from adapt_llm.quant.quantizers import QUANTIZERS
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.progress import SilentReporter
from adapt_llm.runtime.store import TensorStore, open_safetensors


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def gptq(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(Bundle.open(built), "gptq", tmp_path_factory.mktemp("gptq") / "out", reporter=SilentReporter())


def packed(store: TensorStore, matrix: str) -> dict[str, torch.Tensor]:
    stem = matrix.removesuffix("weight")
    return {suffix: store.read(stem + suffix) for suffix in ("qweight", "qzeros", "scales", "g_idx")}


def test_exit_layers_come_back_bit_for_bit(factory: ModuleType, built: Path, gptq: Path) -> None:
    store, arch = open_safetensors(gptq), Bundle.open(built).architecture
    for layer in (2, 3, 4):
        for number, (name, (N, K)) in enumerate(arch.block_matrices(layer - 1).items()):
            found = unpack(packed(store, name), symmetric=False, checkpoint_format="gptq")
            expected = factory.matrix(N, K, 100 * layer + number)
            assert torch.equal(found.codes, expected.codes)
            assert torch.equal(found.zeros, expected.zeros)
            assert torch.equal(found.dequantize(), expected.dequantize())


def test_blocks_without_an_exit_layer_are_rounded(built: Path, source: Path, gptq: Path) -> None:
    store, dense = open_safetensors(gptq), open_safetensors(source)
    for name in Bundle.open(built).architecture.block_matrices(0):
        expected = pack(QUANTIZERS["rtn"](dense.read(name).float(), group_size=32))
        for suffix, tensor in packed(store, name).items():
            assert torch.equal(tensor, expected[suffix])
        found = unpack(packed(store, name), symmetric=False, checkpoint_format="gptq").dequantize()
        error = (found - dense.read(name)).norm() / dense.read(name).float().norm()
        assert error < 0.15


def test_everything_else_stays_in_16_bits(built: Path, source: Path, gptq: Path) -> None:
    store, dense = open_safetensors(gptq), open_safetensors(source)
    arch = Bundle.open(built).architecture
    matrices = {name for index in range(4) for name in arch.block_matrices(index)}
    rest = set(arch.tensors()) - matrices
    stems = {name.removesuffix("weight") for name in matrices}
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    assert set(store.names()) == rest | {stem + suffix for stem in stems for suffix in suffixes}
    for name in rest:
        assert torch.equal(store.read(name), dense.read(name))


def test_the_config_says_what_loaders_ask(source: Path, gptq: Path) -> None:
    config = json.loads((gptq / "config.json").read_text(encoding="utf-8"))
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text(encoding="utf-8"))
    assert quantization == json.loads((gptq / "quantize_config.json").read_text(encoding="utf-8"))
    expected = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "format": "gptq",
        "checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32",
    }  # fmt: skip
    assert expected.items() <= quantization.items()
    assert not (gptq / "adapt.json").exists()
    assert (gptq / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_transformers_reads_the_quantisation_config(gptq: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = json.loads((gptq / "quantize_config.json").read_text(encoding="utf-8"))
    config.pop("quant_method")
    read = transformers.GPTQConfig(**config)
    assert (read.bits, read.group_size, read.sym, read.desc_act, read.format) == (4, 32, False, False, "gptq")


def test_it_says_which_blocks_were_rounded(built: Path, tmp_path: Path) -> None:
    notes = Notes()
    export(Bundle.open(built), "gptq", tmp_path / "out", reporter=notes)
    assert any("Block 1 " in text for text in notes.texts)


def test_act_order_is_declared(
    factory: ModuleType, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = factory.exit_layer

    def shuffled(arch: object, layer: int, **options: bool) -> list[tuple[str, torch.Tensor]]:
        tensors = dict(plain(arch, layer, **options))
        return [(name, tensor.flip(0) if name.endswith("g_idx") else tensor) for name, tensor in tensors.items()]

    monkeypatch.setattr(factory, "exit_layer", shuffled)
    out = factory.bundle(source, tmp_path / "bundle")
    done = export(Bundle.open(out), "gptq", tmp_path / "out", reporter=SilentReporter())
    assert json.loads((done / "quantize_config.json").read_text(encoding="utf-8"))["desc_act"] is True


def test_float_zeros_are_refused_with_the_remedy(factory: ModuleType, source: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(factory.bundle(source, tmp_path / "bundle", float_zeros=True))
    with pytest.raises(UnsupportedError, match=r"--quantizer gptq or rtn"):
        export(bundle, "gptq", tmp_path / "out", reporter=SilentReporter())
    assert not (tmp_path / "out").exists()


def test_the_plain_backbone(built: Path, source: Path, tmp_path: Path) -> None:
    out = export(Bundle.open(built), "hf", tmp_path / "out", reporter=SilentReporter())
    names = {"config.json", "tokenizer.json", "README.md", "model.safetensors.index.json"}
    shards = {path.name for path in source.glob("model-*.safetensors")}
    assert {path.name for path in out.iterdir()} == names | shards
    for name in (names | shards) - {"model.safetensors.index.json"}:
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_a_non_empty_output_is_refused_and_left_alone(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    for fmt in ("hf", "gptq"):
        with pytest.raises(UsageError, match="not empty"):
            export(Bundle.open(built), fmt, out, reporter=SilentReporter())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UsageError, match="neither a bundle nor a model"):
        export(Bundle.open(built), "hf", out, reporter=SilentReporter(), force=True)
    (out / "config.json").touch()
    export(Bundle.open(built), "hf", out, reporter=SilentReporter(), force=True)
    assert not (out / "mine").exists()


def test_two_exports_give_the_same_bytes(factory: ModuleType, built: Path, gptq: Path, tmp_path: Path) -> None:
    again = export(Bundle.open(built), "gptq", tmp_path / "again", reporter=SilentReporter())
    assert factory.contents(again) == factory.contents(gptq)


def test_a_damaged_bundle_gives_no_output(built: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    bundle = Bundle.open(copy)
    (copy / "river-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(Exception, match="river"):
        export(bundle, "gptq", tmp_path / "out", reporter=SilentReporter())
    assert not (tmp_path / "out").exists()


def test_the_loaders_of_the_gptq_extra_agree(built: Path, gptq: Path) -> None:
    pytest.importorskip("gptqmodel", reason="the extra [gptq] is not installed")
    pytest.importorskip("optimum", reason="the extra [gptq] is not installed")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gptq, device_map="cpu", dtype=torch.bfloat16)
    store = open_safetensors(gptq)
    name = "model.layers.2.mlp.up_proj.weight"
    expected = unpack(packed(store, name), symmetric=False, checkpoint_format="gptq").dequantize()
    module = loaded.get_submodule(name.removesuffix(".weight"))
    columns = module(torch.eye(expected.shape[1], dtype=torch.bfloat16)).T.float()
    assert torch.allclose(columns, expected, atol=0.05 * expected.abs().max().item())
