"""Means with intervals, against scipy, brute force and how often they hold the truth."""

import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from swa_jax.base.estimates import (
    Estimate,
    accuracy_interval,
    bootstrap,
    detectable,
    interval_of_score,
    mean_of_groups,
    mean_score,
    paired_accuracy,
    paired_bootstrap,
    paired_score,
)

# ---- 0/1 scores ----


@pytest.mark.parametrize("n", [1, 2, 6, 48, 263])
def test_wilson_is_scipys(n):
    for right in sorted({0, 1, n // 3, n - 1, n}):
        ours = accuracy_interval([1] * right + [0] * (n - right))
        theirs = stats.binomtest(right, n).proportion_ci(method="wilson")
        assert ours == pytest.approx((right / n, theirs.low, theirs.high), abs=1e-12)
        assert mean_score([1] * right + [0] * (n - right)) == ours


def test_all_right_is_not_certain():
    """Six of six: a bootstrap says [1, 1], though two thirds would often do as well."""
    assert mean_score([1] * 6) == pytest.approx((1, 0.6097, 1), abs=1e-4)
    assert mean_score([False] * 6) == pytest.approx((0, 0, 0.3903), abs=1e-4)
    assert mean_score(np.ones(6, np.float32)).high == 1


@pytest.mark.parametrize("scores", [[2], [-0.1, 1], [], [[1]], [math.nan]])
def test_what_is_no_score_is_refused(scores):
    with pytest.raises(ValueError, match="from 0 to 1"):
        accuracy_interval(scores)


# ---- bootstrap ----


def test_one_number_has_no_interval():
    assert bootstrap([2.5]) == Estimate(2.5, None, None)
    assert bootstrap([2.5]).interval is None
    assert bootstrap([2.5, 3.5], weights=[4, 0]) == Estimate(2.5, None, None)  # the other one does not count
    assert paired_bootstrap([1], [0]) == Estimate(1, None, None)
    assert mean_score([0.5]) == Estimate(0.5, None, None)
    assert mean_score([0.2, 0.4, 0.6, 0.3, 0.7]) == bootstrap([0.2, 0.4, 0.6, 0.3, 0.7])


def test_the_bootstrap_is_that_of_brute_force():
    values, weights = np.arange(16.0) ** 2, np.arange(16.0, 0, -1)
    drawn = np.random.default_rng(7).integers(16, size=(200_000, 16))
    for ours, by_hand in (
        (bootstrap(values, resamples=200_000), values[drawn].mean(1)),
        (
            bootstrap(values, weights=weights, resamples=200_000),
            (values * weights)[drawn].sum(1) / weights[drawn].sum(1),
        ),
    ):
        assert ours.interval == pytest.approx(np.quantile(by_hand, [0.025, 0.975]).tolist(), rel=0.01)
    assert bootstrap(values).mean == values.mean()
    assert bootstrap(values, weights=weights).mean == pytest.approx((values * weights).sum() / 136)


@pytest.mark.parametrize("n", [2, 3, 8, 14])
def test_few_numbers_claim_a_difference_no_oftener_than_one_in_twenty(n):
    studies = np.random.default_rng(n).normal(size=(1000, n))
    found = [paired_bootstrap(one, np.zeros(n)) for one in studies]
    assert np.mean([one.low > 0 or one.high < 0 for one in found]) == pytest.approx(0.05, abs=0.02)
    theirs = stats.t.interval(0.95, n - 1, studies[0].mean(), stats.sem(studies[0]))
    assert found[0].interval == pytest.approx(theirs)
    doubled = bootstrap(studies[0], weights=np.full(n, 2.0))
    assert list(doubled) == pytest.approx([studies[0].mean(), *theirs])


def test_few_scores_stay_between_0_and_1():
    assert mean_score([0.9, 1.0, 0.5]).high == 1
    assert mean_score([0.9, 1.1, 0.5]).high > 1


def test_the_bootstrap_is_bounded_in_memory():
    values = np.random.default_rng(0).normal(size=20_000)
    tracemalloc.start()
    few = bootstrap(values, weights=np.ones(20_000), resamples=500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6
    standard_error = values.std() / math.sqrt(values.size)
    assert few.high - few.low == pytest.approx(2 * 1.96 * standard_error, rel=0.15)


def test_chunks_do_not_change_what_is_drawn(monkeypatch):
    values = np.random.default_rng(0).normal(size=50)
    whole = bootstrap(values, resamples=1000)
    monkeypatch.setattr("swa_jax.base.estimates.CHUNK_BYTES", 4000)
    assert bootstrap(values, resamples=1000) == whole


@pytest.mark.parametrize(
    ("values", "weights", "words"),
    [
        ([], None, "at least one number"),
        ([[1.0]], None, "at least one number"),
        ([1.0, 2.0], [1.0], r"weights have shape \(1,\)"),
        ([1.0, 2.0], [1.0, -1.0], "weights must be at least 0"),
        ([1.0, 2.0], [0.0, 0.0], "weights must be at least 0"),
    ],
)
def test_what_has_no_mean_is_refused(values, weights, words):
    with pytest.raises(ValueError, match=words):
        bootstrap(values, weights=weights)


def test_pairing_removes_what_is_common_to_both():
    rng = np.random.default_rng(1)
    hard = rng.normal(0, 10, 50)
    better, worse = hard + 1 + rng.normal(0, 0.1, 50), hard + rng.normal(0, 0.1, 50)
    difference = paired_bootstrap(better, worse)
    assert 0.9 < difference.low < 1 < difference.high < 1.1
    with pytest.raises(ValueError, match="same examples"):
        paired_bootstrap([1, 2], [1])


def test_pairs_of_shares_have_an_interval_where_all_agree():
    """Resampled, 48 differences of 1 would all be 1."""
    always, never = np.ones(48), np.zeros(48)
    difference = paired_score(always, never)
    assert difference == paired_accuracy(always, never)
    assert difference.low < 0.95 < difference.high == 1
    tie = paired_score(always, always)
    assert tie.mean == 0
    assert tie.high == -tie.low == pytest.approx(1 - accuracy_interval(always).low)
    parts = np.linspace(0, 1, 48)
    assert paired_score(always, parts) == paired_bootstrap(always, parts)
    one = paired_score([1.0], [0.0])
    assert one.low < 0


def test_scores_that_are_all_the_same_are_not_certain():
    """Of parts of 1 as of 0s and 1s: a bootstrap of equal numbers has width 0."""
    parts = np.tile([1.0, 0.75, 0.5], 16)
    tie, always = paired_score(parts, parts), np.ones(48)
    assert list(tie) == pytest.approx(list(paired_score(always, always)))
    same = mean_score(np.full(48, 0.25))
    assert list(same) == pytest.approx([0.25, 0.25 * accuracy_interval(always).low, 0.25 + 0.75 * tie.high])
    assert mean_score([2.5, 2.5]).interval == [2.5, 2.5]  # nothing says how far such a number could lie
    assert paired_score([0.5], [0.5]).interval is None


# ---- groups ----


def test_one_group_is_its_own_mean():
    for scores in ([1, 1, 0], [0.3, 0.5, 0.9]):
        assert mean_of_groups([scores]) == pytest.approx(mean_score(scores))


def test_groups_count_the_same_and_keep_their_doubt():
    found = mean_of_groups([[1] * 6, [1] * 12])
    assert found.mean == found.high == 1
    # Square and add: each group's distance to its own bound.
    apart = [1 - accuracy_interval([1] * n).low for n in (6, 12)]
    assert found.low == pytest.approx(1 - math.hypot(*apart) / 2)
    assert mean_of_groups([[1, 0], [0.5, 1.0, 0.0, 0.5]]).mean == 0.5
    assert mean_of_groups([[1, 0, 1], [0.5]]).interval is None  # nothing says how far the 0.5 would vary


def test_groups_are_as_good_as_drawing_within_each():
    rng = np.random.default_rng(0)
    groups = [rng.beta(2, 1, 80), rng.beta(1, 3, 200)]
    drawn = sum(group[rng.integers(group.size, size=(20_000, group.size))].mean(1) for group in groups) / 2
    assert mean_of_groups(groups).interval == pytest.approx(np.quantile(drawn, [0.025, 0.975]).tolist(), abs=0.004)


# ---- what is made of them ----


def test_a_function_of_an_estimate_keeps_its_ends_in_order():
    assert Estimate(0.0, -1.0, 2.0).map(math.exp) == pytest.approx((1, math.exp(-1), math.exp(2)))
    assert Estimate(0.0, -1.0, 2.0).map(lambda x: -x) == (0, -2, 1)
    assert Estimate(2.0, None, None).map(math.exp) == (math.exp(2), None, None)


def test_intervals_are_those_of_the_metric():
    assert interval_of_score(1.0, [1, 1, 1, 1, 1, True]) == pytest.approx([0.6097, 1], abs=1e-4)  # not [1, 1]
    assert interval_of_score(0.5, [0.5]) is None
    assert interval_of_score(0.7, [0.5, 0.7]) is None  # not their mean
    assert interval_of_score(0.7, []) is None
    for other in (["a", "b"], ["0.7", "0.7"], [None], [[0.7], [0.7, 0.7]], [[0.7, 0.7, 0.7]]):
        assert interval_of_score(0.7, other) is None
    # Word perplexity and bits per byte: (log-likelihood, words or bytes) of each document.
    texts = [(-2000.0, 1000), (-900.0, 500)] * 5 + [(-1.0, 2)]
    nats = 14501 / 7502
    for score in (np.exp(nats), nats / np.log(2)):
        low, high = interval_of_score(score, texts)
        assert low < score < high
        assert high / low < 1.2  # two words hardly count
    assert interval_of_score(np.exp(1.4), texts) is None


# ---- paired shares ----


def test_the_paired_interval_of_shares_is_newcombes():
    """His example of 50 pairs: 20 right in both, 12 and 2 in one alone, 16 in neither."""
    first, second = np.repeat([[1, 1], [1, 0], [0, 1], [0, 0]], [20, 12, 2, 16], axis=0).T
    assert list(paired_accuracy(first, second)) == pytest.approx([0.2, 0.0562, 0.3292], abs=1e-4)


@pytest.mark.parametrize(("share", "agreement"), [(0.5, 0.5), (0.9, 0.9), (0.97, 0.5)])
def test_the_paired_interval_of_shares_holds_the_truth_as_often_as_it_says(share, agreement):
    rng = np.random.default_rng(0)
    held = []
    for _ in range(600):
        first = rng.random(48) < share
        second = np.where(rng.random(48) < agreement, first, rng.random(48) < share)
        second = second & (rng.random(48) < 0.9)  # 10 % of what is right is lost
        truth = 0.1 * share
        low, high = paired_accuracy(first.astype(float), second.astype(float)).interval
        held.append(low <= truth <= high)
    assert np.mean(held) > 0.925


@pytest.mark.parametrize("wrong", [([1.0], [1.0, 0.0]), ([0.5], [1.0]), ([], [])])
def test_paired_shares_are_of_the_same_examples(wrong):
    with pytest.raises(ValueError, match=r"same examples|at least one"):
        paired_accuracy(*wrong)


def test_a_difference_from_which_on_power_is_80_percent():
    """Of many drawn studies with just that true difference, four in five find it beyond chance."""
    rng = np.random.default_rng(7)
    study = rng.normal(0.0, 0.5, (400, 80))  # 400 studies of 80 differences
    true = np.mean([detectable(bootstrap(one, resamples=400)) for one in study[:40]])
    assert true == pytest.approx(0.5 / np.sqrt(80) * (1.96 + 0.8416), rel=0.05)
    shifted = study + true
    found = shifted.mean(1) - 1.96 * shifted.std(1, ddof=1) / np.sqrt(80) > 0
    assert found.mean() == pytest.approx(0.8, abs=0.06)
    with pytest.raises(ValueError, match="without an interval"):
        detectable(Estimate(0.0, None, None))
