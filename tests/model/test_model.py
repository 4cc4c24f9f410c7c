"""The decoder under every pattern: caches against the full forward pass, packing, padding, and what a pattern costs."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from timing import least_seconds
from tiny_models import LAYERS, PATTERNS, SIGMOID, SOFTMAX, WINDOW_SIZE, base_model, logits_of, make, model_of

from pallas_kernels.pools import attend_over_pools
from swa_jax.base.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import perplexity, score_answers
from swa_jax.model.attention import Attention, kinds_of, layer_data
from swa_jax.model.cache import allocate, cache_bytes, cache_layouts
from swa_jax.model.decoder import Decoder
from swa_jax.model.layers import onto_stream

NEW = 8
LENGTHS = (1, 2, WINDOW_SIZE - 1, WINDOW_SIZE, WINDOW_SIZE + 1, 3 * WINDOW_SIZE - NEW + 1, 3 * WINDOW_SIZE)
MAX_LENGTH = 3 * WINDOW_SIZE + NEW  # 26
CLOSE = {"atol": 5e-5, "rtol": 1e-4}  # of logits of order ten, f32


pytestmark = pytest.mark.usefixtures("quick_compilation")


def random_tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, SOFTMAX.vocab_size, shape), jnp.int32)


def through_the_cache(model, tokens, lengths, max_length):
    """Prefill, then NEW given tokens through the cache: logits [B, 1 + NEW, V] of what follows each."""
    layouts = cache_layouts(model.config, model.pattern, max_length)
    cache = allocate(model.config, layouts, tokens.shape[0], model.embedding[...].dtype)
    full_from = model.pattern.full_from(lengths)
    prompts = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    first, cache = model.prefill(prompts, lengths, cache, layouts)

    def step(cache, _):
        token = jnp.take_along_axis(tokens, cache.lengths[:, None], axis=1)[:, 0]
        logits, cache = model.decode_step(token, cache, layouts, full_from)
        return cache, logits

    _, rest = jax.lax.scan(step, cache, length=NEW)
    return jnp.concatenate([first[:, None], rest.transpose(1, 0, 2)], axis=1)


teacher_forced = nnx.jit(through_the_cache, static_argnames="max_length")


def test_two_heads_of_64_go_side_by_side_between_the_projections(monkeypatch):
    config = dataclasses.replace(SOFTMAX, qk_norm=False, head_dim=64, num_hidden_layers=1)
    model, tokens = Decoder(config, make("w"), rngs=nnx.Rngs(0)), random_tokens(1, 2 * WINDOW_SIZE)
    assert Attention(config, False, jnp.dtype("float32"), nnx.Rngs(0)).width == 128
    side_by_side = nnx.jit(Decoder.__call__)(model, tokens)
    monkeypatch.setattr(Attention, "width", 64)
    np.testing.assert_allclose(nnx.jit(Decoder.__call__)(model, tokens), side_by_side, **CLOSE)


QUICK = {"every-kind", "head-hybrid", "chunked"}
SLOW = {"experts", "swat-every-kind", "every-kind+fa-decode", "every-kind+last-tokens", "nope-every-kind"}


def each(names):
    marks = {name: [] if name in QUICK else pytest.mark.slow if name in SLOW else pytest.mark.long for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


@each(PATTERNS)
def test_decode_equals_the_full_forward(name):
    """Totals 1 .. 3w + 8 through prompts of 1, 2, w-1, w, w+1, 2w-1 and 3w tokens and eight decoded ones."""
    model, lengths = model_of(name), jnp.array(LENGTHS)
    tokens = random_tokens(len(LENGTHS), MAX_LENGTH)
    options = {"full_from": model.pattern.full_from(lengths)}
    expected = logits_of(model, tokens, **options)
    at = (lengths[:, None] - 1 + jnp.arange(1 + NEW))[..., None]  # [B, 1 + NEW, 1]
    expected = jnp.take_along_axis(expected, jnp.minimum(at, MAX_LENGTH - 1), axis=1)
    actual = teacher_forced(model, tokens, lengths, MAX_LENGTH)
    np.testing.assert_allclose(actual, expected, **CLOSE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("every-kind", marks=pytest.mark.slow),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("every-kind+fa-decode", "swat-every-kind")),
    ],
)
def test_decoding_with_the_tpu_kernel(name, monkeypatch):
    """Interpreted: it reads the pools in place, where the others go head by head."""
    model, lengths = model_of(name), jnp.array([2, WINDOW_SIZE + 1, 3 * WINDOW_SIZE])
    tokens = random_tokens(3, MAX_LENGTH)
    expected = teacher_forced(model, tokens, lengths, MAX_LENGTH)
    calls = []

    def on_a_tpu(*args, **options):
        calls.append(options)
        return attend_over_pools(*args, **options | {"implementation": "tpu"})

    monkeypatch.setattr("swa_jax.model.cached_attention.attend_over_pools", on_a_tpu)
    # A function of its own, as a cached trace would not see the change.
    actual = nnx.jit(lambda *args: through_the_cache(*args, MAX_LENGTH))(model, tokens, lengths)
    assert calls
    np.testing.assert_allclose(actual, expected, **CLOSE)


@pytest.mark.parametrize("name", ["streaming", "head-hybrid"])
def test_queries_from_full_from_on_see_everything(name):
    tokens = random_tokens(len(LENGTHS), MAX_LENGTH)
    everywhere = logits_of(model_of(name), tokens, full_from=jnp.zeros(len(LENGTHS), jnp.int32))
    np.testing.assert_allclose(everywhere, logits_of(model_of("full"), tokens), **CLOSE)


@pytest.mark.parametrize("max_length", [MAX_LENGTH, MAX_LENGTH + 11])
def test_decode_with_a_window_that_never_fills(max_length):
    model = base_model(SOFTMAX).with_pattern(make("wwFw", sliding_window=MAX_LENGTH, num_sink_tokens=1))
    tokens, lengths = random_tokens(2, MAX_LENGTH), jnp.array([4, 18])
    expected = logits_of(model, tokens)
    actual = teacher_forced(model, tokens, lengths, max_length)
    for row, start in enumerate((4, 18)):
        np.testing.assert_allclose(actual[row, :NEW], expected[row, start - 1 : start - 1 + NEW], **CLOSE)


@each([name for name in PATTERNS if name not in ("full", "nope-every-kind")])  # test_nope shows the latter
def test_patterns_differ_from_full_attention(name):
    """Otherwise the comparisons above would prove nothing."""
    model = model_of(name)
    full = base_model(model.config).with_pattern(make("FFFF", sliding_window=None))
    tokens = random_tokens(len(LENGTHS), MAX_LENGTH)
    difference = jnp.abs(logits_of(model, tokens) - logits_of(full, tokens)).max(axis=(0, 2))  # [T]
    # Beyond the window something differs; within it (plus the sink tokens) nothing can.
    assert difference[model.pattern.sliding_window + model.pattern.num_sink_tokens :].max() > 1e-2
    np.testing.assert_allclose(difference[: model.pattern.sliding_window], 0, atol=5e-5)


def test_gates_are_of_both_kinds():
    routing = nnx.jit(lambda model, tokens: model.features(tokens)[1])(model_of("switch"), random_tokens(4, MAX_LENGTH))
    gate = np.asarray(routing.gate)
    assert set(np.unique(gate)) == {0.0, 1.0}
    routed = np.array([True, True, False, True])
    assert np.all((gate.mean(axis=(1, 2)) > 0.1)[routed])
    assert np.all((gate.mean(axis=(1, 2)) < 0.9)[routed])
    assert np.all(np.asarray(routing.logit)[~routed] == 0)
    assert np.all(gate[~routed] == 0)
    assert np.all(np.asarray(routing.disagreement)[~routed] == 0)
    assert np.all(np.asarray(routing.disagreement)[routed].max(axis=(1, 2)) > 0)


# ---- caches ----


@pytest.mark.parametrize("max_length", [5, 64])
@pytest.mark.parametrize("name", PATTERNS)
def test_cache_bytes_are_those_of_the_formula(name, max_length):
    config, pattern = PATTERNS[name]
    cache = allocate(config, cache_layouts(config, pattern, max_length), 3, jnp.bfloat16)
    # Spelled out: heads that see everything hold T_max entries, others their window and sink tokens. What other layers
    # read holds what all of them need, and these hold nothing.
    readers = {layer: [layer] for layer in range(config.num_hidden_layers - config.num_kv_shared_layers)}
    for layer in range(len(readers), config.num_hidden_layers):
        alike = [one for one in readers if config.rope_layers[one] == config.rope_layers[layer]]
        readers[alike[-1]].append(layer)
    expected = 0
    for layer, others in readers.items():
        kv_heads, head_dim = config.head_shapes[layer]
        for head in range(kv_heads):
            see_all = [
                pattern.layer_types[i] in ("full_attention", "switch_attention") or head in pattern.full_kv_heads[i]
                for i in others
            ]
            whole = any(see_all) or len({(pattern.full_kv_heads[i]) for i in others}) > 1
            if whole or pattern.full_attention_decode:
                entries = max_length
            else:
                entries = min(pattern.sliding_window + pattern.num_sink_tokens, max_length)
            expected += 3 * entries * 2 * head_dim * 2
    held = sum(np.asarray(pool).nbytes for pool in jax.tree.leaves(cache)) - 3 * 4  # less `lengths`
    assert cache.nbytes == held == expected == cache_bytes(config, pattern, 3, max_length, itemsize=2)


def test_decoding_keeps_the_cache_in_place():
    """The loop carries the cache: a step's temporary memory is far below a copy of it."""
    model, max_length = model_of("every-kind"), 4096
    graph, weights = nnx.split(model)
    layouts = cache_layouts(model.config, model.pattern, max_length)

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(weights, tokens, cache):
        return nnx.merge(graph, weights).decode_step(tokens, cache, layouts)

    cache = jax.eval_shape(lambda: allocate(model.config, layouts, 16, jnp.float32))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    memory = step.lower(weights, jax.ShapeDtypeStruct((16,), jnp.int32), cache).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * size
    # One KV head's keys and values and its logits.
    assert memory.temp_size_in_bytes < 0.3 * size


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's programs for CPUs")
def test_a_decoded_row_is_multiplied_by_the_tied_table_as_it_lies():
    """A table that is turned round becomes part of a plain loop over its entries, much slower than a product."""
    model = model_of("every-kind")
    assert model.config.tie_word_embeddings
    graph, weights = nnx.split(model)
    step = jax.jit(lambda weights, row: nnx.merge(graph, weights).logits(row))
    row = jnp.ones((1, model.config.hidden_size))
    program = step.lower(weights, row).compile({"xla_backend_optimization_level": 3}).as_text()
    assert " dot(" in program
    assert " transpose(" not in program
    assert "dot_fusion" not in program


