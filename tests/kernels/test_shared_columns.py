"""The two edges of a window as one tile, on strips that have such tiles: as they are on a TPU, and small ones."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.blocks import Tiles
from pallas_kernels.tpu.calls import launches
from pallas_kernels.tpu.tile.tiles import LANES, beside_ones
from pallas_kernels.tpu.tile.tiles import Call as KernelCall
from pallas_kernels.tpu.window.geometry import window_tiles
from pallas_kernels.tpu.window.shared_columns import share_columns, shared_products, shared_values

from .suite import Call, Implementation, assert_matches_reference, quick_jit
from .tolerances import assert_close

TPU = Implementation("tpu")
QUARTERS = Tiles(512, 512, strip=256, tile=256)  # with a head_dim of at most 128, as v6e and v7x have them


@pytest.fixture
def cut_into(monkeypatch):
    return lambda tiles: monkeypatch.setattr(launches, "choose_tiles", lambda *_, **__: tiles)


@pytest.mark.parametrize(("n", "head_dim"), [(16, 8), (256, 128)])
@pytest.mark.parametrize("with_sums", [True, False])
def test_each_query_has_one_key_in_each_column(n, head_dim, with_sums):
    rng = np.random.default_rng(n + head_dim)
    query, far_keys, near_keys, far_values, near_values = rng.normal(size=(5, n, head_dim)).astype(np.float32)
    is_far = np.arange(n)[:, None] < np.arange(n)
    expected = np.where(is_far, query @ far_keys.T, query @ near_keys.T)
    assert_close(shared_products(query, jnp.asarray(far_keys), jnp.asarray(near_keys)), expected, "float32")
    weights = rng.uniform(size=(n, n)).astype(np.float32)
    values = np.where(is_far, weights, 0) @ far_values + np.where(is_far, 0, weights) @ near_values
    far_values, near_values = jnp.asarray(far_values), jnp.asarray(near_values)
    if with_sums:
        spare = [(0, 0), (0, LANES - head_dim)]
        far_values, near_values = (beside_ones(jnp.pad(x, spare)) for x in (far_values, near_values))
        sums = np.broadcast_to(weights.sum(axis=1, keepdims=True), (n, LANES))
        values = np.concatenate([np.pad(values, spare), sums], axis=1)
    found = shared_values(jnp.asarray(weights), far_values, near_values, with_sums=with_sums, acc=1.0)
    assert_close(found / n, (1 + values) / n, "float32")


@pytest.mark.parametrize(
    ("window", "strip", "tile", "shared"),
    [
        (256, 256, 256, True),
        (1024, 256, 256, True),
        (128, 128, 128, True),
        (100, 128, 128, True),  # the next whole window, and a mask
        (2, 128, 128, True),
        (1, 128, 128, False),  # the strip's own tokens are all that it sees
        (129, 128, 128, False),  # of the tile that 256 has more, no query sees a key
        (128, 256, 256, False),  # half of the far tile is enough
        (1000, 256, 256, True),
        (640, 256, 256, False),
        (640, 128, 128, True),
    ],
)
def test_which_windows_have_such_edges(window, strip, tile, shared):
    call = KernelCall(AttentionSpec(window), Tiles(1024, 1024, strip=strip, tile=tile))
    for start in range(0, 1024, strip):
        tiles = window_tiles(call, start, present=-(-(window - 1) // 1024) + 1)
        assert share_columns(call, tiles) == shared
    # A strip whose window begins before the sequence sees one edge alone.
    assert not share_columns(call, window_tiles(call, 0, present=1))


PACKED = (tuple([1] * 20 + [2] * 40 + [3] * 30 + [0] * 6), tuple([1] * 96))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(Call(AttentionSpec(16), q_length=96, kv_length=96), marks=pytest.mark.slow),
        Call(AttentionSpec(24, logit_softcap=2.0), ("alibi_slopes", "sink_logits"), q_length=96, kv_length=96),
        Call(AttentionSpec(16), ("alibi_slopes",), PACKED, q_length=96, kv_length=96),
        Call(AttentionSpec(16, num_sink_tokens=3), (), PACKED, q_length=96, kv_length=96),
        Call(AttentionSpec(5, num_sink_tokens=3), ("alibi_slopes",), q_length=96, kv_length=96),
        Call(AttentionSpec(21, logit_softcap=2.0), ("alibi_slopes",), q_length=96, kv_length=96),
        Call(AttentionSpec(5), ("alibi_slopes",), PACKED, q_length=96, kv_length=96),
    ],
    ids=[
        "window",
        "softcap-alibi-sink-logits",
        "packed-alibi",
        "packed-sink-tokens",
        "less-than-a-strip",
        "between-strips",
        "packed-less-than-a-strip",
    ],
)
def test_small_strips(call, cut_into):
    cut_into(Tiles(32, 32, strip=8, tile=8))
    assert_matches_reference(dataclasses.replace(call, heads=2, kv_heads=1), TPU)


@pytest.mark.parametrize("head_dim", [128, 96])
@pytest.mark.parametrize(
    ("window", "segments"),
    [(256, None), (200, None), *((window, (tuple([1] * 700 + [2] * 324),)) for window in (512, 700))],
    ids=["window-256", "window-200", "packed-window-512", "packed-window-700"],
)
def test_strips_of_a_tpu(window, segments, head_dim, cut_into):
    cut_into(QUARTERS)
    call = Call(AttentionSpec(window), (), segments, 1, 1024, 1024, 1, 1, head_dim=head_dim)
    assert_matches_reference(call, TPU)


@pytest.mark.parametrize("window", [128, None])
def test_narrow_heads_in_bfloat16(window, cut_into):
    cut_into(QUARTERS)
    call = Call(AttentionSpec(window), (), None, 1, 300, 300, 1, 1, head_dim=96, dtype="bfloat16")
    assert_matches_reference(call, TPU)


@pytest.mark.parametrize("head_dim", [128, 96])
def test_what_is_not_a_number_reaches_those_who_see_it(head_dim, cut_into):
    """In every quarter: not every row of a strip is multiplied with every quarter of its edges. And two queries share a
    row of the product with the corners."""
    cut_into(QUARTERS)
    inputs = dict(
        zip("qkv", np.random.default_rng(0).normal(size=(3, 1, 1024, 1, head_dim)).astype(np.float32), strict=True)
    )
    index = np.arange(1024)

    @quick_jit
    def attend(q, k, v):
        out, lse = attention(q, k, v, AttentionSpec(256), return_lse=True, implementation="tpu")
        return out[0, :, 0], lse

    clean, _ = attend(**inputs)
    # Not the last of a tile: on a CPU, XLA's maximum of a row loses a NaN there.
    cases = [*itertools.product("v", (300, 450, 520, 700, 767, 1000)), *itertools.product("qk", (300, 450, 530, 700))]
    for which, token in cases:
        changed = inputs[which].copy()
        changed[0, token] = np.nan
        out, lse = attend(**inputs | {which: changed})
        sees = index == token if which == "q" else (index >= token) & (index < token + 256)
        np.testing.assert_array_equal(np.isnan(out).all(axis=1), sees)
        if which == "v":  # the step is done again
            assert np.isfinite(np.asarray(out)[~sees]).all()
            assert np.isfinite(lse).all()
        else:
            np.testing.assert_array_equal(np.asarray(out)[~sees], np.asarray(clean)[~sees])
