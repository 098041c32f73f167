"""Classification that stops reading and stops thinking: documents in, verdicts out, in the same order.

Several documents are under way at once; one that is done leaves, and the next takes its place. Source: 2D-EE
(arXiv 2604.18592), Algorithm 1 in `schedule`. Knows no files and no text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UsageError
from .adapters import Adapters
from .decoder import Decoder
from .documents import Document
from .methods import Readout
from .packed import SequenceCache, SharedPrefix
from .schedule import Mode, TwoD, Votes, sweeps
from .sweep import Flight, Sweep

AHEAD = 16  # documents read, for each place in the batch, past the oldest one that is not answered yet
ROWS = 4096  # tokens in one product, which bounds the memory of a pass
PREFIXES = 2  # kept at a time
_END = object()


@dataclass(frozen=True)
class Verdict:
    """The answer for one document.

    Where the rule fired, `scores` are mean probabilities over the cells that counted; else those of the classifier
    that read the whole document. `layers` and `sentences` are how many were looked at, `work` the operations as the
    paper counts them, as a share of the full computation (the depth's share of all layers where Algorithm 1 did not
    stop), `computed` the share that was really run.
    """

    label: int
    confidence: float
    scores: tuple[float, ...]
    layers: int
    sentences: int
    work: float
    computed: float
    stopped: bool
    truncated: bool


class Classifier:
    """A decoder with a classifier behind every layer.

    Args:
        decoder: backbone; its head is never used.
        adapters: one for each of its layers.
        prefix: ids that stand before every document: BOS, instruction.
        readout: what is classified where no rule fired: the mean of the sentences' states, or the last sentence's.

    Raises:
        UsageError: adapters for another number of layers.

    """

    def __init__(
        self, decoder: Decoder, adapters: Adapters, *, prefix: Sequence[int] = (), readout: Readout = "mean"
    ) -> None:
        self.layers = decoder.arch.num_layers
        if adapters.layers != self.layers:
            raise UsageError(f"{adapters.layers} adapters do not fit a model of {self.layers} layers")
        self.decoder = decoder
        self.adapters = adapters
        self.readout: Readout = readout
        self._ids = tuple(prefix)
        self._prefixes: dict[tuple[int, ...], SharedPrefix] = {}

    def classify(self, documents: Iterable[Document | None], mode: Mode, *, batch_size: int = 8) -> Iterator[Verdict]:
        """Answer documents in their order, up to `batch_size` at once, reading at most 16 times as many ahead.

        A None among them says that no document is there yet: those under way go on. What is kept does not grow with
        the number of documents. Raises UsageError for a mode that this model does not have, or a batch of none.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}", "It must be 1 or more.")
        sweep = Sweep(self.decoder, self.adapters, mode.depth(self.layers))
        return self._classify(iter(documents), mode, sweep, batch_size)

    def _classify(
        self, documents: Iterator[Document | None], mode: Mode, sweep: Sweep, batch_size: int
    ) -> Iterator[Verdict]:
        flying: dict[int, Flight] = {}
        answered: dict[int, Verdict] = {}
        read = written = 0
        more = True
        while more or flying:
            while more and len(flying) < batch_size and read - written < AHEAD * batch_size:
                document = next(documents, _END)
                if document is None:
                    break
                if isinstance(document, Document):
                    flying[read] = self._take_off(document, mode)
                    read += 1
                else:
                    more = False
            sweep.run(_within(flying.values(), ROWS))
            for place in [place for place, flight in flying.items() if flight.done]:
                answered[place] = self._verdict(flying.pop(place), mode)
            while written in answered:
                yield answered.pop(written)
                written += 1

    @torch.inference_mode()
    def _take_off(self, document: Document, mode: Mode) -> Flight:
        length = len(self._ids) + len(document.ids)
        return Flight(
            document,
            start=len(self._ids),
            sweeps=sweeps(mode.items(self.layers, len(document.ends))),
            cache=SequenceCache(self.decoder, length, self._prefix(length) if self._ids else None),
            votes=Votes(mode.rule, self.adapters.classes) if isinstance(mode, TwoD) else None,
        )

    def _prefix(self, length: int) -> SharedPrefix:
        """The prefix as it is rotated in a sequence of this length: most models have one, longrope two."""
        regimes = tuple(spec.regime(length) for spec in self.decoder.arch.ropes)
        if regimes not in self._prefixes:
            if len(self._prefixes) == PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]
            self._prefixes[regimes] = SharedPrefix(self.decoder, self._ids, length)
        return self._prefixes[regimes]

    @torch.inference_mode()
    def _verdict(self, flight: Flight, mode: Mode) -> Verdict:
        cells = self.layers * flight.sentences
        stop, depth = flight.stop, mode.depth(self.layers)
        if stop is None:
            (scores,) = self.adapters.probabilities(depth - 1, self._read(flight)[None]).tolist()
            label = max(range(len(scores)), key=scores.__getitem__)
            layers, sentences, work = depth, flight.sentences, depth / self.layers
        else:
            label, scores = stop.label, stop.scores
            layers, sentences, work = stop.layers, stop.sentences, stop.operations / cells
        return Verdict(
            label=label,
            confidence=scores[label],
            scores=tuple(scores),
            layers=layers,
            sentences=sentences,
            work=work,
            computed=flight.cells / cells,
            stopped=stop is not None,
            truncated=flight.document.truncated,
        )

    def _read(self, flight: Flight) -> Tensor:
        """The state [hidden] that answers for the whole document."""
        if flight.total is None or flight.last is None:
            raise ValueError("a document is answered before it has run")
        return flight.last if self.readout == "last" else flight.total / flight.sentences


def _within(flights: Iterable[Flight], rows: int) -> list[Flight]:
    """The oldest flights whose next items come to at most `rows` tokens; always one."""
    chosen: list[Flight] = []
    for flight in flights:
        rows -= flight.rows
        if chosen and rows < 0:
            break
        chosen.append(flight)
    return chosen