# ---- packing, padding, positions ----


@pytest.mark.parametrize("name", ["every-kind", pytest.param("swat-every-kind", marks=pytest.mark.slow)])
def test_left_padded_batch_equals_each_alone(name):
    model, tokens = model_of(name), random_tokens(2, 26)
    lengths = np.array([19, 9])
    segments = jnp.asarray(np.arange(26) >= 26 - lengths[:, None], jnp.int32)
    batched = logits_of(model, tokens, segment_ids=segments)
    for row, length in enumerate(lengths):
        # What stands behind a sequence changes nothing before it, and the shape is that of other tests.
        alone = logits_of(model, np.roll(tokens, length, axis=1))
        np.testing.assert_allclose(batched[row, -length:], alone[row, :length], **CLOSE)
    assert jnp.isfinite(batched).all()


def test_packed_documents_do_not_see_each_other():
    model = model_of("every-kind")
    segments = jnp.array([[1] * 9 + [2] * 14 + [0] * 3] * 2)
    one = random_tokens(2, 26)
    other = one.at[:, :9].set((one[:, :9] + 1) % 61).at[:, 23:].set(0)
    a, b = logits_of(model, one, segment_ids=segments), logits_of(model, other, segment_ids=segments)
    assert np.abs(a[:, :9] - b[:, :9]).max() > 1e-2
    np.testing.assert_array_equal(a[:, 9:23], b[:, 9:23])  # bit-equal
    alone = logits_of(model, np.roll(one, -9, axis=1))
    np.testing.assert_allclose(a[:, 9:23], alone[:, :14], **CLOSE)


