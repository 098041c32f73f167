"""Which tokens each layer sees and how it rotates them, from config.json.

Split from `families` because every generation of config files says this in another place. Knows no sizes, no weights.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import FormatError, UnsupportedError
from .config_types import REMEDY
from .rope import RopeSpec

Config = Mapping[str, Any]
MOST_LAYERS = 1_000  # more is damage, and would take its time to be found
SLIDING, FULL = "sliding_attention", "full_attention"
SCALED = ("llama3", "yarn", "longrope")  # kinds that know the length trained before scaling


def read_layers(
    config: Config, windows: str, theta: float, head_dim: int
) -> tuple[tuple[tuple[int | None, int | None], ...], tuple[RopeSpec, ...]]:
    """Per layer (window, rope index), and the rotations that the indices name.

    `windows` is the family's rule (see `families.Family`), `theta` its default base.
    """
    types = _layer_types(config, windows)
    window = _window(config, windows)
    if SLIDING in types and window is None:
        raise FormatError("config.json has sliding layers but no sliding_window", REMEDY)
    by_type = {name: _rope(config, name, theta, head_dim) for name in sorted(set(types))}
    ropes = tuple(dict.fromkeys(by_type.values()))
    rotated = _rotated(config, windows, len(types))
    layers = tuple(
        (window if name == SLIDING else None, ropes.index(by_type[name]) if turns else None)
        for name, turns in zip(types, rotated, strict=True)
    )
    return layers, ropes


def _layer_types(config: Config, windows: str) -> list[str]:
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MOST_LAYERS:
        raise FormatError(f"config.json has num_hidden_layers = {count!r}", REMEDY)
    given = config.get("layer_types")
    if given is None or windows in ("none", "all"):  # transformers ignores layer_types for these families, too
        return [SLIDING if _slides(config, windows, index) else FULL for index in range(count)]
    for name in given:
        if name not in (SLIDING, FULL):
            raise UnsupportedError(f"Layer type {name!r} is not supported", f"Known: {FULL}, {SLIDING}.")
    if len(given) < count:
        raise FormatError(f"config.json has {len(given)} layer_types for {count} layers", REMEDY)
    return list(given[:count])


def _slides(config: Config, windows: str, index: int) -> bool:
    windowed = _window(config, windows) is not None
    match windows:
        case "all" | "given":
            return windowed
        case "qwen":
            return windowed and index >= config["max_window_layers"]
        case "alternate":
            return index % 2 == 0
        case "pattern":
            return (index + 1) % config["sliding_window_pattern"] != 0
        case "nope":
            return (
                windowed and bool(config.get("use_sliding_window")) and not _rotated(config, windows, index + 1)[index]
            )
        case _:
            return False


def _window(config: Config, windows: str) -> int | None:
    if windows == "none" or (windows == "qwen" and not config.get("use_sliding_window")):
        return None
    return config.get("sliding_window")


def _rotated(config: Config, windows: str, count: int) -> list[bool]:
    """SmolLM3 leaves some layers without positions: `no_rope_layers` holds 1 where a layer does rotate."""
    if windows != "nope":
        return [True] * count
    given = config.get("no_rope_layers")
    if given is not None:
        if len(given) < count:
            raise FormatError(f"config.json has {len(given)} no_rope_layers for {count} layers", REMEDY)
        return [bool(flag) for flag in given[:count]]
    interval = config.get("no_rope_layer_interval", 4)
    return [(index + 1) % interval != 0 for index in range(count)]


def _rope(config: Config, layer_type: str, theta: float, head_dim: int) -> RopeSpec:
    positions = config["max_position_embeddings"]
    parameters, theta = _parameters(config, layer_type, theta)
    if config["model_type"] == "phi3" and _kind(parameters) in ("su", "yarn"):  # earlier names of longrope
        parameters["rope_type"] = "longrope"
    if config.get("original_max_position_embeddings") and _kind(parameters) in SCALED:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * partial)
    return RopeSpec.from_parameters(parameters, theta=theta, rotary_dim=rotary_dim, max_positions=positions)


def _parameters(config: Config, layer_type: str, theta: float) -> tuple[dict[str, Any], float]:
    """The rope parameters of a layer type, and the base where they do not name one."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or theta
    if config["model_type"] == "gemma3_text":  # full and sliding layers differ; rope_scaling scales the full ones only
        theta = config.get("rope_local_base_freq") or 10_000.0 if layer_type == SLIDING else theta
        if not _nested(given):
            given = {FULL: given}
    if _nested(given):
        given = given.get(layer_type) or {}
    return dict(given), theta


def _nested(parameters: Config) -> bool:
    return SLIDING in parameters or FULL in parameters


def _kind(parameters: Config) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"
