"""Swaps over all heads: they find what BOSCH's buckets cannot hold, at a fixed count and within their budget."""

import numpy as np
import pytest
from plants import FULL_HEADS, KV_HEADS, LAYERS, PLACEMENTS, WINDOW_SIZE, Plant, placement

from swa_jax.model.window import Window
from swa_jax.select import MaskEvaluator, Score, bosch
from swa_jax.select.search import with_ones
from swa_jax.select.swaps import eliminate, swap_search

SHAPE = (LAYERS, KV_HEADS)
RATIO = 1 - FULL_HEADS / (LAYERS * KV_HEADS)


def counted(value):
    """A score of bits by a function of them, and the bits that were asked for."""
    asked = []

    def score(bits):
        asked.append(bits.copy())
        return Score(float(value(bits)), 0.0)

    return score, asked


def start(size, ones, seed=0):
    return with_ones(np.zeros(size, bool), ones, np.random.default_rng(seed).permutation(size))


@pytest.mark.parametrize("ones", [0, 1, 5, 20])
def test_the_best_of_independent_heads_are_found(ones):
    worth = np.random.default_rng(0).random(20)
    score, asked = counted(worth.__matmul__)
    found = swap_search(score, start(20, ones), 1000, np.random.default_rng(1))
    assert set(np.flatnonzero(found.bits)) == set(np.argsort(-worth)[:ones])
    assert found.score.value == pytest.approx(worth[found.bits].sum())
    assert len(found.tried) == len({bits.tobytes() for bits in asked}) == len(asked), "each is asked for once"


@pytest.mark.parametrize("budget", [1, 7, 40, 100])
def test_a_budget_is_kept_and_never_worsens_the_start(budget):
    worth = np.random.default_rng(0).random(20)
    runs = []
    for _ in range(2):
        score, asked = counted(worth.__matmul__)
        runs.append(swap_search(score, start(20, 5), budget, np.random.default_rng(1)))
        assert len(asked) <= budget
    assert runs[0].bits.sum() == 5
    assert runs[0].score >= score(start(20, 5))
    np.testing.assert_array_equal(runs[0].bits, runs[1].bits)


@pytest.mark.parametrize(("budget", "rounds"), [(90, [64, 8]), (250, [64, 32, 16, 8]), (1000, None)])
def test_a_small_budget_still_ranks_every_head_once(budget, rounds):
    """Of 64 heads 8 are needed, and worth most all together; rounds are as small as the budget allows."""
    needed = np.random.default_rng(3).permutation(64)[:8]
    score, asked = counted(lambda bits: bits[needed].sum() + 10.0 * bits[needed].all())
    found = swap_search(score, start(64, 8), budget, np.random.default_rng(1))
    assert found.bits[needed].all()
    assert len(asked) <= budget
    if rounds:
        counts = [int(bits.sum()) for bits in asked]
        assert [n for n in (63, 31, 15, 7) if n in counts] == [n - 1 for n in rounds[:-1]] + [7]


def test_heads_that_help_only_together_are_seen_from_full_attention():
    pairs = np.random.default_rng(2).permutation(20)[:8].reshape(4, 2)
    score, _ = counted(lambda bits: bits[pairs].all(axis=1).sum())
    far = with_ones(np.ones(20, bool), 8, pairs.ravel())  # none of them
    assert eliminate(score, 20, 8)[pairs].all()
    assert swap_search(score, far, 500, np.random.default_rng(0)).bits[pairs].all()


class ByHits:
    """In place of a model: a mask is as good as the share of the planted heads that are full, or of whole units."""

    shape = SHAPE

    def __init__(self, units):
        self.plant, self.scores = Plant(units), {}

    def __call__(self, full):
        right = [unit.found(full) == unit.needed for unit in self.plant.units]
        return self.scores.setdefault(full.tobytes(), Score(float(np.mean(right)), self.plant.hits(full) / 10))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_is_found_where_scores_say_so(name):
    for seed in range(3):
        evaluate = ByHits(placement(name, seed))
        found = bosch(evaluate, RATIO, variant="swaps", seed=seed)
        assert (~found.full).sum() == found.target
        assert evaluate.plant.hits(found.full) == 1
        assert len(evaluate.scores) < 800


def test_the_buckets_do_not_hold_every_placement():
    evaluate = ByHits(placement("one a layer", 0))
    assert evaluate.plant.hits(bosch(evaluate, RATIO).full) < 1


@pytest.mark.long
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_placement_is_found_in_a_model(name):
    hits = []
    for seed in range(3):
        plant = Plant(placement(name, seed))
        evaluate = MaskEvaluator(plant.model(seed=seed), plant.examples(16, seed), Window(WINDOW_SIZE), batch_size=16)
        hits.append(plant.hits(bosch(evaluate, RATIO, variant="swaps", seed=seed).full))
    assert np.mean(hits) >= 0.95


@pytest.mark.parametrize("name", ["conjunctions", pytest.param("chains", marks=pytest.mark.slow)])
def test_both_heads_of_a_unit_are_needed(name):
    plant = Plant(placement(name, 0))
    evaluate = MaskEvaluator(plant.model(), plant.examples(16), Window(WINDOW_SIZE), batch_size=16)
    full = np.zeros(SHAPE, bool)
    for unit in plant.units:
        for head in unit.heads:
            full[head] = True
    assert evaluate(full).value > 0.9
    for head in plant.units[0].heads:
        without = full.copy()
        without[head] = False
        assert evaluate(without).value < evaluate(full).value
