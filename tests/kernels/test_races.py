"""The TPU kernels under JAX's simulation of a TPU's memories, as strict as it gets.

Two cores share the work and take the grid's parallel dimensions in a random order; copies happen when they are waited
for; memory starts as NaN; reads out of bounds, results visited again after another, and unordered accesses to one
place by two cores or copies raise an error. Numbers are held to the reference all the same.
"""

import contextlib
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import AttentionSpec, decode_attention
from pallas_kernels.math.spec import PerHead, coordinates
from pallas_kernels.tpu.decode.decode import decode_pool

from .suite import PACKED, Call, Implementation, set_parallel_dimensions
from .tolerances import assert_both_close, assert_close

STRICT = pltpu.InterpretParams(
    detect_races=True,
    num_cores_or_threads=2,
    random_seed=1,
    dma_execution_mode="on_wait",
    uninitialized_memory="nan",
    out_of_bounds_reads="raise",
)
TPU = Implementation("tpu", block=16)
ROWS = tuple(tuple(row[:40]) for row in PACKED)


def call(window=None, *options, segments=None, **fields) -> Call:
    return Call(AttentionSpec(window, **fields), options, segments, 2, 40, 40, 4, 2, 8)


CALLS = {
    "window": call(11),
    "window-longer-than-blocks": call(37),
    "window-packed-softcap": call(11, segments=ROWS, logit_softcap=2.0),
    "window-sigmoid": call(11, "alibi_slopes", "sigmoid_bias", activation="sigmoid"),
    "sink-tokens": call(11, num_sink_tokens=3),
    "sink-tokens-packed": call(11, segments=ROWS, num_sink_tokens=3),
    "full": call(),
    "full-packed": call(segments=ROWS),
    "bidirectional": call(11, causal=False),
    "full-from": call(11, "full_from_row", "alibi_slopes", "sink_logits"),
    "full-heads": call(11, "full_heads"),
    "sigmoid-everything": call(
        7,
        *("alibi_slopes", "sigmoid_bias", "full_from", "full_heads"),
        segments=ROWS,
        activation="sigmoid",
        num_sink_tokens=3,
    ),
    "ring": call(11, "chunk", "ring"),
}


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    TPU.install(monkeypatch)
    yield
    pltpu.reset_tpu_interpret_mode_state()  # which an error leaves behind


@contextlib.contextmanager
def strict_memories():
    with contextlib.redirect_stdout(io.StringIO()) as printed, pltpu.force_tpu_interpret_mode(STRICT):
        yield
    if "RACE DETECTED" in printed.getvalue():  # all that JAX did about it before 0.12
        raise jax.errors.JaxRuntimeError(printed.getvalue())


def check(run, expected):
    with strict_memories():
        actual = jax.block_until_ready(run())
    assert_both_close(actual, expected, "float32")


def slow_but(*quick):
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.long]) for name in CALLS]


@pytest.mark.parametrize("name", slow_but("window", "sink-tokens-packed"))
def test_attention(name, monkeypatch):
    if "full_heads" in CALLS[name].options:  # whose number is dynamic: the simulation splits what is static
        set_parallel_dimensions(monkeypatch, 1)
    check(lambda: CALLS[name].run("tpu"), CALLS[name].expected())


@pytest.mark.long
@pytest.mark.parametrize("name", ["window", "window-packed-softcap", "sigmoid-everything"])
def test_routed_attention(name, monkeypatch):
    if "full_heads" in CALLS[name].options:  # whose number is dynamic: the simulation splits what is static
        set_parallel_dimensions(monkeypatch, 1)
    gate = jnp.asarray(np.arange(40) % 7 == 0, jnp.float32) * jnp.ones((2, 1))
    (expected,) = CALLS[name].run_routed("reference", gate)
    check(lambda: CALLS[name].run_routed("tpu", gate)[0], expected)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("window", [None, 11])
def test_decode_attention(window, tokens):
    learned, _ = call().draw()

    @functools.partial(jax.jit, static_argnums=3)
    def decode(q, k, v, name):
        lengths, starts = jnp.array([tokens, 35]), jnp.array([0, 4])
        spec = AttentionSpec(window, num_sink_tokens=2)
        return decode_attention(q[:, :tokens], k, v, spec, lengths=lengths, starts=starts, implementation=name)

    with strict_memories():
        actual = jax.block_until_ready(decode(**learned, name="tpu"))
    assert_close(actual, decode(**learned, name="reference"), "float32")


@pytest.mark.long
@pytest.mark.parametrize("scattered", [False, True])
def test_decode_from_pools(scattered):
    """As the model decodes: KV heads are rows of pools, next to each other or anywhere; a third row is not theirs."""
    learned, _ = call().draw()
    q, slots = learned["q"][:, :1], jnp.array([2, 0] if scattered else [1, 2])
    pools = [jnp.zeros((3, 2, 40, 8)).at[slots].set(learned[x].transpose(2, 0, 1, 3)) for x in "kv"]
    where = coordinates(1, 40, q_positions=jnp.array([[11], [34]]), kv_positions=jnp.arange(40)[None])
    spec = AttentionSpec(11, num_sink_tokens=2)
    run = jax.jit(decode_pool, static_argnums=4, static_argnames="scattered")
    with strict_memories():
        actual = jax.block_until_ready(run(q, *pools, slots, spec, where, PerHead(), scattered=scattered))
    lengths = jnp.array([12, 35])
    expected = decode_attention(q, learned["k"], learned["v"], spec, lengths=lengths, implementation="reference")
    assert_close(actual, expected, "float32")


# ---- that the checks can fail ----


def test_two_cores_that_write_one_block_are_found():
    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def run(x):
        call = pl.pallas_call(
            copy,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        )
        jax.block_until_ready(call(x))

    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"), strict_memories():
        run(jnp.zeros((32, 128)))


def test_steps_that_hand_on_accumulators_must_not_be_shared_by_cores(monkeypatch):
    """The window's backward pass with its steps declared parallel."""
    set_parallel_dimensions(monkeypatch, 3)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RACE DETECTED|Revisited block"):
        check(lambda: CALLS["window"].run("tpu"), CALLS["window"].expected())
