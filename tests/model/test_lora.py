"""LoRA: adapters change nothing at first, train alone, resume to the bit, merge, and are written as PEFT reads them."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tiny_models import PATTERNS, PLAIN, logits_of, model_of
from training_runs import assert_same_weights, interrupted, losses

import swa_jax.train.loop
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.checkpoint.folder import load_model, save_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.peft import save_adapter
from swa_jax.data.haystack import ANSWER, NEEDLE, QUESTION
from swa_jax.model.decoder import Decoder
from swa_jax.model.flops import matrix_parameters, train_flops_per_token
from swa_jax.model.generate import generate
from swa_jax.model.lora import TARGETS, LoraConfig, LoraLinear, merge_lora, seed_dropout, trained_and_frozen, with_lora
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.remat import TrainingPass
from swa_jax.train.config import TrainConfig
from swa_jax.train.loop import train
from swa_jax.train.records import claimed, records_of
from swa_jax.train.step import init_state, make_loss, make_step, make_validation_loss

ROOT = Path(__file__).parents[2]
EVERYWHERE = LoraConfig(rank=3, alpha=6.0, dropout=0.25, targets=tuple(name for name in TARGETS if name != "g_proj"))
TOKENS = np.random.default_rng(0).integers(1, 61, size=(4, 20)).astype(np.int32)
BATCH = {"tokens": TOKENS, "segment_ids": np.ones_like(TOKENS), "weights": np.ones(TOKENS.shape, np.float32)}


def randomised(model: Decoder) -> Decoder:
    """With adapters that do change something."""
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    rng = np.random.default_rng(5)
    drawn = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32), adapters)
    return nnx.merge(graph, drawn, rest)


def adapted(pattern: str, config: LoraConfig = EVERYWHERE) -> Decoder:
    return with_lora(model_of(pattern), config, nnx.Rngs(1))


def run_config(**changes) -> TrainConfig:
    stages = [{"steps": 10, "sequence_length": 20, "batch_size": 4}]
    settings = {"output": "-", "tokenizer": "-", "init_from": "-", "stages": stages}
    settings["optimizer"] = {"name": "adamw", "learning_rate": 1e-2}
    return from_dict(TrainConfig, settings | changes)


def arrays(tree) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def start(model: Decoder, config: TrainConfig):
    """A fresh state, which a step may consume, and the step."""
    optimizer = swa_jax.train.loop.make_optimizer(config.optimizer, config.total_steps, model.config)
    trained, frozen = jax.tree.map(jnp.copy, trained_and_frozen(model))
    return init_state(trained, optimizer, frozen), make_step(model, optimizer, config, None)


def test_a_new_adapter_changes_nothing():
    plain, model = model_of("window+fa-decode"), adapted("window+fa-decode")
    full_from = jnp.full(4, 12)
    expected = logits_of(plain, TOKENS, full_from=full_from)
    np.testing.assert_array_equal(logits_of(model, TOKENS, full_from=full_from), expected)
    shapes = {
        name: (projection.lora_a.shape, projection.lora_b.shape)
        for part in (model.layers.attention, model.layers.mlp)
        for name, projection in vars(part).items()
        if isinstance(projection, LoraLinear)
    }
    assert set(shapes) == set(EVERYWHERE.targets)
    assert shapes["k_proj"] == ((4, 24, 3), (4, 3, 16))
    assert shapes["down_proj"] == ((4, 40, 3), (4, 3, 24))
    a = model.layers.attention.q_proj.lora_a[...]
    assert 0.9 < float(jnp.abs(a).max()) * 24**0.5 <= 1
    assert len(np.unique(a)) > a.size - 3  # layers are drawn one by one
    adapters = nnx.state(model, nnx.LoRAParam)
    assert sum(x.size for x in jax.tree.leaves(adapters)) == EVERYWHERE.num_parameters(model.config)


def test_merged_is_unmerged():
    model = randomised(adapted("full"))
    merged = merge_lora(model)
    assert nnx.split(merged)[0] == nnx.split(model_of("full"))[0]  # a plain decoder
    ours, theirs = logits_of(model, TOKENS), logits_of(merged, TOKENS)
    assert np.abs(theirs - logits_of(model_of("full"), TOKENS)).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_prefill_and_decoding_use_the_adapters():
    model = randomised(adapted("full"))
    merged = merge_lora(model)
    window = PATTERNS["window+fa-decode"][1]
    moved = model.with_pattern(window)
    assert moved.lora == model.lora
    prompts = [TOKENS[0].tolist(), TOKENS[1, :7].tolist()]
    replies = generate(moved, prompts, max_new_tokens=6)  # prefill, then steps
    assert replies == generate(merged.with_pattern(window), prompts, max_new_tokens=6)


@pytest.mark.slow
def test_only_adapters_and_routers_are_trained_and_have_moments():
    """The rest stays as it is to the bit, held in bf16 where that is computed in."""
    graph, weights = nnx.split(model_of("switch"))
    small = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights))
    model, config = with_lora(small, EVERYWHERE, nnx.Rngs(0)), run_config(bfloat16=True)
    assert merge_lora(model).layers.mlp.up_proj.kernel.dtype == jnp.bfloat16
    state, step = start(model, config)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(state.frozen)} == {"bfloat16"}
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
    assert all("lora_" in name or "router" in name for name in names)
    assert len(names) == 14 + 2
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim > 0]
    assert len(moments) == 2 * len(names)
    before, frozen = arrays(state.params), arrays(state.frozen)
    for _ in range(3):
        state, metrics = step(state, BATCH, 2)
    assert float(metrics["loss"]) > 0
    for ours, theirs in zip(arrays(state.frozen), frozen, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert all((ours != theirs).any() for ours, theirs in zip(arrays(state.params), before, strict=True))


def test_gradients_are_those_of_the_dense_weights():
    """dA = scale dW B', dB = scale A' dW, with the weights' gradient at the merged weights."""
    model, config = randomised(adapted("full")), run_config()
    totals = swa_jax.train.step.totals_of(BATCH["segment_ids"], BATCH["weights"])

    def gradients(model):
        trained, frozen = trained_and_frozen(model)
        loss = make_loss(model, config, None)
        return jax.jit(jax.grad(lambda p, f: loss(p, f, BATCH, totals, None)[0]))(trained, frozen)

    low, dense = gradients(model), gradients(merge_lora(model))
    for name in EVERYWHERE.targets:
        part = TARGETS[name]
        projection = getattr(getattr(model.layers, part), name)
        change = dense["layers"][part][name]["kernel"][...]  # [L, in, out]
        a = EVERYWHERE.scale * jnp.einsum("lio,lro->lir", change, projection.lora_b[...])
        b = EVERYWHERE.scale * jnp.einsum("lir,lio->lro", projection.lora_a[...], change)
        for expected, factor in ((a, "lora_a"), (b, "lora_b")):
            found = low["layers"][part][name][factor][...]
            assert float(jnp.abs(expected).max()) > 1e-4
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max()))


