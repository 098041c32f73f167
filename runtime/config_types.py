"""What kind of value each field of config.json must have, before anything is computed with it.

Knows the names that `families`, `layers` and `rope` read, and nothing of what they mean. Fields that are read as they
are compared (NEUTRAL) and sizes that are always needed are checked there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from ..errors import FormatError

LARGEST = 1 << 31
"""No size of a model is near it; a larger number is damage."""
REMEDY = "Download the model again; of a bundle: convert again, or fetch the bundle again."


def is_size(value: object) -> TypeGuard[int]:
    """Whether a value is a positive whole number that may be a size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _is_number(value: object) -> bool:
    # A whole number beyond this is no float, and no parameter either.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_positive(value: object) -> TypeGuard[float]:
    """Whether a value is a positive finite number."""
    return isinstance(value, int | float) and _is_number(value) and value > 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool | int)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _all(value: object, each: Callable[[object], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(each(item) for item in value)


Kind = tuple[str, Callable[[object], bool]]
SIZE: Kind = ("a positive whole number", is_size)
COUNT: Kind = ("a whole number from 0 on", _is_count)
NUMBER: Kind = ("a number", _is_number)
POSITIVE: Kind = ("a positive number", is_positive)
FLAG: Kind = ("true or false", _is_flag)
TEXT: Kind = ("a name", _is_text)
TEXTS: Kind = ("a list of names", lambda value: _all(value, _is_text))
FLAGS: Kind = ("a list of 0 and 1", lambda value: _all(value, _is_flag))
FACTORS: Kind = ("a list of positive numbers", lambda value: _all(value, is_positive))
TABLE: Kind = ("a table", lambda value: isinstance(value, Mapping))

FIELDS: Mapping[str, Kind] = {
    "head_dim": SIZE,
    "sliding_window": SIZE,
    "sliding_window_pattern": SIZE,
    "no_rope_layer_interval": SIZE,
    "original_max_position_embeddings": SIZE,
    "max_window_layers": COUNT,
    "rope_theta": POSITIVE,
    "rope_local_base_freq": POSITIVE,
    "query_pre_attn_scalar": POSITIVE,
    "attn_logit_softcapping": POSITIVE,
    "final_logit_softcapping": POSITIVE,
    "partial_rotary_factor": POSITIVE,
    "use_sliding_window": FLAG,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "hidden_act": TEXT,
    "hidden_activation": TEXT,
    "layer_types": TEXTS,
    "no_rope_layers": FLAGS,
    "rope_parameters": TABLE,
    "rope_scaling": TABLE,
}
ROPE: Mapping[str, Kind] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": POSITIVE,
    "partial_rotary_factor": POSITIVE,
    "original_max_position_embeddings": SIZE,
    "factor": POSITIVE,
    "attention_factor": POSITIVE,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "mscale": NUMBER,
    "mscale_all_dim": NUMBER,
    "llama_4_scaling_beta": NUMBER,
    "truncate": FLAG,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
    "sliding_attention": TABLE,
    "full_attention": TABLE,
}


def check_types(config: Mapping[str, Any]) -> None:
    """Raise FormatError naming the first field whose value is of another kind; null is as good as absent."""
    for where, value, (kind, is_kind) in _found(config):
        if value is not None and not is_kind(value):
            raise FormatError(f"config.json has {where} = {shown(value)}, not {kind}", REMEDY)


def _found(config: Mapping[str, Any]) -> Iterator[tuple[str, object, Kind]]:
    """Each known field, its value and its kind: a table before what is in it."""
    for name in config.keys() & FIELDS.keys():
        yield name, config[name], FIELDS[name]
    for name in ("rope_parameters", "rope_scaling"):
        yield from _rope(name, config.get(name))


def _rope(where: str, parameters: object) -> Iterator[tuple[str, object, Kind]]:
    if not isinstance(parameters, Mapping):
        return
    for name in parameters.keys() & ROPE.keys():
        yield f"{where}.{name}", parameters[name], ROPE[name]
        if ROPE[name] is TABLE:
            yield from _rope(f"{where}.{name}", parameters[name])


def check_known(token: int, vocab_size: int) -> None:
    """Raise FormatError for a token, the highest of a text, that a model of `vocab_size` does not have."""
    if token >= vocab_size:
        what = f"the tokenizer knows token {token}, the model only {vocab_size}"
        raise FormatError(what, "tokenizer.json and config.json seem to be of two models; fetch them again.")


def shown(value: object) -> str:
    """A value as a message has it: no longer than a line can take."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
