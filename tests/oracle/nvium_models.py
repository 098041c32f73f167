"""Tiny models with random junctions, and the mixture written out plainly: every exit of every position, no cache."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.junctions import Junctions, start
from adapt_llm.runtime.nvium import Nvium
from adapt_llm.runtime.pass_store import PassStore

NEVER = -300.0
"""A bias with which the probability of leaving is 0."""


def junction_tensors(
    decoder: Decoder,
    points: Sequence[int],
    *,
    biases: Sequence[float] | float = 0.0,
    final_adapter: bool = False,
    seed: int = 1,
) -> dict[str, Tensor]:
    """Random junctions in which every part shows: adapters and norms that change something, routers that differ."""
    arch = decoder.arch
    tensors = start(arch, points, decoder.final_norm.weight, seed, final_adapter=final_adapter)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        scale = 3.0 if "router.head.weight" in name else 0.3
        tensor.add_(torch.randn(tensor.shape, generator=generator) * scale / max(1, tensor.shape[-1]) ** 0.5)
    listed = [biases] * len(points) if isinstance(biases, float | int) else biases
    for number, bias in enumerate(listed, start=1):
        tensors[f"junctions.{number}.router.head.bias"] += torch.tensor([0.0, bias])
    return tensors


def model(decoder: Decoder, points: Sequence[int], tensors: dict[str, Tensor], **options: object) -> Nvium:
    return Nvium(decoder, Junctions.of(decoder.arch, points, tensors), **options)


def mixture(decoder: Decoder, points: Sequence[int], tensors: dict[str, Tensor], ids: Sequence[int]) -> Tensor:
    """Probabilities [S, V] of the mixture, float64, by its definition."""
    weights, parts = exits(decoder, points, tensors, ids)
    return sum(weight[:, None] * part for weight, part in zip(weights, parts, strict=True))


def exits(
    decoder: Decoder, points: Sequence[int], tensors: dict[str, Tensor], ids: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """p_k [S] and pi_k [S, V] of every exit, float64."""
    arch = decoder.arch
    eps, d = arch.norm_eps, (arch.hidden_size,)
    row = torch.tensor([list(ids)])
    step = decoder.step(None, row)
    store = PassStore(arch)
    h = decoder.embed(row)
    left, weights, parts = torch.ones(len(ids), dtype=torch.float64), [], []
    for layer, block in enumerate(decoder.blocks, start=1):
        h = block(h, step, store)
        if layer not in points:
            continue
        t = {n.split(".", 2)[2]: v for n, v in tensors.items() if n.startswith(f"junctions.{len(weights) + 1}.")}
        n = rms_norm(h[0], d, t["norm.weight"], eps)
        u = gelu(n @ t["router.inner.weight"].T + t["router.inner.bias"]) @ t["router.outer.weight"].T
        v = rms_norm(u + t["router.outer.bias"], d, t["router.norm.weight"], eps)
        r = (v @ t["router.head.weight"].T + t["router.head.bias"]).double().softmax(-1)[:, 1]
        weights.append(left * r)
        left = left * (1 - r)
        parts.append(_law(decoder, n + silu(n @ t["adapter.up.weight"].T) @ t["adapter.down.weight"].T))
    n = decoder.final_norm(h[0])
    if "final.adapter.up.weight" in tensors:
        n = n + silu(n @ tensors["final.adapter.up.weight"].T) @ tensors["final.adapter.down.weight"].T
    return [*weights, left], [*parts, _law(decoder, n)]


def _law(decoder: Decoder, x: Tensor) -> Tensor:
    logits = decoder.head(x)
    cap = decoder.arch.logit_softcap
    return (logits if cap is None else cap * torch.tanh(logits / cap)).double().softmax(-1)
