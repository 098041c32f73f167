"""What `adapt inspect` says of a mixture of exits: how it was trained, what each is worth, what other depths cost."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TRAINED = {"routers": "the junctions alone", "all": "all weights", "scratch": "all weights, from random ones"}


def settings(method: Mapping[str, Any], layers: int) -> list[tuple[str, str]]:
    """Return name and value of each setting, in reading order; `layers`: blocks of the model."""
    points = method["junctions"]
    depth, bias = method["expected_depth"], method["router_bias"]
    found = [
        ("exits", f"after {', '.join(map(str, points))} and all {layers} blocks" if points else "one, at the end"),
        ("blocks", "the backbone's" if method["blocks"] == "dense" else "4-bit exit layers where there are any"),
        ("trained", _training(method)),
        ("price", _price(method) if points else ""),
        ("expected depth", "" if depth is None else f"{depth:.1%} of the blocks"),
        ("router bias", f"{bias:+g}" if bias else ""),
    ]
    return [(name, text) for name, text in found if text]


def _training(method: Mapping[str, Any]) -> str:
    what, training = _TRAINED[method["trained"]], method.get("training")
    if training is None:
        return what
    size = f"{training['sequences_per_step']} x {training['sequence_length']} tokens"
    return f"{what}; {training['steps']} steps of {size} from {training['data']['name']}"


def _price(method: Mapping[str, Any]) -> str:
    target, price = method["target_depth"], f"beta {method['beta']:.3g}"
    return price if target is None else f"{price} at the end, steered to {target:.0%} of the blocks"


def figures(method: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of what was measured on held-out text; `*` marks the routers' bias that is in use."""
    if method["junctions"] and method["exits"]:
        exits = [(f"{it['layers']}", f"{it['mass']:.1%}", f"{it['perplexity']:.4g}") for it in method["exits"]]
        yield from _table(("exit after", "mass", "perplexity alone"), exits)
    if method["trade_off"]:
        used = method["router_bias"]
        points = [
            (_marked(it["bias"], used), f"{it['expected_depth']:.1%}", f"{it['perplexity']:.4g}")
            for it in method["trade_off"]
        ]
        yield from _table(("router bias", "depth", "perplexity"), points)


def _marked(bias: float, used: float) -> str:
    return f"{bias:+g}{' *' if bias == used else '  '}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    for row in (head, *rows):
        yield "  " + "".join(f"{cell:>18}" for cell in row)
