"""`nope_full_layers`: full layers without rotary embeddings, against a model that is written so, and by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import fails
from flax import nnx
from tiny_models import PLAIN, SHARED_KEYS, SOFTMAX, TWO_SHAPES, base_model, byte_checkpoint, logits_of, make, model_of

from pallas_kernels.math.reference import attention
from pallas_kernels.math.spec import AttentionSpec, Coordinates, PerHead
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families import apply_pattern, hf_config
from swa_jax.checkpoint.servers import SERVERS, served_config
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern

CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # of logits of order ten, f32
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 20))

pytestmark = pytest.mark.usefixtures("quick_compilation")


def off(pattern):
    return dataclasses.replace(pattern, nope_full_layers=False)


def written_so(model):
    """The same weights in a model whose own configuration rotates all but the full layers."""
    kinds = ["none" if kind == "full_attention" else "global" for kind in model.pattern.layer_types]
    config = dataclasses.replace(model.config, rope_layers=tuple(kinds))
    other = Decoder(config, off(model.pattern), rngs=nnx.Rngs(1))
    nnx.update(other, nnx.state(model))
    return other


def test_it_is_the_model_that_is_written_so():
    model = model_of("nope-every-kind")
    options = {"segment_ids": jnp.array([[1] * 11 + [2] * 9] * 2), "full_from": jnp.array([[7, 4], [9, 9]])}
    actual = logits_of(model, TOKENS, **options)
    np.testing.assert_allclose(actual, logits_of(written_so(model), TOKENS, **options), **CLOSE)
    rotated = logits_of(model.with_pattern(off(model.pattern)), TOKENS, **options)
    assert np.abs(actual - rotated).max() > 1e-1
    back = model.with_pattern(off(model.pattern)).with_pattern(model.pattern)
    np.testing.assert_array_equal(actual, logits_of(back, TOKENS, **options))


def test_two_layers_by_hand():
    """A windowed layer and a full one in float32; only the first is rotated."""
    config = dataclasses.replace(PLAIN, num_hidden_layers=2, initializer_range=0.3)
    model = Decoder(config, make("wF", nope_full_layers=True), rngs=nnx.Rngs(0))
    weights = {path: np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(model))}
    length, angles = TOKENS.shape[1], np.arange(20)[:, None] * 10000.0 ** (-np.arange(4) / 4)  # [T, D/2]
    cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))  # [T, 1, D/2]

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * scale

    def rotate(x):
        first, second = x[..., :4], x[..., 4:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = weights["embedding",][TOKENS]
    where = Coordinates(*(jnp.broadcast_to(jnp.arange(length), TOKENS.shape) for _ in range(4)))
    for layer, window in enumerate((6, None)):
        of = {path[-2:]: value[layer] for path, value in weights.items() if path[0] == "layers"}
        read = norm(x, of["input_norm", "scale"])
        q, k, v = ((read @ of[f"{n}_proj", "kernel"]).reshape(2, length, -1, 8) for n in "qkv")
        if layer == 0:
            q, k = rotate(q), rotate(k)
        out, _ = attention(*map(jnp.asarray, (q, k, v)), AttentionSpec(window), where, PerHead())
        x = x + np.asarray(out).reshape(2, length, -1) @ of["o_proj", "kernel"]
        read = norm(x, of["post_attention_norm", "scale"])
        gate, up = (read @ of[f"{n}_proj", "kernel"] for n in ("gate", "up"))
        x = x + (np.asarray(jax.nn.silu(gate)) * up) @ of["down_proj", "kernel"]
    np.testing.assert_allclose(
        logits_of(model, TOKENS), norm(x, weights["norm", "scale"]) @ weights["lm_head", "kernel"], **CLOSE
    )


@pytest.mark.parametrize("config", [TWO_SHAPES, SHARED_KEYS], ids=["two-shapes", "shared-keys"])
def test_no_full_layer_knows_of_positions(config):
    """Where windows hold the query's own key alone, in which rotation shows nothing, positions change nothing."""
    pattern = make("wFwF", sliding_window=1, nope_full_layers=True)
    model, further = base_model(config).with_pattern(pattern), 3 * jnp.broadcast_to(jnp.arange(20), TOKENS.shape)
    np.testing.assert_allclose(logits_of(model, TOKENS, positions=further), logits_of(model, TOKENS), **CLOSE)
    rotated = model.with_pattern(off(pattern))
    assert np.abs(logits_of(rotated, TOKENS, positions=further) - logits_of(rotated, TOKENS)).max() > 1e-2