def test_packed_full_from_has_a_column_a_segment():
    model = model_of("window+fa-decode")
    segments, tokens = jnp.array([[1] * 12 + [2] * 14]), random_tokens(1, 26)
    packed = logits_of(model, tokens, segment_ids=segments, full_from=jnp.array([[100, 10]]))
    np.testing.assert_allclose(packed[:, :12], logits_of(model, tokens[:, :12]), **CLOSE)
    expected = logits_of(model, tokens[:, 12:], full_from=jnp.array([10]))
    np.testing.assert_allclose(packed[:, 12:], expected, **CLOSE)
    windowed = logits_of(model, tokens[:, 12:])
    np.testing.assert_array_equal(np.abs(expected - windowed).max(axis=(0, 2)) > 1e-3, np.arange(14) >= 10)


def test_positions():
    model, tokens = model_of("interleave"), random_tokens(2, 15)
    default = logits_of(model, tokens)
    index = jnp.broadcast_to(jnp.arange(15), (2, 15))
    np.testing.assert_allclose(logits_of(model, tokens, positions=index), default, **CLOSE)
    # Rotary embeddings and windows go by distance, so that a shift changes nothing; a stretch does.
    np.testing.assert_allclose(logits_of(model, tokens, positions=index + 7), default, atol=1e-4, rtol=1e-4)
    assert np.abs(logits_of(model, tokens, positions=2 * index) - default).max() > 1e-2


