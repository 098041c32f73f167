"""Pooled states against a plain forward of every family, and the classifiers trained on them."""

import copy
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from adapt_llm.convert.adapters import Fitting, Scale, fit, probabilities, running_means
from adapt_llm.convert.features import PIECE_DOCUMENTS, Encoder, Features, piece_name, write_features
from adapt_llm.convert.workspace import Workspace
from adapt_llm.runtime.adapters import Adapters
from adapt_llm.runtime.block import Block
from adapt_llm.runtime.decoder import Decoder
from adapt_llm.runtime.documents import Document
from adapt_llm.runtime.exit_layers import LazyBlocks
from adapt_llm.runtime.pass_store import PassStore
from adapt_llm.runtime.progress import SilentReporter


def random_document(seed: int, sentences: int) -> Document:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (sentences,), generator=generator)
    ids = torch.randint(3, 60, (int(sizes.sum()),), generator=generator)
    return Document(tuple(ids.tolist()), tuple(sizes.cumsum(0).tolist()))


def reference(decoder: Decoder, prefix: tuple[int, ...], document: Document) -> torch.Tensor:
    """[sentences, layers, hidden] by one document alone, layer by layer."""
    ids = torch.tensor([[*prefix, *document.ids]])
    step, store, h = decoder.step(None, ids), PassStore(decoder.arch), decoder.embed(ids)
    layers: list[torch.Tensor] = []
    for block in decoder.blocks:
        h = block(h, step, store)
        rows = h[0, len(prefix) :]
        layers.append(torch.stack([rows[start:end].mean(0) for start, end in pairwise((0, *document.ends))]))
    return torch.stack(layers, 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("prefix", [(), (5, 7, 9)])
def test_packed_means_are_those_of_every_document_alone(name: str, prefix: tuple[int, ...], tiny_model) -> None:
    decoder = tiny_model(name).decoder
    documents = [random_document(seed, sentences) for seed, sentences in enumerate((1, 4, 2, 7))]
    (found,) = Encoder(decoder, prefix).pooled([documents])
    with torch.inference_mode():
        expected = torch.cat([reference(decoder, prefix, document) for document in documents])
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-4)


def test_shared_keys_and_values(tiny_model) -> None:
    """A follower reads its keeper's, which are kept for as long as somebody reads them."""
    decoder = tiny_model("llama").decoder
    count = decoder.arch.num_layers
    arch = decoder.arch.share((0,) * count)
    blocks = decoder.blocks
    shared = Decoder(arch, embedding=decoder.embedding, blocks=blocks, final_norm=decoder.final_norm, head=decoder.head)
    document = random_document(0, 5)
    with torch.inference_mode():
        expected = reference(shared, (), document)
    (found,) = Encoder(shared).pooled([[document]])
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-4)


class Counting(Encoder):
    def pooled(self, pieces):
        calls.extend(map(len, pieces))
        return super().pooled(pieces)


calls: list[int] = []


class Read(list[Document]):
    """Documents that must not be asked for: reading a text takes time too."""

    def __getitem__(self, index):
        if isinstance(index, slice):
            slices.append(index.start)
        return super().__getitem__(index)


slices: list[int] = []


def test_finished_pieces_are_not_made_again(tiny_model, tmp_path: Path) -> None:
    decoder = tiny_model("llama").decoder
    documents = Read(random_document(seed, 1 + seed % 4) for seed in range(PIECE_DOCUMENTS + 5))
    for expected in ([PIECE_DOCUMENTS, 5], [5]):
        calls.clear()
        slices.clear()
        with Workspace(tmp_path / "out", {}) as work:
            features = write_features(work, Counting(decoder), documents, SilentReporter())
            assert calls == expected
            assert slices == [0, PIECE_DOCUMENTS][-len(expected) :]
            work.piece(piece_name(1)).unlink()
    assert features.counts.tolist() == [len(document.ends) for document in documents]
    some = [PIECE_DOCUMENTS + 2, 0, 7]
    states, counts = features.gather(some)
    with torch.inference_mode():
        expected = torch.cat([reference(decoder, (), documents[number]) for number in some])
    assert counts.tolist() == [len(documents[number].ends) for number in some]
    torch.testing.assert_close(states.float(), expected, rtol=2**-8, atol=1e-4)


class ReadBlocks:
    """Reads blocks and counts; at most one of them is alive when another is read."""

    def __init__(self, decoder: Decoder) -> None:
        self.reads: list[int] = []
        self.alive: weakref.WeakSet[Block] = weakref.WeakSet()
        self.most = 0
        self._decoder = decoder

    def __call__(self, index: int) -> Block:
        self.most = max(self.most, len(self.alive) + 1)
        self.reads.append(index)
        block = copy.copy(self._decoder.blocks[index])
        self.alive.add(block)
        return block

    def frame(self, *, keep: bool) -> Decoder:
        whole = self._decoder
        blocks = LazyBlocks(len(whole.blocks), self, keep=keep)
        return Decoder(
            whole.arch, embedding=whole.embedding, blocks=blocks, final_norm=whole.final_norm, head=whole.head
        )


