"""Full-attention ratio by layer, position and needle depth, with routers whose decision is known."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import WIDER, make

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import Example
from swa_jax.evaluate.routing import answer_routing, keys_read, measure_routing, text_routing
from swa_jax.model.decoder import Decoder

CONFIG = dataclasses.replace(WIDER, initializer_range=0.3)


def routed(biases: list[float], pattern: str = "SSSS", weight: float = 0.0) -> Decoder:
    """A model whose routers say full where the bias is positive; with a weight it depends on the token as well."""
    model = Decoder(CONFIG, make(pattern, sliding_window=4, num_sink_tokens=1), rngs=nnx.Rngs(0))
    router = model.layers.attention.router.proj
    router.kernel[...] = router.kernel[...] * weight
    router.bias[...] = jnp.array(biases, jnp.float32)[:, None]
    return model


@functools.partial(jax.jit, static_argnums=0)
def jitted_gates(graph, weights, tokens):
    return nnx.merge(graph, weights).features(tokens)[1].gate


def gates(model: Decoder, tokens) -> np.ndarray:
    """The routers' decisions on whole rows: [L, B, T]."""
    return np.asarray(jitted_gates(*nnx.split(model), np.asarray(tokens)))


def test_layers_count_as_their_routers_say_and_keys_follow() -> None:
    tokens = np.random.default_rng(0).integers(0, 64, 43).tolist()
    result, by_position = text_routing(routed([1, -1, -1, 1]), tokens, length=10, batch_size=3)
    assert [layer.mean for layer in result.by_layer] == [1, 0, 0, 1]
    assert result.full_ratio.mean == 0.5
    assert result.num_units == 4
    # Visible: all of them, or a window of 4 and one sink token.
    full, window = np.arange(1, 11), np.minimum(np.arange(1, 11), 5)
    np.testing.assert_allclose(by_position, (full + window) / 2)
    assert result.keys_read.mean == pytest.approx((full + window).mean() / 2)
    assert result.keys_of_full == full.mean()


def test_a_start_token_begins_every_sequence_and_does_not_count() -> None:
    model = routed([0, 0, 0, 0], weight=5.0)
    tokens = np.random.default_rng(1).integers(0, 64, (5, 11))
    result, by_position = text_routing(model, tokens.ravel().tolist(), length=12, start=[7], batch_size=2)
    want = gates(model, np.insert(tokens, 0, 7, axis=1))[:, :, 1:].mean((1, 2))
    assert 0 < want.min() < want.max() < 1
    assert result.full_ratio.low < result.full_ratio.mean < result.full_ratio.high
    np.testing.assert_allclose([layer.mean for layer in result.by_layer], want, rtol=1e-6)
    assert (len(by_position), result.num_units) == (12, 5)
    report = measure_routing("name", model, tokens.ravel().tolist(), {}, length=12, start=[7], batch_size=2)
    assert report.rows[0]["full_ratio"] == pytest.approx(want.mean(), rel=1e-6)


def test_layers_without_a_router_count_by_their_kind() -> None:
    tokens = np.random.default_rng(0).integers(0, 64, 30).tolist()
    result, _ = text_routing(routed([-1, -1, -1, -1], "SFwS"), tokens, length=10)
    assert [layer.mean for layer in result.by_layer] == [0, 1, 0, 0]


def test_answers_are_counted_at_the_queries_that_predict_them() -> None:
    model = routed([0, 0, 0, 0], weight=5.0)
    rng = np.random.default_rng(2)
    examples = [
        Example(rng.integers(0, 64, p).tolist(), rng.integers(0, 64, a).tolist(), ["?"])
        for p, a in ((20, 5), (13, 2), (9, 7))
    ]
    result = answer_routing(model, examples, batch_size=2)
    ratios, keys = [], []
    rows = [np.resize(example.prompt + example.answer, 25) for example in examples]  # what comes later is not seen
    for example, gate_of_row in zip(examples, gates(model, rows).swapaxes(0, 1), strict=True):
        some = slice(len(example.prompt) - 1, len(example.prompt) + len(example.answer) - 1)
        gate = gate_of_row[:, some]  # [L, A]
        ratios.append(gate.mean(1))
        visible = np.arange(some.start, some.stop) + 1
        keys.append(np.where(gate > 0, visible, np.minimum(visible, 5)).mean())
    np.testing.assert_allclose([layer.mean for layer in result.by_layer], np.mean(ratios, 0), rtol=1e-6)
    assert result.keys_read.mean == pytest.approx(np.mean(keys))
    cells = {("t", 30, 0.0): examples[:2], ("t", 30, 1.0): examples[2:]}
    report = measure_routing("name", model, [], cells, length=8)
    assert [(row["data"], row["length"], row["depth"]) for row in report.rows] == list(cells)
    assert report.rows[1]["full_ratio"] == pytest.approx(ratios[2].mean())
    assert report.by_layer == []
    assert [depth for depth, _ in report.by_depth["t, 30 tokens"]] == [0, 1]
    assert report.by_depth["t, 30 tokens"][1][1].mean == pytest.approx(ratios[2].mean())


def test_long_and_short_answers_are_counted_together() -> None:
    """They go through the model in batches of their own."""
    rng = np.random.default_rng(3)
    examples = [Example([1, 2, 3], rng.integers(0, 64, length).tolist(), ["?"]) for length in (3, 70)]
    model = routed([0, 0, 0, 0], weight=5.0)
    together, apart = answer_routing(model, examples), [answer_routing(model, [one]) for one in examples]
    assert together.full_ratio.mean == pytest.approx(np.mean([one.full_ratio.mean for one in apart]))
    assert together.keys_read.mean == pytest.approx(np.mean([one.keys_read.mean for one in apart]))


def test_head_hybrids_read_by_the_share_of_their_full_heads() -> None:
    pattern = dataclasses.replace(make("wwww", sliding_window=4), num_sink_tokens=1)
    got = keys_read(np.array([[[0.5], [1.0]]]), np.array([[9]]), pattern)
    np.testing.assert_allclose(got, [[[7.5], [10]]])


def test_a_model_without_routers_has_no_routing() -> None:
    model = Decoder(CONFIG, make("FwFw", sliding_window=4), rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="no layer of this pattern is routed"):
        text_routing(model, [1] * 10, length=5)
    with pytest.raises(ConfigError, match="too few for one sequence of 20"):
        text_routing(routed([1, 1, 1, 1]), [1] * 10, length=20)
