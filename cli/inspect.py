"""`adapt inspect`: what is in a bundle, as a table or as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from . import inspect_nvium, inspect_twodee, services
from .charts import histogram, human_bytes
from .console import make_reporter
from .options import CacheDir, Json

EXAMPLES = """\
  adapt inspect qwen-river
  adapt inspect qwen-river --resident 4         # memory with four dense blocks kept
  adapt inspect qwen-river --json | jq .bytes
"""

Layer = Mapping[str, Any]


def command(
    ctx: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="The bundle's folder.", metavar="BUNDLE")],
    *,
    resident: Annotated[
        int | None, typer.Option("--resident", min=1, metavar="N", help="Plan memory with N dense blocks kept.")
    ] = None,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Show what is in a bundle.

    Methods and their settings, the base model, the layers, bytes per part, memory, licence, and the quality that
    was measured when it was converted or tuned. Reads no tensors.
    """
    facts = services.describe(bundle, resident=resident, cache_dir=cache_dir, reporter=make_reporter(ctx.obj))
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    for line in _page(bundle, facts):
        typer.echo(line.rstrip())


def _page(bundle: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    base = facts["base"]
    yield f"{bundle}: {base['id']}" + (f" @ {base['revision'][:12]}" if base.get("revision") else "")
    yield from _pairs(_summary(facts))
    for method in facts["methods"]:
        yield ""
        yield method["name"]
        if method["name"] == "2dee":
            yield from _pairs(inspect_twodee.settings(method))
            yield from inspect_twodee.figures(method)
            continue
        if method["name"] == "nvium":
            yield from _pairs(inspect_nvium.settings(method, len(facts["layers"])))
            yield from inspect_nvium.figures(method)
            continue
        yield from _pairs(_settings(method))
        yield from _retention(method.get("retention") or ())
    yield ""
    yield "layers"
    yield from layer_table(facts["layers"])
    yield ""
    yield "bytes"
    yield from _pairs([(name.replace("_", " "), human_bytes(size)) for name, size in facts["bytes"].items() if size])
    if facts.get("memory"):
        yield ""
        yield "memory for weights"
        yield from _pairs(_memory(facts["memory"]))
    yield from _quality(facts.get("quality"), "when it was tuned" if facts.get("tuned") else "at conversion")


def _summary(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    trained = "" if facts["trained"] else "no: converted with --untrained, so expect a loss of quality"
    found = [("family", facts.get("family")), ("licence", facts.get("license") or "not stated")]
    found += [("backbone", facts.get("backbone")), ("trained", trained), ("tuned", _tuned(facts.get("tuned")))]
    found += [("format", facts["format_version"])]
    return [(name, str(value)) for name, value in found if value]


def _tuned(tuned: Mapping[str, Any] | None) -> str:
    """Say what was chosen, and for which goal on which data."""
    if not tuned:
        return ""
    goal = f"{tuned['goal'].replace('_', ' ')} {tuned['limit']:g}"
    return f"{tuned['chosen']}, for {goal} on {tuned['data']['name']}"


def _settings(method: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the plain settings; lists (layers, curves) are shown elsewhere."""
    shown = []
    for name, value in method.items():
        if isinstance(value, Mapping) and "name" in value:
            shown.append((name, f"{value['name']}, {value.get('tokens')} tokens"))
        elif name == "training" and value:
            shown.append((name, _training(value)))
        elif name == "thresholds" and value:
            shown.append((name, "one for each block, instead of tau"))
        elif name == "dense_layers" and value:
            shown.append(("stay dense", ", ".join(map(str, value))))
        elif name != "name" and isinstance(value, str | int | float) and not isinstance(value, bool):
            shown.append((name, str(value)))
        elif isinstance(value, bool):
            shown.append((name, "yes" if value else "no"))
    return [(name.replace("_", " "), text) for name, text in shown]


def _training(training: Mapping[str, Any]) -> str:
    """Say in one line how weights were trained."""
    what = "all weights" if training.get("lora_rank") is None else f"LoRA of rank {training['lora_rank']}"
    size = f"{training['sequences_per_step']} x {training['sequence_length']} tokens"
    return f"{training['steps']} steps of {size} from {training['data']['name']}; {what}"


def _retention(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Draw held-out perplexity by how many layers keep a cache."""
    if not points:
        return
    yield ""
    yield f"  {'held-out perplexity with a cache in':<36}{'as it came':>12}{'trained':>12}"
    for point in points:
        layers = len(point["kv_sources"])
        figures = ["" if point[name] is None else f"{point[name]:.4g}" for name in ("source", "trained")]
        name = f"{point['keepers']:>6} of {layers} layers ({point['keepers'] / layers:.0%})"
        yield f"  {name:<36}" + "".join(f"{text:>12}" for text in figures)


def _memory(memory: Mapping[str, int]) -> list[tuple[str, str]]:
    parts = [(name.replace("_", " "), human_bytes(size)) for name, size in memory.items() if name != "resident"]
    return [("dense blocks kept", str(memory["resident"])), *parts]


def _quality(quality: Mapping[str, Any] | None, when: str) -> Iterator[str]:
    """Say what was measured `when`: at conversion, or when the bundle was tuned."""
    if not quality:
        return
    yield ""
    yield f"quality, measured {when} on {quality['tokens']} tokens of {quality['text']}"
    yield from _pairs(
        [
            ("perplexity", f"{quality['perplexity']:.4g} (dense {quality['dense_perplexity']:.4g})"),
            ("KL from dense", f"{quality['kl']:.4g}"),
            ("same next token", f"{quality['agreement']:.1%}"),
            ("mean depth", f"{quality['mean_depth']:.1f}"),
        ]
    )
    if any(quality.get("exit_histogram") or ()):
        yield "depth at which tokens left"
        yield from histogram(quality["exit_histogram"])


def _pairs(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        yield f"  {name:<{width}}  {value}"


def layer_table(layers: Sequence[Layer]) -> Iterator[str]:
    """Draw the layers, equal neighbours on one line."""
    followed = {layer.get("kv_source") for layer in layers if layer.get("kv_source") != layer["index"]}
    marked = [{**layer, "followed": layer["index"] in followed} for layer in layers]
    for what, group in groupby(marked, key=layer_text):
        run = list(group)
        first, last = run[0]["index"], run[-1]["index"]
        name = str(first) if first == last else f"{first}-{last}"
        yield f"  {name:>9}  {what}"


def layer_text(layer: Layer) -> str:
    """Say in words what a layer has."""
    parts = ["dense"] if layer.get("dense") else []
    if layer.get("exit_layer"):
        parts.append("exit (4-bit)")
    source = layer.get("kv_source")
    if layer.get("followed"):
        parts.append("leader")
    if source not in {None, layer["index"]}:
        parts.append(f"keys and values of {source}")
    parts += [name for name in ("junction", "adapter") if layer.get(name)]
    return " + ".join(parts) or "dropped"
