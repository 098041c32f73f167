"""Teacher-forced scores: what decoding token by token would have said, however passages are batched."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import UnsupportedError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.models import load_model
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.river import River
from adapt_llm.runtime.scoring import Passage, Score, Scorer, full_depth, reader_of

VOCAB, LAYERS = 128, 4


@pytest.fixture(scope="module")
def river(built: Path) -> River:
    model = load_model(Bundle.open(built), SessionOptions(dtype="fp32", device="cpu", tau=0.55))
    assert isinstance(model, River)
    return model


def by_decoding(model: River | Dense, passage: Passage) -> tuple[Score, list[int]]:
    """The definition: token after token through the cache, and at which depth the predicting ones left."""
    cache = model.new_cache(1, len(passage.ids))
    total, greedy, depths = 0.0, True, []
    with torch.inference_mode():
        for at, token in enumerate(passage.ids[:-1]):
            output = model.decode(torch.tensor([[token]]), cache)
            if at + 1 >= passage.first:
                logs, wanted = output.logits[0].log_softmax(-1), passage.ids[at + 1]
                total += float(logs[wanted])
                greedy &= int(logs.argmax()) == wanted
                depths.append(output.depth or LAYERS)
    return Score(total, greedy), depths


def passages(count: int, seed: int = 3) -> list[Passage]:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    made = []
    for _ in range(count):
        length = number(2, 14)
        made.append(Passage(tuple(number(0, VOCAB) for _ in range(length)), number(1, length)))
    return made


def test_a_score_is_that_of_decoding(river: River) -> None:
    asked = passages(12)
    scorer = Scorer(reader_of(river), batch_size=5)
    found, expected = scorer.score(asked), [by_decoding(river, passage) for passage in asked]
    for score, (wanted, _) in zip(found, expected, strict=True):
        assert score.log_prob == pytest.approx(wanted.log_prob, abs=1e-3)
        assert score.greedy == wanted.greedy
    depths = [depth for _, some in expected for depth in some]
    assert scorer.depths.tolist() == [depths.count(depth) for depth in range(1, LAYERS + 1)]
    assert len(set(depths)) > 1, "some tokens leave early, some late"


def test_what_the_model_would_say_is_greedy(river: River) -> None:
    for model in (river, full_depth(river)):
        prompt, cache = [5, 9, 2], model.new_cache(1, 8)
        ids = list(prompt)
        with torch.inference_mode():
            outputs = [model.decode(torch.tensor([[token]]), cache) for token in prompt]
            for _ in range(3):
                ids.append(int(outputs[-1].logits.argmax()))
                outputs.append(model.decode(torch.tensor([[ids[-1]]]), cache))
        other = [*ids[:-1], (ids[-1] + 1) % VOCAB]
        scores = Scorer(reader_of(model)).score([Passage(tuple(ids), 3), Passage(tuple(other), 3)])
        assert [score.greedy for score in scores] == [True, False]


def test_full_depth_is_the_backbone(river: River) -> None:
    dense = full_depth(river)
    scorer = Scorer(reader_of(dense))
    asked = passages(4)
    for score, passage in zip(scorer.score(asked), asked, strict=True):
        assert score.log_prob == pytest.approx(by_decoding(Dense(river.decoder), passage)[0].log_prob, abs=1e-3)
    assert scorer.depths.tolist()[:-1] == [0, 0, 0]
    assert full_depth(dense) is dense


@given(st.integers(1, 4), st.permutations(range(9)))
@settings(max_examples=8, deadline=None)
def test_neither_batch_nor_order_changes_a_score(river: River, batch_size: int, order: list[int]) -> None:
    asked = passages(8, seed=5)
    asked.append(Passage((*asked[0].ids[:-1], 7), asked[0].first))  # the same inputs, another last token
    found = Scorer(reader_of(river), batch_size=batch_size).score([asked[place] for place in order])
    alone = [Scorer(reader_of(river)).score([asked[place]])[0] for place in order]
    for score, single in zip(found, alone, strict=True):
        assert score.log_prob == pytest.approx(single.log_prob, abs=1e-3)
        assert score.greedy == single.greedy


def test_equal_inputs_run_once(river: River) -> None:
    reader, runs = reader_of(river), []
    counting = type(reader)(
        reader.layers, reader.vocab, lambda ids, counts: runs.append(ids) or reader.read(ids, counts)
    )
    done: list[int] = []
    Scorer(counting, batch_size=4).score([Passage((1, 2, last), 2) for last in range(20)], done.append)
    assert [len(ids) for ids in runs] == [1]
    assert done == [20]
    assert Scorer(counting).score([]) == []


def test_what_cannot_be_scored(river: River, built: Path) -> None:
    for first in (0, 3):
        with pytest.raises(UsageError):
            Passage((1, 2, 3), first)
    with pytest.raises(UnsupportedError, match="object"):
        reader_of(object())
    dropped = load_model(Bundle.open(built), SessionOptions(dtype="fp32", device="cpu", resident=2))
    with pytest.raises(UsageError, match="2 are resident"):
        full_depth(dropped)
