"""A random checkpoint of a real model's shape, sharded as the Hub's are: for memory and time, not for quality.

python tests/bench/synthetic.py OUT_DIR [--layers 32] [--sparse]

The shape is Llama-3.1-8B's. `--sparse` writes zeros that take no disk, for memory at twice the layers.
"""

import argparse
import json
from math import prod
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from adapt_llm.convert.stream import (
    HashingFile,
    index_text,
    lazy,
    plan_shards,
    read_entries,
    shard_name,
    write_safetensors,
)
from adapt_llm.runtime.architecture import Architecture

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
SHARD = 5_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sparse", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    config = LLAMA_8B | {"num_hidden_layers": arguments.layers}
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    byte_tokenizer().save(str(arguments.out / "tokenizer.json"))
    (arguments.out / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    tensors = Architecture.from_config(config).tensors()
    shards = plan_shards({name: 2 * prod(shape) for name, shape in tensors.items()}, SHARD)
    placed = {}
    for number, names in enumerate(shards, start=1):
        path = arguments.out / shard_name("model", number, len(shards))
        entries = [
            lazy(name, torch.bfloat16, tensors[name], lambda shape=tensors[name]: random(shape)) for name in names
        ]
        with path.open("wb") as file:
            if arguments.sparse:
                sparse(file, entries)
            else:
                write_safetensors(HashingFile(file), entries)
        placed[path.name] = read_entries(path)
        print(path.name, flush=True)
    (arguments.out / "model.safetensors.index.json").write_bytes(index_text(placed))


def random(shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
    )


def sparse(file, entries) -> None:
    """The header of these tensors, and a hole where their data would be."""
    table, at = {}, 0
    for entry in entries:
        table[entry.name] = {"dtype": "BF16", "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    header = json.dumps(table).encode("utf-8")
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(8 + len(header) + at)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


if __name__ == "__main__":
    main()
