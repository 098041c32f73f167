"""Tiny models and bundles on disk, made with the writer itself. Loaded by the conftests beside it."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from adapt_llm.convert.backbone import plan_backbone
from adapt_llm.convert.workspace import Workspace
from adapt_llm.convert.writer import place_backbone, place_configs, place_river, place_text_files, seal, write_piece
from adapt_llm.quant.layout import Int4Matrix, pack, round_scale
from adapt_llm.runtime.architecture import Architecture
from adapt_llm.runtime.manifest import Base, Manifest, Quality
from adapt_llm.runtime.methods import River, TauPoint
from adapt_llm.runtime.progress import Reporter, SilentReporter
from adapt_llm.runtime.store import open_safetensors

GROUP = 32
SHA = "0" * 64


def config(**changes: object) -> dict:
    """A Llama of 4 blocks, small enough to write in milliseconds."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **changes,
    }


def model_folder(folder: Path, *, shards: int = 2, extra_head: bool = False, **changes: object) -> Path:
    """A Hugging Face folder with random bf16 weights; `extra_head` stores a head although it is tied."""
    folder.mkdir(parents=True)
    data = config(**changes)
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "说": "안녕"}', encoding="utf-8")
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n", encoding="utf-8")
    shapes = dict(Architecture.from_config(data).tensors())
    if extra_head:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(7)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    _save(folder, tensors, shards)
    return folder


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def matrix(N: int, K: int, seed: int, *, float_zeros: bool = False) -> Int4Matrix:
    """Random codes, scales and zeros."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
    scales = round_scale(torch.rand((N, K // GROUP), generator=g) * 0.1 + 0.01)
    zeros = torch.randint(1, 16, (N, K // GROUP), generator=g, dtype=torch.uint8)
    return Int4Matrix(codes, scales, zeros.float() if float_zeros else zeros, GROUP)


def exit_layer(arch: Architecture, layer: int, *, float_zeros: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Packed tensors of one exit layer."""
    for number, (name, (N, K)) in enumerate(arch.block_matrices(layer - 1).items()):
        for suffix, tensor in pack(matrix(N, K, 100 * layer + number, float_zeros=float_zeros)).items():
            yield f"{name.removesuffix('weight')}{suffix}", tensor


def river_settings(arch: Architecture, **changes: object) -> River:
    """Settings that fit `exit_layer`."""
    fields = {
        "quantizer": "rtn",
        "group_size": GROUP,
        "exit_layers": tuple(range(2, arch.num_layers + 1)),
        "tau": 0.95,
        "tau_curve": (TauPoint(tau=0.95, kl=0.01, agreement=0.9, perplexity=12.0, mean_depth=2.5),),
        **changes,
    }
    return River.model_validate(fields)


def manifest(arch: Architecture, **changes: object) -> Manifest:
    """A manifest for `bundle`, without its files."""
    quality = Quality(
        tokens=512, text="wiki", dense_perplexity=25.36, perplexity=25.8, kl=0.012, agreement=0.95, mean_depth=3.0
    )
    fields = {
        "required": ("river",),
        "base": Base(id="example/tiny", revision="0" * 40, config_sha256=SHA, index_sha256=SHA),
        "methods": (river_settings(arch),),
        "quality": quality,
        "libraries": {"torch": "2.13.0", "safetensors": "0.8.0"},
        **changes,
    }
    return Manifest(**fields)


def bundle(
    source: Path,
    output: Path,
    *,
    mode: str = "copy",
    float_zeros: bool = False,
    force: bool = False,
    revision: str | None = None,
    reporter: Reporter | None = None,
) -> Path:
    """A whole conversion of `source`, with random exit layers; resumes where it was stopped."""
    reporter = reporter or SilentReporter()
    data = json.loads((source / "config.json").read_text(encoding="utf-8"))
    arch = Architecture.from_config(data)
    fingerprint = {"source": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(), "mode": mode}
    plan = plan_backbone(
        files=sorted(source.glob("*.safetensors")),
        store=open_safetensors(source),
        expected=arch.tensors(),
        tied=arch.tied,
        mode=mode,
        revision=revision,
    )
    with Workspace(output, fingerprint, force=force) as work:
        pieces = [f"river-{layer:05d}.safetensors" for layer in range(2, arch.num_layers + 1)]
        for layer, piece in enumerate(pieces, start=2):
            if not work.has(piece):
                write_piece(work, piece, dict(exit_layer(arch, layer, float_zeros=float_zeros)))
        backbone = place_backbone(work, plan, reporter)
        place_river(work, pieces, reporter)
        place_text_files(work, {n: source / n for n in ("tokenizer.json", "README.md")})
        place_configs(work, data, None, tied=arch.tied)
        method = river_settings(arch, float_zeros=float_zeros, quantizer="hqq" if float_zeros else "rtn")
        base = Base(id="example/tiny", revision=revision, config_sha256=SHA, index_sha256=SHA)
        return seal(work, manifest(arch, backbone=backbone, methods=(method,), base=base))


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