# ---- patterns as data, weights and layer maps ----


def test_routed_layers_choose_a_branch():
    model = base_model(SOFTMAX).with_pattern(make("SSSS", num_sink_tokens=3))
    tokens = random_tokens(len(LENGTHS), MAX_LENGTH)
    outputs = {}
    for bias in (-100.0, 100.0):
        proj = nnx.clone(model).layers.attention.router.proj
        biased = nnx.clone(model)
        biased.layers.attention.router.proj.bias = nnx.Param(jnp.full_like(proj.bias[...], bias))
        outputs[bias] = logits_of(biased, tokens)
    window, full = (logits_of(model_of(name), tokens) for name in ("streaming", "full"))
    np.testing.assert_allclose(outputs[-100.0], window, **CLOSE)
    np.testing.assert_allclose(outputs[100.0], full, **CLOSE)


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_parameters_do_not_depend_on_the_pattern(config):
    def tree(pattern):
        state = nnx.state(nnx.eval_shape(lambda: Decoder(config, pattern, rngs=nnx.Rngs(0))))
        return {path: leaf.shape for path, leaf in nnx.to_flat_state(state)}

    plain = tree(make("FFFF", sliding_window=None))
    for types, heads in (("wwww", ()), ("wFwF", ()), ("hwFh", ((0,), (), (), (1,)))):
        assert tree(make(types, heads)) == plain
    routed = tree(make("FFFS"))
    routers = {path: shape for path, shape in routed.items() if "router" in path}
    assert set(routers.values()) == {(LAYERS, 24, 1), (LAYERS, 1)}
    assert {path: shape for path, shape in routed.items() if "router" not in path} == plain


def test_with_pattern_shares_the_arrays():
    model = model_of("every-kind")
    windowed = model.with_pattern(make("wwww"))
    assert windowed.pattern == make("wwww")
    assert model.pattern == PATTERNS["every-kind"][1]
    mine = dict(nnx.to_flat_state(nnx.state(model)))
    for path, leaf in nnx.to_flat_state(nnx.state(windowed)):
        assert leaf[...] is mine[path][...], path
    # Fresh routers, the same again from the same seed; everything else is shared.
    routed = [windowed.with_pattern(make("SSSS"), rngs=nnx.Rngs(seed)) for seed in (1, 1, 2)]
    kernels = [model.layers.attention.router.proj.kernel[...] for model in routed]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])
    assert routed[0].embedding[...] is model.embedding[...]


