"""The static head scores: each against the paper's equations on dense T x T matrices, and their memory at 32K."""

import dataclasses

import dense_scores
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from planted import PLANTED, planted_examples, planted_mask, planted_model
from plants import WINDOW_SIZE
from tiny_models import PLAIN

from pallas_kernels import AttentionSpec
from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import Example
from swa_jax.evaluate.nll import answer_batches
from swa_jax.model.decoder import Decoder
from swa_jax.model.layers import rope_tables
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import attention_rows, static
from swa_jax.select.attention_rows import Heads
from swa_jax.select.heads import compare_masks, head_mask, head_pattern, heuristic_mask, swap_back
from swa_jax.select.light_transfer import lazy_ratio
from swa_jax.select.methods import rank_heads
from swa_jax.select.static import LARGER_IS_LOCAL, STATISTICS, static_scores

WINDOW = 100
CONFIG = dataclasses.replace(PLAIN, num_hidden_layers=2, qk_norm=True, initializer_range=0.4)


@pytest.fixture(scope="module")
def model():
    model = Decoder(CONFIG, AttentionPattern.from_recipe("full", 2), rngs=nnx.Rngs(0))
    for norm in (model.layers.attention.q_norm, model.layers.attention.k_norm):
        # Attention that is far from uniform, and heads whose queries differ in norm.
        norm.scale[...] = jnp.asarray(np.random.default_rng(1).uniform(0.4, 2.8, norm.scale[...].shape))
    return model


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    drawn = [rng.integers(CONFIG.vocab_size, size=n).tolist() for n in (512, 333)]
    return [Example(tokens[:-5], tokens[-5:], []) for tokens in drawn]


@pytest.fixture
def several_blocks(monkeypatch):
    monkeypatch.setattr(attention_rows, "ROW_BYTES", 100 * 4 * 3 * 4 * 512)  # 100 query rows, not a divisor of 512
    jax.clear_caches()


def test_positions_count_from_the_first_token(model):
    _, context = static._full_attention(model, jnp.ones((1, 512), jnp.int32))
    expected = rope_tables(CONFIG, jnp.arange(512)[None], 512)
    jax.tree.map(np.testing.assert_array_equal, context.rope, expected)


@pytest.mark.parametrize("method", ["dcam", "qada", "razor"])
def test_a_head_that_looks_far_back_stays_full(method):
    """Of two heads, one looks at its own token, the other always 8 tokens back: beyond a window of 4, one period."""
    length, back = 64, 8
    place = np.arange(length)
    looks = np.stack([place, np.maximum(place - back, 0)])  # [H, T]
    keys = np.broadcast_to(np.eye(length)[None, :, None], (1, length, 2, length))
    queries = 200.0 * np.eye(length)[looks].transpose(1, 0, 2)[None]  # [1, T, H, D]
    heads = Heads(jnp.asarray(queries), jnp.asarray(keys), jnp.array([length]), AttentionSpec())
    scores = np.asarray(STATISTICS[method](heads, back if method == "razor" else 4))
    scores = scores.max(-1) if method == "razor" else scores
    full = rank_heads(scores, larger_is_local=method in LARGER_IS_LOCAL).first(0.5)[0]
    np.testing.assert_array_equal(full, [[False, True]])


@pytest.mark.parametrize("method", dense_scores.SCORES)
def test_each_score_is_that_of_whole_matrices(model, examples, several_blocks, method):
    want = dense_scores.SCORES[method](model, examples, WINDOW)  # [L, H]
    got = static_scores(model, examples, method, Window(WINDOW), batch_size=2, seed=dense_scores.SEED)
    assert got.shape == (2, 2)
    np.testing.assert_allclose(got, want.reshape(2, 2, 2).mean(-1), atol=1e-5, rtol=0)
    assert np.ptp(want) > 0.02  # there is something to agree on


def test_fisher_of_a_text_counts_the_loss_of_every_token(model, examples):
    texts = [Example(e.prompt[:1], e.prompt[1:] + e.answer, []) for e in examples]
    got = static_scores(model, examples, "fisher-text", Window(WINDOW), batch_size=2)
    np.testing.assert_allclose(
        got, dense_scores.fisher(model, texts, WINDOW).reshape(2, 2, 2).mean(-1), atol=1e-5, rtol=0
    )
    answers = static_scores(model, examples, "fisher", Window(WINDOW), batch_size=2)
    assert np.abs(got - answers).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["apl", "proxy", "fisher"])
def test_padding_and_batches_change_nothing(model, examples, method):
    one = static_scores(model, examples, method, Window(WINDOW), batch_size=1)
    two = static_scores(model, examples[::-1], method, Window(WINDOW), batch_size=2)
    np.testing.assert_allclose(one, two, atol=1e-5)


def test_a_window_that_holds_everything_leaves_nothing_to_lose(model, examples):
    for method in ("qada", "fisher"):
        got = static_scores(model, examples, method, Window(512), batch_size=2)
        np.testing.assert_allclose(got, 1, atol=1e-6, err_msg=method)


@pytest.mark.parametrize("method", ["dcam", "razor"])
def test_examples_are_needed(model, method):
    with pytest.raises(ValueError, match="examples is empty"):
        static_scores(model, [], method, Window(8))


