"""Generation: batches, sampling, stop tokens, compilations, and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernels.tolerances import assert_close
from tiny_models import PARALLEL, base_model, make, model_of, random_prompts

from pallas_kernels import dispatch
from swa_jax.base.errors import ConfigError
from swa_jax.model.cache import allocate, cache_bytes
from swa_jax.model.generate import (
    GREEDY,
    NOTHING,
    Sampling,
    _decode,
    _prefill,
    decode,
    drawing,
    generate,
    layouts_of,
    prefill,
    prepare,
    round_up,
    sample,
    sampling,
)

NEW = 12
pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_the_length_of_one_prompt_does_not_change_the_rope_of_another():
    """LongRoPE has other frequencies in a cache of more than 64 tokens: a short prompt keeps those of its own."""
    scaling = dataclasses.replace(PARALLEL.rope_scaling, original_max_position_embeddings=64)
    model = base_model(dataclasses.replace(PARALLEL, rope_scaling=scaling)).with_pattern(make("wFwF"))
    prompts = random_prompts((20, 70, 20))
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        alone = [generate(model, [prompt], max_new_tokens=NEW, **options)[0] for prompt in prompts]
        assert generate(model, prompts, max_new_tokens=NEW, **options) == alone
    assert generate(model, prompts[:1], max_new_tokens=NEW, max_length=128, **options) != alone[:1]


# ---- batches ----


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(f"every-kind+{how}", marks=pytest.mark.slow) for how in ("fa-decode", "last-tokens")),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("every-kind", "experts", "sink-logits-every-kind")),
    ],
)
def test_batch_equals_each_alone_and_the_full_forward(name):
    model, prompts = model_of(name), random_prompts()
    lengths = [len(prompt) for prompt in prompts]
    batch = generate(model, prompts, max_new_tokens=NEW)
    assert [len(new) for new in batch] == [NEW] * 4
    assert batch == [generate(model, [prompt], max_new_tokens=NEW)[0] for prompt in prompts]
    # Every token is the likeliest after all that stands before it, in one plain forward pass.
    rows = [prompt + new for prompt, new in zip(prompts, batch, strict=True)]
    tokens = jnp.array([row + [0] * (64 - len(row)) for row in rows])
    options = {"full_from": model.pattern.full_from(jnp.array(lengths))}
    predicted = nnx.jit(lambda model, tokens: model(tokens, **options).argmax(-1))(model, tokens)
    for row, length, new in zip(np.asarray(predicted), lengths, batch, strict=True):
        assert row[length - 1 : length - 1 + NEW].tolist() == new
    assert len({tuple(new) for new in batch}) == 4  # the model does listen to its prompt


@pytest.mark.parametrize("name", ["window", pytest.param("every-kind", marks=pytest.mark.slow)])
def test_full_attention_decode_starts_after_the_prompt(name):
    model, prompts = model_of(f"{name}+fa-decode"), random_prompts()
    pattern = dataclasses.replace(model.pattern, full_attention_decode=False)
    full = generate(model, prompts, max_new_tokens=NEW)
    plain = generate(model.with_pattern(pattern), prompts, max_new_tokens=NEW)
    assert [new[0] for new in full] == [new[0] for new in plain]  # drawn by the last prompt query
    assert full != plain


def test_last_tokens_of_the_prompt_see_everything_too():
    """All of them: what full attention gives. Some: neither that nor what none gives."""
    model, prompts = model_of("window+fa-decode"), random_prompts()

    def new(pattern):
        return generate(model.with_pattern(pattern), prompts, max_new_tokens=NEW)

    all_of_them, some = (new(dataclasses.replace(model.pattern, num_last_tokens=last)) for last in (40, 3))
    assert all_of_them == new(make("FFFF", sliding_window=None))
    assert some not in (all_of_them, new(model.pattern))


def test_samples_do_not_depend_on_the_batch():
    model, prompts = model_of("window"), random_prompts()
    options = {"max_new_tokens": NEW, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "seed": 3}
    batch = generate(model, prompts, **options)
    assert generate(model, prompts[::-1], **options) == batch[::-1]
    assert generate(model, prompts[2:3], **options) == batch[2:3]
    assert generate(model, prompts, **options | {"seed": 4}) != batch
    assert generate(model, prompts, **options | {"temperature": 0.1}) != batch
    # Equal prompts draw different samples, the first the same as alone.
    equal = generate(model, [prompts[2]] * 4, **options)
    assert equal[0] == batch[2]
    assert len({tuple(new) for new in equal}) == 4


def test_stop_tokens_end_sequences_and_the_loop():
    model, prompts = model_of("window"), random_prompts()
    free = generate(model, prompts, max_new_tokens=NEW)
    stops = (free[0][4], free[2][2])
    expected = []
    for new in free:
        ends = [i for i, token in enumerate(new) if token in stops]
        expected.append(new[: ends[0]] if ends else new)
    assert len(expected[0]) <= 4
    assert len(expected[2]) <= 2
    assert generate(model, prompts, max_new_tokens=NEW, stop_tokens=stops) == expected
    # Once every sequence has stopped, no further step runs: the caches hold the prompt and what was fed back.
    batch = prepare(model, [prompts[2]] * 4, NEW)
    logits, cache = prefill(model, batch)
    new, cache = decode(model, batch, logits, cache, NEW, drawing(stop_tokens=stops))
    kept = len(expected[2])
    assert np.asarray(new).tolist() == [free[2][:kept] + [NOTHING] * (NEW - kept)] * 4
    assert np.asarray(cache.lengths).tolist() == [19 + kept] * 4
    # Where others go on, the cache of one that has stopped stays as it is.
    batch = prepare(model, prompts, NEW)
    logits, beside = prefill(model, batch)
    _, beside = decode(model, batch, logits, beside, NEW, drawing(stop_tokens=stops))
    assert beside.lengths[2] == 19 + kept < beside.lengths[3]
    (pools,), (others,) = cache.pools, beside.pools
    for alone, among in ((pools.k_ring, others.k_ring), (pools.v_ring, others.v_ring)):
        assert_close(among[:, 2], alone[:, 2], "float32")


@pytest.mark.slow
def test_similar_calls_share_their_compilations():
    model = model_of("window")
    options = {"max_new_tokens": NEW, "temperature": 1.0}
    generate(model, random_prompts((3, 8)), **options)
    before = _prefill.program()._cache_size(), _decode.program()._cache_size()
    generate(model, random_prompts((31, 2), seed=1), **options | {"temperature": 0.5, "seed": 9})
    generate(model_of("window").with_pattern(model.pattern), random_prompts((9, 50)), **options)
    generate(model, random_prompts((9, 50)), max_new_tokens=7, temperature=1.0)
    assert (_prefill.program()._cache_size(), _decode.program()._cache_size()) == before
    generate(model, random_prompts((9, 70)), **options)  # a longer prompt does compile
    assert (_prefill.program()._cache_size(), _decode.program()._cache_size()) == (before[0] + 1, before[1] + 1)


def test_max_length_is_that_of_the_caches():
    model, prompts = model_of("window+fa-decode"), random_prompts((3, 5))
    batch = prepare(model, prompts, NEW, max_length=17)
    assert batch.tokens.shape == (2, 17)
    _, cache = prefill(model, batch)
    assert cache.nbytes == cache_bytes(model.config, model.pattern, 2, 17, itemsize=4)
    assert generate(model, prompts, max_new_tokens=NEW, max_length=17) == generate(model, prompts, max_new_tokens=NEW)


def test_lengths_are_rounded_up_to_few():
    for length in (1, 63, 64, 65, 500, 512, 513, 1000, 1025, 5000, 131073):
        assert length <= round_up(length) <= max(64, length + 63, length * 9 / 8)
        assert round_up(length) % 64 == 0
        assert round_up(round_up(length)) == round_up(length)
    assert len({round_up(length) for length in range(1, 8193)}) == 8 + 8 * 4


# ---- drawing a token ----

SHARES = np.array([0.05, 0.5, 0.15, 0.3])
LOGITS = jnp.log(jnp.asarray(SHARES, jnp.float32))


def draw_many(temperature=1.0, top_k=None, top_p=None, logits=LOGITS, count=4000) -> np.ndarray:
    """The share of each token among many draws."""
    chosen = Sampling(
        jnp.float32(temperature),
        None if top_k is None else jnp.int32(top_k),
        None if top_p is None else jnp.float32(top_p),
    )
    keys = jax.random.split(jax.random.key(0), count)
    drawn = jax.jit(sample)(jnp.broadcast_to(logits, (count, logits.size)), keys, chosen)
    assert drawn.dtype == jnp.int32
    return np.bincount(np.asarray(drawn), minlength=logits.size) / count


def test_settings_that_change_nothing_cost_nothing():
    assert sampling(1e-40, 5, 0.5) == sampling(9e-6) == sampling(0.0) == GREEDY
    assert sampling(1.0, top_p=1.0).top_p is None


@pytest.mark.parametrize(
    ("options", "kept", "power"),
    [
        ({}, (0, 1, 2, 3), 1),
        ({"temperature": 0.5}, (0, 1, 2, 3), 2),
        ({"top_k": 1}, (1,), 1),
        ({"top_k": 2}, (1, 3), 1),
        ({"top_k": 9}, (0, 1, 2, 3), 1),
        ({"top_p": 1.0}, (0, 1, 2, 3), 1),
        ({"top_p": 0.75}, (1, 3), 1),
        ({"top_p": 0.85}, (1, 2, 3), 1),
        ({"top_p": 1e-6}, (1,), 1),
        ({"top_k": 3, "top_p": 0.8}, (1, 3), 1),  # of the three kept, two have 0.84
        ({"top_k": 2, "top_p": 0.99, "temperature": 2.0}, (1, 3), 0.5),
    ],
)
def test_sampling_draws_from_the_right_distribution(options, kept, power):
    expected = np.zeros(4)
    expected[list(kept)] = SHARES[list(kept)] ** power
    expected /= expected.sum()
    drawn = draw_many(**options)
    assert set(np.flatnonzero(drawn)) == set(kept)
    np.testing.assert_allclose(drawn, expected, atol=4 * 0.5 / np.sqrt(4000))  # four standard deviations


def test_each_step_and_each_of_equal_prompts_draws_anew():
    """At this temperature all tokens are about as likely: what is drawn is the keys' doing."""
    model, prompts, options = model_of("window"), [[1, 2, 3]] * 4, {"max_new_tokens": NEW, "temperature": 1e6}
    first, second, *_ = drawn = generate(model, prompts, **options)
    assert len(set(first)) > 4
    assert first != second
    for array in (np.array(prompts), jnp.array(prompts)):  # as good as lists
        assert generate(model, array, **options) == drawn


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_of_equal_tokens_no_more_are_kept_than_asked_for(kept):
    """Four of a quarter each, exactly: two reach a half, and a third is not needed."""
    for options in ({"top_k": kept}, {"top_p": kept / 4}):
        assert np.count_nonzero(draw_many(logits=jnp.zeros(4), count=400, **options)) == kept


