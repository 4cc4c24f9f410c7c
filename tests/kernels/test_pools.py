"""Decoding over the two pools of a model's cache."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, decode_attention
from pallas_kernels.math.spec import PerHead, Pools
from pallas_kernels.pools import attend_over_pools

from .suite import Implementation, quick_jit
from .tolerances import assert_close

WINDOW, ENTRIES, HEADS, KV_HEADS, HEAD_DIM = 21, 90, 6, 3, 12
WHOLE, RING = jnp.array([4, 99, 1]), jnp.array([99, 2, 99])  # slots of the heads; the pools have 5 and 3 rows
IN_WHOLE = np.array([True, False, True])


def normal(rng, *shape) -> jax.Array:
    return jnp.asarray(np.float32(rng.normal(size=shape)))


def held_by_rings(lengths: np.ndarray, tokens: int, sinks: int) -> np.ndarray:
    """Entry j holds the newest position p with (p - sinks) % size == j - sinks, and the sink tokens lie in front."""
    size = WINDOW + tokens - 1
    entry, last = np.arange(sinks + size)[None], lengths[:, None] - 1 - sinks
    rotating = last - (last - (entry - sinks)) % size
    held = np.where(entry < sinks, entry, rotating + sinks)
    return np.where((held < lengths[:, None]) & ((entry < sinks) | (rotating >= 0)), held, -1)


def pool(rng, x, rows: int, slots, index: np.ndarray) -> jax.Array:
    """Of the heads that have a slot in it, the entries of x [B, S, K, D] at `index` [B, entries]."""
    full = np.array(normal(rng, rows, *index.shape, HEAD_DIM))
    for head in np.flatnonzero(np.asarray(slots) < rows):
        full[slots[head]] = np.take_along_axis(np.asarray(x[:, :, head]), np.maximum(index, 0)[:, :, None], axis=1)
    return jnp.asarray(full)


CASES = [
    (0, 1, ()),
    (1, 2, ("sinks",)),
    (2, 1, ("full_heads", "sinks")),
    (3, 1, ("sigmoid", "full_from", "full_heads")),
    (4, 5, ("sigmoid", "sinks")),
    (5, 1, ("softcap", "full_from", "full_heads", "sinks")),
]


@pytest.mark.parametrize(
    ("seed", "tokens", "options", "implementation"),
    [
        pytest.param(*case, name, marks=[] if case[0] in quick else pytest.mark.slow)
        for name, quick in (("tpu", (1, 3)), ("xla", (0, 3)), ("triton", (0, 3)))
        for case in CASES
    ],
)
def test_each_head_reads_the_pool_that_it_is_in(seed, tokens, options, implementation, monkeypatch):
    """Whole sequences and rings side by side, against one dense cache; blocks of 16 show each of their edges."""
    Implementation("triton", block=16).install(monkeypatch)
    rng, lengths = np.random.default_rng(seed), np.array([90, 37, tokens, 22])
    spec = AttentionSpec(
        WINDOW,
        3 if "sinks" in options else 0,
        "sigmoid" if "sigmoid" in options else "softmax",
        logit_softcap=5.0 if "softcap" in options else None,
    )
    q = normal(rng, 4, tokens, HEADS, HEAD_DIM)
    dense = [normal(rng, 4, ENTRIES, KV_HEADS, HEAD_DIM) for _ in "kv"]
    held = held_by_rings(lengths, tokens, spec.num_sink_tokens)
    index = np.tile(np.arange(ENTRIES), (4, 1))
    whole = Pools(*(pool(rng, x, 5, WHOLE, index) for x in dense), WHOLE)
    rings = Pools(*(pool(rng, x, 3, RING, held) for x in dense), RING, jnp.asarray(held, jnp.int32))
    given = {"full_heads": jnp.asarray(IN_WHOLE)} if "full_heads" in options else {}
    if "sigmoid" in options:
        given |= {"sigmoid_bias": normal(rng, HEADS), "alibi_slopes": normal(rng, HEADS) / 10}
    full_from = jnp.array([88, 0, 5, 30]) if "full_from" in options else None
    asked = {"lengths": jnp.asarray(lengths), "full_from": full_from}

    @quick_jit
    def attend(q, whole, rings, given):
        others = rings, spec
        return attend_over_pools(
            q, whole, spec, PerHead(**given), others=others, implementation=implementation, **asked
        )

    @quick_jit
    def reference(q, given):
        out = decode_attention(q, *dense, spec, **asked, **given, implementation="reference")
        if full_from is None:
            return out
        # A ring holds no more than the window.
        narrow = decode_attention(q, *dense, spec, lengths=lengths, **given, implementation="reference")
        return jnp.where(np.repeat(~IN_WHOLE, HEADS // KV_HEADS)[:, None], narrow, out)

    assert_close(attend(q, whole, rings, given), reference(q, given), "float32")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's programs for CPUs")
def test_a_head_on_a_cpu_takes_its_keys_out_of_the_pool_once():
    """What decoding takes is the time to read the cache: nothing as large is made of it but the head's own row."""
    length, size = 1040, 64
    pools = [jax.ShapeDtypeStruct((6, 1, length, size), jnp.float32)] * 2
    q, slots = jax.ShapeDtypeStruct((1, 1, 6, size), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)

    def decode(q, k, v, slots):
        return attend_over_pools(q, Pools(k, v, slots), AttentionSpec(), PerHead(), lengths=jnp.array([1000]))

    program = jax.jit(decode).lower(q, *pools, slots).compile({"xla_backend_optimization_level": 3}).as_text()
    large = re.compile(rf"= f32\[[1,]*{length},[1,]*{size}\]")
    free = re.compile("bitcast\\(|get-tuple-element\\(|parameter\\(")
    loops = [
        text for text in program.split("\n\n") if "fused_computation" not in text.split("{")[0] and large.search(text)
    ]
    made = [sum(bool(large.search(line) and not free.search(line)) for line in text.splitlines()) for text in loops]
    assert sorted(count for count in made if count)[0] == 2, made  # keys and values of a head
    assert not re.search(rf"= f32\[[1,]*{size},[1,]*{length}\]", program)  # turned round
    assert max(made) <= 4  # where a number is not finite, values without it too