@pytest.mark.parametrize(("method", "least", "most"), [("fisher", 6, 8), ("dcam", 0, 4), ("razor", 0, 4)])
def test_only_what_the_answers_depend_on_points_at_the_planted_heads(method, least, most):
    # They look far from one token in 48 and say nothing to others, so that averages over queries pass them by.
    hits = []
    for seed in range(3):
        model, examples = planted_model(seed=seed), planted_examples(seed=seed)
        scores = static_scores(model, examples, method, Window(WINDOW_SIZE), batch_size=8)
        full = rank_heads(scores, larger_is_local=method in LARGER_IS_LOCAL).first(1 - len(PLANTED) / scores.size)[0]
        assert full.sum() == len(PLANTED)
        hits.append(int((full & planted_mask()).sum()))
    assert least <= np.mean(hits) <= most


OF_32K = [pytest.param(lazy_ratio, (32, 4, 1020), marks=pytest.mark.slow)]
OF_32K += [pytest.param(name, 1024, marks=pytest.mark.long) for name in dense_scores.SCORES]


@pytest.mark.parametrize(("statistic", "setting"), OF_32K)
def test_32k_tokens_take_less_than_2_gb(statistic, setting):
    config = dataclasses.replace(
        CONFIG, hidden_size=256, intermediate_size=768, num_attention_heads=16, num_key_value_heads=8, head_dim=32
    )
    model = Decoder(config, AttentionPattern.from_recipe("full", 2), rngs=nnx.Rngs(0))
    graph, weights = nnx.split(model)
    ((_, batch),) = answer_batches([Example([1] * 32763, [2] * 5, [])], 1)
    if statistic == "fisher":
        lowered = static.fisher_masses.lower(graph, weights, batch, setting)
    else:
        lowered = static.layer_statistics.lower(graph, weights, batch.tokens, batch.segment_ids, (statistic, setting))
    used = lowered.compile().memory_analysis().temp_size_in_bytes
    assert used < 2e9, f"{used / 1e9:.2f} GB"
    whole_matrix = 4 * 16 * 32768**2
    assert used < whole_matrix / 30


# ---- masks and heuristics ----


def test_ranking_windows_the_most_local_heads_and_keeps_the_count():
    scores = np.array([[0.1, 0.9, 0.5], [0.5, 0.2, 0.9]])
    assert rank_heads(scores, larger_is_local=True).first(0.5)[0].tolist() == [
        [True, False, False],
        [True, True, False],
    ]
    assert (~rank_heads(scores, larger_is_local=False).first(0.5)[0]).tolist() == [
        [True, False, True],
        [False, True, False],
    ]
    assert rank_heads(scores, larger_is_local=True).first(0.51)[0].sum() == 2  # rounded up
    assert (~rank_heads(np.zeros((2, 5)), larger_is_local=True).first(0.7)[0]).sum() == 7
    with pytest.raises(ConfigError, match="scores must be finite numbers"):
        rank_heads(np.array([[0.0, np.nan]]), larger_is_local=True)


def test_heuristics_by_hand():
    full = {kind: heuristic_mask(kind, 8, 4, 0.75) for kind in ("interleave", "begin-middle-end", "random")}
    assert np.flatnonzero(full["interleave"].all(1)).tolist() == [3, 7]
    assert full["begin-middle-end"].sum() == full["random"].sum() == 8
    assert set(full["random"].sum(1).tolist()) == {0, 4}
    uneven = heuristic_mask("interleave", 8, 4, 0.8)  # 6 full heads: a layer and a half
    assert uneven.sum(1).tolist() == [0, 0, 0, 4, 0, 0, 0, 2]
    for ratio in (0.0, 0.3, 1.0):
        for kind in (*full, "random-heads"):
            mask = heuristic_mask(kind, 8, 4, ratio, seed=1)
            assert (~mask).sum() == np.ceil(ratio * 32), (kind, ratio)


def test_masks_and_patterns_are_two_forms_of_one_thing():
    mask = np.array([[True, True], [False, False], [True, False]])
    pattern = head_pattern(mask, Window(16, 2), {"method": "by hand"})
    assert pattern.layer_types == ("full_attention", "sliding_attention", "head_hybrid_attention")
    np.testing.assert_array_equal(head_mask(pattern, 2), mask)
    with pytest.raises(ConfigError, match="layer 0 is routed"):
        head_mask(AttentionPattern.from_recipe("switch", 2), 2)


def test_turnover_and_jaccard_by_hand():
    small, large = np.ones(8, bool), np.ones(8, bool)
    small[[0, 1, 2, 3]] = False  # rho = .5
    large[[2, 3, 4, 5, 6, 7]] = False  # rho = .75: at most 2 of the 4 can be missing
    got = compare_masks(small, large)
    assert got == (0.5, 1.0, 1 - 2 / 8)
    assert compare_masks(small, small) == (0, 0, 0)
    swapped = swap_back(small, large, seed=0)
    assert (~swapped).sum() == 6
    assert not swapped[[0, 1]].any()
    with pytest.raises(ConfigError, match="different models"):
        compare_masks(small, large[:4])