def test_greedy_takes_the_first_of_the_likeliest():
    logits = jnp.array([[0.0, 3.0, 3.0], [5.0, -1.0, 2.0]])
    assert sample(logits, jax.random.split(jax.random.key(0), 2), Sampling()).tolist() == [1, 0]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompts": []}, "prompts is empty: give at least one prompt"),
        ({"prompts": [1, 2]}, "prompts[0] must be a list of token ids, got 1"),
        ({"prompts": ["text"]}, "prompts[0] must be a list of token ids, got 'text'"),
        ({"prompts": [[1], []]}, "prompts[1] is empty: a prompt needs at least one token"),
        ({"prompts": [[1], [2, 61]]}, "prompts[1] holds token 61 at [1], the model's vocabulary has ids 0 to 60"),
        ({"prompts": [[-1]]}, "prompts[0] holds token -1 at [0], the model's vocabulary has ids 0 to 60"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": "8"}, "max_new_tokens must be a whole number, got '8'"),
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or a positive number, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 (greedy) or a positive number, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"stop_tokens": 5}, "stop_tokens must be a list of token ids, got 5"),
        ({"stop_tokens": (61,)}, "stop_tokens holds token 61 at [0], the model's vocabulary has ids 0 to 60"),
        (
            {"max_length": 6},
            "max_length is 6, but the longest prompt has 3 tokens and max_new_tokens is 4: it must be at least 7",
        ),
    ],
)
def test_wrong_arguments(change, sentence):
    arguments = {"prompts": [[1, 2, 3]], "max_new_tokens": 4} | change
    with pytest.raises(ConfigError) as error:
        generate(model_of("window"), arguments.pop("prompts"), **arguments)
    assert str(error.value) == sentence


