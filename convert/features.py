"""What the classifiers of 2D-EE are trained on: the mean state of every sentence behind every block.

Each document runs once, whole, without a cache. Results go into the work folder as pieces of some documents each, which
are mapped into memory when read. Knows documents and blocks; knows no labels and no classifier.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import overload

import torch
from safetensors import safe_open
from torch import Tensor

from ..runtime.block import Block
from ..runtime.cache import PassStore
from ..runtime.decoder import Decoder
from ..runtime.documents import Document, DocumentReader
from ..runtime.packed import PackedStep, PackedStore
from ..runtime.progress import Reporter
from .labelled import Text
from .pace import Paced
from .workspace import Workspace
from .writer import write_piece

PIECE_DOCUMENTS = 32
"""Documents in a piece: what a kill costs at most."""
_ROWS = 2048
"""Tokens that go through a block at once."""
_STATES, _COUNTS = "states", "counts"


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
    def pooled(self, documents: Sequence[Document]) -> Tensor:
        """Mean states of all sentences of the documents, in order: bf16 [sentences, layers, hidden], on the host.

        bf16 because some families have single channels far beyond fp16 (massive activations). Layer after layer, so
        that blocks which are not kept are read once.
        """
        packs = [_Pack(self.frame, self.prefix, chunk) for chunk in _chunks(documents, len(self.prefix))]
        sentences = sum(len(document.ends) for document in documents)
        states = torch.empty(sentences, len(self.frame.blocks), self.frame.arch.hidden_size, dtype=torch.bfloat16)
        for layer in range(len(self.frame.blocks)):
            block = self.frame.blocks[layer]
            first = 0
            for pack in packs:
                means = pack.through(block)
                states[first : first + len(means), layer] = means.to("cpu", torch.bfloat16)
                first += len(means)
        return states


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
        means = torch.segment_reduce(self._h[0].float(), "mean", lengths=self._lengths, axis=0, unsafe=True)
        return means[self._is_sentence.to(means.device)]


def _chunks(documents: Sequence[Document], extra: int) -> Iterator[list[Document]]:
    """Documents in order, cut into groups of about `_ROWS` tokens."""
    group: list[Document] = []
    rows = 0
    for document in documents:
        size = len(document.ids) + extra
        if group and rows + size > _ROWS:
            yield group
            group, rows = [], 0
        group.append(document)
        rows += size
    if group:
        yield group


def piece_name(number: int) -> str:
    """Name of a piece in the work folder."""
    return f"features-{number:05d}.safetensors"


def write_features(work: Workspace, encoder: Encoder, documents: Sequence[Document], reporter: Reporter) -> "Features":
    """Compute the pooled states of all documents, in their order; pieces that are there already are skipped.

    Raises ResourceError on a full disk. Memory does not grow with the number of documents.
    """
    starts = range(0, len(documents), PIECE_DOCUMENTS)
    with reporter.task("Read the documents", len(starts)) as bar:
        task = Paced(bar, len(starts), reporter, step=f"{PIECE_DOCUMENTS} documents")
        for number, start in enumerate(starts):
            if not work.has(piece_name(number)):
                some = documents[start : start + PIECE_DOCUMENTS]
                counts = torch.tensor([len(document.ends) for document in some], dtype=torch.int32)
                write_piece(work, piece_name(number), {_STATES: encoder.pooled(some), _COUNTS: counts})
            task.advance(1)
    return Features([work.piece(piece_name(number)) for number in range(len(starts))])


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
