"""One passage up the model with several documents at once, each running its own items and leaving as it may.

A layer multiplies the rows of every document that has reached it: new sentences on their way up, and stored states of
earlier sentences that go deeper. Knows no files, no text and no order of documents.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .adapters import Adapters
from .decoder import Decoder
from .documents import Document
from .packed import PackedStep, PackedStore, SequenceCache, mean_states
from .schedule import Item, Stop, Votes
from .step import Step


class Flight:
    """One document under way: what it has run, what it keeps, and how it stands. `start`: tokens before its first."""

    def __init__(
        self,
        document: Document,
        *,
        start: int,
        sweeps: Iterator[Sequence[Item]],
        cache: SequenceCache,
        votes: Votes | None,
    ) -> None:
        self.document = document
        self.sizes = [end - begin for begin, end in pairwise((0, *document.ends))]
        self.cache = cache
        self.votes = votes
        self.stop: Stop | None = None
        self.cells = 0
        """Cells computed; the rule counts fewer where the cells of an item run together."""
        self.total: Tensor | None = None
        self.last: Tensor | None = None
        self._start = start
        self._sweeps = sweeps
        self._upcoming, self._later = next(sweeps, ()), next(sweeps, ())
        self._states: Tensor | None = None  # [1, tokens so far, hidden], behind the deepest layer that all have run
        self._votes_due: list[NDArray[np.float32]] = []

    @property
    def sentences(self) -> int:
        """How many."""
        return len(self.sizes)

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return self.stop is not None or not self._upcoming

    @property
    def rows(self) -> int:
        """The most rows that the next passage brings into one product."""
        return max(self._tokens(item)[1] for item in self._upcoming)

    @property
    def last_passage(self) -> bool:
        """Whether no layer will be run again after this passage."""
        return not self._later

    def begins(self, layer: int) -> Item | None:
        """The item that begins in `layer`, if one does in this passage."""
        if self.stop is not None:
            return None
        return next((item for item in self._upcoming if item.first_layer == layer), None)

    def advance(self) -> None:
        """The passage is over."""
        self._upcoming, self._later = self._later, next(self._sweeps, ())

    def step(self, item: Item, decoder: Decoder) -> Step:
        """The pass over the item's tokens."""
        first, count = self._tokens(item)
        return decoder.segment(self._start + first, count, self._start + len(self.document.ids))

    def enter(self, item: Item, decoder: Decoder) -> Tensor:
        """States [1, rows, hidden] with which the item begins."""
        if item.first_layer == 0:
            first, count = self._tokens(item)
            return decoder.embed(torch.tensor([self.document.ids[first : first + count]], device=decoder.device))
        states, self._states = self._states, None
        if states is None:
            raise ValueError("an item goes on from states that nothing has computed")
        return states

    def leave(self, states: Tensor) -> None:
        """Keep the states [1, rows, hidden] with which an item ended, behind those of earlier sentences."""
        kept = [states] if self._states is None else [self._states, states]
        self._states = None if self.stop else torch.cat(kept, 1)

    def take(self, item: Item, layer: int, probabilities: NDArray[np.float32]) -> None:
        """Probabilities [sentences, C] of the item's cells in `layer`; they vote as soon as their order allows."""
        if self.stop is not None or self.votes is None or not item.votes:
            return
        self._votes_due.append(probabilities)
        if item.sentences == 1:
            item = item._replace(first_layer=layer, last_layer=layer + 1)
        if layer == item.last_layer - 1:
            self.stop = self.votes.take(item, np.stack(self._votes_due))
            self._votes_due.clear()

    def read(self, pooled: Tensor) -> None:
        """Mean states [sentences, hidden] of sentences behind the layer that answers; the last ones come last."""
        total = pooled.sum(0)
        self.total = total if self.total is None else self.total + total
        self.last = pooled[-1].clone()

    def _tokens(self, item: Item) -> tuple[int, int]:
        ends = (0, *self.document.ends)
        first = ends[item.first_sentence]
        return first, ends[item.last_sentence] - first