def test_more_than_the_memory_holds_is_refused():
    with pytest.raises(ConfigError, match=r"room for \d+ tokens take .* GiB are free: lower max_new_tokens"):
        generate(model_of("window"), [[1, 2, 3]], max_new_tokens=10**12)


# ---- the kernels of a GPU and of a TPU, interpreted ----


def three_steps(name):
    """Logits [3, B, V] of three decoded tokens, and the program of a step."""
    model = model_of(name)
    batch = prepare(model, random_prompts(), 4)
    layouts = layouts_of(model, batch.max_length)
    full_from = batch.lengths if model.pattern.full_attention_decode else None

    def step(tokens, cache):  # a function of its own: JAX would take the last one's program
        return model.decode_step(tokens, cache, layouts, full_from)

    logits, cache = prefill(model, batch)  # by the program of the first call, which is XLA's
    traced = jax.jit(step).trace(jnp.zeros(4, jnp.int32), cache)
    run, found = traced.lower().compile(), []
    for _ in range(3):
        logits, cache = run(logits.argmax(-1).astype(jnp.int32), cache)
        found.append(logits)
    return jnp.stack(found), str(traced.jaxpr)


by_xla = functools.cache(three_steps)


@pytest.mark.parametrize("best", ["triton", "tpu"])
@pytest.mark.parametrize(
    "name", ["every-kind", *(pytest.param(x, marks=pytest.mark.slow) for x in ("head-hybrid", "every-kind+fa-decode"))]
)
def test_decoding_by_kernels_knows_layers_of_every_kind(name, best, monkeypatch):
    """To a GPU's one launch full, windowed, hybrid and routed layers are data; a TPU's lists are made once for all."""
    expected, body = by_xla(name)
    assert "pallas_call[" not in body
    monkeypatch.setitem(dispatch._BEST, "cpu", (best,))
    found, body = three_steps(name)
    assert_close(found, expected, "float32")
    if best == "triton":
        assert body.count("pallas_call[") == 1
        assert " cond[" not in body
    elif name == "head-hybrid":  # a list is a running sum
        assert "cumsum[" in body
        assert "cumsum[" not in body[body.index(" scan[") :]


