"""Who is in a batch and when: order, rows that come and go, rows that fail, pauses, memory; the model is a toy."""

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models

from adapt_llm.errors import AdaptError, ResourceError, UsageError
from adapt_llm.runtime import batch
from adapt_llm.runtime.batch import AHEAD, CPU_ROWS, Answer, BatchModel, answer_all, suitable_batch
from adapt_llm.runtime.continuation import Request
from adapt_llm.runtime.generate import StepOutput
from adapt_llm.runtime.sampling import Sampler, Sampling
from adapt_llm.runtime.stops import Stops
from adapt_llm.runtime.text import Tokenizer

SIZE = 260


class ToyCache:
    """Rows of ids; a part of it shares them."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.batch, self.capacity = batch, capacity
        self.ids: list[list[int]] = [[] for _ in range(batch)]
        self.device, self.nbytes = torch.device("cpu"), batch * capacity << 20

    def rows(self, first: int, count: int = 1) -> "ToyCache":
        part = ToyCache(0, self.capacity)
        part.batch, part.ids = count, self.ids[first : first + count]
        return part

    def truncate(self, length: int) -> None:
        for row in self.ids:
            del row[length:]

    def move(self, source: int, target: int) -> None:
        self.ids[target][:], self.ids[source][:] = self.ids[source], []

    def grow(self, capacity: int) -> None:
        self.capacity = capacity


class Toy:
    """Counts on from the last token of a row: each one is one more. 250 is broken."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.caches: list[ToyCache] = []

    def new_cache(self, batch: int, capacity: int) -> ToyCache:
        self.caches.append(ToyCache(batch, capacity))
        return self.caches[-1]

    def prefill(self, ids: torch.Tensor, cache: ToyCache, sampler: Sampler | None = None) -> StepOutput:
        assert cache.ids == [[]], "a prompt enters an empty row"
        return self._pass(ids, cache)[0]

    def decode(self, ids: torch.Tensor, cache: ToyCache, sampler: Sampler | None = None) -> StepOutput:
        return self._pass(ids, cache)[0]

    def decode_batch(self, ids: torch.Tensor, cache: ToyCache, samplers: Sequence[Sampler]) -> list[StepOutput]:
        assert len(ids) == len(samplers) == cache.batch
        assert all(cache.ids), "nothing is computed for an empty row"
        self.batches.append(len(ids))
        return self._pass(ids, cache)

    def _pass(self, ids: torch.Tensor, cache: ToyCache) -> list[StepOutput]:
        found = []
        for row, new in zip(cache.ids, ids.tolist(), strict=True):
            row.extend(new)
            assert row == list(range(row[0], row[0] + len(row))), "rows were mixed up"
            assert len(row) <= cache.capacity
            logits = torch.zeros(1, SIZE)
            logits[0, row[-1] + 1] = math.nan if row[-1] + 1 == 250 else 9.0
            found.append(StepOutput(logits, len(row)))
        return found


TOKENIZER = Tokenizer(Backend(models.WordLevel({chr(0x4E00 + i): i for i in range(SIZE)}, "一")), {})


def counting(start: int, tokens: int, *, context: int = 200, stop: int = -1) -> Request:
    return Request([start], Sampling(), Stops(frozenset({stop})), context, tokens, continues=True)


def run(requests: Iterator[Request | None] | Sequence[Request | None], size: int, toy: Toy | None = None) -> list:
    return list(answer_all(toy or Toy(), requests, tokenizer=TOKENIZER, batch_size=size))


def text(start: int, tokens: int) -> str:
    return "".join(f" {chr(0x4E00 + start + 1 + i)}" for i in range(tokens))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_answers_come_in_order_whatever_their_length(size: int) -> None:
    lengths, toy = [9, 1, 4, 30, 2, 2, 70, 5], Toy()
    found = run([counting(10 * row, n) for row, n in enumerate(lengths)], size, toy)
    assert [answer.text for answer in found] == [text(10 * row, n) for row, n in enumerate(lengths)]
    assert [answer.stats.tokens for answer in found] == lengths
    assert all(answer.stats.finish_reason == "length" for answer in found)
    assert max(toy.batches) <= size
    assert len(toy.caches) == 2  # the first only tells what a token takes


