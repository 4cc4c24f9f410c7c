"""What is particular to the TPU kernels: which one serves a call, and what they visit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionSpec, attention
from pallas_kernels.blocks import Tiles, longest_window
from pallas_kernels.math.schedule import flat_visits, fully_visible, unpack, visited
from pallas_kernels.math.spec import PerHead, coordinates
from pallas_kernels.tpu.calls import launches
from pallas_kernels.tpu.schedule import scheduled_backward as tpu_backward
from pallas_kernels.tpu.schedule import scheduled_forward as tpu_forward
from pallas_kernels.tpu.schedule.pair_schedule import order_pairs
from pallas_kernels.tpu.tile.tiles import LANES
from pallas_kernels.tpu.tile.tiles import Call as KernelCall
from pallas_kernels.tpu.window.geometry import window_kernel_serves

from .suite import PACKED, Call, Implementation, assert_matches_reference, seen_pairs

SPECS = {
    "full": AttentionSpec(),
    "bidirectional": AttentionSpec(causal=False),
    "window": AttentionSpec(11),
    "chunked": AttentionSpec(11, chunked=True),
    "chunked-bidirectional": AttentionSpec(11, causal=False, chunked=True),
    "window-bidirectional": AttentionSpec(11, causal=False),
    "window-that-misses-one-corner-of-a-block": AttentionSpec(15),
    "sinks": AttentionSpec(9, 3),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("full_from", [None, 40])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_without_a_mask_are_exactly_the_fully_visible_ones(spec, full_from, outside, packed):
    packing = {"q_segment_ids": np.array(PACKED[:1])[:, :48]} if packed else {}
    if full_from is not None and spec.window is not None:
        packing["full_from"] = np.full((1, 3), full_from)
    where = coordinates(48, 48, **packing)
    by_block = seen_pairs(spec, where, outside=outside)[0].reshape(6, 8, 6, 8).swapaxes(1, 2)
    fully = np.asarray(fully_visible(spec, where, 8, 8, outside=outside))
    assert not (fully & ~by_block.all((2, 3))).any()
    if not packing and not spec.num_sink_tokens:
        np.testing.assert_array_equal(fully, by_block.all((2, 3)))
    listed = np.asarray(visited(spec, where, 8, 8, outside=outside))
    assert not (by_block.any((2, 3)) & ~listed).any()
    if not packing:
        np.testing.assert_array_equal(listed, by_block.any((2, 3)))


def test_flat_visits_list_every_wanted_pair_once_and_every_row_at_least_once():
    rng = np.random.default_rng(0)
    table = rng.random((7, 5)) < 0.4
    table[3] = False
    fully = table & (rng.random((7, 5)) < 0.5)
    visits = flat_visits(jnp.asarray(table), jnp.asarray(fully))
    used = [jax.tree.map(int, unpack(pair)) for pair in np.asarray(visits.pairs)[: int(visits.used)]]
    wanted = [(visit.row, visit.column) for visit in used if visit.wanted]
    assert wanted == [tuple(map(int, pair)) for pair in np.argwhere(table)]
    assert {(v.row, v.column) for v in used if v.wanted and not v.masked} == set(
        map(tuple, np.argwhere(fully).tolist())
    )
    for row in range(7):
        mine = [visit for visit in used if visit.row == row]
        assert [visit.first for visit in mine] == [True] + [False] * (len(mine) - 1)
        assert [visit.last for visit in mine] == [False] * (len(mine) - 1) + [True]


@pytest.mark.parametrize(
    "change", ["none", "positions", "full_from", "lengths", "sinks in segments", "long", "chunked"]
)
def test_window_kernel_serves_default_positions_and_moderate_windows(change):
    spec = AttentionSpec(
        2049 if change == "long" else 11, 2 if change == "sinks in segments" else 0, chunked=change == "chunked"
    )
    options = {
        "positions": {"q_positions": np.arange(48)[None]},
        "full_from": {"full_from": np.array([4])},
        "sinks in segments": {"q_segment_ids": np.ones((1, 48), int)},
    }
    where = coordinates(48, 40 if change == "lengths" else 48, **options.get(change, {}))
    call = KernelCall(spec, Tiles(16, 16, strip=8, tile=8), indexed=launches.is_indexed(where))
    assert window_kernel_serves(call, where) == (change not in ("positions", "lengths", "long", "chunked"))


def test_the_longest_window_of_the_window_kernel_depends_on_the_chip_and_the_size_of_a_row():
    for kind in ("TPU v6 lite", "TPU7x"):
        assert longest_window(kind, 64, jnp.bfloat16) == longest_window(kind, 128, jnp.bfloat16) == 4096
        assert longest_window(kind, 256, jnp.bfloat16) == longest_window(kind, 128, jnp.float32) == 2048
    assert longest_window("TPU v5 lite", 128, jnp.bfloat16) == longest_window("TPU v5p", 64, jnp.bfloat16) == 2048
    for head_dim, served in ((128, True), (256, False)):
        q = jnp.zeros((1, 2, 1, head_dim), jnp.bfloat16)
        where = coordinates(2, 2)
        call = launches.call_of(q, AttentionSpec(4096), where, PerHead())
        assert launches.choose_kernel(call, where).window_kernel == served


@pytest.mark.parametrize("scale", [0.25, 0.3, 96**-0.5])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_scale_of_a_sigmoid_does_not_round_q(scale, softcap):
    spec = AttentionSpec(11, activation="sigmoid", scale=scale, logit_softcap=softcap)
    call = KernelCall(spec, Tiles())
    assert math.frexp(call.query_factor)[0] == 0.5  # a power of two
    assert 1 <= call.rest_factor < 2
    factor = scale / 2 if softcap is None else scale / softcap
    assert call.query_factor * call.rest_factor == pytest.approx(factor)


def test_float64_is_refused_by_name():
    with jax.enable_x64(True):
        q = jnp.zeros((1, 4, 1, 8), jnp.float64)
        with pytest.raises(NotImplementedError, match="takes float32 and bfloat16, but q is float64"):
            attention(q, q, q, AttentionSpec(), implementation="tpu")


@pytest.mark.parametrize("implementation", ["tpu", "triton"])
def test_kernels_count_in_32_bits(implementation):
    with jax.enable_x64(True):
        q = jnp.zeros((1, 4, 1, 8), jnp.float32)
        with pytest.raises(NotImplementedError, match=r"kernels count in 32 bits, but jax_enable_x64 is on"):
            attention(q, q, q, AttentionSpec(), implementation=implementation)


@pytest.mark.parametrize(
    ("length", "spec"), [(40, AttentionSpec(4, 1)), pytest.param(96, AttentionSpec(40, 2), marks=pytest.mark.slow)]
)
def test_a_short_row_whose_tiles_are_no_multiples_of_each_other(length, spec):
    rows = ((1,) * 25 + (2,) * (length - 25),)
    assert_matches_reference(Call(spec, (), rows, 1, length, length, 2, 1), Implementation("tpu"))


@pytest.mark.parametrize("given", ["q_positions", "kv_positions"])
def test_positions_of_one_side_alone_are_no_indices(given):
    assert launches.is_indexed(coordinates(8, 8))
    assert not launches.is_indexed(coordinates(8, 8, **{given: jnp.arange(3, 11)[None]}))


WALKED = {
    "full": Call(AttentionSpec()),
    "long-window": Call(AttentionSpec(21)),
    "packed": Call(AttentionSpec(21), segments=tuple(map(tuple, PACKED))),
    "full-heads": Call(AttentionSpec(21), ("full_heads",)),
    "sigmoid": Call(AttentionSpec(21, activation="sigmoid"), ("alibi_slopes", "sigmoid_bias", "full_heads"), heads=3),
}


VMEM = ("holds keys", "holds gradients", "holds some gradients")
USUAL = {("packed", VMEM[1]), ("full-heads", VMEM[2])}


@pytest.mark.parametrize(
    ("name", "vmem"),
    # With all keys at hand, test_variants has every variant but a long causal window.
    [
        ("long-window", VMEM[0]),
        *(
            pytest.param(name, vmem, marks=pytest.mark.slow if (name, vmem) in USUAL else pytest.mark.long)
            for name in WALKED
            for vmem in VMEM[1:]
        ),
    ],
)
def test_scheduled_kernels_whatever_vmem_holds(monkeypatch, vmem, name):
    """Long sequences take a step of the grid for each pair of blocks, and longer ones their keys in chunks."""
    implementation = Implementation("tpu", block=16).install(monkeypatch)
    monkeypatch.setattr(launches, "longest_window", lambda *_: 0)  # scheduled kernels only
    block_of_gradients = 2 * 4 * 16 * LANES
    keys, gradients = {
        "holds keys": (1 << 20, 1 << 20),
        "holds gradients": (0, 4 * block_of_gradients),
        "holds some gradients": (0, 2 * block_of_gradients),
    }[vmem]
    monkeypatch.setattr(tpu_forward, "_RESIDENT_BYTES", keys)
    monkeypatch.setattr(tpu_backward, "_VMEM_BYTES", gradients)
    assert_matches_reference(WALKED[name], implementation)


@pytest.mark.parametrize("num_blocks", [1, 5, 6])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("window", [None, 3, 8, 21])
def test_folded_walk_takes_each_pair_once_and_hardly_an_idle_step(num_blocks, window, outside):
    call = KernelCall(AttentionSpec(window), Tiles(8, 8), indexed=True, outside=outside)
    where = coordinates(8 * num_blocks, 8 * num_blocks)
    schedule = order_pairs(call, where, resident=False, flush=True)
    steps = [schedule.visit(indices, ()) for indices in np.ndindex(*schedule.grid)]
    wanted = [(int(visit.row), int(visit.column)) for visit in steps if visit.wanted]
    expected = visited(call.spec, where, 8, 8, outside=outside)
    assert sorted(wanted) == sorted(map(tuple, np.argwhere(expected).tolist()))
    assert [int(visit.column) for visit in steps if visit.flush] == list(range(num_blocks))
    for row in range(num_blocks):
        mine = [visit for visit in steps if int(visit.row) == row and not visit.flush]
        assert sum(bool(visit.first) for visit in mine) == sum(bool(visit.last) for visit in mine) == 1
