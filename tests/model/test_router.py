"""The router: its logit is f32 whatever the model's dtype, in training, in a prompt's pass and in decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import SOFTMAX, make

import swa_jax.model.attention
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.checkpoint.folder import load_model, open_checkpoint, save_model
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.model.attention import Router
from swa_jax.model.cache import allocate, cache_layouts
from swa_jax.model.decoder import Decoder
from swa_jax.train.config import TrainConfig
from swa_jax.train.step import make_validation_loss

SIZE = 384


@pytest.fixture
def close_calls():
    """A router, and normed hidden states [1, T, d] in bf16, whose exact logits [T] lie close to 0."""
    config = dataclasses.replace(SOFTMAX, hidden_size=SIZE, initializer_range=1.0)
    router = Router(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((20000, SIZE)), jnp.bfloat16)
    kernel = np.asarray(router.proj.kernel[...], np.float64)[:, 0]
    exact = np.asarray(x, np.float64) @ kernel
    near = np.abs(exact) < 0.05  # of a spread of 20
    bias = np.float32(-np.median(exact[near]))
    router.proj.bias[...] = jnp.full(1, bias)
    exact = exact + np.float64(bias)
    near &= np.abs(exact) > 1e-4
    assert near.sum() > 20
    return router, x[near][None], exact[near]


def test_rounding_turns_no_gate_over(close_calls):
    router, x, exact = close_calls
    kernel = router.proj.kernel[...].astype(jnp.bfloat16)
    rounded = (x @ kernel)[0, :, 0] + router.proj.bias[...].astype(jnp.bfloat16)
    assert ((np.asarray(rounded, np.float64) > 0) != (exact > 0)).any()  # in bf16 there are such gates
    logit, gate = jax.jit(lambda x: router(x))(x)
    assert logit.dtype == gate.dtype == jnp.float32
    np.testing.assert_allclose(logit[0], exact, atol=3e-5)
    np.testing.assert_array_equal(gate[0], exact > 0)


def test_a_tie_goes_to_the_window_and_still_has_a_gradient():
    """Half is not more than half; and the gate's gradient is the sigmoid's, 1/4 there."""
    router = Router(SOFTMAX, rngs=nnx.Rngs(0))
    nothing = jnp.zeros((1, 3, SOFTMAX.hidden_size))
    logit, gate = router(nothing)
    assert not logit.any()
    assert not gate.any()
    gradient = jax.grad(lambda x: router(x)[1].sum())(nothing)
    expected = np.broadcast_to(0.25 * router.proj.kernel[...][:, 0], nothing.shape)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def bfloat16_model():
    model = Decoder(SOFTMAX, make("SSSS"), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    bias = jax.random.normal(jax.random.key(1), (4, 1)) * 0.1  # that bf16 cannot hold
    model.layers.attention.router.proj.bias[...] = bias
    return model


def test_training_a_prompt_and_decoding_route_alike(monkeypatch):
    seen = []
    real = swa_jax.model.attention.Router.__call__

    def recorded(router, x):
        logit, gate = real(router, x)
        seen.append([str(a.dtype) for a in (x, router.proj.kernel[...], router.proj.bias[...], logit, gate)])
        return logit, gate

    monkeypatch.setattr(swa_jax.model.attention.Router, "__call__", recorded)
    model = bfloat16_model()
    tokens = jnp.arange(12)[None] % 61
    layouts = cache_layouts(model.config, model.pattern, 16)
    cache = allocate(model.config, layouts, 1, jnp.dtype(jnp.bfloat16))
    _, cache = jax.eval_shape(lambda cache: model.prefill(tokens, jnp.array([12]), cache, layouts), cache)
    jax.eval_shape(lambda cache: model.decode_step(tokens[:, 0], cache, layouts), cache)
    settings = {"output": "", "tokenizer": "none", "model": to_dict(SOFTMAX), "pattern": "switch"}
    stages = [{"steps": 1, "sequence_length": 12, "batch_size": 1}]
    config = from_dict(TrainConfig, settings | {"stages": stages, "bfloat16": True})
    trained = Decoder(SOFTMAX, make("SSSS"), rngs=nnx.Rngs(0))
    ones = jnp.ones((1, 12))
    batch = {"tokens": tokens, "segment_ids": ones.astype(jnp.int32), "weights": ones}
    jax.eval_shape(make_validation_loss(trained, config, None), nnx.state(trained), nnx.State({}), batch)
    assert len(seen) >= 3
    assert all(one == ["bfloat16", "float32", "float32", "float32", "float32"] for one in seen)


def test_a_bfloat16_checkpoint_keeps_its_routers(tmp_path):
    model = bfloat16_model()
    folder = save_model(model, tmp_path / "model")
    assert open_checkpoint(folder).dtype == jnp.bfloat16
    for dtype in (None, "bfloat16", "float32"):
        again = load_model(folder, dtype=dtype)
        assert again.embedding[...].dtype == (dtype or "bfloat16")
        for name in ("kernel", "bias"):
            ours, theirs = (getattr(m.layers.attention.router.proj, name)[...] for m in (model, again))
            assert theirs.dtype == jnp.float32
            np.testing.assert_array_equal(ours, theirs)
    export_model(folder, tmp_path / "exported", canary=False)
    import_model(tmp_path / "exported", tmp_path / "imported")
    assert open_checkpoint(tmp_path / "imported").tensors == open_checkpoint(folder).tensors
    again = load_model(tmp_path / "imported").layers.attention.router.proj.bias[...]
    np.testing.assert_array_equal(again, model.layers.attention.router.proj.bias[...])
    plain = save_model(model.with_pattern(make("wwww")), tmp_path / "plain")
    fresh = load_model(plain, make("SSSS"))
    assert fresh.layers.attention.router.proj.kernel[...].dtype == jnp.float32