@pytest.mark.parametrize(
    "name", ["head-hybrid", pytest.param("every-kind", marks=pytest.mark.slow), "sink-logits-every-kind"]
)
def test_a_piece_of_a_prompt_takes_all_heads_together(name, monkeypatch):
    """As on a GPU, whose kernels are interpreted here: heads side by side, not in a loop."""
    model = model_of(name)
    layouts = layouts_of(model, 128)
    empty = allocate(model.config, layouts, 2, jnp.float32)
    tokens = np.pad(np.array(random_prompts((80,))[0], np.int32), (0, 32))

    def pieces():
        def extend(tokens, count, cache):  # a function of its own: JAX would take the last one's program
            return model.extend(tokens, count, jnp.int32(1), cache, layouts)

        traced = jax.jit(extend).trace(tokens[:32], jnp.int32(32), empty)
        run, cache, found = traced.lower().compile(), empty, []
        for start, count in ((0, 30), (30, 32), (62, 17)):
            logits, cache = run(tokens[start : start + 32], jnp.int32(count), cache)
            found.append(logits)
        return jnp.stack(found), str(traced.jaxpr).count("pallas_call[")

    expected, launches = pieces()
    assert launches == 0
    monkeypatch.setitem(dispatch._BEST, "cpu", ("triton",))
    found, launches = pieces()
    assert launches > 0
    assert_close(found, expected, "float32")
