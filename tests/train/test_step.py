"""One training step seen from outside: pieces of a batch, keys for dropout, the held-out loss, its data."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_models import model_of

import swa_jax.train.step as step_module
from pallas_kernels.math.spec import NEVER
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.model.attention import Routing
from swa_jax.model.layer_types import FULL, SWITCH
from swa_jax.model.loss import TokenLoss, next_token_targets
from swa_jax.model.sharding import MeshConfig, Partition, make_mesh
from swa_jax.train import stage_data
from swa_jax.train.config import TrainConfig
from swa_jax.train.loop import place_batch
from swa_jax.train.objectives import SwitchLoss, totals_of
from swa_jax.train.step import _added, _gradients, init_state, make_loss, make_step, make_validation_loss

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 9, size=(4, 6)).astype(np.int32)
BATCH = {
    "tokens": TOKENS,
    "segment_ids": np.array([[1] * 6, [1] * 6, [1, 1, 2, 2, 2, 0], [1, 1, 1, 0, 0, 0]], np.int32),
    "weights": RNG.uniform(1, 2, size=TOKENS.shape).astype(np.float32),
}
PARAMS = {"scale": jnp.float32(3.0)}


def weighted_targets(params, batch, totals, key):
    """The scaled targets' weighted mean over the whole batch: a piece's loss is its share of it."""
    targets, weights = next_token_targets(batch["tokens"], batch["segment_ids"], batch["weights"])
    loss = params["scale"] * jnp.sum(targets * weights) / totals.weight
    drawn = jnp.float32(0) if key is None else jax.random.uniform(key)
    return loss, {"loss": loss, "drawn": drawn}


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_of_a_batch_add_up_to_the_whole(pieces):
    whole, expected = _gradients(weighted_targets, PARAMS, BATCH, 1, None, None)
    gradients, metrics = _gradients(weighted_targets, PARAMS, BATCH, pieces, None, None)
    np.testing.assert_allclose(gradients["scale"], whole["scale"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)


def test_each_piece_has_a_key_of_its_own():
    key = jax.random.key(7)
    _, metrics = _gradients(weighted_targets, PARAMS, BATCH, 4, None, key)
    drawn = [jax.random.uniform(piece) for piece in jax.random.split(key, 4)]
    np.testing.assert_allclose(metrics["drawn"], sum(drawn), rtol=1e-6)


@pytest.fixture
def made_up(monkeypatch):
    """A model that is nothing but its loss and LoRA's dropout."""

    def make_loss(model, config, partition, teacher=None):
        return lambda params, frozen, batch, totals, key, state=None: weighted_targets(params, batch, totals, key)

    monkeypatch.setattr(step_module, "make_loss", make_loss)
    return types.SimpleNamespace(lora=types.SimpleNamespace(dropout=0.5))


def test_dropout_is_drawn_anew_in_each_step_and_from_the_seed(made_up):
    drawn = []
    for seed in (0, 0, 1):
        config = types.SimpleNamespace(seed=seed, on_nonfinite="stop", spike_factor=None, xla_options={})
        optimizer = optax.sgd(0.0)
        step, state = make_step(made_up, optimizer, config, None), init_state(dict(PARAMS), optimizer)
        for _ in range(3):
            state, metrics = step(jax.tree.map(jnp.copy, state), BATCH, 1)
            drawn.append(float(metrics["drawn"]))
    assert drawn[:3] == drawn[3:6]
    assert len(set(drawn)) == 6


def test_the_held_out_loss_can_be_summed_over_batches_by_weight(made_up):
    loss = make_validation_loss(made_up, types.SimpleNamespace(xla_options={}), None)
    parts = [loss(PARAMS, {}, {name: x[rows] for name, x in BATCH.items()}) for rows in (slice(0, 1), slice(1, 4))]
    whole, weight = loss(PARAMS, {}, BATCH)
    np.testing.assert_allclose(sum(total for total, _ in parts), whole, rtol=1e-6)
    np.testing.assert_allclose(sum(count for _, count in parts), weight, rtol=1e-6)
    expected, _ = weighted_targets(PARAMS, BATCH, types.SimpleNamespace(weight=weight), None)
    np.testing.assert_allclose(whole / weight, expected, rtol=1e-6)


