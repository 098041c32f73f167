"""What the classifiers of 2D-EE are trained on: the mean state of every sentence behind every block.

Each document runs once, whole, without a cache. Results go into the work folder as pieces of some documents each, which
are mapped into memory when read. Knows documents and blocks; knows no labels and no classifier.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TypeVar, overload

import torch
from safetensors import safe_open
from torch import Tensor

from ..runtime.block import Block
from ..runtime.decoder import Decoder
from ..runtime.documents import Document, DocumentReader
from ..runtime.packed import PackedStep, PackedStore, mean_states
from ..runtime.pass_store import PassStore
from ..runtime.progress import Reporter
from .labelled import Text
from .pace import Paced
from .workspace import Workspace
from .writer import write_piece

PIECE_DOCUMENTS = 32
"""Documents in a piece: what a kill costs at most."""
ROWS = 2048
"""Tokens that go through a block at once."""
TOGETHER_BYTES = 1 << 30
"""States of documents that climb side by side where blocks are not kept. For a model of 8 billion parameters these are
some 40,000 tokens, in which a block computes fifty times as long as it takes to read on an ordinary machine."""
_STATES, _COUNTS = "states", "counts"

T = TypeVar("T")


class TextDocuments(Sequence[Document]):
    """Texts that are read as they are asked for."""

    def __init__(self, reader: DocumentReader, texts: Sequence[Text]) -> None:
        self._reader, self._texts = reader, texts

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self._reader.read(text) for text in self._texts[index]]
        return self._reader.read(self._texts[index])


@dataclass(frozen=True)
class Encoder:
    """Runs documents through blocks. `prefix` are tokens before every document, never pooled."""

    frame: Decoder
    prefix: tuple[int, ...] = ()

    @torch.inference_mode()
    def pooled(self, pieces: Sequence[Sequence[Document]]) -> list[Tensor]:
        """Mean states of the sentences of each piece, in order: bf16 [sentences, layers, hidden], on the host.

        bf16 because some families have single channels far beyond fp16 (massive activations). Layer after layer, so
        that blocks which are not kept are read once. What a piece gives does not depend on the others.
        """
        rising = [_Piece(self.frame, self.prefix, documents) for documents in pieces]
        for layer in range(len(self.frame.blocks)):
            for piece in rising:
                piece.through(self.frame.blocks[layer], layer)  # no name here holds a block while the next is read
        return [piece.states for piece in rising]

    def nbytes(self, documents: Sequence[Document]) -> int:
        """Bytes of these documents' states as they climb: of tokens behind one block, of sentences behind all."""
        arch = self.frame.arch
        tokens = sum(len(self.prefix) + len(document.ids) for document in documents)
        sentences = sum(len(document.ends) for document in documents)
        behind_all = sentences * arch.num_layers * torch.bfloat16.itemsize
        return arch.hidden_size * (tokens * self.frame.embedding.element_size() + behind_all)


class _Piece:
    """The documents of a piece on their way up, and the states that their sentences left behind each block."""

    def __init__(self, frame: Decoder, prefix: Sequence[int], documents: Sequence[Document]) -> None:
        self._packs = [_Pack(frame, prefix, chunk) for chunk in _chunks(documents, len(prefix))]
        sentences = sum(len(document.ends) for document in documents)
        self.states = torch.empty(sentences, len(frame.blocks), frame.arch.hidden_size, dtype=torch.bfloat16)

    def through(self, block: Block, layer: int) -> None:
        first = 0
        for pack in self._packs:
            means = pack.through(block)
            self.states[first : first + len(means), layer] = means.to("cpu", torch.bfloat16)
            first += len(means)