def test_layer_data_replaces_the_pattern():
    """One compiled function serves every pattern made of the same kinds."""
    model, tokens = model_of("streaming"), random_tokens(len(LENGTHS), MAX_LENGTH)
    kinds = kinds_of(make("Fwhw", ((), (), (0,), ())))

    @nnx.jit
    def logits(model, data):
        return model.logits(model.features(tokens, data=data)[0])

    for types, heads, name in (("wwww", (), "streaming"), ("FFFF", (), "full")):
        actual = logits(model, layer_data(make(types, heads), model.config, kinds))
        np.testing.assert_allclose(actual, logits_of(model_of(name), tokens), **CLOSE)
    # Hybrid layers with no full head, or with all of them, are windowed and full layers.
    actual = logits(model, layer_data(make("hhhh"), model.config, kinds))
    np.testing.assert_allclose(actual, logits_of(model_of("streaming"), tokens), **CLOSE)
    actual = logits(model, layer_data(make("hFhh", ((0, 1), (), (1, 0), (0, 1))), model.config, kinds))
    np.testing.assert_allclose(actual, logits_of(model_of("full"), tokens), **CLOSE)


def test_bfloat16_model_gives_float32_logits():
    config, pattern = PATTERNS["every-kind"]
    abstract = nnx.eval_shape(lambda: Decoder(config, pattern, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, wanted = nnx.split(abstract)
    weights = nnx.state(model_of("every-kind"))
    model = nnx.merge(graph, jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), weights, wanted))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        assert variable.dtype == (jnp.float32 if "router" in path else jnp.bfloat16), path
    tokens = random_tokens(2, 20)
    logits = logits_of(model, tokens)
    assert logits.dtype == jnp.float32
    difference = np.abs(logits - logits_of(model_of("every-kind"), tokens))
    assert 0 < difference.mean() < 0.2  # of logits of order ten


def test_tokens_and_patterns_as_a_user_may_write_them():
    model = model_of("window")
    np.testing.assert_array_equal(model([[5, 6]]), model(jnp.array([[5, 6]])))
    with pytest.raises(ConfigError, match=r"batch of sequences, \[B, T\], got the shape \(2,\); .* write tokens"):
        model([5, 6])
    with pytest.raises(ConfigError, match="sequences of one length: pad them"):
        model([[5, 6], [7]])
    np.testing.assert_array_equal(model([[5, 6]], positions=[[1, 2]]), model([[5, 6]], positions=jnp.array([[1, 2]])))
    for name in ("segment_ids", "positions"):
        for wrong, said in ([1, 2], r"has shape \(2,\)"), ([[1.0, 2.0]], "is float64; it must be integers"):
            with pytest.raises(ValueError, match=f"^{name} {said}"):
                model([[5, 6]], **{name: wrong})
    before, window = model.pattern, model.pattern.sliding_window
    model.pattern = "interleave-1-in-2"
    assert (model.pattern.full_layers, model.pattern.sliding_window) == ((1, 3), window)
    for wrong, sentence in (("windw", "did you mean 'window'"), (3, "an AttentionPattern or a recipe, got 3"),
                            ("switch", "no routers"), (make("w"), "has 1 layers")):  # fmt: skip
        with pytest.raises(ConfigError, match=sentence):
            model.pattern = wrong
    assert model.with_pattern("interleave-1-in-2").pattern == model.pattern
    model.pattern = before
    made = nnx.eval_shape(lambda: Decoder(model.config, "layers:0", rngs=nnx.Rngs(0)))
    assert made.pattern.full_layers == (0,)
    with pytest.raises(ConfigError, match="an AttentionPattern or a recipe, got None"):
        Decoder(model.config, None, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(5,), (4, 3)])
def test_gradients_of_what_leads_onto_the_stream(shape):
    rng = np.random.default_rng(0)
    x, kernel, weight = (rng.normal(size=size).astype(np.float32) for size in ((2, 7, *shape), (*shape, 6), (2, 7, 6)))

    def by_hand(x, kernel):
        return x.reshape(2, 7, -1) @ kernel.reshape(-1, 6)

    np.testing.assert_allclose(onto_stream(x, kernel), by_hand(x, kernel), **CLOSE)
    got, expected = (
        jax.grad(lambda *a, f=f: jnp.vdot(f(*a), weight), (0, 1))(x, kernel) for f in (onto_stream, by_hand)
    )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("token", [61, -1])