def test_each_layer_and_projection_drops_something_else():
    model, key = randomised(adapted("window")), jax.random.key(3)
    seed_dropout(model.layers, key)
    projections = [model.layers.attention.q_proj, model.layers.attention.v_proj, model.layers.mlp.up_proj]
    assert len({str(jax.random.key_data(projection.dropout_key)) for projection in projections}) == 3

    @nnx.jit
    def by_hand(model, tokens):
        stream, data = model.begin(tokens)
        graph, stacked = nnx.split(model.layers)
        for i, own in enumerate(jax.random.split(key, model.config.num_hidden_layers)):
            block = nnx.merge(graph, jax.tree.map(lambda weights, i=i: weights[i], stacked))
            seed_dropout(block, own)
            stream, _ = block(stream, jax.tree.map(lambda rows, i=i: rows[i], data), model.context(tokens))
        return model.norm(stream.x), model.features(tokens, training=TrainingPass(dropout_key=key))[0]

    expected, hidden = by_hand(randomised(adapted("window")), jnp.asarray(TOKENS))
    np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_of_the_adapters_input_in_training_alone():
    model = randomised(adapted("full"))
    layer = jax.tree.map(lambda x: x[0], nnx.state(model.layers.attention.q_proj))
    projection = nnx.merge(nnx.split(model.layers.attention.q_proj)[0], layer)
    key, x = jax.random.key(0), jnp.ones((4, 50, 24))
    projection.dropout_key = key
    kept = jax.random.bernoulli(key, 0.75, x.shape)
    assert 0.7 < float(kept.mean()) < 0.8
    base = x @ projection.kernel[...] + projection.bias[...]
    expected = base + 2.0 * (kept / 0.75) @ projection.lora_a[...] @ projection.lora_b[...]
    np.testing.assert_allclose(projection(x), expected, rtol=1e-4, atol=1e-5)
    config, merged = run_config(), merge_lora(model)
    loss, weight = make_validation_loss(model, config, None)(*trained_and_frozen(model), BATCH)
    plain, _ = make_validation_loss(merged, config, None)(nnx.state(merged), nnx.State({}), BATCH)
    np.testing.assert_allclose(loss / weight, plain / weight, rtol=1e-5)


