"""Selection scores are those of the model's own attention: its scale, softcap and ALiBi, not plain attention's."""

import dataclasses

import dense_scores
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import LAYER_KINDS, PLAIN
from whole_attention import whole_attention

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate import Example
from swa_jax.model.attention import model_spec
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import generate
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import lazy_ratios
from swa_jax.select.static import static_scores

WINDOW, LENGTH, LAST, SINKS = 9, 150, 20, 2
CONFIG = dataclasses.replace(PLAIN, num_hidden_layers=2, initializer_range=0.4)
SCALE = 0.11  # a third of the usual 1 / sqrt(8)
ALIBI = {
    "position_embedding": "alirope",
    "alibi_negative_heads": 3,
    "alibi_positive_heads": 1,
    "slope_schedule": "press",
}
OWN = {
    "scale": {"attention_scale": SCALE},
    "softcap": {"attention_softcap": 0.7},
    "alibi": ALIBI,
    "all": {
        "attention_scale": SCALE,
        "attention_softcap": 1.3,
        **ALIBI,
        "rope_layers": ("none", "local"),
        "norm_placement": "sandwich",
        "qk_norm": True,
        "qk_norm_over": "projection",
        "residual_multiplier": 0.8,
    },
    "parallel": {
        "norm_type": "layer",
        "norm_placement": "parallel",
        "rope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
TOKENS = np.random.default_rng(0).integers(61, size=LENGTH).tolist()
EXAMPLES = [Example(TOKENS[:-3], TOKENS[-3:], [])]


def model_of(**changes):
    return Decoder(dataclasses.replace(CONFIG, **changes), AttentionPattern.from_recipe("full", 2), rngs=nnx.Rngs(0))


def slow_but(names, fast):
    """All of `names`, those that are not in `fast` marked slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", params=slow_but(OWN, ["all"]))
def own(request):
    """A model, and its logits under full attention."""
    model = model_of(**OWN[request.param])
    logits, _, weights, _ = whole_attention(model, TOKENS)
    plain = whole_attention(model_of(), TOKENS)[2]
    assert float(jnp.abs(weights - plain).max()) > 0.1  # what the variant changes can be seen
    return model, np.asarray(logits)


def test_the_model_computes_what_its_configuration_says(own):
    model, logits = own
    np.testing.assert_allclose(model(jnp.asarray([TOKENS]))[0], logits, atol=2e-4)


@pytest.mark.parametrize("method", dense_scores.SCORES)
def test_scores_are_those_of_the_model(own, method):
    window = LENGTH if method == "apl" else WINDOW
    wanted = dense_scores.SCORES[method](own[0], EXAMPLES, window).reshape(2, 2, 2).mean(-1)  # [L, H] -> [L, K]
    got = static_scores(own[0], EXAMPLES, method, Window(window), seed=dense_scores.SEED)
    np.testing.assert_allclose(got, wanted, atol={"apl": 1e-6, "fisher": 1e-4}.get(method, 1e-5))


def test_lazy_ratios_are_those_of_the_model(own):
    wanted = dense_scores.lazy_ratios(own[0], EXAMPLES[0].prompt, LAST, SINKS, WINDOW)
    got = lazy_ratios(own[0], EXAMPLES, last_queries=LAST, num_sink_tokens=SINKS, recent_keys=WINDOW)
    np.testing.assert_allclose(got[0], wanted, atol=1e-5)


def twins():
    """The same function twice: with `attention_scale`, and with that scale in the queries' weights."""
    scaled, folded = model_of(attention_scale=SCALE), model_of()
    kernel = folded.layers.attention.q_proj.kernel
    kernel[...] = kernel[...] * (SCALE * CONFIG.head_dim**0.5)
    return scaled, folded


@pytest.mark.parametrize("recipe", ["full", "streaming"])
def test_a_scale_generates_like_the_same_scale_in_the_weights(recipe):
    pattern = AttentionPattern.from_recipe(recipe, 2, sliding_window=None if recipe == "full" else WINDOW)
    one, other = (
        generate(model.with_pattern(pattern), [EXAMPLES[0].prompt[:40]], max_new_tokens=8) for model in twins()
    )
    assert one == other


def test_the_spec_of_a_model_has_all_that_its_configuration_has():
    config = dataclasses.replace(CONFIG, attention_activation="sigmoid", **OWN["all"])
    spec = model_spec(config, AttentionPattern.from_recipe("streaming", 2, sliding_window=7))
    assert (spec.window, spec.activation, spec.scale, spec.logit_softcap) == (7, "sigmoid", SCALE, 1.3)
    assert spec.num_sink_tokens > 0
    for name in ("attention_scale", "attention_softcap"):
        with pytest.raises(ConfigError, match=f"{name} must be above 0, got -1"):
            dataclasses.replace(CONFIG, **{name: -1})


def test_sigmoid_attention_has_no_such_scores():
    model = model_of(attention_activation="sigmoid")
    with pytest.raises(ConfigError, match="dcam scores heads of softmax attention, the model has sigmoid"):
        static_scores(model, EXAMPLES, "dcam", Window(WINDOW))


def test_layers_with_other_numbers_of_query_heads_have_no_such_scores():
    changes = {"sink_logits": False, "global_sink_logits": None, "num_key_value_heads": 1}
    config = dataclasses.replace(LAYER_KINDS, **changes)
    pattern = AttentionPattern.from_recipe("full", config)
    model = nnx.eval_shape(lambda: Decoder(config, pattern, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r"^dcam scores heads where .* the model's have 2 or 4: choose by nll"):
        static_scores(model, [], "dcam", Window(5))
    with pytest.raises(ConfigError, match=r"^LightTransfer scores layers where .* 2 or 4: choose by nll"):
        lazy_ratios(model, [])
