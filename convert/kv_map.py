"""Which layers keep a cache, and whose keys and values the others read: R-CLA's map.

A map gives each layer its source, counted from 0: itself, or the nearest earlier keeper that attends alike (papers:
R-CLA, eq. 3.2). Layers of different windows or rotations never share, so each kind of layer has keepers of its own.
Knows no weights: what a map costs is measured by the caller.
"""

from collections.abc import Callable, Iterable, Sequence

from ..errors import UsageError
from ..runtime.architecture import Architecture

KVMap = tuple[int, ...]
Measure = Callable[[Sequence[KVMap]], Sequence[float]]
"""Mean loss of each map, in nats a token; lower is better."""
TRIES = 8
"""Keepers, least missed first, for which the search tries every other place in a round."""


def every(arch: Architecture, size: int) -> KVMap:
    """The first of every `size` layers of a kind keeps its cache. Raises UsageError where `size` is below 1."""
    if size < 1:
        raise UsageError(f"Groups of {size} layers are not possible", "Use 1 or more.")
    return from_keepers(arch, [layer for layers in _by_kind(arch) for layer in layers[::size]])


def spread(arch: Architecture, keepers: int) -> KVMap:
    """So many keepers, evenly: each kind has its share of them, at equal distances. See `search` for what is raised."""
    kinds = _by_kind(arch)
    _check_count(arch, keepers)
    counts = [1] * len(kinds)
    for _ in range(keepers - len(kinds)):  # the kind with the largest groups gets the next one
        widest = max(range(len(kinds)), key=lambda kind: len(kinds[kind]) / counts[kind])
        counts[widest] += 1
    chosen = [
        layers[number * len(layers) // count]
        for layers, count in zip(kinds, counts, strict=True)
        for number in range(count)
    ]
    return from_keepers(arch, chosen)


def from_keepers(arch: Architecture, keepers: Iterable[int]) -> KVMap:
    """The map of these keepers (from 0). Raises UsageError where a layer has no keeper before it that attends alike."""
    kept, latest, sources = set(keepers), dict[int, int](), list[int]()
    for wrong in sorted(kept - set(range(arch.num_layers))):
        raise UsageError(f"There is no layer {wrong + 1}", f"The model has {arch.num_layers}.")
    for layer, kind in enumerate(arch.kind_of):
        if layer in kept:
            latest[kind] = layer
        if kind not in latest:
            raise UsageError(*_without_keeper(arch, layer))
        sources.append(latest[kind])
    return tuple(sources)


def keepers_of(sources: Sequence[int]) -> tuple[int, ...]:
    """The layers (from 0) that keep a cache."""
    return tuple(layer for layer, source in enumerate(sources) if source == layer)


def search(arch: Architecture, measure: Measure, keepers: int) -> KVMap:
    """The map with so many keepers whose measured loss is lowest, found by exchanges from the even spread on.

    Each round takes away the keeper that is missed least and gives its place to the layer that helps most; it ends
    where no exchange lowers the loss. So the result is never worse than the even spread on the text measured. `measure`
    is asked for many maps at once, which share the layers that they have in common.

    Raises UsageError where `keepers` is more than there are layers, or fewer than there are kinds of layers.
    """
    best = spread(arch, keepers)
    (lowest,) = measure([best])
    improved = True
    while improved:
        improved = False
        for fewer in _removals(arch, best, measure):
            candidates = _additions(arch, fewer, best)
            losses = measure(candidates) if candidates else ()
            loss, chosen = min(zip(losses, candidates, strict=True), default=(lowest, best))
            if loss < lowest:
                best, lowest, improved = chosen, loss, True
                break
    return best


def count_of(arch: Architecture, ratio: float) -> int:
    """How many layers are this share of all, at least one of each kind. The size of the cache is theirs."""
    return max(len(arch.kinds), round(arch.num_layers * ratio))


def _removals(arch: Architecture, best: KVMap, measure: Measure) -> list[tuple[int, ...]]:
    """The keepers without one of them, what is missed least first; no kind loses its first layer."""
    first = {layers[0] for layers in _by_kind(arch)}
    kept = keepers_of(best)
    fewer = [tuple(layer for layer in kept if layer != gone) for gone in kept if gone not in first]
    if not fewer:
        return []
    losses = measure([from_keepers(arch, some) for some in fewer])
    return [some for _, some in sorted(zip(losses, fewer, strict=True))][:TRIES]


def _additions(arch: Architecture, fewer: Sequence[int], best: KVMap) -> list[KVMap]:
    """Maps with one keeper more than `fewer`, but for `best` itself."""
    free = [layer for layer in range(arch.num_layers) if layer not in fewer]
    return [found for layer in free if (found := from_keepers(arch, (*fewer, layer))) != best]


def _by_kind(arch: Architecture) -> list[list[int]]:
    """The layers of each kind, in order of the kinds' first layers."""
    return [[layer for layer, of in enumerate(arch.kind_of) if of == kind] for kind in range(len(arch.kinds))]


def _check_count(arch: Architecture, keepers: int) -> None:
    if len(arch.kinds) <= keepers <= arch.num_layers:
        return
    what = f"{keepers} of {arch.num_layers} layers cannot keep the cache"
    if keepers > arch.num_layers or len(arch.kinds) == 1:
        raise UsageError(what, f"Use 1 to {arch.num_layers}.")
    raise UsageError(what, f"The model has {len(arch.kinds)} kinds of layers that cannot share: one of each must keep.")


def _without_keeper(arch: Architecture, layer: int) -> tuple[str, str]:
    """Why a layer cannot do without a cache of its own, and what to do."""
    if layer == 0:
        return "Layer 1 has no layer before it whose cache it could read", "Let it keep its own."
    window = arch.layers[layer].window
    sees = "attends to everything" if window is None else f"attends to {window} tokens"
    what = f"Layer {layer + 1} {sees}, and no layer before it that attends alike keeps a cache"
    return what, f"Layers of different attention cannot share: let layer {layer + 1} keep its own."
