"""Makes GPTQ checkpoints of a tiny random Llama with GPTQModel, and what GPTQModel reads out of them.

A tool, not a test. It runs in an environment of its own, since GPTQModel pins its dependencies:

    python -m venv gptq && gptq/bin/pip install torch==2.13.0 transformers==5.17.0 optimum==2.3.0 gptqmodel==7.6.0
    GPTQMODEL_CPU_WORKERS=2 gptq/bin/python tests/quant/make_gptq_fixtures.py TOKENIZER_FOLDER OUT

OUT/NAME is each checkpoint; OUT/NAME/dequantized.safetensors holds the weights [N, K] in float32. OUT/gptq.safetensors
is one matrix of each, with 16 rows of its weight: the file that tests/quant/test_gptqmodel.py reads.
"""

import argparse
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

VARIANTS = {
    "sym-g128-v1": {"sym": True, "group_size": 128, "format": "gptq"},
    "sym-g32-v2": {"sym": True, "group_size": 32, "format": "gptq_v2"},
    "asym-g32-v1": {"sym": False, "group_size": 32, "format": "gptq"},
    "asym-g128-v2": {"sym": False, "group_size": 128, "format": "gptq_v2"},
    "sym-row-v1": {"sym": True, "group_size": -1, "format": "gptq"},
    "sym-g32-v1-desc": {"sym": True, "group_size": 32, "format": "gptq", "desc_act": True},
    "asym-g32-v2-desc": {"sym": False, "group_size": 32, "format": "gptq_v2", "desc_act": True},
}
SAMPLE = "model.layers.0.self_attn.k_proj"
TEXT = "The small model is calibrated on a handful of plain sentences, repeated until there are enough tokens. "


def make_source(tokenizer_folder: Path, folder: Path) -> None:
    """Write a two-layer random Llama with inputs of 128 and 256."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_variant(source: Path, folder: Path, options: dict) -> None:
    """Quantise the source and save it."""
    config = QuantizeConfig(bits=4, **{"desc_act": False, "act_group_aware": False, **options})
    model = GPTQModel.load(str(source), config, device="cpu")
    model.quantize([TEXT * repeats for repeats in (5, 7, 9, 11)], batch_size=1)
    model.save(str(folder))


def dequantize(folder: Path) -> dict[str, torch.Tensor]:
    """Every 4-bit weight [N, K] of a checkpoint, as GPTQModel's plain torch backend reads it."""
    model = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    modules = {name: m for name, m in model.model.named_modules() if hasattr(m, "dequantize_weight")}
    return {name: m.dequantize_weight().t().float().contiguous() for name, m in modules.items()}


def main() -> None:
    """Make every variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    out: Path = arguments.out
    make_source(arguments.tokenizer, out / "source")
    samples = {}
    for name, options in VARIANTS.items():
        make_variant(out / "source", out / name, options)
        weights = dequantize(out / name)
        save_file(weights, out / name / "dequantized.safetensors")
        tensors = load_file(out / name / "model.safetensors")
        samples |= {
            f"{name}/{t.removeprefix(SAMPLE + '.')}": v for t, v in tensors.items() if t.startswith(SAMPLE + ".")
        }
        samples[f"{name}/weight"] = weights[SAMPLE][:16].half()
        print(name, len(weights))
    save_file(samples, out / "gptq.safetensors")


if __name__ == "__main__":
    main()
