"""Small sources: tests/bundle_factory.py as a fixture (test folders are no packages), and a model of transformers."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_FACTORY = Path(__file__).parents[1] / "bundle_factory.py"


@pytest.fixture(scope="session")
def factory() -> ModuleType:
    name = "bundle_factory"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _FACTORY)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def source(factory: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factory.model_folder(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="session")
def built(factory: ModuleType, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that tests read; those that change one copy it first."""
    return factory.bundle(source, tmp_path_factory.mktemp("built") / "tiny-river")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer, as transformers saves it."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=256,
        bos_token_id=256,
        initializer_range=0.1,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}), encoding="utf-8")
    return folder
