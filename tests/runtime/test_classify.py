"""The batch around Algorithm 1: order, who is under way, what is kept, and what a verdict says."""

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from math import inf
from typing import Any

import pytest
import torch

from adapt_llm.errors import UsageError
from adapt_llm.runtime import classify
from adapt_llm.runtime.adapters import Adapters
from adapt_llm.runtime.classify import AHEAD, Classifier
from adapt_llm.runtime.decoder import Decoder, load_decoder
from adapt_llm.runtime.documents import Document
from adapt_llm.runtime.schedule import Full, OneD, Rule, TwoD
from adapt_llm.runtime.sweep import Flight

MODE = TwoD(Rule(0.1, 0.8))


@pytest.fixture(scope="module")
def ours(tiny_model: Callable[[str], Any]) -> Classifier:
    return classifier(tiny_model("llama").decoder)


def classifier(decoder: Decoder) -> Classifier:
    layers, hidden = decoder.arch.num_layers, decoder.arch.hidden_size
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    adapters = Adapters(random(layers, 8, hidden), random(layers, 8), random(layers, 3, 8), random(layers, 3))
    return Classifier(decoder, adapters, prefix=(1, 7))


def document(seed: int, sentences: int = 3) -> Document:
    ids = tuple(3 + (seed * 7 + place * 5) % 90 for place in range(4 * sentences))
    return Document(ids, tuple(range(4, 4 * sentences + 1, 4)), truncated=seed % 2 == 1)


def test_verdicts_come_in_the_order_of_the_documents(ours: Classifier) -> None:
    documents = [document(seed, 1 + seed * 3 % 8) for seed in range(17)]
    together = list(ours.classify(documents, MODE, batch_size=5))
    assert len({verdict.sentences for verdict in together}) > 1  # some leave early, some late
    for text, verdict in zip(documents, together, strict=True):
        (alone,) = ours.classify([text], MODE)
        assert (verdict.label, verdict.work, verdict.truncated) == (alone.label, alone.work, text.truncated)
        assert verdict.scores == pytest.approx(alone.scores, abs=1e-5)


def test_nothing_in_nothing_out(ours: Classifier) -> None:
    assert list(ours.classify([], MODE)) == []


def test_documents_under_way_and_ahead_are_bounded(ours: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long document at the front neither stops the others nor lets them pile up."""
    under_way: list[int] = []
    original = classify.Sweep.run

    def run(self: Any, flights: list[Flight]) -> None:
        under_way.append(len(flights))
        original(self, flights)

    monkeypatch.setattr(classify.Sweep, "run", run)
    read = 0

    def documents() -> Iterator[Document]:
        nonlocal read
        for seed in range(500):
            read += 1
            yield document(seed, 120 if seed == 0 else 1)

    verdicts = ours.classify(documents(), TwoD(Rule(0.0, inf)), batch_size=2)
    next(verdicts)
    assert read == 2 * AHEAD
    assert max(under_way) == 2
    assert len(list(verdicts)) == 499


def test_a_pause_lets_those_under_way_go_on(ours: Classifier) -> None:
    """None stands for a document that is not there yet; nobody waits for a full batch."""
    asked = 0

    def documents() -> Iterator[Document | None]:
        nonlocal asked
        for seed in range(3):
            yield document(seed)
            for _ in range(40):
                asked += 1
                yield None

    verdicts = ours.classify(documents(), MODE, batch_size=8)
    next(verdicts)
    assert asked < 40  # answered before the second document was there
    assert len(list(verdicts)) == 2


def test_products_are_bounded(ours: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify, "ROWS", 20)
    rows: list[int] = []
    block = type(ours.decoder.blocks[0])
    original = block.__call__

    def call(self: Any, h: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(h.shape[1])
        return original(self, h, *rest)

    monkeypatch.setattr(block, "__call__", call)
    sizes = [1, 2, 9, 3, 1, 1, 4]
    found = list(ours.classify([document(seed, n) for seed, n in enumerate(sizes)], Full(), batch_size=7))
    assert [verdict.sentences for verdict in found] == sizes
    assert max(rows) == 36  # a document of its own when it is larger
    assert all(count <= 20 or count == 36 for count in rows)


def test_what_a_verdict_says(ours: Classifier) -> None:
    text = document(1, 4)
    (dense,) = ours.classify([text], Full())
    (fixed,) = ours.classify([text], OneD(2))
    (eager,) = ours.classify([text], TwoD(Rule(0.0, 0.0)))
    assert (dense.work, dense.computed, dense.layers, dense.sentences, dense.stopped) == (1, 1, 3, 4, False)
    assert (fixed.work, fixed.computed, fixed.layers, fixed.sentences) == (2 / 3, 2 / 3, 2, 4)
    assert (eager.work, eager.computed, eager.layers, eager.sentences, eager.stopped) == (1 / 12, 1 / 12, 1, 1, True)
    for verdict in (dense, fixed, eager):
        assert sum(verdict.scores) == pytest.approx(1)
        assert verdict.confidence == verdict.scores[verdict.label]
        assert verdict.truncated


def test_memory_does_not_grow(ours: Classifier) -> None:
    kept: list[weakref.ref[Document]] = []

    def documents(count: int) -> Iterator[Document]:
        for seed in range(count):
            text = document(seed, 1 + seed % 3)
            kept.append(weakref.ref(text))
            yield text

    def traced(count: int) -> int:
        for _ in ours.classify(documents(count), MODE, batch_size=8):
            pass
        kept.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    verdicts = ours.classify(documents(200), MODE, batch_size=4)
    list(islice(verdicts, 150))
    assert sum(ref() is not None for ref in kept) <= 4 * AHEAD  # and not by a cycle of references either
    verdicts.close()
    tracemalloc.start()
    try:
        sizes = [traced(100) for _ in range(5)]
        assert min(after - before for before, after in pairwise(sizes)) < 10_000  # bytes; 100 documents are 40,000
    finally:
        tracemalloc.stop()


def test_shared_keys_and_values(tiny_model: Callable[[str], Any]) -> None:
    """A layer that reads another's keys and values (R-CLA), in stretches and as a whole."""
    model = tiny_model("qwen2")
    shared = classifier(load_decoder(model.arch.share((0, 0, 2)), model.store, device="cpu", dtype=torch.float32))
    documents = [document(seed, 1 + seed) for seed in range(6)]
    whole = list(shared.classify(documents, Full(), batch_size=1))
    parts = list(shared.classify(documents, TwoD(Rule(0.0, inf)), batch_size=3))
    plain = list(classifier(model.decoder).classify(documents, Full()))
    for one, other, unshared in zip(whole, parts, plain, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=1e-4)
        assert one.scores != pytest.approx(unshared.scores, abs=1e-4)


def test_refused(ours: Classifier) -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        ours.classify([], MODE, batch_size=0)
    with pytest.raises(UsageError, match="layers 1 to 3"):
        ours.classify([], OneD(4))
    a = ours.adapters
    with pytest.raises(UsageError, match="2 adapters do not fit a model of 3 layers"):
        Classifier(ours.decoder, Adapters(a.up_weight[:2], a.up_bias[:2], a.down_weight[:2], a.down_bias[:2]))