def test_answers_see_what_the_pattern_lets_them_see_in_training():
    """`full_from` of a batch is taken by a pattern with full-attention decode, and by no other."""
    stages = [{"steps": 1, "sequence_length": 24, "batch_size": 1}]
    tokens = RNG.integers(1, 61, size=(1, 24)).astype(np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "weights": np.ones(tokens.shape, np.float32)}
    for name, matters in (("window+fa-decode", True), ("window", False)):
        model = model_of(name)
        settings = {"output": "-", "tokenizer": "-", "stages": stages, "model": to_dict(model.config)}
        loss = make_validation_loss(model, from_dict(TrainConfig, settings), None)
        losses = [
            float(loss(nnx.state(model), nnx.State({}), batch | {"full_from": np.array([[start]], np.int32)})[0])
            for start in (12, NEVER)
        ]
        assert (losses[0] != losses[1]) == matters, name


def test_the_z_loss_has_its_weight():
    tokens = RNG.integers(1, 61, size=(1, 12)).astype(np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "weights": np.ones(tokens.shape, np.float32)}
    model, stages = model_of("window"), [{"steps": 1, "sequence_length": 12, "batch_size": 1}]
    settings = {"output": "-", "tokenizer": "-", "stages": stages, "model": to_dict(model.config), "z_loss": 0.25}
    loss_of = make_loss(model, from_dict(TrainConfig, settings), None)
    totals = totals_of(batch["segment_ids"], batch["weights"])
    loss, metrics = jax.jit(loss_of)(nnx.state(model), nnx.State({}), batch, totals, None)
    assert metrics["z_loss"] > 0.1
    np.testing.assert_allclose(loss, metrics["loss"] + 0.25 * metrics["z_loss"], rtol=1e-6)


def test_every_stage_reads_data_of_its_own(byte_tokenizer):
    stage = {"steps": 1, "sequence_length": 64, "batch_size": 2, "data": [{"kind": "dictionary"}]}
    settings = {"output": "-", "tokenizer": str(byte_tokenizer), "init_from": "-", "stages": [stage, stage]}
    config, tokenizer = from_dict(TrainConfig, settings), load_tokenizer(byte_tokenizer)
    first, second = (next(stage_data.stage_batches(config, number, tokenizer, None))["tokens"] for number in (0, 1))
    assert (first != second).any()


@pytest.mark.parametrize(("done", "opened"), [(0, {0, 1}), (2, {0, 1}), (3, {1}), (4, {1})])
def test_a_finished_stage_is_not_opened_again(monkeypatch, byte_tokenizer, done, opened):
    monkeypatch.setattr(stage_data, "newest_step", lambda folder: done)
    stage = {"steps": 3, "sequence_length": 64, "batch_size": 2, "data": [{"kind": "dictionary"}]}
    settings = {"output": "-", "tokenizer": str(byte_tokenizer), "init_from": "-", "stages": [stage, stage]}
    config = from_dict(TrainConfig, settings)
    assert set(stage_data.open_stages(config, load_tokenizer(byte_tokenizer), None)) == opened


def test_a_batch_on_a_mesh_of_one_device_is_the_batch():
    batch = {"tokens": np.arange(24).reshape(4, 6), "full_from": np.arange(4)}
    placed = place_batch(batch, Partition(make_mesh(MeshConfig())), 4)
    for name, x in batch.items():
        np.testing.assert_array_equal(placed[name], x)


def test_layers_that_are_not_routed_do_not_count_in_the_regularizer_and_the_ratio():
    ones = np.ones((1, 6), np.float32)
    totals = totals_of(ones.astype(np.int32), ones)
    config = types.SimpleNamespace(z_loss=0.0, switch_loss=SwitchLoss())

    def added(kinds):
        here = jnp.array([kind == SWITCH for kind in kinds], jnp.float32)[:, None, None] * ones
        model = types.SimpleNamespace(pattern=types.SimpleNamespace(layer_types=kinds))
        loss, metrics = _added(
            config, model, TokenLoss(ones, ones, ones, ones), Routing(here, here, here), ones, totals
        )
        return float(loss), float(metrics["full_attention_ratio"]), metrics["full_attention_ratio_by_layer"].tolist()

    loss, ratio, by_layer = added((SWITCH, SWITCH))
    assert (ratio, by_layer) == (1.0, [1.0, 1.0])
    assert added((FULL, SWITCH, FULL)) == (pytest.approx(loss), 1.0, [0.0, 1.0, 0.0])