class Part(NamedTuple):
    """What a flight has in a pack."""

    flight: Flight
    item: Item
    step: Step


class Pack:
    """The items running side by side between two changes of who takes part."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts = parts
        self.step = PackedStep([part.step for part in parts])
        self.store = PackedStore([part.flight.cache for part in parts])
        self.counts = [part.item.sentences for part in parts]
        sizes = [part.flight.sizes[part.item.first_sentence : part.item.last_sentence] for part in parts]
        self._lengths = torch.tensor(list(chain.from_iterable(sizes)), device=device)

    def pooled(self, h: Tensor) -> Tensor:
        """Mean of each sentence's rows of h [1, R, hidden] -> [cells, hidden], float32."""
        return mean_states(h, self._lengths)


class Sweep:
    """Takes flights up the layers. `depth`: the number of layers behind which answers are read.

    On a CPU votes are taken behind every layer, so that a document leaves at once; elsewhere that would make the device
    wait for the host, and they are taken at the end of the passage. The decisions are the same.
    """

    def __init__(self, decoder: Decoder, adapters: Adapters, depth: int) -> None:
        self._decoder = decoder
        self._adapters = adapters
        self._depth = depth
        self._eager = decoder.device.type == "cpu"
        self._pending: list[tuple[Part, int, int]] = []
        self._asked: list[Tensor] = []

    @torch.inference_mode()
    def run(self, flights: Sequence[Flight]) -> None:
        """Take every flight through its next items."""
        pack, h = None, None
        for layer in range(self._depth):
            pack, h = self._gather(flights, pack, h, layer)
            if pack is None or h is None:
                break
            h = self._decoder.blocks[layer](h, pack.step, pack.store)
            self._look(pack, h, layer)
        self._settle()
        for flight in flights:
            flight.advance()

    def _gather(
        self, flights: Sequence[Flight], pack: Pack | None, h: Tensor | None, layer: int
    ) -> tuple[Pack | None, Tensor | None]:
        """Let those go whose item has ended, and take in the items that begin in this layer."""
        begun = [(flight, item) for flight in flights if (item := flight.begins(layer)) is not None]
        running = [] if pack is None or h is None else list(zip(pack.parts, h.split(pack.step.sizes, 1), strict=True))
        staying: list[tuple[Part, Tensor]] = []
        for part, states in running:
            if part.item.last_layer > layer and part.flight.stop is None:
                staying.append((part, states))
            else:
                part.flight.leave(states)
        if len(staying) == len(running) and not begun:
            return pack, h
        parts = staying + [
            (Part(flight, item, flight.step(item, self._decoder)), flight.enter(item, self._decoder))
            for flight, item in begun
        ]
        if not parts:
            return None, None
        return Pack([part for part, _ in parts], self._decoder.device), torch.cat([states for _, states in parts], 1)

    def _look(self, pack: Pack, h: Tensor, layer: int) -> None:
        """Keep count, ask the classifiers of this layer, and keep what the last answer will be read from."""
        for part, count in zip(pack.parts, pack.counts, strict=True):
            part.flight.cells += count
            if part.flight.last_passage:
                part.flight.cache.release(layer)
        answers, votes = layer == self._depth - 1, any(part.item.votes for part in pack.parts)
        if not answers and not votes:
            return
        pooled = pack.pooled(h)
        if answers:
            for part, states in zip(pack.parts, pooled.split(pack.counts), strict=True):
                part.flight.read(states)
        if votes:
            self._asked.append(self._adapters.probabilities(layer, pooled))
            self._pending += [(part, layer, count) for part, count in zip(pack.parts, pack.counts, strict=True)]
        if self._eager:
            self._settle()

    def _settle(self) -> None:
        """Let the votes count that were asked for, in the order of the layers."""
        if not self._asked:
            return
        answers = torch.cat(self._asked).cpu().numpy()
        first = 0
        for part, layer, count in self._pending:
            part.flight.take(part.item, layer, answers[first : first + count])
            first += count
        self._asked.clear()
        self._pending.clear()