def test_a_free_row_is_filled_at_once() -> None:
    toy = Toy()
    run([counting(1, 5) for _ in range(9)], 3, toy)
    assert toy.batches == [3] * 12, "4 passes for each of 3 rounds: the first token is the prompt's"


def test_stops_end_a_row_and_leave_the_others() -> None:
    found = run([counting(1, 50, stop=9), counting(2, 50, stop=40), counting(3, 4)], 3)
    assert [(a.text, a.stats.finish_reason) for a in found] == [
        (text(1, 7), "stop"),
        (text(2, 37), "stop"),
        (text(3, 4), "length"),
    ]


def test_a_row_that_fails_is_its_own_error() -> None:
    """One prompt that does not fit, one whose logits break on the way."""
    found = run([counting(1, 6), counting(2, 6, context=1), counting(244, 20), counting(3, 6)], 4)
    assert [type(outcome) for outcome in found] == [Answer, AdaptError, AdaptError, Answer]
    assert "The prompt has 1 tokens" in str(found[1])
    assert "nan as a logit" in str(found[2])
    assert found[3].text == text(3, 6)


def test_what_is_read_ahead_is_bounded() -> None:
    read: list[int] = []

    def requests() -> Iterator[Request]:
        for row in range(200):
            read.append(row)
            yield counting(1, 100 if row == 0 else 1)

    answers = answer_all(Toy(), requests(), tokenizer=TOKENIZER, batch_size=2)
    next(answers)
    assert len(read) == 2 * AHEAD
    assert sum(1 for _ in answers) == 199


def test_answers_do_not_wait_for_rows_that_are_not_there_yet() -> None:
    asked: list[str] = []

    def requests() -> Iterator[Request | None]:
        yield counting(1, 3)
        while "done" not in asked:
            asked.append("pause")
            yield None
        yield counting(5, 2)

    answers = answer_all(Toy(), requests(), tokenizer=TOKENIZER, batch_size=4)
    assert next(answers).text == text(1, 3)
    asked.append("done")
    assert [answer.text for answer in answers] == [text(5, 2)]


def test_memory_grows_with_the_longest_row_only_as_needed() -> None:
    toy = Toy()
    run([counting(1, 150), counting(2, 3)], 2, toy)
    _, cache = toy.caches
    assert cache.capacity == 256


@pytest.mark.parametrize(("free", "fits"), [(256, True), (255, False), (10, False)])
def test_memory_is_looked_at_before_it_is_taken(monkeypatch: pytest.MonkeyPatch, free: int, fits: bool) -> None:
    """The toy's tokens take a MiB each: two rows of 64 at first, of 128 later, which takes as much again."""
    toy = Toy()
    monkeypatch.setattr(
        batch, "free_memory", lambda _device: (free - sum(c.nbytes >> 20 for c in toy.caches[1:])) << 20
    )
    if fits:
        run([counting(1, 100), counting(2, 3)], 2, toy)
    else:
        with pytest.raises(
            ResourceError, match=r"Keys and values of 2 texts of (64|128) tokens take 0\.\d GiB; .* free"
        ):
            run([counting(1, 100), counting(2, 3)], 2, toy)


def test_no_memory_is_everybodys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: ToyCache, capacity: int) -> None:
        raise RuntimeError(f"not enough memory for {capacity}")

    monkeypatch.setattr(ToyCache, "grow", refuse)
    with pytest.raises(ResourceError, match="2 rows of 128 tokens"):
        run([counting(1, 150), counting(2, 3)], 2)


def test_a_batch_of_none() -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        run([], 0)
    assert run([], 2) == []


def test_a_batch_suits_the_memory() -> None:
    """A token of the toy takes 1 MiB."""
    assert isinstance(Toy(), BatchModel)
    assert suitable_batch(Toy(), 1) == CPU_ROWS
    assert suitable_batch(Toy(), 10**9) == 1
