"""The simulated frontier against Algorithm 1 as it is run, row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from adapt_llm.convert.frontier import (
    ACCEPT,
    IGNORE,
    Judged,
    decision,
    fixed_layers,
    macro_f1,
    measure,
    simulate,
    smoothed,
    surface,
    useful_depth,
)
from adapt_llm.runtime.methods import FixedLayer
from adapt_llm.runtime.schedule import Rule, Stop, Votes, two_d

sizes = st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(2, 4))


def played(row: Judged, rule: Rule) -> tuple[int, int, int, int]:
    """Answer, operations, layers and sentences by `schedule`, one item after the other."""
    layers, sentences, classes = row.cells.shape
    votes = Votes(rule, classes)
    for item in two_d(layers, sentences):
        if not item.votes:
            continue
        cells = row.cells[item.first_layer : item.last_layer, item.first_sentence : item.last_sentence]
        stop = votes.take(item, cells)
        if isinstance(stop, Stop):
            return stop.label, stop.operations, stop.layers, stop.sentences
    return int(row.whole[-1].argmax()), layers * sentences, layers, sentences


@st.composite
def judged(draw: st.DrawFn) -> Judged:
    """A row whose margins are often equal, often 0 and often exactly a threshold."""
    layers, sentences, classes = draw(sizes)
    steps = draw(arrays(np.int64, (layers, sentences, classes), elements=st.integers(0, 5)))
    cells = (steps + 0.01) / (steps + 0.01).sum(-1, keepdims=True)
    return Judged(cells.astype(np.float32), cells[:, -1].astype(np.float32), label=0)


@settings(max_examples=60, deadline=None)
@given(judged(), st.lists(st.floats(0, 5), min_size=1, max_size=6))
def test_decisions_are_those_of_the_schedule(row: Judged, accept: list[float]) -> None:
    accept = sorted({0.0, 1.0, *accept})
    ignore = (0.0, 0.25, 0.5)
    runs = simulate(row, ignore, accept)
    for i, low in enumerate(ignore):
        for j, high in enumerate(accept):
            expected = played(row, Rule(low, high))
            found = tuple(int(part[i, j]) for part in (runs.answers, runs.operations, runs.layers, runs.sentences))
            assert found == expected


def random_rows(count: int, layers: int = 6, classes: int = 3) -> list[Judged]:
    """Rows of 1 to 9 sentences whose cells are right a little more often than not."""
    generator = np.random.default_rng(0)
    rows: list[Judged] = []
    for number in range(count):
        label = number % classes
        logits = generator.normal(size=(layers, int(generator.integers(1, 10)), classes))
        logits[..., label] += 0.8
        cells = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        rows.append(Judged(cells, cells.mean(1), label))
    return rows


def test_work_is_a_ratio_of_sums_and_falls_with_the_threshold() -> None:
    rows = random_rows(40)
    runs = surface(rows, IGNORE, ACCEPT)
    total = sum(row.cells.shape[0] * row.cells.shape[1] for row in rows)
    work = runs.operations.sum(-1) / total
    assert work[3, 20] == pytest.approx(sum(simulate(r, IGNORE, ACCEPT).operations[3, 20] for r in rows) / total)
    assert (np.diff(work, axis=1) >= 0).all()
    assert work[0, 0] < 0.2
    assert work[0, -1] == 1.0


def test_a_fixed_layer_costs_its_share() -> None:
    rows = random_rows(40)
    points = fixed_layers(rows, 3)
    assert [point.layer for point in points] == [1, 2, 3, 4, 5, 6]
    assert points[2].work == pytest.approx(0.5)
    assert points[2].mean_layers == 3
    right = [int(row.whole[2].argmax()) == row.label for row in rows]
    assert points[2].accuracy == pytest.approx(np.mean(right))


def test_macro_f1_weighs_classes_the_same() -> None:
    labels, answers = np.array([0, 0, 0, 1]), np.array([0, 0, 0, 0])
    assert macro_f1(labels, answers, 2) == pytest.approx((6 / 7 + 0) / 2)
    assert macro_f1(labels, answers, 3) == pytest.approx((6 / 7 + 0) / 2)


def test_figures_of_a_decision() -> None:
    rows = random_rows(3)
    runs = simulate(rows[0], (0.0,), (1e9,))
    figures = decision(surface([rows[0]], (0.0,), (1e9,)), [rows[0]], 3)
    assert int(runs.operations[0, 0]) == rows[0].cells.shape[0] * rows[0].cells.shape[1]
    assert figures.work == 1.0


def test_a_lucky_pair_is_not_chosen() -> None:
    surface = np.full((4, 5), 0.8)
    surface[1, 2] = 1.0
    assert smoothed(surface)[1, 2] == pytest.approx(0.8 + 0.2 / 9)
    assert smoothed(surface)[3, 4] == pytest.approx(0.8)


def test_the_frontier_rises() -> None:
    rows = random_rows(60)
    curve = measure(rows, 3, "mean")
    work = [point.work for point in curve.frontier]
    steady = [point.steady for point in curve.frontier]
    assert work == sorted(work)
    assert steady == sorted(steady)
    assert len(set(steady)) == len(steady)
    runs = surface(rows, [curve.frontier[-1].tau_ignore], [curve.frontier[-1].tau_acc])
    assert float((runs.answers[0, 0] == [row.label for row in rows]).mean()) == pytest.approx(
        curve.frontier[-1].accuracy
    )


@pytest.mark.parametrize(
    ("accuracies", "depth"),
    [([0.5, 0.7, 0.9, 0.9, 0.9, 0.7], 4), ([0.5, 0.6, 0.7, 0.8], 4), ([0.5, 0.95, 0.5, 0.8, 0.85, 0.8], 5), ([0.5], 1)],
)
def test_two_dimensions_go_as_deep_as_layers_are_reliably_good(accuracies: list[float], depth: int) -> None:
    layers = [
        FixedLayer(layer=layer, accuracy=accuracy, macro_f1=accuracy, work=1, mean_layers=layer, mean_sentences=1)
        for layer, accuracy in enumerate(accuracies, 1)
    ]
    assert useful_depth(layers) == depth