def test_an_id_without_an_embedding(token):
    """One sentence where values are known; inside a compiled function they are not, and what sees it is no number."""
    model, tokens = model_of("window"), [[5, 6, token, 7, 8]]
    sentence = rf"holds token {token} at \[.*2\], the model's vocabulary has ids 0 to 60"
    with pytest.raises(ConfigError, match="^tokens " + sentence):
        model(tokens)
    with pytest.raises(ConfigError, match="^tokens " + sentence):
        perplexity(model, tokens[0], context=4)
    with pytest.raises(ConfigError, match=r"^examples\[1\] " + sentence):
        score_answers(model, [Example([1], [2], []), Example([5, 6], [token], [])])
    logits = logits_of(model, jnp.array(tokens))
    np.testing.assert_array_equal(jnp.isnan(logits).all(-1), [[False, False, True, True, True]])
    np.testing.assert_allclose(logits[:, :2], model([[5, 6]]), **CLOSE)


def test_equal_models_share_compilations():
    """Functions are cached by the model's graph definition, which must hash alike however a model was made."""
    config, pattern = PATTERNS["every-kind"]
    made = nnx.eval_shape(lambda: Decoder(config, pattern, rngs=nnx.Rngs(0)))
    assert hash(nnx.split(made)[0]) == hash(nnx.split(model_of("every-kind"))[0])
    noted = dataclasses.replace(pattern, provenance={"method": "selected", "scores": [1.0]})
    assert hash(nnx.split(model_of("every-kind").with_pattern(noted))[0]) == hash(nnx.split(made)[0])


# ---- what a pattern costs ----

_DEEP_TYPES = "FwhSwwSw"


def deep(layers: int) -> Decoder:
    """An abstract model of mixed layers, nothing allocated."""
    config = dataclasses.replace(SOFTMAX, num_hidden_layers=layers)
    heads = ((), (), (0,), (), (), (), (), ()) * (layers // 8)
    pattern = make(_DEEP_TYPES * (layers // 8), heads, num_sink_tokens=1)
    return nnx.eval_shape(lambda: Decoder(config, pattern, rngs=nnx.Rngs(0)))


def lower_gradient(layers: int):
    graph, weights = nnx.split(deep(layers))

    def loss(weights, tokens):
        return nnx.merge(graph, weights)(tokens).sum()

    return jax.jit(jax.grad(loss)).lower(weights, jax.ShapeDtypeStruct((1, 32), jnp.int32))


def lower_generation(layers: int):
    graph, weights = nnx.split(deep(layers))

    def run(weights, tokens, lengths):
        return teacher_forced.__wrapped__(nnx.merge(graph, weights), tokens, lengths, max_length=MAX_LENGTH)

    tokens = jax.ShapeDtypeStruct((1, MAX_LENGTH), jnp.int32)
    return jax.jit(run).lower(weights, tokens, jax.ShapeDtypeStruct((1,), jnp.int32))


@pytest.mark.parametrize("lower", [pytest.param(lower_gradient, marks=pytest.mark.slow), lower_generation])
def test_program_does_not_grow_with_depth(lower):
    """Compile time follows the program: 32 layers must be the very program of 8, but for its array sizes."""
    operations = [len(lower(layers).as_text().splitlines()) for layers in (8, 32)]
    assert operations[0] > 200
    assert operations[1] == operations[0]


@pytest.mark.slow
def test_a_windowed_layer_does_not_pay_for_full_attention():
    """One executable for full and windowed layers; at T = 4096 and w = 64 the windowed map must be far faster."""
    model = base_model(SOFTMAX).with_pattern(make("FwFw", sliding_window=64))
    graph, weights = nnx.split(model)
    kinds, tokens = kinds_of(model.pattern), random_tokens(1, 4096)

    @jax.jit
    def hidden(weights, data):
        return nnx.merge(graph, weights).features(tokens, data=data)[0]

    def seconds(types):
        data = layer_data(make(types, sliding_window=64), model.config, kinds)
        hidden(weights, data).block_until_ready()
        start = time.process_time()
        hidden(weights, data).block_until_ready()
        return time.process_time() - start

    def faster(least):
        return least["wwww"] < 0.4 * least["FFFF"]

    least = least_seconds(seconds, ("wwww", "FFFF"), faster)
    assert faster(least), least
