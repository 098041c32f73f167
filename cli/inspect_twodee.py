"""What `adapt inspect` says of a bundle that classifies: labels, how it decides, what that costs and saves."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_POINTS = 9
"""Points of the frontier shown; all are in --json."""
_NAME = 22
_COLUMNS = (("accuracy", 8), ("steady", 6), ("macro-F1", 8), ("work", 6), ("layers", 6), ("sentences", 9))


def settings(method: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and value of each setting, in reading order."""
    prompt = " ".join(method["prompt"].split()) or "none"
    return [
        ("labels", _wrapped(", ".join(method["labels"]))),
        ("prompt", _wrapped(prompt)),
        ("reads", f"{method['max_tokens']} tokens at most"),
        ("sentences", f"{method['least']} to {method['most']} characters"),
        ("language", method["language"] or "guessed text by text"),
        ("blocks", "the backbone's" if method["blocks"] == "dense" else "4-bit exit layers where there are any"),
        ("classifiers", f"{method['hidden']} hidden units each"),
        ("rows", _wrapped(_rows(method))),
        ("fine-tuned", _training(method.get("training"))),
        ("decides", _decides(method)),
    ]


def _rows(method: Mapping[str, Any]) -> str:
    data, judged = method["data"], method.get("validation_data")
    if judged is None:
        return f"{data['rows']} of {data['name']}, {data['validation']} of them to choose thresholds"
    return f"{data['rows']} of {data['name']}, {judged['rows']} of {judged['name']} to choose thresholds"


def _wrapped(text: str) -> str:
    """Keep it to one line."""
    return textwrap.shorten(text, 62, placeholder=" …")


def _training(training: Mapping[str, Any] | None) -> str:
    return "no: the model is as it came" if training is None else f"LoRA of rank {training['lora_rank']}"


def _decides(method: Mapping[str, Any]) -> str:
    lost = f"losing at most {method['max_drop']:g}"
    if method["use"] == "2d":
        chosen = method["chosen"]
        within = f", layers 1 to {method['depth']}" if method.get("depth") else ""
        return f"2D, thresholds {chosen['tau_ignore']:g},{chosen['tau_acc']:g}{within}, {lost}"
    return f"1D, layer {method['chosen_one_d']['layer']}, {lost}"


def figures(method: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of what was measured on the validation rows; `*` marks what `run` does.

    `steady` is the accuracy that thresholds are chosen by, smoothed over their neighbours.
    """
    yield ""
    yield f"  {'on the validation rows':<{_NAME}}" + "".join(f"  {name:>{size}}" for name, size in _COLUMNS)
    two_d, one_d = method["use"] == "2d", method["chosen_one_d"]
    yield _line(f"full, layer {method['full']['layer']}", method["full"])
    yield _line(f"1D, layer {one_d['layer']}{'' if two_d else ' *'}", one_d)
    for point in sample(method["frontier"], method["chosen"]):
        mark = " *" if two_d and point == method["chosen"] else ""
        yield _line(f"2D, {point['tau_ignore']:g},{point['tau_acc']:g}{mark}", point)
    if len(method["frontier"]) > MAX_POINTS:
        yield f"  ({len(method['frontier'])} points in all; --json has them)"


def gained(method: Mapping[str, Any]) -> str:
    """Say in one line what conversion measured on the validation rows."""
    found = measured(method)
    full, one_d, two_d = found["dense"], found["one_d"], found["two_d"]
    parts = [f"full {full['accuracy']:.4f}", f"1D {one_d['accuracy']:.4f} with work {one_d['work']:.3f}"]
    parts += [] if two_d is None else [f"2D {two_d['accuracy']:.4f} with work {two_d['work']:.3f}"]
    return f"Accuracy on {found['rows']} validation rows: {', '.join(parts)}"


def measured(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same for `convert --json`, by the names of `eval --labels --json`."""
    judged = method.get("validation_data") or method["data"]
    points = {"dense": method["full"], "one_d": method["chosen_one_d"], "two_d": method["chosen"]}
    return {"rows": judged["validation"], "use": method["use"], **points}


def sample(points: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return a few points, evenly over the list, the ends and the chosen one among them."""
    if len(points) <= MAX_POINTS:
        return points
    places = {round(place * (len(points) - 1) / (MAX_POINTS - 2)) for place in range(MAX_POINTS - 1)}
    return [point for place, point in enumerate(points) if place in places or point == chosen]


def _line(name: str, point: Mapping[str, Any]) -> str:
    steady = point.get("steady")
    values = (f"{point['accuracy']:.4f}", "" if steady is None else f"{steady:.4f}", f"{point['macro_f1']:.4f}")
    values += (f"{point['work']:.3f}", f"{point['mean_layers']:.1f}", f"{point['mean_sentences']:.1f}")
    return f"  {name:<{_NAME}}" + "".join(f"  {text:>{size}}" for text, (_, size) in zip(values, _COLUMNS, strict=True))