def test_the_gradient_is_that_of_the_model_that_is_written_so():
    @nnx.jit
    def gradient(model):
        def loss(model):
            return -jax.nn.log_softmax(model(TOKENS))[:, :-1][..., 3].mean()

        return nnx.grad(loss)(model).layers.attention.q_proj.kernel[...]

    model = base_model(SOFTMAX).with_pattern(make("wFwF", nope_full_layers=True))
    actual = gradient(model)
    np.testing.assert_allclose(actual, gradient(written_so(model)), atol=1e-6, rtol=1e-4)
    rotated = gradient(model.with_pattern(off(model.pattern)))
    assert np.abs(actual - rotated).max() > 1e-2 * np.abs(actual).max()


@pytest.mark.parametrize("types", ["wFwF", "FwhF"])
def test_answers_are_scored_without_rotation(types):
    """Patterns that share a compilation otherwise: it must not rotate these."""
    heads = tuple((1,) if kind == "h" else () for kind in types)
    model = base_model(SOFTMAX).with_pattern(make(types, heads, nope_full_layers=True))
    examples = [Example(row[:15], row[15:], []) for row in TOKENS.tolist()]
    actual = score_answers(model, examples).nll
    np.testing.assert_allclose(actual, score_answers(written_so(model), examples).nll, **CLOSE)
    np.testing.assert_array_equal(actual, score_answers(base_model(SOFTMAX), examples, pattern=model.pattern).nll)
    assert np.abs(actual - score_answers(model, examples, pattern=off(model.pattern)).nll).max() > 1e-2


def test_recipe_and_json():
    pattern = AttentionPattern.from_recipe("interleave-1-in-2+fa-decode+nope", 4, sliding_window=6)
    assert pattern == make("wFwF", full_attention_decode=True, nope_full_layers=True) != off(pattern)
    assert AttentionPattern.from_json(pattern.to_json()) == pattern
    assert "full layers without rotary embeddings (NoPE)" in str(pattern)
    assert "NoPE" not in str(off(pattern))


@pytest.mark.parametrize(
    ("config", "types", "sentence"),
    [
        (dataclasses.replace(SOFTMAX, position_embedding="none"), "wFwF", "but position_embedding = none has none"),
        (SOFTMAX, "FFFF", "this one has only full layers, and would know no positions"),
        (SOFTMAX, "wwhS", "this one has no full layer"),
        (SHARED_KEYS, "wFFF", "layer 2 reads the keys of layer 0, and one of the two is full"),
    ],
)
def test_where_it_makes_no_sense(config, types, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make(types, nope_full_layers=True).validate(config)


def test_exports_say_that_they_cannot():
    pattern = make("wFwF", nope_full_layers=True)
    hf = hf_config(PLAIN)
    assert "its full layers have no rotary embeddings (nope_full_layers)" in apply_pattern(hf, pattern)[1]
    for server in ("transformers", *SERVERS):
        with pytest.raises(ConfigError, match="its full layers have no rotary embeddings"):
            served_config(server, hf, pattern)


def test_nothing_is_chosen_for_a_model_that_was_trained_so(byte_tokenizer, tmp_path):
    model = byte_checkpoint(tmp_path, byte_tokenizer, make("wF", nope_full_layers=True), num_hidden_layers=2)
    wanted = ("--window", 16, "--out", tmp_path / "out.json")
    asked = [
        ("select", "interleave", model, "--budget", 1, *wanted),
        ("compare", model, "--method", "interleave", "--ratio", 0.5, *wanted),
        ("adapt", model, tmp_path / "adapted", "--kv-budget", 0.5),
    ]
    for words in asked:
        assert fails(*words).startswith("this model's own pattern has nope_full_layers")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}
