"""Hybrids with linear layers: the delta rule by itself, and whole models against transformers (tests/golden/linear)."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_letters import letters_of
from safetensors.numpy import load_file
from tiny_models import PLAIN, abstract_partition

import swa_jax
from swa_jax.base.errors import ConfigError
from swa_jax.model.cache import allocate, cache_bytes, cache_layouts
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.engine import Engine
from swa_jax.model.gated_delta import CHUNK, GatedDelta, Updates, chunked, recurrent
from swa_jax.model.layer_stacks import layer_stacks
from swa_jax.model.layer_types import FULL, HYBRID, LINEAR, SWITCH, WINDOW
from swa_jax.model.lora import LoraConfig, with_lora
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import check_model

GOLDEN = Path(__file__).parents[1] / "golden" / "linear"
CASES = sorted(folder.name for folder in GOLDEN.iterdir())
TOLERANCE = 1e-4
WINDOW_SIZE = 8


def updates(length: int, *, rows: int = 2, heads: int = 3, width: int = 8, value: int = 6) -> tuple[Updates, jax.Array]:
    """Tokens of which some begin a document, and a state before them."""
    rng = np.random.default_rng(length)
    q, k = (rng.normal(size=(rows, heads, length, width)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, state = rng.normal(size=(rows, heads, length, value)), rng.normal(size=(rows, heads, width, value))
    g, b = -2 * rng.random((rows, heads, length)), rng.random((rows, heads, length))
    runs = np.cumsum(rng.random((rows, length)) < 0.03, axis=1)
    given = (jnp.asarray(x, jnp.float32) for x in (q, k, v, g, b))
    return Updates(*given, jnp.asarray(runs, jnp.int32)), jnp.asarray(state, jnp.float32)


def by_hand(given: Updates, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The delta rule as the paper writes it, S [Dv, Dk], in f64: S (a (I - b k k^T)) + b v k^T."""
    q, k, v, g, b, runs = (np.asarray(x, np.float64) for x in given)
    said, behind = np.zeros(v.shape), np.zeros(state.shape)
    for row, head in np.ndindex(*v.shape[:2]):
        s, run = np.asarray(state, np.float64)[row, head].T, 0
        for t in range(v.shape[2]):
            key, value, step = k[row, head, t], v[row, head, t], b[row, head, t]
            s, run = s * (runs[row, t] == run), runs[row, t]
            s = np.exp(g[row, head, t]) * s @ (np.eye(len(key)) - step * np.outer(key, key))
            s = s + step * np.outer(value, key)
            said[row, head, t] = s @ q[row, head, t]
        behind[row, head] = s.T
    return said, behind


