"""A bundle that classifies, once it is open: texts to documents, documents to verdicts, and its labels' names.

Imports no torch; `services.open_classifier` fills it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..runtime.scores import DIGITS

if TYPE_CHECKING:
    from ..runtime.classify import Classifier, Verdict
    from ..runtime.documents import Document, DocumentReader
    from ..runtime.schedule import Mode

COLUMNS = ("label", "confidence", "scores", "layers", "sentences", "work", "truncated")
"""What a classified row has besides its own keys."""


@dataclass(frozen=True)
class TextClassifier:
    """`labels`: a verdict's label is a place in them. `batch_size`: documents at once where nothing else is said."""

    labels: Sequence[str]
    layers: int
    batch_size: int
    reader: "DocumentReader"
    classifier: "Classifier"

    def read(self, content: str | Sequence[str]) -> "Document":
        """Tokenise a text, or its sentences. Raises UsageError for one that is empty."""
        return self.reader.read(content)

    def classify(self, documents: "Iterable[Document | None]", mode: "Mode", *, batch_size: int) -> "Iterator[Verdict]":
        """See `runtime.classify.Classifier.classify`."""
        return self.classifier.classify(documents, mode, batch_size=batch_size)

    def result(self, verdict: "Verdict") -> Mapping[str, object]:
        """Return a verdict by stable keys."""
        scores = {name: round(score, DIGITS) for name, score in zip(self.labels, verdict.scores, strict=True)}
        found = (self.labels[verdict.label], round(verdict.confidence, DIGITS), scores)
        effort = (verdict.layers, verdict.sentences, round(verdict.work, DIGITS))
        return dict(zip(COLUMNS, (*found, *effort, verdict.truncated), strict=True))
