"""BOSCH: planted heads are found, counts kept, runs repeat and resume; its three stages on worked cases."""

import dataclasses
import itertools
import math
import sys

import numpy as np
import pytest
from planted import PLANTED, planted_examples, planted_mask, planted_model
from plants import KV_HEADS, LAYERS, WINDOW_SIZE

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import Example
from swa_jax.evaluate.nll import score_answers, score_batch
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import MaskEvaluator, Score, Task, bosch, choose
from swa_jax.select.bosch_search import adaptive_counts, layer_weights
from swa_jax.select.heads import head_mask, head_pattern
from swa_jax.select.search import search, with_ones

HEADS = LAYERS * KV_HEADS
RATIO = 1 - len(PLANTED) / HEADS


@pytest.fixture(scope="module")
def model():
    return planted_model()


@pytest.fixture(scope="module")
def examples():
    return planted_examples()


def evaluator(model, examples, **options):
    return MaskEvaluator(model, examples, **({"window": Window(WINDOW_SIZE), "batch_size": 8} | options))


@pytest.fixture(scope="module")
def evaluate(model, examples):
    return evaluator(model, examples)


def test_each_planted_head_answers_its_class_alone(evaluate):
    assert evaluate(np.ones((LAYERS, KV_HEADS), bool)).value == 1
    assert evaluate(np.zeros((LAYERS, KV_HEADS), bool)).value == 0
    assert evaluate(planted_mask()).value == 1
    for layer, head in PLANTED:
        without = planted_mask()
        without[layer, head] = False
        assert evaluate(without).value == 1 - 1 / len(PLANTED)


def test_sink_tokens_that_hold_the_prompt_answer_everything(model, examples):
    sinks = evaluator(model, examples, window=Window(WINDOW_SIZE, len(examples[0].prompt)))
    assert sinks(np.zeros((LAYERS, KV_HEADS), bool)).value == 1


def test_masks_under_full_attention_decode(model, examples):
    asked = [Example(e.prompt[:-1], [e.prompt[-1], *e.answer], []) for e in examples[:4]]
    mask = planted_mask()
    for decode in (False, True):
        window = Window(WINDOW_SIZE, 0, decode)
        got = evaluator(model, asked, window=window)(mask).log_likelihood
        scored = score_answers(model, asked, pattern=head_pattern(mask, window))
        assert got == pytest.approx(-float(scored.nll.mean()), rel=1e-5)


def test_masks_are_scored_by_the_answers_values(model, examples):
    """A sentence around the value that the model does not write says nothing of what it has found."""
    wordy = [
        dataclasses.replace(e, prompt=e.prompt[:-1], answer=[e.prompt[-1], *e.answer], value=(1,)) for e in examples
    ]
    mask = np.ones((LAYERS, KV_HEADS), bool)
    whole = [dataclasses.replace(e, value=None) for e in wordy]
    assert evaluator(model, wordy)(mask).value == 1
    assert evaluator(model, whole)(mask).value < 0.5


def test_masks_by_loss_have_the_likelihood_of_the_answers(model, examples):
    """A model that never says the right answer, but finds it likelier with the planted heads, is searched by loss."""
    wrong = [dataclasses.replace(e, answer=[*e.answer, 0], value=(1,)) for e in examples]
    by_loss = evaluator(model, wrong, by="loss")
    full, none = np.ones((LAYERS, KV_HEADS), bool), np.zeros((LAYERS, KV_HEADS), bool)
    for mask in (full, none):
        assert evaluator(model, wrong)(mask).value == 0
        score = by_loss(mask)
        assert score.value == pytest.approx(np.exp(-by_loss.answers(mask).nll.mean()), rel=1e-6)
        assert score.value == pytest.approx(np.exp(score.log_likelihood), rel=1e-6)
    chosen = bosch(by_loss, RATIO)
    assert (chosen.full & planted_mask()).sum() >= len(PLANTED) - 2
    drawn = np.random.default_rng(0).permutation(chosen.full.ravel()).reshape(chosen.full.shape)
    assert chosen.score.value > by_loss(drawn).value


def test_the_planted_heads_are_found_with_one_compilation(model, examples):
    before = score_batch._cache_size()
    evaluate, seen = evaluator(model, examples), []
    chosen = bosch(evaluate, RATIO, progress=lambda done, total: seen.append((done, total)))
    np.testing.assert_array_equal(chosen.full, planted_mask())
    assert score_batch._cache_size() - before <= 1  # 0 where another test has scored this shape
    assert chosen.num_windowed == chosen.target == HEADS - len(PLANTED)
    assert chosen.score.value == chosen.original.value == 1
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert all(done <= total for done, total in seen)
    assert seen[-1][0] == seen[-1][1]


