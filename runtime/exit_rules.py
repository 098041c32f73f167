"""Exit rules made from measured errors: a threshold per block, and which blocks stay dense in the river.

Beyond the paper, which has one threshold for all blocks. Knows tensors of figures; no model and no files.
"""

import torch
from torch import Tensor

from .exit_quality import ExitErrors

NEVER, AT_ONCE = 1.0, -1.0
"""A threshold that no cosine passes, and one that every cosine does."""
SHARES = (0.07, 0.14, 0.21, 0.28, 0.35, 0.5, 0.65, 0.8)


def thresholds_by_layer(errors: ExitErrors, price: float, entry_layer: int) -> tuple[float, ...]:
    """Return thresholds of blocks 1 to L - 1 that make the measured loss and the blocks run cheapest together.

    A dense block costs `price` nats. Backward induction: the last block's threshold first; at each block, with those
    above it known, a token costs either what leaving here does (KL + price x blocks), or what going on does. The best
    threshold cuts the tokens, sorted by cosine, where the sum of the gains is largest: exact for the tokens measured,
    as if all of them came this far. Where the cosine says nothing about the error, a block gets 1 (never) or -1 (all).
    """
    layers, tokens = errors.losses.shape
    going_on = torch.full((tokens,), price * layers, dtype=torch.float64)
    found = [NEVER] * (layers - 1)
    for layer in range(layers - 1, entry_layer - 2, -1):
        leaving = errors.losses[layer - 1].double() + price * layer
        cosines = errors.cosines[layer - 1]
        found[layer - 1] = _cut(cosines, going_on - leaving)
        going_on = torch.where(cosines > found[layer - 1], leaving, going_on)
    return tuple(found)


def _cut(cosines: Tensor, gains: Tensor) -> float:
    """The threshold above which the sum of `gains` is largest; to six digits, as a manifest keeps it."""
    order = cosines.argsort(descending=True)
    sums = gains[order].cumsum(0)
    best = int(sums.argmax())
    if sums[best] <= 0:
        return NEVER
    if best + 1 == len(order):
        return AT_ONCE
    middle = float(cosines[order[best]] + cosines[order[best + 1]]) / 2
    return max(AT_ONCE, min(NEVER, float(f"{middle:.6g}")))


def sensitivities(errors: ExitErrors, entry_layer: int) -> dict[int, float]:
    """Return by block, from `entry_layer` on, by how many nats the loss falls when it is dense too.

    The blocks below it are dense and those above it in 4 bits: what leaving after block l rather than l - 1 saves.
    """
    means = errors.losses.double().mean(1).tolist()
    return {layer: means[layer - 2] - means[layer - 1] for layer in range(entry_layer, len(means) + 1)}


def most_sensitive(found: dict[int, float], count: int) -> frozenset[int]:
    """Return the `count` blocks that lose most; of equals the first."""
    return frozenset(sorted(found, key=lambda layer: (-found[layer], layer))[:count])


def sizes(layers: int, entry_layer: int) -> list[int]:
    """Return how many blocks to keep dense: some shares of those that have an exit layer."""
    count = layers - entry_layer + 1
    return sorted({size for share in SHARES if 0 < (size := round(share * count)) < count})
