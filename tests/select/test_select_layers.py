"""Reused activations give the deltas of whole passes for half the layers; interruptions; greedy; planted layers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from planted import CLASSES, PLANT, PLANTED, planted_examples, planted_model
from plants import WINDOW_SIZE, Unit
from tiny_models import WIDER

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import Example, score_answers
from swa_jax.evaluate.nll import score_batch
from swa_jax.model.decoder import Block, Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import LayerScorer, Task, choose, nll_deltas, nll_scores, toggles
from swa_jax.select import nll as nll_module
from swa_jax.select.nll import provenance_of

LAYERS = 5
# Losses near log 64, so that 1e-6 is two units in their last place.
CONFIG = dataclasses.replace(WIDER, num_hidden_layers=LAYERS, initializer_range=0.2)
VARIANTS = {
    "llama": {},
    "qwen3, tied": {"qk_norm": True, "tie_word_embeddings": True, "attention_bias": True},
    "swat": {
        "attention_activation": "sigmoid",
        "position_embedding": "alirope",
        "alibi_negative_heads": 2,
        "alibi_positive_heads": 2,
    },
}
OPTIONS = {"window": Window(6, 1, True), "batch_size": 4}


def make_model(seed: int = 0, **changes) -> Decoder:
    config = dataclasses.replace(CONFIG, **changes)
    return Decoder(config, AttentionPattern.from_recipe("full", LAYERS), rngs=nnx.Rngs(seed))


def make_examples(count: int = 6) -> list[Example]:
    rng = np.random.default_rng(0)
    return [
        Example(rng.integers(64, size=30 + i).tolist(), rng.integers(64, size=3).tolist(), []) for i in range(count)
    ]


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def examples():
    return make_examples()


@pytest.fixture(scope="module")
def plain(model, examples):
    return nll_deltas(model, examples, toggles_at_once=0, **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "decode"), [("llama", False), ("qwen3, tied", True), ("swat", False)])
def test_reuse_gives_the_deltas_of_whole_passes(variant, decode, examples):
    model = make_model(**VARIANTS[variant])
    options = OPTIONS | {"window": Window(6, 1, decode)}
    plain = nll_deltas(model, examples, toggles_at_once=0, **options)
    got = nll_deltas(model, examples, **options)
    np.testing.assert_allclose(got.deltas, plain.deltas, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got.window_nll, plain.window_nll, rtol=0, atol=1e-6)
    assert (np.abs(plain.deltas).max(0) > 1e-4).all()


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_toggles_side_by_side_give_the_same(model, examples, plain, at_once):
    got = nll_deltas(model, examples, toggles_at_once=at_once, **OPTIONS)
    np.testing.assert_allclose(got.deltas, plain.deltas, rtol=0, atol=1e-6)


@pytest.mark.parametrize("full", [(0,), (2, 4), (0, 1, 2, 3, 4)])
def test_scoring_from_a_base_that_has_full_layers(model, examples, plain, full):
    got, passes = (LayerScorer(model, examples, toggles_at_once=at_once, **OPTIONS)(full) for at_once in (2, 0))
    np.testing.assert_allclose(got.deltas, passes.deltas, rtol=0, atol=1e-6)
    assert (got.deltas[:, full] == 0).all()
    if len(full) == 1:
        np.testing.assert_allclose(got.window_nll, plain.window_nll - plain.deltas[:, full[0]], rtol=0, atol=1e-6)
        pattern = AttentionPattern.from_full_layers([0, 3], LAYERS, 6, num_sink_tokens=1, full_attention_decode=True)
        wanted = got.window_nll - score_answers(model, examples, pattern=pattern).nll
        np.testing.assert_allclose(got.deltas[:, 3], wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_layer_evaluations_and_compilations_are_counted(monkeypatch, at_once):
    evaluated, real = [], Block.__call__

    def counted(self, stream, *rest):
        jax.debug.callback(lambda rows=stream.x.shape[0]: evaluated.append(rows))
        return real(self, stream, *rest)

    monkeypatch.setattr(Block, "__call__", counted)
    jax.clear_caches()
    model, examples = make_model(), make_examples(4)
    try:
        counts = []
        for reuse in (False, True):
            before = score_batch._cache_size(), toggles._group._cache_size(), toggles._embed._cache_size()
            evaluated.clear()
            nll_deltas(model, examples, toggles_at_once=at_once if reuse else 0, **OPTIONS)
            jax.effects_barrier()
            counts.append(sum(evaluated) / len(examples))
            after = score_batch._cache_size(), toggles._group._cache_size(), toggles._embed._cache_size()
            assert np.subtract(after, before).tolist() == ([0, 1, 1] if reuse else [1, 0, 0])
    finally:
        jax.clear_caches()  # of programs that count
    assert counts[False] == LAYERS * (LAYERS + 1)
    assert counts[True] == LAYERS * (LAYERS + 3) / 2
    assert counts[True] / counts[False] == pytest.approx((LAYERS + 3) / (2 * (LAYERS + 1)))


def test_a_prompt_that_the_window_holds_scores_exactly_zero(model, examples):
    """Among longer ones in one batch, too. Window 6 and 1 sink token hold 7 prompt tokens, not 8."""
    short, longer = (dataclasses.replace(examples[0], prompt=examples[0].prompt[:n]) for n in (7, 8))
    got = nll_deltas(model, [short, longer, examples[1]], **OPTIONS)
    assert got.deltas.any(1).tolist() == [False, True, True]
    assert got.window_nll[0] == pytest.approx(score_answers(model, [short]).nll[0], rel=1e-5)
    # Without full-attention decode the queries at answer tokens that predict another one count too.
    fits = dataclasses.replace(short, answer=examples[0].answer[:1])
    assert nll_deltas(model, [short, fits], Window(6, 1, False), batch_size=4).deltas.any(1).tolist() == [True, False]


def test_the_public_function_gives_the_means(model, examples, plain):
    got = nll_scores(model, examples, sliding_window=6, num_sink_tokens=1, batch_size=4)
    assert got.shape == (LAYERS,)
    np.testing.assert_allclose(got, plain.mean, rtol=0, atol=1e-6)
    for interval, mean in zip(plain.intervals(), plain.mean, strict=True):
        assert interval.mean == pytest.approx(mean)
        assert interval.low < mean < interval.high
    for options in ({}, {"num_sink_tokens": 2}):
        with pytest.raises(ConfigError, match="no window is given"):
            nll_scores(model, examples, **options)


# ---- interruptions ----


def test_an_interrupted_selection_goes_on(model, examples, plain, tmp_path, monkeypatch):
    file = tmp_path / "new" / "scores.jsonl"

    def stop(done, total):
        if done == LAYERS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nll_deltas(model, examples, file=file, progress=stop, **OPTIONS)
    kept = file.read_text().splitlines()
    assert len(kept) == 4  # one of two batches
    scorer, batches, seen = LayerScorer(model, examples, file=file, **OPTIONS), [], []
    assert scorer.num_known == 4
    real = toggles.reuse
    monkeypatch.setattr(toggles, "reuse", lambda *a, **k: batches.append(1) or real(*a, **k))
    got = scorer(progress=lambda done, total: seen.append(done))
    assert (len(batches), scorer.num_known) == (1, 6)
    assert seen == list(range(1, LAYERS + 2))
    np.testing.assert_allclose(got.deltas, plain.deltas, rtol=0, atol=1e-6)
    again = nll_deltas(model, examples, file=file, **OPTIONS)
    assert len(batches) == 1
    np.testing.assert_array_equal(again.deltas, got.deltas)


def test_toggles_below_none_are_refused(model, examples):
    with pytest.raises(ConfigError, match="toggles_at_once must be at least 0, got -1"):
        nll_deltas(model, examples, toggles_at_once=-1, **OPTIONS)


# ---- planted answers ----

PLANTED_LAYERS = tuple(sorted({layer for layer, _ in PLANTED}))
PLANTED_OPTIONS = {"window": Window(WINDOW_SIZE, 0, True), "batch_size": 8}


def test_the_planted_layers_are_found():
    scores = nll_deltas(planted_model(), planted_examples(), **PLANTED_OPTIONS)
    assert tuple(sorted(scores.best(len(PLANTED_LAYERS)))) == PLANTED_LAYERS
    others = [layer for layer in range(scores.deltas.shape[1]) if layer not in PLANTED_LAYERS]
    assert scores.mean[list(PLANTED_LAYERS)].min() > 3 * np.abs(scores.mean[others]).max()


def test_greedy_finds_the_planted_layers():
    task = Task(planted_model(), planted_examples(), Window(WINDOW_SIZE), batch_size=8)
    (pattern,) = choose("nll-greedy", task, [0.5])
    assert pattern.full_layers == PLANTED_LAYERS
    assert sorted(pattern.provenance["picked"]) == list(PLANTED_LAYERS)
    assert pattern.provenance["method"] == "nll-greedy"
    assert np.shape(pattern.provenance["rounds"]) == (4, 8)
    assert AttentionPattern.from_json(pattern.to_json()) == pattern


def test_a_gradient_names_the_layers_that_greedy_scores(tmp_path, monkeypatch):
    """Both scores are kept, of the layers not tried there is none, and an interrupted search goes on."""
    model, examples, file = planted_model(), planted_examples(), tmp_path / "scores.jsonl"

    def scorer():
        return LayerScorer(model, examples, file=file, **PLANTED_OPTIONS)

    seen = []
    rounds = scorer().greedy(4, tried=2, progress=lambda *counts: seen.append(counts))
    found = json.loads(json.dumps(provenance_of(rounds)))
    assert tuple(sorted(found["picked"])) == PLANTED_LAYERS
    assert seen[-1] == (28, 28)
    assert seen == sorted(seen)
    exact, full = LayerScorer(model, examples, **PLANTED_OPTIONS), []
    for scores, row, gradient in zip(rounds, found["rounds"], found["gradients"], strict=True):
        named = sorted(range(8), key=lambda layer: (layer in full, -gradient[layer]))[:2]
        assert [i for i, value in enumerate(row) if value is not None] == sorted({*named, *full})
        assert scores.full_layers == tuple(sorted(full))
        np.testing.assert_allclose(scores.mean[named], exact(full).mean[named], rtol=0, atol=1e-6)
        assert scores.picked == (max(named, key=lambda layer: scores.mean[layer]),)
        full += scores.picked
    calls, real = [], nll_module.gate_gradient
    monkeypatch.setattr(nll_module, "gate_gradient", lambda *a: calls.append(1) or real(*a))
    again = scorer().greedy(4, tried=2)
    assert not calls
    assert [scores.picked for scores in again] == [scores.picked for scores in rounds]
    scorer().greedy(4)  # what was not tried is scored, the rest is known
    np.testing.assert_allclose(scorer()().mean, exact().mean, rtol=0, atol=1e-6)


def test_what_else_a_file_knows_does_not_change_a_choice(tmp_path, monkeypatch):
    """And stays there: a gradient that names layer 7 is not overruled by the scores of all layers."""
    monkeypatch.setattr(LayerScorer, "gradient", lambda self, full: np.arange(8.0))
    file, batches, real = tmp_path / "scores.jsonl", [], toggles.reuse
    monkeypatch.setattr(toggles, "reuse", lambda *a, **k: batches.append(1) or real(*a, **k))

    def scorer():
        return LayerScorer(planted_model(), planted_examples(), file=file, **PLANTED_OPTIONS)

    (alone,) = scorer().greedy(1, tried=1)
    assert scorer()().best() != [7]
    (beside,) = scorer().greedy(1, tried=1)
    assert alone.picked == beside.picked == (7,)
    np.testing.assert_array_equal(beside.mean, [*[np.nan] * 7, alone.mean[7]])
    scorer()((0,), tried=[1])
    scorer()((0,), tried=[2])
    done = len(batches)
    scorer()((0,), tried=[1, 2])
    assert len(batches) == done


def test_a_round_takes_several_layers_where_rounds_are_few():
    scorer = LayerScorer(planted_model(), planted_examples(), **PLANTED_OPTIONS)
    rounds = scorer.greedy(4, tried=1, rounds=3)
    assert [len(scores.picked) for scores in rounds] == [2, 1, 1]
    assert [int((~np.isnan(scores.deltas[0])).sum()) for scores in rounds] == [2, 3, 4]
    assert sorted(layer for scores in rounds for layer in scores.picked) == list(PLANTED_LAYERS)


def test_two_layers_that_do_the_same_fool_scoring_once():
    # Layers 2 and 3 both answer class 0, which is asked twice as often as class 1, which layer 5 answers.
    model = planted_model(units=[Unit("either", ((2, 0), (3, 1))), Unit("one", ((5, 2),)), *[Unit("one", ())] * 6])
    drawn = planted_examples(count=8 * CLASSES)
    asked = {c: [e for e in drawn if e.prompt[-1] == PLANT.question(c)] for c in (0, 1)}
    examples = asked[0] + asked[1][:4]
    seen = []
    task = Task(model, examples, Window(WINDOW_SIZE), batch_size=8, force=True)
    (once,) = choose("nll", task, [0.75])
    task.progress = lambda *counts: seen.append(counts)
    (greedy,) = choose("nll-greedy", task, [0.75], toggles_at_once=3)
    assert once.full_layers == (2, 3)
    assert greedy.full_layers in ((2, 5), (3, 5))
    assert seen == [(i + 1, 17) for i in range(17)]
    losses = [score_answers(model, examples, pattern=pattern).nll.mean() for pattern in (once, greedy)]
    assert losses[1] < losses[0] / 2


@pytest.mark.parametrize("budget", [0, 9])
def test_greedy_refuses_a_budget_it_cannot_meet(budget):
    with pytest.raises(ConfigError, match=f"budget is {budget} full layers; greedy selection takes 1 to 8"):
        LayerScorer(planted_model(), planted_examples(), **PLANTED_OPTIONS).greedy(budget)
