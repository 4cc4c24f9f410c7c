"""Rows that devices share: one device's queries against all keys, as the devices hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention, routed_attention, tpu
from pallas_kernels.math.ring import RowOrder
from pallas_kernels.math.spec import PerHead, coordinates
from pallas_kernels.tpu.schedule import pair_schedule, scheduled_backward, scheduled_forward

from .suite import Implementation, quick_jit
from .tolerances import assert_both_close

T = 128
IDS = np.array([[1] * 70 + [2] * 9 + [3] * 49, [0] * 5 + [1] * 20 + [2] * 90 + [0] * 13])
WINDOW = AttentionSpec(21)
SOME_FULL = {"full_heads": jnp.array([True, False])}


@pytest.fixture
def schedules(monkeypatch):
    """What the kernels visit, in blocks of 16 that are cut into small ones of 4."""
    Implementation("tpu", block=16).install(monkeypatch)
    seen = []

    def order_pairs(*arguments, **options):
        seen.append(pair_schedule.order_pairs(*arguments, **options))
        return seen[-1]

    for kernel in (scheduled_forward, scheduled_backward):
        monkeypatch.setattr(kernel, "order_pairs", order_pairs)
    return seen


def by_device(order: RowOrder, ids, attend, *arrays: jax.Array) -> jax.Array:
    """`attend` of each device's queries, put together; the first two of `arrays` [B, T, ..] are the keys and values."""
    held = order.tokens_as_held(T)
    whole = coordinates(T, T, q_segment_ids=ids)
    index = jnp.asarray(whole.q_order)

    def on_device(queries):
        where = whole._replace(
            q_pos=jnp.asarray(whole.q_pos)[:, queries],
            kv_pos=whole.kv_pos[:, held],
            q_order=index[:, queries],
            kv_order=index[:, held],
            q_segment_ids=None if ids is None else whole.q_segment_ids[:, queries],
            kv_segment_ids=None if ids is None else whole.kv_segment_ids[:, held],
        )
        keys = (x[:, held] for x in arrays[:2])
        return attend(*keys, *(x[:, queries] for x in arrays[2:]), where)

    parts = jax.lax.map(on_device, held.reshape(order.devices, -1))  # [devices, B, T / devices, ..]
    return jnp.concatenate(parts, axis=1)[:, np.argsort(held)]


@pytest.mark.parametrize(
    ("zigzag", "ids", "spec", "per_head", "routed"),
    [
        pytest.param(True, IDS, WINDOW, {}, True, id="routed-packed"),
        pytest.param(True, None, WINDOW, SOME_FULL, False, id="some-heads-full", marks=pytest.mark.slow),
        pytest.param(True, IDS, AttentionSpec(), {}, False, id="full-packed", marks=pytest.mark.slow),
        pytest.param(False, IDS, WINDOW, SOME_FULL, False, id="neighbours-packed", marks=pytest.mark.slow),
        pytest.param(False, None, WINDOW, {}, True, id="neighbours-routed", marks=pytest.mark.long),
    ],
)
def test_each_device_has_the_rows_of_one(schedules, zigzag, ids, spec, per_head, routed):
    rng = np.random.default_rng(0)
    k, v, q = (jnp.asarray(rng.normal(size=(2, T, heads, 8)), jnp.float32) for heads in (2, 2, 4))
    gate = jnp.asarray(rng.uniform(size=(2, T)) < 0.4, jnp.float32)
    order = RowOrder(2, zigzag)

    def here(k, v, q):
        def attend(k, v, q, gate, where):
            if routed:
                return tpu.routed_attention(q, k, v, gate, spec, where, PerHead(**per_head), order=order)[0]
            return tpu.attention(q, k, v, spec, where, PerHead(**per_head), order=order)[0]

        return by_device(order, ids, attend, k, v, q, gate)

    def there(k, v, q):
        options = {"q_segment_ids": ids, "implementation": "reference"} | per_head
        if routed:
            return routed_attention(q, k, v, gate, spec, **options)[0]
        return attention(q, k, v, spec, **options)

    def differentiated(f):
        def loss(k, v, q):
            out = f(k, v, q)
            return jnp.sin(out).sum(), out

        (_, out), gradients = quick_jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(k, v, q)
        return out, gradients

    assert_both_close(differentiated(here), differentiated(there), "float32")
    shared = [one.shared is not None for one in schedules]
    assert any(shared)
    assert routed or all(shared)  # of routed rows, the backward pass outside the window has a list


@pytest.mark.parametrize("zigzag", [True, False])
def test_blocks_of_a_row_are_found_where_the_devices_hold_them(zigzag):
    order, blocks = RowOrder(4, zigzag), 16
    held = order.tokens_as_held(blocks)  # one token a block
    found = [int(order.held_at(jnp.int32(block), blocks)) for block in range(blocks)]
    np.testing.assert_array_equal(held[found], np.arange(blocks))


class _Held:
    """A ring of this process alone: what each of its devices holds comes by in turn."""

    devices = 8

    def __init__(self, parts):
        self.parts = iter(parts)

    def passed_on(self, _):
        return next(self.parts)

    def at_hand(self, where, number):
        here = slice(number * T // self.devices, (number + 1) * T // self.devices)
        return where._replace(kv_pos=where.kv_pos[:, here], kv_order=where.kv_order[:, here])


def test_what_a_ring_has_summed_so_far_is_not_rounded(monkeypatch):
    Implementation("tpu", block=16).install(monkeypatch)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, T, heads, 8)).astype(jnp.bfloat16) for heads in (4, 2, 2))
    first, *others = zip(*(np.split(x, _Held.devices, axis=1) for x in (k, v)), strict=True)
    others = [[x.swapaxes(1, 2) for x in part] for part in others]  # as they go round: [B, K, T, D]
    spec, where = AttentionSpec(causal=False), coordinates(T, T)

    def attend(*arrays, ring=None):
        out = quick_jit(lambda *qkv: tpu.attention(*qkv, spec, where, PerHead(), ring=ring)[0])(*arrays)
        return np.asarray(out, np.float32)

    exact = attend(*(x.astype(np.float32) for x in (q, k, v)))
    in_ring, whole = (
        np.sqrt(np.square(out - exact).mean()) for out in (attend(q, *first, ring=_Held(others)), attend(q, k, v))
    )
    assert in_ring < 1.08 * whole  # 1.17 if each part's sum is rounded
