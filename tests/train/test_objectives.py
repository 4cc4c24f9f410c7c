"""Chunked cross-entropy against the plain form, its memory, and SwiAttn's regulariser against numbers by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swa_jax.model.attention import Routing
from swa_jax.model.loss import Teacher, TeacherStates, TokenLoss, next_token_targets, token_loss
from swa_jax.train.objectives import SwitchLoss, mean_by_layer, switch_regularizer

VOCABULARY = 300  # of which the backward pass takes 128 tokens at a time, and a rest


@functools.cache
def random_case(batch=2, length=37, vocabulary=VOCABULARY):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (batch, length, 8))
    head = jax.random.normal(keys[1], (8, vocabulary))
    tokens = jax.random.randint(keys[2], (batch, length), 0, vocabulary)
    weights = jax.random.uniform(keys[3], (batch, length)) * (jnp.arange(length) % 3 > 0)
    return hidden, head, tokens, weights


def value_and_gradients(function, *arguments):
    return jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(*arguments)


def mean_loss(loss):
    return jnp.sum(loss.nll * loss.weight) / jnp.sum(loss.weight)


@pytest.mark.parametrize(("chunk", "vocabulary"), [(16, VOCABULARY), (16, 29), (1000, VOCABULARY)])
@pytest.mark.parametrize("scaled", [{}, {"logit_multiplier": 3.0, "logit_softcap": 2.0}])
def test_chunked_cross_entropy_equals_the_plain_form_with_gradients(chunk, vocabulary, scaled):
    hidden, head, targets, weights = random_case(vocabulary=vocabulary)
    mix = np.random.default_rng(9).standard_normal(weights.shape).astype(np.float32) / weights.size

    def plain(hidden, head):
        logits = hidden @ head
        logits = 2 * jnp.tanh(3 * logits / 2) if scaled else logits
        log_z = jax.nn.logsumexp(logits, axis=-1)
        nll = jnp.where(weights > 0, log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0], 0)
        return jnp.sum(nll * weights) / jnp.sum(weights) + (mix * jnp.where(weights > 0, log_z, 0)).sum(), nll

    def chunked(hidden, head):
        loss = token_loss(hidden, head, targets, weights, chunk, **scaled)
        return mean_loss(loss) + (mix * loss.log_z).sum(), loss.nll

    (ours, nll), gradients = value_and_gradients(chunked, hidden, head)
    (theirs, expected_nll), expected = value_and_gradients(plain, hidden, head)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_allclose(nll, expected_nll, rtol=2e-5, atol=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_the_head_s_gradient_in_bfloat16_does_not_lose_by_chunks():
    hidden, head, targets, weights = random_case(batch=8, length=512)
    exact = jax.jit(jax.grad(lambda w: mean_loss(token_loss(hidden, w, targets, weights, 16))))(head)
    hidden, narrow = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    whole, parts = (
        jax.jit(jax.grad(lambda w, chunk=chunk: mean_loss(token_loss(hidden, w, targets, weights, chunk))))(narrow)
        for chunk in (4096, 16)
    )
    assert parts.dtype == jnp.bfloat16
    error_whole, error_parts = (
        jnp.linalg.norm((x - exact).astype(jnp.float32)) / jnp.linalg.norm(exact) for x in (whole, parts)
    )
    assert error_parts < 1.2 * error_whole


def test_correct_counts_scored_positions_whose_target_is_the_likeliest():
    hidden, head, _, weights = random_case()
    second, best = jnp.moveaxis(jnp.argsort(hidden @ head, -1)[..., -2:], -1, 0)
    right = jnp.arange(best.shape[1]) % 2 == 0
    loss = token_loss(hidden, head, jnp.where(right, best, second), weights, 16)
    np.testing.assert_array_equal(loss.correct, right & (weights > 0))


def test_logits_never_exist_for_the_whole_sequence():
    length, size, vocabulary = 16384, 8, 4096
    shapes = [(1, length, size), (size, vocabulary)]
    hidden, head = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    rows = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(hidden, head, targets):
        return mean_loss(token_loss(hidden, head, targets, jnp.ones_like(targets, jnp.float32)))

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * vocabulary * 4 / 4


def test_targets_stay_inside_their_segment_and_skip_padding():
    tokens = jnp.array([[5, 6, 7, 8, 9, 0, 0]])
    segments = jnp.array([[1, 1, 2, 2, 2, 0, 0]])
    targets, weights = next_token_targets(tokens, segments, None)
    np.testing.assert_array_equal(targets[0, :4], [6, 7, 8, 9])
    np.testing.assert_array_equal(weights, [[1, 0, 1, 1, 0, 0, 0]])
    _, weights = next_token_targets(tokens, segments, jnp.array([[9.0, 2, 9, 3, 0, 9, 9]]))
    np.testing.assert_array_equal(weights, [[2, 0, 3, 0, 0, 0, 0]])
    _, weights = next_token_targets(tokens, jnp.ones_like(tokens), None)  # one document fills the row
    np.testing.assert_array_equal(weights, [[1, 1, 1, 1, 1, 1, 0]])


def routing_of(logit, disagreement):
    logit = jnp.asarray(logit)
    return Routing(logit, (logit > 0).astype(jnp.float32), jnp.asarray(disagreement))


def test_switch_regularizer_is_equations_7_to_9():
    logit = [[[0.3, -1.0, 2.0]], [[0.0, 0.5, 1.0]]]  # [L = 2, B = 1, T = 3]
    disagreement = [[[0.01, 0.02, 0.5]], [[0.0, 0.1, 0.5]]]
    loss = TokenLoss(jnp.array([[1.5, 0.2, 0.0]]), jnp.array([[1.0, 1.0, 0.0]]), *[jnp.zeros((1, 3))] * 2)
    expected = 0.0
    for layer in range(2):
        for t in range(2):  # the third position has no target
            gamma = 1e-3 / (0.1 + float(loss.nll[0, t]) + 100 * disagreement[layer][0][t])
            expected += gamma * np.log1p(np.exp(logit[layer][0][t]))
    value = switch_regularizer(routing_of(logit, disagreement), loss, SwitchLoss(), jnp.float32(2))
    np.testing.assert_allclose(value, expected / 4, rtol=1e-5)


def test_the_adaptive_weight_carries_no_gradient():
    def penalty(logit, disagreement, nll):
        loss = TokenLoss(nll, jnp.ones_like(nll), nll, nll)
        return switch_regularizer(Routing(logit, logit, disagreement), loss, SwitchLoss(), jnp.float32(3))

    shape = (2, 1, 3)
    gradients = jax.grad(penalty, (0, 1, 2))(jnp.ones(shape), jnp.ones(shape), jnp.ones(shape[1:]))
    assert np.all(np.asarray(gradients[0]) > 0)
    assert not np.any(gradients[1])
    assert not np.any(gradients[2])


def test_the_mean_by_layer_leaves_padding_out():
    gates = jnp.array([[[1.0, 1.0, 1.0, 0.0]], [[0.0, 0.0, 1.0, 1.0]]])
    np.testing.assert_allclose(mean_by_layer(gates, jnp.array([[1, 1, 0, 0]]), jnp.float32(2)), [1.0, 0.0])


# ---- KL to a teacher's top K ----


def teacher_case(count, vocabulary):
    hidden, head, targets, weights = random_case(vocabulary=vocabulary)
    logits = np.random.default_rng(7).standard_normal((*targets.shape, head.shape[1])) * 2
    logp = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    values, ids = jax.lax.top_k(logp, count)
    return hidden, head, targets, weights, logp, Teacher(ids, values)


@pytest.mark.parametrize(("chunk", "count", "vocabulary"), [(1000, 1, VOCABULARY), (16, 5, VOCABULARY), (16, 28, 29)])
def test_divergence_from_the_top_k_and_the_rest_as_one_class(chunk, count, vocabulary):
    """KL over K + 1 classes by the plain formula, with its gradients. With V - 1 of V tokens it is the whole KL."""
    hidden, head, targets, weights, logp, teacher = teacher_case(count, vocabulary)

    def plain(hidden, head):
        logq = jax.nn.log_softmax(hidden @ head)
        p, q = jnp.exp(teacher.logprobs), jnp.exp(jnp.take_along_axis(logq, teacher.tokens, -1))
        p = jnp.concatenate([p, 1 - p.sum(-1, keepdims=True)], -1)
        q = jnp.concatenate([q, 1 - q.sum(-1, keepdims=True)], -1)
        return mixed(jnp.where(weights > 0, (p * (jnp.log(p) - jnp.log(q))).sum(-1), 0))

    def ours(hidden, head):
        return mixed(token_loss(hidden, head, targets, weights, chunk, teacher=teacher).divergence)

    mix = np.random.default_rng(9).standard_normal(weights.shape).astype(np.float32)
    mixed = lambda divergence: ((divergence * mix).sum(), divergence)  # noqa: E731
    (_, found), gradients = value_and_gradients(ours, hidden, head)
    (_, expected), theirs = value_and_gradients(plain, hidden, head)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    if count == vocabulary - 1:
        logq = jax.nn.log_softmax(hidden @ head)
        whole = jnp.where(weights > 0, (jnp.exp(logp) * (logp - logq)).sum(-1), 0)
        np.testing.assert_allclose(found, whole, rtol=1e-3, atol=1e-4)
    for got, want in zip(gradients, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("chunk", "vocabulary"), [(16, VOCABULARY), (16, 29), (1000, VOCABULARY)])
def test_divergence_from_a_whole_distribution_at_a_temperature(chunk, vocabulary):
    hidden, head, targets, weights = random_case(vocabulary=vocabulary)
    rng = np.random.default_rng(8)
    theirs, their_head, mix = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (hidden.shape, head.shape, weights.shape)
    )
    learned = jnp.asarray(rng.integers(2, size=weights.shape), jnp.float32)

    def plain(hidden, head):
        logp, logq = (jax.nn.log_softmax(x @ w / 1.5) for x, w in ((theirs, their_head), (hidden, head)))
        divergence = jnp.where(learned > 0, (jnp.exp(logp) * (logp - logq)).sum(-1), 0)
        return (divergence * mix).sum(), divergence

    def ours(hidden, head):
        said = TeacherStates(theirs, their_head, learned, 1.5)
        divergence = token_loss(hidden, head, targets, weights, chunk, teacher=said).divergence
        return (divergence * mix).sum(), divergence

    (_, found), gradients = value_and_gradients(ours, hidden, head)
    (_, expected), exact = value_and_gradients(plain, hidden, head)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for got, want in zip(gradients, exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_divergence_from_oneself_is_nothing():
    """Also where the K likeliest hold all of the probability that f32 and the file's float16 can tell."""
    hidden, head, targets, weights = random_case(vocabulary=29)

    @jax.jit
    def divergence(head):
        values, ids = jax.lax.top_k(jax.nn.log_softmax(hidden @ head), 3)
        teacher = Teacher(ids, values.astype(jnp.float16).astype(jnp.float32))

        def total(hidden):
            found = token_loss(hidden, head, targets, weights, 16, teacher=teacher).divergence
            return found.sum(), found

        return jax.value_and_grad(total, has_aux=True)(hidden)

    for sharpness in (1.0, 40.0):
        (_, found), gradient = divergence(head * sharpness)
        assert jnp.abs(found).max() < 3e-3
        assert jnp.isfinite(gradient).all()
        assert jnp.abs(gradient).max() < 0.02 * sharpness
