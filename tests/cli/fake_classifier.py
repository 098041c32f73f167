"""A classifier without a model, at the seam `adapt_llm.cli.services`. As a script it is the program with it.

What a text says decides: "good" is positive, "bad" negative, a word FAIL is refused, FULL has no memory, DEFECT breaks
the program. Sentences end at full stops. A document takes as many turns as it has words, with others beside it.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapt_llm.cli import services
from adapt_llm.cli.text_classifier import TextClassifier
from adapt_llm.errors import ResourceError, UsageError
from adapt_llm.runtime.documents import Document
from adapt_llm.runtime.methods import FixedLayer, LabelledRows, Thresholds, TwoDee

LAYERS = 6
LABELS = ("neg", "pos")


@dataclass(frozen=True)
class Verdict:
    """The fields of `runtime.classify.Verdict`, without torch."""

    label: int
    confidence: float
    scores: tuple[float, ...]
    layers: int
    sentences: int
    work: float
    computed: float
    stopped: bool
    truncated: bool


def _figures(accuracy: float, work: float) -> dict[str, float]:
    return {"accuracy": accuracy, "macro_f1": accuracy, "work": work, "mean_layers": 6 * work, "mean_sentences": 3.0}


def settings(**changes: Any) -> TwoDee:
    points = [(0.9, 0.6, 0.5, 3.0), (0.88, 0.4, 0.4, 2.0), (0.86, 0.2, 0.3, 1.0)]
    frontier = [
        Thresholds(tau_ignore=ignore, tau_acc=acc, **_figures(accuracy, work)) for accuracy, work, ignore, acc in points
    ]
    accuracies = (0.5, 0.6, 0.87, 0.89, 0.9, 0.89)
    layers = [FixedLayer(layer=n, **_figures(accuracy, n / LAYERS)) for n, accuracy in enumerate(accuracies, 1)]
    values: dict[str, Any] = {
        "labels": LABELS,
        "prompt": "What is it?\n",
        "least": 24,
        "most": 600,
        "max_tokens": 50,
        "max_drop": 0.02,
        "frontier": frontier,
        "one_d": layers,
        "full": layers[-1],
        "chosen": frontier[1],
        "chosen_one_d": layers[3],
        "data": LabelledRows(name="train.jsonl", sha256="0" * 64, rows=100, validation=20),
    }
    return TwoDee(**values | changes)


class FakeReader:
    max_tokens = 50

    def __init__(self) -> None:
        self.seen: list[str | tuple[str, ...]] = []

    def read(self, content: str | Sequence[str]) -> Document:
        text = content if isinstance(content, str) else " ".join(content)
        if len(self.seen) < 100:
            self.seen.append(content if isinstance(content, str) else tuple(content))
        if "FAIL" in text:
            raise UsageError("the text has no token")
        if "FULL" in text:
            raise ResourceError("not enough memory")
        words = text.split()
        ids = tuple(2 if "good" in word else 1 if "bad" in word else 0 for word in words)
        pieces = text.split(".") if isinstance(content, str) else content
        ends, total = [], 0
        for piece in pieces:
            total += len(piece.split())
            ends.append(total)
        distinct = sorted({min(end, self.max_tokens) for end in ends if end})
        return Document(ids[: self.max_tokens], tuple(distinct), truncated=len(ids) > self.max_tokens)


class FakeClassifier:
    """Takes documents as the real one does: leaves it open which are done first, keeps their order."""

    def __init__(self) -> None:
        self.most_at_once = 0
        self.batch_sizes: set[int] = set()
        self.modes: list[Any] = []

    def classify(self, documents: Iterable[Document | None], mode: Any, *, batch_size: int) -> Iterator[Verdict]:
        self.batch_sizes.add(batch_size)
        self.modes.append(mode)
        end, source = object(), iter(documents)
        flying: dict[int, list[Any]] = {}
        answered: dict[int, Verdict] = {}
        read = written = 0
        more = True
        while more or flying:
            while more and len(flying) < batch_size and read - written < 16 * batch_size:
                document = next(source, end)
                if document is None:
                    if not flying:
                        raise AssertionError("told to wait with nothing to do")
                    break
                if isinstance(document, Document):
                    flying[read] = [len(document.ids), document]
                    read += 1
                else:
                    more = False
            self.most_at_once = max(self.most_at_once, len(flying))
            for place in list(flying):
                flying[place][0] -= 1
                if flying[place][0] <= 0:
                    answered[place] = verdict(flying.pop(place)[1], mode)
            while written in answered:
                yield answered.pop(written)
                written += 1


def verdict(document: Document, mode: Any) -> Verdict:
    kind = type(mode).__name__
    positive = document.ids.count(2) >= document.ids.count(1)
    layers = {"Full": LAYERS, "OneD": getattr(mode, "layer", 0), "TwoD": min(LAYERS, 1 + len(document.ends))}[kind]
    sentences = min(2, len(document.ends)) if kind == "TwoD" else len(document.ends)
    scores = (0.123456789, 0.876543211) if positive else (0.876543211, 0.123456789)
    work = layers * sentences / (LAYERS * len(document.ends))
    return Verdict(
        int(positive), max(scores), scores, layers, sentences, work, work, kind == "TwoD", document.truncated
    )


def open_classifier(path: Path, settings: object, reporter: object) -> TextClassifier:
    return TextClassifier(LABELS, LAYERS, 4, FakeReader(), FakeClassifier())  # pyright: ignore[reportArgumentType]


PATCHES: dict[str, Any] = {"open_classifier": open_classifier, "twodee": lambda path: settings()}
PATCHES["peak_memory"] = lambda: 3 << 30
PATCHES["machine"] = lambda: {"adapt": "0", "device": "none"}

if __name__ == "__main__":
    for name, fake in PATCHES.items():
        setattr(services, name, fake)
    from adapt_llm.cli.app import main

    main()
    sys.exit(0)