class _Pack:
    """Some documents side by side, without padding, behind the blocks that they have been through."""

    def __init__(self, frame: Decoder, prefix: Sequence[int], documents: Sequence[Document]) -> None:
        ids = [(*prefix, *document.ids) for document in documents]
        self._step = PackedStep([frame.segment(0, len(row), len(row)) for row in ids])
        self._store = PackedStore([PassStore(frame.arch) for _ in ids])
        self._h = frame.embed(torch.tensor([[token for row in ids for token in row]], device=frame.device))
        head = [len(prefix)] if prefix else []
        lengths = [[*head, *(end - start for start, end in pairwise((0, *document.ends)))] for document in documents]
        self._lengths = torch.tensor([size for row in lengths for size in row], device=frame.device)
        self._is_sentence = torch.tensor([number >= len(head) for row in lengths for number in range(len(row))])

    def through(self, block: Block) -> Tensor:
        """Run one block more and return the sentences' means [sentences, hidden], float32."""
        self._h = block(self._h, self._step, self._store)
        means = mean_states(self._h, self._lengths)
        return means[self._is_sentence.to(means.device)]


def _chunks(documents: Sequence[Document], extra: int) -> Iterator[list[Document]]:
    """Documents in order, cut into groups of about `ROWS` tokens."""
    return _grouped(documents, lambda document: len(document.ids) + extra, ROWS)


def _grouped(items: Iterable[T], size: Callable[[T], int], room: int) -> Iterator[list[T]]:
    """Items in order, as many together as there is room for; always one."""
    group: list[T] = []
    used = 0
    for item in items:
        own = size(item)
        if group and used + own > room:
            yield group
            group, used = [], 0
        group.append(item)
        used += own
    if group:
        yield group


def piece_name(number: int) -> str:
    """Name of a piece in the work folder."""
    return f"features-{number:05d}.safetensors"


def write_features(
    work: Workspace, encoder: Encoder, documents: Sequence[Document], reporter: Reporter, *, together: int = 0
) -> "Features":
    """Compute the pooled states of all documents, in their order; pieces that are there already are skipped.

    `together`: bytes of states of pieces that climb side by side; 0: one piece at a time. The bytes written are the
    same. Raises ResourceError on a full disk. Memory does not grow with the number of documents.
    """
    count = ceil(len(documents) / PIECE_DOCUMENTS)
    missing = [number for number in range(count) if not work.has(piece_name(number))]
    read = (documents[number * PIECE_DOCUMENTS : (number + 1) * PIECE_DOCUMENTS] for number in missing)
    pieces = _grouped(zip(missing, read, strict=True), lambda piece: encoder.nbytes(piece[1]), together)
    with reporter.task("Read the documents", count) as bar:
        task = Paced(bar, count, reporter, step=f"{PIECE_DOCUMENTS} documents")
        task.advance(count - len(missing))
        for group in pieces:
            for (number, some), states in zip(group, encoder.pooled([some for _, some in group]), strict=True):
                counts = torch.tensor([len(document.ends) for document in some], dtype=torch.int32)
                write_piece(work, piece_name(number), {_STATES: states, _COUNTS: counts})
            task.advance(len(group))
    return Features([work.piece(piece_name(number)) for number in range(count)])


class Features:
    """Pooled states on disk, by document; mapped into memory, so that only what is used takes any."""

    def __init__(self, pieces: Sequence[Path]) -> None:
        self._states: list[Tensor] = []
        counts: list[Tensor] = []
        for path in pieces:
            with safe_open(path, framework="pt") as file:
                self._states.append(file.get_tensor(_STATES))
                counts.append(file.get_tensor(_COUNTS).long())
        self.counts = torch.cat(counts)
        """Sentences of every document, [documents] int64."""
        self._begins = torch.cat([part.cumsum(0) - part for part in counts]).tolist()

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and hidden size."""
        _, layers, hidden = self._states[0].shape
        return layers, hidden

    def gather(self, documents: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copy the states bf16 [sentences, layers, hidden] of documents, one after the other, and their counts."""
        counts = self.counts[list(documents)]
        parts = [
            self._states[number // PIECE_DOCUMENTS].narrow(0, self._begins[number], count)
            for number, count in zip(documents, counts.tolist(), strict=True)
        ]
        return torch.cat(parts), counts

    def pieces(self, documents: range) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what `gather` gives for the documents, some at a time, in order."""
        for start in range(documents.start, documents.stop, PIECE_DOCUMENTS):
            yield self.gather(range(start, min(start + PIECE_DOCUMENTS, documents.stop)))