def test_a_search_that_cannot_try_everything_comes_close_and_repeats_itself(evaluate):
    # In Stage 3 it sees 24 of the 28 ways to window 6 (or 2) of the 8 heads of two layers.
    runs = [bosch(evaluate, RATIO, iterations=12, seed=seed) for seed in (0, 1, 2, 3, 3)]
    np.testing.assert_array_equal(runs[-1].full, runs[-2].full)
    assert all(run.score.value >= 1 - 2 / len(PLANTED) for run in runs)
    assert sum((run.full == planted_mask()).all() for run in runs[:-1]) >= 2


@pytest.mark.parametrize("variant", ["bosch", "swaps", "single", "multi", "layer"])
@pytest.mark.parametrize("ratio", [0.5, 0.875])
def test_counts_are_kept(evaluate, variant, ratio):
    chosen = bosch(evaluate, ratio, variant=variant, iterations=2)
    by_layer = (~chosen.full).sum(1)
    if variant == "single":
        assert (by_layer == np.ceil(ratio * KV_HEADS)).all()
    elif variant == "layer":
        assert set(by_layer.tolist()) == {0, KV_HEADS}
        assert chosen.num_windowed == chosen.target
    else:
        assert chosen.num_windowed == chosen.target == ratio * HEADS
    if variant == "bosch":
        for count in set(chosen.layer_counts.tolist()):
            group = chosen.layer_counts == count
            assert by_layer[group].sum() == chosen.layer_counts[group].sum()


def test_the_ends_of_the_ratio_need_no_search(evaluate):
    assert bosch(evaluate, 0.0).full.all()
    assert not bosch(evaluate, 1.0).full.any()


def test_prompts_inside_the_window_make_every_mask_the_same(model, examples):
    evaluate = MaskEvaluator(model, examples, Window(len(examples[0].prompt)), batch_size=8)
    rng = np.random.default_rng(0)
    scores = {evaluate(rng.random((LAYERS, KV_HEADS)) < 0.5) for _ in range(5)}
    assert len(scores) == 1  # to the last bit
    assert evaluate.num_evaluations == 5


def test_full_attention_without_an_answer_is_refused(model, examples):
    wrong = [dataclasses.replace(e, answer=[0]) for e in examples]
    with pytest.raises(ConfigError, match=r"full attention scores 0.0% and windows everywhere 0.0%"):
        bosch(evaluator(model, wrong), 0.5)
    with pytest.raises(ConfigError, match=r"ratio is 1\.5"):
        bosch(evaluator(model, examples), 1.5)
    with pytest.raises(ConfigError, match="no window is given"):
        MaskEvaluator(model, examples)


def test_an_interrupted_search_goes_on_and_ends_the_same(model, examples, tmp_path, monkeypatch):
    whole = evaluator(model, examples)
    wanted = bosch(whole, RATIO, iterations=2)
    file = tmp_path / "scores.json"
    first = evaluator(model, examples, file=file)

    def stop(done, _):
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bosch(first, RATIO, iterations=2, progress=stop)
    kept = file.read_text().count('"score"')
    assert 2 < kept == first.num_evaluations < whole.num_evaluations
    again, calls = evaluator(model, examples, file=file), []
    score_one = again._evaluate
    monkeypatch.setattr(again, "_evaluate", lambda full: calls.append(1) or score_one(full))
    chosen = bosch(again, RATIO, iterations=2)
    np.testing.assert_array_equal(chosen.full, wanted.full)
    assert len(calls) == whole.num_evaluations - kept
    assert again.num_evaluations == whole.num_evaluations


def test_the_pattern_says_how_it_was_found(tmp_path):
    file = tmp_path / "masks.json"
    task = Task(
        planted_model(), planted_examples(), Window(WINDOW_SIZE), batch_size=8, seed=5, data="planted", file=file
    )
    (pattern,) = choose("bosch", task, [RATIO], iterations=2)
    again = AttentionPattern.from_json(pattern.to_json())
    assert again == pattern
    np.testing.assert_array_equal(head_mask(again, KV_HEADS), planted_mask())
    assert again.full_kv_heads[2] == (0, 1, 3)
    said = again.provenance
    assert (said["method"], said["seed"], said["data"], said["windowed_heads"]) == ("bosch", 5, "planted", 24)
    assert said["scores"]["chosen"]["value"] == 1
    assert said["evaluations"] == len(file.read_text().splitlines()) > 20
    # What is known to the file counts for the search that asks for it, and for no other.
    (single,) = choose("bosch-single", task, [RATIO], iterations=2)
    (same,) = choose("bosch-single", dataclasses.replace(task, file=None), [RATIO], iterations=2)
    assert single.provenance["evaluations"] == same.provenance["evaluations"] < len(file.read_text().splitlines())


