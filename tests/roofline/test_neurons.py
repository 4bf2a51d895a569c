"""The time model of neurons on two sides."""

import numpy as np
import pytest

from foretell.roofline.neurons import Side, Sides, predict_placement

COUNTS = np.random.default_rng(2).zipf(1.5, (3, 40)).clip(0, 100)
FAST, SLOW = Side("fast", 8.0), Side("slow", 1.0)


@pytest.mark.parametrize("hot", [0, 1, 17, 39, 40])
def test_a_layer_takes_the_longer_side_and_what_combining_takes(hot: int) -> None:
    ranked = -np.sort(-COUNTS[0].astype(float)) / 100
    sides = 16 * ranked[:hot].sum() / 8, 16 * ranked[hot:].sum()
    found = Sides(FAST, SLOW, 0.5).layer_seconds(ranked, hot, 16)
    assert found == pytest.approx(max(sides) + 0.5 * (0 < hot < 40))


def test_a_side_is_bound_by_its_memory_or_by_its_arithmetic() -> None:
    assert Side("many cores", 100.0, 32.0).seconds(64.0) == 2.0
    assert Side("few cores", 100.0, 4.0).seconds(64.0) == 16.0
    assert Side("few cores, slow memory", 1.0, 4.0).seconds(64.0) == 64.0


def test_where_every_token_reads_all_neurons_both_sides_are_layers_that_run_at_once() -> None:
    always = np.full((2, 10), 7)
    placed, layered = predict_placement(always, 7, (4, 4), 8, Sides(FAST, SLOW))
    assert placed == pytest.approx(2 * 6 * 8) and layered == pytest.approx(8 + 12 * 8)


def test_a_placement_gains_what_is_not_read() -> None:
    placed, layered = predict_placement(COUNTS, 100, (10, 10, 10), 8, Sides(FAST, SLOW))
    assert placed < layered
    slower = predict_placement(COUNTS, 100, (5, 5, 5), 8, Sides(FAST, SLOW))
    assert slower[0] >= placed