def test_dropout_beside_linear_layers():
    sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    config = dataclasses.replace(PLAIN, linear_layers=(0, 2), linear_value_head_dim=8, **sizes)

    def hidden():
        plain = Decoder(config, AttentionPattern.from_recipe("full", config), rngs=nnx.Rngs(0))
        training = TrainingPass(dropout_key=jax.random.key(0))
        return with_lora(plain, EVERYWHERE, nnx.Rngs(1)).features(jnp.asarray(TOKENS), training=training)[0]

    assert jax.eval_shape(hidden).shape == (4, 20, 24)


# ---- whole runs ----


@pytest.fixture(scope="module")
def recall(tmp_path_factory):
    return import_model(ROOT / "swa_jax" / "recall", tmp_path_factory.mktemp("recall") / "model")


@pytest.fixture
def settings(tmp_path, recall):
    """SWAA in small: prompts under windows, answers full."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(48):
        key, value = f"brave-{('otter', 'tiger', 'river', 'eagle')[i % 4]}", int(rng.integers(1e6, 1e7))
        prompt = "x = 1\n" * 9 + NEEDLE.format(key=key, value=value) + "y = 2\n" * 9 + QUESTION.format(key=key)
        lines.append(json.dumps({"prompt": prompt, "answer": ANSWER.format(key=key, value=value)}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    data = [{"kind": "prompts", "files": [str(tmp_path / "prompts.jsonl")]}]
    return {
        "output": str(tmp_path / "run"),
        "tokenizer": str(recall),
        "init_from": str(recall),
        "pattern": "swaa-trained-efficiency",
        "sliding_window": 8,
        "lora": {"rank": 4, "alpha": 32},
        "checkpoint_every": 3,
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "warmup_steps": 1, "weight_decay": 0.0},
        "stages": [{"steps": 8, "sequence_length": 160, "batch_size": 4, "accumulate": 2, "data": data}],
    }


@pytest.mark.long  # the answers' form is what so few steps teach
def test_a_run_learns_resumes_to_the_bit_and_writes_model_and_adapter(settings, tmp_path, recall):
    settings["pattern"] = "interleave-1-in-2+fa-decode"
    model = train(from_dict(TrainConfig, settings), quiet=True)
    expected = losses(tmp_path / "run")
    assert np.mean(expected[-2:]) < 0.8 * expected[0]

    again = settings | {"output": str(tmp_path / "again")}
    interrupted(5, train, from_dict(TrainConfig, again), quiet=True)
    resumed = train(from_dict(TrainConfig, again), quiet=True)
    assert losses(tmp_path / "again") == expected
    trained, base = load_model(model), load_model(recall, dtype=jnp.float32)
    assert trained.pattern.full_attention_decode
    assert_same_weights(trained, load_model(resumed))

    # The checkpoints hold the adapters only.
    size = sum(f.stat().st_size for f in (tmp_path / "run" / "checkpoints" / "8").rglob("*") if f.is_file())
    lora = from_dict(LoraConfig, settings["lora"])
    assert size < 4 * 4 * lora.num_parameters(base.config)

    # By hand, from PEFT's files: W + scale B A.
    folder = tmp_path / "run" / "adapter"
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_rslora"]) == ("LORA", 4, 32, False)
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj"]
    assert AttentionPattern.from_json(folder / "pattern.json") == trained.pattern
    assert len(tensors) == 8 * 3 * 2
    for layer in range(8):
        for name, outputs in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
            assert (a.shape, b.shape) == ((4, 128), (outputs, 4))
            ours = np.asarray(getattr(trained.layers.attention, name).kernel[layer])
            theirs = np.asarray(getattr(base.layers.attention, name).kernel[layer])
            np.testing.assert_allclose(ours, theirs + 8 * (b @ a).T, rtol=1e-5, atol=1e-6)
            assert np.abs(ours - theirs).max() > 1e-4
    np.testing.assert_array_equal(trained.layers.mlp.up_proj.kernel[...], base.layers.mlp.up_proj.kernel[...])


@pytest.mark.slow
def test_an_adapter_names_the_base_that_the_run_started_from(settings, tmp_path, recall, monkeypatch):
    monkeypatch.setenv("SWA_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(recall.parent)
    settings["stages"] = [settings["stages"][0] | {"steps": 1, "batch_size": 1, "accumulate": 1}]
    for name, base in (("recall", "recall"), ("model", str(recall))):
        train(from_dict(TrainConfig, settings | {"output": str(tmp_path / name), "init_from": name}), quiet=True)
        written = json.loads((tmp_path / name / "adapter" / "adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == base
    swa_jax.load_model(tmp_path / "model" / "adapter")


def claim(run, config):
    with claimed(run, config, records_of(config, [])):
        pass


def test_adapters_of_another_base_do_not_go_on(settings, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "manifest.json").write_text("sums of the first model")
    config, run = from_dict(TrainConfig, settings | {"init_from": str(tmp_path / "base")}), tmp_path / "run"
    claim(run, config)
    (run / "checkpoints" / "3").mkdir(parents=True)
    claim(run, config)  # goes on
    (tmp_path / "base" / "manifest.json").write_text("sums of another model")
    with pytest.raises(ConfigError, match=r"is not the model that the run in .* began with"):
        claim(run, config)
    (run / "checkpoints" / "3").rmdir()
    claim(run, config)  # nothing trained yet


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        ({"rank": 0}, r"'lora\.rank' must be at least 1, got 0"),
        ({"alpha": 0}, r"'lora\.alpha' must be a number above 0"),
        ({"dropout": 1.0}, r"'lora\.dropout' must be a share from 0 to below 1"),
        ({"targets": []}, r"'lora\.targets' is empty"),
        ({"targets": ["q_prj"]}, r"'lora\.targets' names 'q_prj'.*did you mean 'q_proj'"),
        ({"targets": ["q_proj", "q_proj"]}, "names 'q_proj' twice"),
        ({"r": 8}, r"unknown key 'lora\.r'"),
    ],
)
def test_wrong_adapters_are_one_sentence(lora, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run_config(lora=lora)


def test_what_lora_is_not_for_is_refused(settings, tmp_path):
    random = settings | {"init_from": None, "model": to_dict(PATTERNS["window"][0])}
    with pytest.raises(ConfigError, match="'lora' adapts a trained model: set 'init_from'"):
        train(from_dict(TrainConfig, random), quiet=True)
    model = adapted("window")
    with pytest.raises(ConfigError, match="has LoRA adapters already"):
        with_lora(model, EVERYWHERE, nnx.Rngs(0))
    with pytest.raises(ConfigError, match="a checkpoint has no place for LoRA adapters"):
        save_model(model, tmp_path / "model")
    with pytest.raises(ConfigError, match="no LoRA adapters to save"):
        save_adapter(model_of("window"), tmp_path / "adapter")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "model").exists()


def test_operations_and_scales():
    config, pattern = PATTERNS["full"]
    weights = matrix_parameters(config)
    full = train_flops_per_token(config, pattern, 20)
    lora = train_flops_per_token(config, pattern, 20, lora=EVERYWHERE)
    assert full - lora == 2 * weights - 6 * EVERYWHERE.num_parameters(config)
    assert LoraConfig().scale == 8
    assert LoraConfig(alpha=32, rs_lora=True).scale == 8
