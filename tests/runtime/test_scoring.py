"""Teacher-forced scores: what decoding token by token would have said, however passages are batched."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapt_llm.errors import AdaptError, UnsupportedError, UsageError
from adapt_llm.runtime.bundle import Bundle
from adapt_llm.runtime.dense import Dense
from adapt_llm.runtime.models import load_model
from adapt_llm.runtime.options import SessionOptions
from adapt_llm.runtime.river import River
from adapt_llm.runtime.scoring import Passage, Score, Scorer, full_depth, reader_of
from adapt_llm.runtime.text_meters import MixtureMeter, Reading, RowScores
from adapt_llm.runtime.text_quality import Sums

VOCAB, LAYERS = 128, 4
ORACLE = Path(__file__).parents[1] / "oracle" / "nvium_models.py"


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


@pytest.fixture(scope="module")
def nvium_models() -> ModuleType:
    """tests/oracle/nvium_models.py: the mixture written out plainly (test folders are no packages)."""
    spec = importlib.util.spec_from_file_location("nvium_models", ORACLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("nll", [float("nan"), float("inf"), 1e4])
def test_broken_logits_are_no_figure(nll: float) -> None:
    class Broken:
        layers, vocab, compares, exits = LAYERS, VOCAB, False, ()

        def read(self, ids: torch.Tensor) -> Reading:
            depths = torch.tensor([0, 0, 0, ids.numel()])
            return Reading(depths, 1, lambda _, wanted: RowScores(torch.full(wanted.shape, nll).double(), None))

    sums = Sums(Broken(), positions=4)
    sums.add(torch.tensor([[1, 2, 3, 4]]))
    with pytest.raises(AdaptError, match="no perplexity"):
        sums.result()


POINTS = (1, 3)


@pytest.mark.parametrize("final_adapter", [False, True])
def test_a_mixture_is_scored_as_a_whole(river: River, nvium_models: ModuleType, final_adapter: bool) -> None:
    decoder, asked = river.decoder, passages(6, seed=8)
    tensors = nvium_models.junction_tensors(decoder, POINTS, final_adapter=final_adapter)
    model = nvium_models.model(decoder, POINTS, tensors)
    scorer, dense = Scorer(reader_of(model), batch_size=4), Scorer(reader_of(full_depth(model)))
    whole, last = scorer.score(asked), dense.score(asked)
    blocks = 0.0
    with torch.inference_mode():
        for passage, score, end in zip(asked, whole, last, strict=True):
            places = torch.arange(passage.first - 1, len(passage.ids) - 1)
            wanted = torch.tensor(passage.ids[passage.first :])
            mixture = nvium_models.mixture(decoder, POINTS, tensors, passage.ids[:-1])[places]
            weights, parts = nvium_models.exits(decoder, POINTS, tensors, passage.ids[:-1])
            assert score.log_prob == pytest.approx(float(mixture.log().gather(1, wanted[:, None]).sum()), abs=1e-3)
            assert score.greedy == bool((mixture.argmax(-1) == wanted).all())
            exit_log = parts[-1][places].log().gather(1, wanted[:, None]).sum()
            assert end.log_prob == pytest.approx(float(exit_log), abs=1e-3)
            blocks += sum(float(w[places].sum()) * depth for w, depth in zip(weights, (*POINTS, LAYERS), strict=True))
    assert scorer.blocks == pytest.approx(blocks, rel=1e-4)
    assert 1 < scorer.blocks / int(scorer.depths.sum()) < LAYERS


def test_a_text_measures_every_exit_of_a_mixture(river: River, nvium_models: ModuleType) -> None:
    decoder, ids = river.decoder, [list(range(7, 20)), list(range(40, 66, 2))]
    tensors = nvium_models.junction_tensors(decoder, POINTS)
    meter = MixtureMeter(nvium_models.model(decoder, POINTS, tensors))
    sums = Sums(meter, positions=13)
    sums.add(torch.tensor(ids))
    found = sums.result()
    nll, masses, nlls, last = [], torch.zeros(3), torch.zeros(3), []
    depths = torch.zeros(3)
    with torch.inference_mode():
        for row in ids:
            wanted = torch.tensor(row[1:])[:, None]
            weights, parts = nvium_models.exits(decoder, POINTS, tensors, row)
            mixture = sum(weight[:, None] * part for weight, part in zip(weights, parts, strict=True))
            nll.append(-mixture[:-1].log().gather(1, wanted))
            last.append(-parts[-1][:-1].log().gather(1, wanted))
            masses += torch.stack([weight[:-1].sum() for weight in weights])
            depths += torch.stack([weight.sum() for weight in weights])
            nlls += torch.stack([-part[:-1].log().gather(1, wanted).sum() for part in parts])
    count = sum(len(row) - 1 for row in ids)
    assert found.tokens == count
    assert found.perplexity == pytest.approx(float(torch.cat(nll).mean().exp()), rel=1e-4)
    assert found.dense_perplexity == pytest.approx(float(torch.cat(last).mean().exp()), rel=1e-4)
    assert [part.depth for part in found.exits] == [1, 3, 4]
    assert [part.mass for part in found.exits] == pytest.approx((masses / count).tolist(), rel=1e-4)
    assert [part.perplexity for part in found.exits] == pytest.approx((nlls / count).exp().tolist(), rel=1e-4)
    assert found.mean_depth == pytest.approx(float((depths * torch.tensor([1.0, 3, 4])).sum() / 26), rel=1e-4)
    assert found.exit_histogram[1] == 0
    assert sum(found.exit_histogram) == pytest.approx(26, abs=0.01)
    assert [part.tokens for part in found.by_position] == [2, 4, 8, 10]