def test_blocks_that_are_not_kept_are_read_once_for_many_documents(tiny_model, tmp_path: Path) -> None:
    """One block is in memory; the files are the same, also from where a kill left them."""
    decoder = tiny_model("llama").decoder
    documents = [random_document(seed, 1 + seed % 4) for seed in range(3 * PIECE_DOCUMENTS)]
    layers = list(range(len(decoder.blocks)))
    found: list[list[bytes]] = []
    for keep, together, passes in ((True, 0, 1), (False, 0, 3), (False, 1 << 30, 1)):
        read = ReadBlocks(decoder)
        with Workspace(tmp_path / f"{keep}-{together}", {}) as work:
            encoder = Encoder(read.frame(keep=keep), (3, 4))
            write_features(work, encoder, documents, SilentReporter(), together=together)
            assert read.reads == layers * passes
            assert read.most == (len(layers) if keep else 1)
            pieces = [work.piece(piece_name(number)) for number in range(3)]
            found.append([piece.read_bytes() for piece in pieces])
            pieces[1].unlink()
            write_features(work, encoder, documents, SilentReporter(), together=together)
            found.append([piece.read_bytes() for piece in pieces])
    assert all(files == found[0] for files in found)


def test_as_many_documents_climb_together_as_there_is_room_for(tiny_model, tmp_path: Path) -> None:
    decoder = tiny_model("llama").decoder
    documents = [random_document(3, 4)] * (5 * PIECE_DOCUMENTS)
    piece = Encoder(decoder).nbytes(documents[:PIECE_DOCUMENTS])
    arch, one = decoder.arch, documents[0]
    numbers = 4 * len(one.ids) + 2 * len(one.ends) * arch.num_layers
    assert piece == PIECE_DOCUMENTS * arch.hidden_size * numbers
    read = ReadBlocks(decoder)
    with Workspace(tmp_path / "out", {}) as work:
        encoder = Encoder(read.frame(keep=False))
        write_features(work, encoder, documents, SilentReporter(), together=2 * piece + 1)
    assert len(read.reads) == 3 * arch.num_layers  # 2 + 2 + 1 pieces


class Made(Features):
    """Features of documents whose second channel says the label, from layer 1 on; channels are far from 0."""

    def __init__(self, labels: list[int], layers: int = 3, hidden: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.counts = torch.tensor([1 + number % 3 for number in range(len(labels))])
        self.states = torch.randn(int(self.counts.sum()), layers, hidden, generator=generator)
        self.states[:, 1:, 1] += 3.0 * (torch.tensor(labels).repeat_interleave(self.counts)[:, None] * 2 - 1)
        self.states = (self.states * torch.logspace(-1, 1, hidden) + 100).bfloat16()
        self.ends = self.counts.cumsum(0).tolist()

    @property
    def shape(self) -> tuple[int, int]:
        _, layers, hidden = self.states.shape
        return layers, hidden

    def gather(self, documents):
        counts = self.counts[list(documents)]
        return torch.cat([self.states[self.ends[n] - self.counts[n] : self.ends[n]] for n in documents]), counts


LABELS = [number % 2 for number in range(240)]
FITTING = Fitting(classes=2, hidden=8, epochs=40, learning_rate=5e-3)


def test_the_classifiers_find_what_is_there_to_be_found() -> None:
    features = Made(LABELS)
    fitted = fit(features, LABELS, 160, FITTING, SilentReporter())
    answers = list(probabilities(fitted.adapters, features, range(160, 240)))
    right = [mean.argmax(-1) == label for (_, mean), label in zip(answers, LABELS[160:], strict=True)]
    accuracy = np.mean(right, axis=0).tolist()
    assert accuracy[0] < 0.7
    assert min(accuracy[1:]) > 0.95
    assert fitted.losses[0] > fitted.losses[1]


def test_the_same_seed_gives_the_same_weights() -> None:
    features = Made(LABELS)
    first, second, other = (
        fit(features, LABELS, 200, Fitting(classes=2, hidden=4, epochs=2, seed=seed), SilentReporter())
        for seed in (0, 0, 1)
    )
    assert all(
        torch.equal(tensor, second.adapters.tensors()[name]) for name, tensor in first.adapters.tensors().items()
    )
    assert not torch.equal(first.adapters.up_weight, other.adapters.up_weight)


def test_a_scale_is_folded_into_the_first_layer() -> None:
    features = Made(LABELS)
    scale = Scale.of(features, range(240))
    states, _ = features.gather(range(20))
    torch.testing.assert_close(scale(features.states).mean(1), torch.zeros(3, 8), atol=1e-3, rtol=0)
    torch.testing.assert_close(scale(features.states).std(1), torch.ones(3, 8), atol=1e-2, rtol=0)
    up, bias = torch.randn(3, 5, 8), torch.randn(3, 5)
    expected = torch.baddbmm(bias[:, None], scale(states), up.mT)
    folded = Adapters(*scale.fold(up, bias), torch.eye(5).expand(3, 5, 5), torch.zeros(3, 5))
    for layer in range(3):
        found = folded.logits(layer, states[:, layer])
        torch.testing.assert_close(found, expected[layer].relu(), atol=2e-3, rtol=1e-3)


def test_training_ends_when_nothing_gets_better() -> None:
    features = Made([0, 1] * 60)
    noise = [int(x) for x in torch.randint(0, 2, (120,), generator=torch.Generator().manual_seed(5))]
    fitted = fit(features, noise, 60, Fitting(classes=2, hidden=8, epochs=200, learning_rate=1e-2), SilentReporter())
    assert fitted.epochs < 100


def test_means_over_the_first_sentences() -> None:
    x = torch.tensor([[[2.0], [4.0], [6.0], [10.0], [20.0]]])
    assert running_means(x, torch.tensor([3, 2]))[0, :, 0].tolist() == [2, 3, 4, 10, 15]