@pytest.mark.parametrize("length", [1, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_the_delta_rule_is_the_papers(rule, length):
    given, state = updates(length)
    for found, expected in zip(jax.jit(rule)(given, state), by_hand(given, state), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_gradients_of_chunks_are_those_of_tokens():
    given, state = updates(CHUNK + 9)

    def gradients(rule):
        def total(numbers, state):
            said, behind = rule(Updates(*numbers, given.runs), state)
            return jnp.sum(jnp.sin(said)) + jnp.sum(jnp.cos(behind))

        return jax.jit(jax.grad(total, argnums=(0, 1)))(tuple(given[:5]), state)

    for one, other in zip(*(jax.tree.leaves(gradients(rule)) for rule in (recurrent, chunked)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def layer_by_hand(config: ModelConfig, weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """One linear layer over rows of one document each, in f64."""
    heads, width, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    keys, (rows, length, _) = config.linear_num_key_heads * width, x.shape

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def unit(x):
        x = x.reshape(rows, length, -1, width)
        return (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)).repeat(heads // x.shape[2], axis=2)

    inputs = np.pad(x @ weights["in_proj_qkv"], ((0, 0), (config.linear_conv_kernel_dim - 1, 0), (0, 0)))
    mixed = sum(inputs[:, i : i + length] * weights["conv"][:, 0, i] for i in range(config.linear_conv_kernel_dim))
    mixed = mixed * sigmoid(mixed)
    q, k = unit(mixed[..., :keys]) / np.sqrt(width), unit(mixed[..., keys : 2 * keys])
    v = mixed[..., 2 * keys :].reshape(rows, length, heads, value)
    g = -np.exp(weights["A_log"]) * np.log1p(np.exp(x @ weights["in_proj_a"] + weights["dt_bias"]))
    b = sigmoid(x @ weights["in_proj_b"])
    given = [array.swapaxes(1, 2) for array in (q, k, v, g, b)]
    said, _ = by_hand(Updates(*given, np.zeros((rows, length), int)), np.zeros((rows, heads, width, value)))
    said = said.swapaxes(1, 2)
    said = said / np.sqrt((said**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights["norm_scale"]
    z = (x @ weights["in_proj_z"]).reshape(said.shape)
    return (said * z * sigmoid(z)).reshape(rows, length, -1) @ weights["out_proj"]


@pytest.mark.parametrize("seed", range(3))
def test_a_layer_at_the_eps_of_released_models_is_the_papers(seed):
    """Which goldens cannot show: with 1e-6 under the root, f32 rounds what heads say by more than their tolerance."""
    config = dataclasses.replace(
        PLAIN, num_hidden_layers=2, linear_layers=(0,), rms_norm_eps=1e-6, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=12,
    )  # fmt: skip
    layer, rng = GatedDelta(layer_stacks(config)[0].config, jnp.float32, nnx.Rngs(0)), np.random.default_rng(seed)
    weights, drawn = {}, nnx.state(layer)
    for path, value in nnx.to_flat_state(drawn):
        size = np.sqrt(len(value)) if path[-1] == "kernel" else 1
        weights[path[0]] = rng.normal(size=value.shape).astype(np.float32) / np.float32(size)
        value[...] = jnp.asarray(weights[path[0]])
    nnx.update(layer, drawn)
    x = rng.normal(size=(2, CHUNK + 20, config.hidden_size)).astype(np.float32)
    found, _ = nnx.jit(GatedDelta.__call__)(layer, x)
    expected = layer_by_hand(config, {name: w.astype(np.float64) for name, w in weights.items()}, x.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@functools.cache
def golden(case: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / case / "golden.safetensors")


@nnx.jit
def logits(model: Decoder, tokens, segment_ids=None):
    return model(tokens, segment_ids=segment_ids)


def windowed(model: Decoder) -> Decoder:
    return model.with_pattern(AttentionPattern.everywhere(WINDOW, model.config, WINDOW_SIZE))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(load, case):
    """With the layers of config.json, and with windows in the attention layers: transformers was given that mask."""
    model, expected = load(case), golden(case)
    assert {*model.pattern.layer_types} == {FULL, LINEAR}
    np.testing.assert_allclose(logits(model, expected["tokens"]), expected["logits"], rtol=0, atol=TOLERANCE)
    found = logits(windowed(model), expected["tokens"])
    np.testing.assert_allclose(found, expected["logits_window"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_goes_on_as_in_transformers(load, case):
    expected = load_file(GOLDEN / case / "generation.safetensors")
    rows = zip(expected["tokens"], expected["attention_mask"], strict=True)
    prompts = [row[real == 1].tolist() for row, real in rows]
    model, new = load(case), expected["new_tokens"]
    assert len({len(prompt) for prompt in prompts}) == 2
    assert [list(reply) for reply in swa_jax.generate(model, prompts, max_new_tokens=new.shape[1])] == new.tolist()


def test_documents_of_a_row_know_nothing_of_each_other(load):
    model, tokens = windowed(load("qwen3-5-eight")), golden("qwen3-5-eight")["tokens"][:1]
    lengths = 37, 30, 23
    segments = np.repeat([[1, 2, 0]], 1, axis=0).repeat(lengths, axis=1)
    together = logits(model, tokens, segments)
    first = 0
    for length in lengths[:2]:
        alone = logits(model, tokens[:, first : first + length])
        np.testing.assert_allclose(together[:, first : first + length], alone, rtol=0, atol=TOLERANCE)
        first += length


def test_decoding_and_chunks_give_the_logits_of_a_forward_pass(load):
    """A prompt at once and token by token behind it; and prompts that come in pieces to a row that another had."""
    model, tokens = windowed(load("qwen3-5-four")), golden("qwen3-5-four")["tokens"]
    layouts = cache_layouts(model.config, model.pattern, 96)
    expected = np.asarray(logits(model, tokens))

    cache = allocate(model.config, layouts, 2, jnp.float32)
    lengths = jnp.array([20, 33])
    found, cache = model.prefill(jnp.asarray(tokens[:, :40]), lengths, cache, layouts)
    np.testing.assert_allclose(found, expected[[0, 1], lengths - 1], rtol=0, atol=TOLERANCE)
    for at in range(3):
        new = jnp.asarray(tokens[[0, 1], np.asarray(lengths) + at])
        active = jnp.array([True, at < 2])
        found, cache = model.decode_step(new, cache, layouts, active=active)
        rows = [0, 1] if at < 2 else [0]
        wanted = expected[rows, np.asarray(lengths)[rows] + at]
        np.testing.assert_allclose(found[: len(rows)], wanted, rtol=0, atol=TOLERANCE)
    assert cache.lengths.tolist() == [23, 35]
    found, cache = model.decode_step(jnp.asarray(tokens[[0, 1], [23, 35]]), cache, layouts)
    np.testing.assert_allclose(found[1], expected[1, 35], rtol=0, atol=TOLERANCE)

    cache = dataclasses.replace(cache, lengths=cache.lengths.at[1].set(0))
    for first, last in ((0, 2), (2, 30), (30, 70)):
        piece = np.zeros(48, np.int32)
        piece[: last - first] = tokens[0, first:last]
        found, cache = model.extend(jnp.asarray(piece), jnp.int32(last - first), jnp.int32(1), cache, layouts)
        np.testing.assert_allclose(found, expected[0, last - 1], rtol=0, atol=TOLERANCE)
    assert cache.lengths.tolist() == [24, 70]


def test_an_engine_remembers_prefixes(load):
    model, tokens = windowed(load("qwen3-5-four")), golden("qwen3-5-four")["tokens"]
    prompts = [tokens[0, :30].tolist(), tokens[1, :20].tolist(), tokens[0, :45].tolist(), tokens[0, :30].tolist()]
    expected = [list(reply) for reply in swa_jax.generate(model, prompts, max_new_tokens=6)]
    engine = Engine(model, slots=2, max_length=96, chunk=16, prefixes=4)
    replies: list[list[int]] = [[] for _ in prompts]
    for piece in engine.stream(prompts, max_new_tokens=6):
        replies[piece.prompt] += piece.tokens
    assert replies == expected
    assert engine.computed_tokens < sum(map(len, prompts))


def test_bytes_of_a_cache(load):
    model = windowed(load("qwen3-5-four"))
    config, layouts = model.config, cache_layouts(model.config, model.pattern, 64)
    cache = allocate(config, layouts, 3, jnp.bfloat16)
    by_hand = 3 * (2 * 2 * WINDOW_SIZE * 16 * 2)  # rows, keys and values, KV heads, entries, head_dim, bytes
    by_hand += 3 * 3 * (2 * 8 * 6 * 4 + 3 * (2 * 2 * 8 + 2 * 6) * 2)  # rows, linear layers, states and inputs
    assert cache.nbytes == cache_bytes(config, model.pattern, 3, 64, 2) == by_hand


def test_recipes_count_and_change_attention_layers_alone(load):
    config = load("qwen3-5-eight").config

    def of(recipe: str) -> str:
        return letters_of(AttentionPattern.from_recipe(recipe, config))

    assert of("full") == "LFLLLLFF"
    assert of("window") == "LwLLLLww"
    assert of("interleave-1-in-2") == "LwLLLLFw"
    assert of("begin-middle-end-1-in-3") == "LFLLLLww"
    assert of("layers:6") == "LwLLLLFw"
    with pytest.raises(ConfigError, match="full layer 2 is a linear layer"):
        of("layers:2")
    wrong = AttentionPattern((WINDOW,) * 8, 4)
    with pytest.raises(ConfigError, match=r"\[0\] is 'sliding_attention', but layer 0 of the model is a linear layer"):
        wrong.validate(config)


@pytest.mark.parametrize("kind", ["heads", "routed", "decode"])
def test_generation_under_other_patterns_is_a_forward_pass(load, kind):
    """Single KV heads that stay full, routers, and full-attention decode with sink tokens, in the attention layers."""
    model, tokens = load("qwen3-5-eight"), golden("qwen3-5-eight")["tokens"][:1, :30]
    types = AttentionPattern.everywhere(WINDOW, model.config, WINDOW_SIZE).layer_types
    pattern = {
        "heads": AttentionPattern(
            (LINEAR, HYBRID, *types[2:]), WINDOW_SIZE, full_kv_heads=((), (1,), (), (), (), (), (), ())
        ),
        "routed": AttentionPattern.everywhere(SWITCH, model.config, WINDOW_SIZE),
        "decode": AttentionPattern(types, WINDOW_SIZE, num_sink_tokens=2, full_attention_decode=True),
    }[kind]
    model = model.with_pattern(pattern, rngs=nnx.Rngs(3))
    (reply,) = swa_jax.generate(model, tokens.tolist(), max_new_tokens=8)
    whole = np.concatenate([tokens[0], reply])[None]
    full_from = pattern.full_from(jnp.array([30]))
    found = nnx.jit(Decoder.__call__)(model, whole, full_from=full_from)
    assert found[0, 29:-1].argmax(-1).tolist() == list(reply)


def test_a_step_of_training_changes_every_parameter_and_adapters_are_of_attention_and_mlps(load):
    model, tokens = load("qwen3-5-four"), golden("qwen3-5-four")["tokens"]

    def loss(model):
        found = model(tokens)
        return -jnp.take_along_axis(jax.nn.log_softmax(found[:, :-1]), tokens[:, 1:, None], axis=-1).mean()

    gradients = jax.tree_util.tree_leaves_with_path(nnx.jit(nnx.grad(loss))(model))
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for _, leaf in gradients)
    adapted = with_lora(model, LoraConfig(targets=("q_proj", "o_proj", "up_proj")), nnx.Rngs(0))
    np.testing.assert_array_equal(logits(adapted, tokens), logits(model, tokens))
    paths = {path for path, _ in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam))}
    assert {path[1:-1] for path in paths} == {
        ("attending", "attention", "q_proj"), ("attending", "attention", "o_proj"), ("attending", "mlp", "up_proj"),
        ("linear", "mlp", "up_proj"),
    }  # fmt: skip


def test_attention_layers_without_rotary_embeddings(load):
    """Linear layers tell tokens apart, so that every attention layer may go without: as in a model written so."""
    model, tokens = load("qwen3-5-eight"), golden("qwen3-5-eight")["tokens"]
    found = logits(model.with_pattern(dataclasses.replace(model.pattern, nope_full_layers=True)), tokens)
    written = Decoder(dataclasses.replace(model.config, rope_layers=("none",) * 8), model.pattern, rngs=nnx.Rngs(0))
    nnx.update(written, nnx.state(model))
    np.testing.assert_allclose(found, logits(written, tokens), rtol=0, atol=TOLERANCE)
    assert np.abs(found - logits(model, tokens)).max() > 1e-2


def test_a_mesh_that_splits_sequences_is_refused(load):
    with pytest.raises(ConfigError, match=r"'mesh.context'.* is not made yet for models with linear layers"):
        check_model(load("qwen3-5-four").config, abstract_partition(context=2))
