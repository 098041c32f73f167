"""Algorithm 1 as data against the loops that the paper prints."""

from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapt_llm.errors import UsageError
from adapt_llm.runtime.schedule import Full, Item, OneD, Rule, TwoD, Votes, cells, full, margins, one_d, sweeps, two_d

LAYERS, SENTENCES = st.integers(1, 40), st.integers(1, 60)


def printed(layers: int, sentences: int) -> list[tuple[int, int]]:
    """The cells of Algorithm 1 in its order, as the paper prints its loops."""
    delta = max(1, layers // sentences)
    return [
        (layer, s1)
        for s in range(sentences)
        for s1 in range(s + 1)
        for layer in range(0 if s1 == s else delta * s, min((s + 1) * delta, layers))
    ]


@given(LAYERS, SENTENCES)
def test_cells_vote_in_the_printed_order(layers: int, sentences: int) -> None:
    assert [tuple(cell) for cell in cells(two_d(layers, sentences)).tolist()] == printed(layers, sentences)


@given(LAYERS, SENTENCES)
def test_every_cell_runs_once_and_never_before_what_it_needs(layers: int, sentences: int) -> None:
    done = np.zeros((layers, sentences), dtype=bool)
    for item in two_d(layers, sentences):
        part = done[item.first_layer : item.last_layer, item.first_sentence : item.last_sentence]
        assert part.size
        assert not part.any()
        assert done[: item.first_layer, item.first_sentence : item.last_sentence].all()  # its own states below
        assert done[item.first_layer : item.last_layer, : item.first_sentence].all()  # keys and values before
        part[:] = True
    assert done.all()


@given(LAYERS, SENTENCES)
def test_a_passage_goes_up_without_a_gap(layers: int, sentences: int) -> None:
    items = list(two_d(layers, sentences))
    groups = list(sweeps(iter(items)))
    assert [item for group in groups for item in group] == items
    assert len(groups) == sentences  # a passage per sentence
    for group in groups:
        assert group[0].first_layer == 0
        assert all(a.last_layer == b.first_layer for a, b in pairwise(group))


def test_items_of_an_example() -> None:
    assert list(two_d(7, 3)) == [
        Item(0, 2, 0, 1),
        Item(2, 4, 0, 1),
        Item(0, 4, 1, 2),
        Item(4, 6, 0, 2),
        Item(0, 6, 2, 3),
        Item(6, 7, 0, 3, votes=False),
    ]
    assert list(two_d(2, 3)) == [Item(0, 1, 0, 1), Item(1, 2, 0, 1), Item(0, 2, 1, 2), Item(0, 2, 2, 3)]
    assert list(full(4, 3)) == [Item(0, 4, 0, 3, votes=False)]
    assert list(one_d(2, 3)) == [Item(0, 2, 0, 3, votes=False)]
    assert cells(full(4, 3)).shape == (0, 2)


def test_margins() -> None:
    labels, ahead = margins(np.array([[[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]], [[0.4, 0.4, 0.2], [0.0, 1.0, 0.0]]]))
    np.testing.assert_array_equal(labels, [[0, 2], [0, 1]])  # the first of equals
    np.testing.assert_allclose(ahead, [[0.2, 0.7], [0.0, 1.0]])


@given(
    layers=st.integers(1, 6),
    sentences=st.integers(1, 6),
    classes=st.integers(2, 4),
    ignore=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
    acc=st.sampled_from([0.0, 0.4, 1.0, 2.5, inf]),
    seed=st.integers(0, 1000),
)
def test_votes_stop_where_the_printed_loop_returns(
    layers: int, sentences: int, classes: int, ignore: float, acc: float, seed: int
) -> None:
    p = np.random.default_rng(seed).dirichlet(np.ones(classes), (layers, sentences)).astype(np.float32)
    score, expected = [0.0] * classes, None
    for count, (layer, sentence) in enumerate(printed(layers, sentences), 1):
        first, second = sorted(p[layer, sentence].tolist(), reverse=True)[:2]
        label = int(p[layer, sentence].argmax())
        if first - second > ignore:
            score[label] += first - second
        if score[label] > acc:
            expected = (label, count, layer, sentence)
            break
    votes, stop = Votes(Rule(ignore, acc), classes), None
    for item in two_d(layers, sentences):
        if item.votes and stop is None:
            part = p[item.first_layer : item.last_layer, item.first_sentence : item.last_sentence]
            stop = votes.take(item, part)
    assert (stop and (stop.label, stop.operations, stop.layer, stop.sentence)) == expected
    if stop:
        seen = printed(layers, sentences)[: stop.operations]
        assert stop.layers == 1 + max(layer for layer, _ in seen)
        assert stop.sentences == 1 + max(sentence for _, sentence in seen)
        assert sum(stop.scores) == pytest.approx(1)
        if classes == 2:
            assert stop.scores[stop.label] >= 0.5


def test_scores_are_the_mean_of_what_counted() -> None:
    votes = Votes(Rule(0.5, 1.0), 2)
    assert votes.take(Item(0, 2, 0, 1), np.array([[[0.9, 0.1]], [[0.4, 0.6]]])) is None
    stop = votes.take(Item(2, 3, 0, 1), np.array([[[0.8, 0.2]]]))
    assert stop is not None
    assert stop.scores == pytest.approx((0.85, 0.15))
    assert (stop.operations, stop.layers, stop.sentences) == (3, 3, 1)


@pytest.mark.parametrize(("ignore", "acc"), [(-0.1, 1), (0, -1), (nan, 1), (0, nan)])
def test_no_thresholds(ignore: float, acc: float) -> None:
    with pytest.raises(UsageError, match="tau_"):
        Rule(ignore, acc)


def test_modes() -> None:
    assert list(TwoD(Rule(0, 1)).items(4, 2)) == list(two_d(4, 2))
    assert list(OneD(3).items(4, 2)) == list(one_d(3, 2))
    assert list(Full().items(4, 2)) == list(full(4, 2))
    assert [mode.depth(4) for mode in (TwoD(Rule(0, 1)), OneD(3), Full())] == [4, 3, 4]
    assert list(TwoD(Rule(0, 1), 3).items(4, 2)) == list(two_d(3, 2))
    assert [TwoD(Rule(0, 1), limit).depth(4) for limit in (3, 4, 9)] == [3, 4, 4]
    for layer in (0, 5):
        with pytest.raises(UsageError, match="layers 1 to 4"):
            OneD(layer).depth(4)