# ---- the stages alone ----


def test_layer_weights_follow_the_corrected_algorithm():
    # Layer 3 costs nothing, 2 costs .4 of the original, 1 nothing more, 0 another .2.
    weights = layer_weights(np.array([0.3, 0.5, 0.5, 0.9]) * 0.8, 0.9 * 0.8)
    drop = np.array([0.2, 0.0, 0.4, 0.0]) / 0.9
    low, high = np.percentile(drop, (2.5, 97.5))
    np.testing.assert_allclose(weights, (np.clip(drop, low, high) - low) / (high - low))
    assert weights[2] == 1 == weights.max()
    np.testing.assert_array_equal(layer_weights(np.full(4, 0.5), 0.5), 0)  # q_hi == q_lo


def test_adaptive_counts_by_hand():
    nothing = np.zeros(8)
    # Hardest to easiest is 0, 1, ... 7: buckets 0 0 1 1 2 2 3 4, 13 heads; two sweeps from the easy end reach 24.
    weights = np.linspace(1, 0, 8)
    assert adaptive_counts(weights, nothing, 4, 13).tolist() == [0, 0, 1, 1, 2, 2, 3, 4]
    assert adaptive_counts(weights, nothing, 4, 24).tolist() == [1, 1, 3, 3, 4, 4, 4, 4]
    assert adaptive_counts(weights, nothing, 4, 9).tolist() == [0, 0, 0, 0, 1, 1, 3, 4]
    # Ties go by the rise of the loss, then from the top down.
    assert adaptive_counts(nothing, np.arange(8.0), 4, 13).tolist() == [4, 3, 2, 2, 1, 1, 0, 0]
    assert adaptive_counts(nothing, nothing, 4, 13).tolist() == [0, 0, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12])
def test_adaptive_counts_reach_the_nearest_count_and_end(heads):
    rng = np.random.default_rng(heads)
    steps = {math.ceil(bucket * heads) for bucket in (0, 0.25, 0.5, 0.75, 1)}
    reachable = {0}
    for layers in range(1, 8):
        reachable = {count + step for count in reachable for step in steps}
        for target in range(layers * heads + 1):
            got = adaptive_counts(rng.random(layers), rng.random(layers), heads, target)
            assert set(got.tolist()) <= steps
            nearest = min(abs(count - target) for count in reachable)
            assert abs(int(got.sum()) - target) == nearest, (layers, target, got)
            assert heads > 4 or nearest == 0  # up to four heads the buckets have every count


def test_search_keeps_the_count_and_its_budget():
    rng = np.random.default_rng(0)
    worth = rng.random(12)
    for budget, ones in itertools.product([1, 7, 100], [0, 1, 5, 12]):
        tried = []

        def score(bits):
            tried.append(bits)  # noqa: B023
            return Score(0.0, float(worth @ bits))

        start = with_ones(np.zeros(12, bool), ones, rng.permutation(12))
        found = search(score, start, budget, np.random.default_rng(1))
        assert all(bits.sum() == ones for bits in tried)
        assert len({bits.tobytes() for bits in tried}) == len(tried) <= budget
        assert found.score == max(found.tried) == Score(0.0, float(worth @ found.bits))
        if ones in (1, 12) and budget == 100:  # tried all
            assert found.bits.sum() == ones
            assert set(np.flatnonzero(found.bits)) == set(np.argsort(-worth)[:ones])


def test_nomad_keeps_the_count_and_repeats_itself():
    pytest.importorskip("PyNomad")
    worth = np.random.default_rng(0).random(10)

    def score(bits):
        assert bits.sum() == 5
        return Score(float(worth @ bits) / 10, -1.0)

    start = np.arange(10) < 5
    runs = [search(score, start, 40, np.random.default_rng(seed), optimizer="nomad") for seed in (1, 1, 2, 1)]
    assert runs[0].tried == runs[1].tried == runs[3].tried != runs[2].tried
    assert runs[0].score == max(runs[0].tried) == score(runs[0].bits) > score(start)
    assert len(runs[0].tried) <= 40

    def broken(bits):
        raise ValueError("the model is gone")

    with pytest.raises(ValueError, match="the model is gone"):
        search(broken, start, 40, np.random.default_rng(1), optimizer="nomad")


def test_nomad_that_is_not_installed_is_refused(evaluate, monkeypatch):
    monkeypatch.setitem(sys.modules, "PyNomad", None)
    with pytest.raises(ConfigError, match="needs PyNomadBBO, which is not installed"):
        bosch(evaluate, 0.5, optimizer="nomad")
