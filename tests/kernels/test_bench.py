"""What the static measurement compiles is what the API dispatches to, launch for launch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import AttentionSpec, attention, decode_attention, routed_attention
from pallas_kernels.math.spec import coordinates
from pallas_kernels.tpu.decode.decode import choose_steps, list_visits
from pallas_kernels.tpu.schedule import documents
from swa_jax.bench import bench_rows, tpu_kernels
from swa_jax.bench.compile_for_chip import kernel_name, pallas_calls

T, WINDOW = 2048, 1024
BF16 = jnp.bfloat16


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def launches(kind: str, function, arguments) -> list[tuple]:
    """Name, grid, block shapes and kernel of every launch, in the order of their texts."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.jit(function).trace(*arguments).jaxpr.jaxpr
    found = []
    for eqn in pallas_calls(jaxpr):
        grid = eqn.params["grid_mapping"]
        blocks = [str(block.block_shape) for block in grid.block_mappings]
        found.append((kernel_name(eqn), str(grid.grid), str(blocks), str(eqn.params["jaxpr"])))
    return sorted(found)


def through_the_api(name: str):
    """The call of the API that a function of `bench` stands for, as (function, arguments)."""
    heads = 8 if name in ("head_hybrid_forward", "decode") else 1
    q = array(1, T, heads, 128)
    if name == "decode":
        one, lengths = array(1, 1, heads, 128), array(1, dtype=jnp.int32)
        spec = AttentionSpec(WINDOW)
        return lambda q, k, v, n: decode_attention(q, k, v, spec, lengths=n, implementation="tpu"), (one, q, q, lengths)
    activation = "sigmoid" if name.startswith("sigmoid") else "softmax"
    spec = AttentionSpec(None if name.startswith("full") else WINDOW, activation=activation)

    def forward(q, k, v, gate):
        if name.startswith("routed"):
            return routed_attention(q, k, v, gate, spec, implementation="tpu")[0]
        options = {}
        if activation == "sigmoid":
            options["alibi_slopes"] = jnp.ones(heads)
        if name == "head_hybrid_forward":
            options["full_heads"] = jnp.arange(heads) >= 6
        return attention(q, k, v, spec, **options, implementation="tpu")

    def both(*arguments):
        out, pullback = jax.vjp(forward, *arguments)
        return pullback(out)

    return (both if name.endswith("backward") else forward), (q, q, q, array(1, T, dtype=jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in tpu_kernels.FUNCTIONS if not name.startswith("rows_")]
)  # parts of a call
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
def test_bench_functions_launch_what_the_api_launches(name, kind):
    measured = launches(kind, *tpu_kernels.FUNCTIONS[name](T=T))
    called = launches(kind, *through_the_api(name))
    assert measured
    if name in ("window_backward", "full_backward", "sigmoid_backward"):
        # A vjp launches the forward kernels too, which have a function of their own.
        forward = launches(kind, *tpu_kernels.FUNCTIONS[name.replace("backward", "forward")](T=T))
        measured = sorted(measured + forward)
    assert [launch[:3] for launch in measured] == [launch[:3] for launch in called]
    assert measured == called


@pytest.mark.parametrize(
    "option",
    [
        {"packed": True},
        {"num_sink_tokens": 128},
        {"packed": True, "num_sink_tokens": 4},
        {"packed": True, "full_from": 512},
        {"packed": True, "H": 2, "K": 2, "D": 64},  # a pair of heads
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_variants_of_the_window_launch_what_the_api_launches(option, backward):
    kind, name = "TPU v6 lite", "window_backward" if backward else "window_forward"
    spec = AttentionSpec(WINDOW, option.get("num_sink_tokens", 0))

    def forward(q, k, v, ids):
        options = {"q_segment_ids": ids} if "packed" in option else {}
        if "full_from" in option:
            options["full_from"] = jnp.full((1, 1), option["full_from"]) + ids[:, :1]
        return attention(q, k, v, spec, **options, implementation="tpu")

    def both(*arguments):
        out, pullback = jax.vjp(forward, *arguments)
        return pullback(out)

    q, ids = array(1, T, option.get("H", 1), option.get("D", 128)), array(1, T, dtype=jnp.int32)
    called = launches(kind, both if backward else forward, (q, q, q, ids))
    measured = launches(kind, *tpu_kernels.FUNCTIONS[name](T=T, **option))
    if backward:
        measured = sorted(measured + launches(kind, *tpu_kernels.window_forward(T=T, **option)))
    assert measured == called


def test_settings_are_what_the_functions_take():
    for name, function in tpu_kernels.FUNCTIONS.items():
        assert {"T", "D", "window"} <= set(tpu_kernels.settings(name))
        small = {"T": 256, "D": 32, "H": 2, "K": 1, "window": 64, "dtype": "float32", "num_sink_tokens": 2}
        _, arguments = function(**small)
        assert arguments[0].dtype == jnp.float32
        assert 32 in arguments[0].shape
    assert "packed" in tpu_kernels.settings("window_forward")
    assert "strip" in tpu_kernels.settings("window_forward")
    assert "strip" not in tpu_kernels.settings("routed_backward")
    assert "ratio" in tpu_kernels.settings("routed_backward")


# ---- how often the blocks of code run ----


def test_executions_of_the_window_kernels_are_their_steps():
    forward = tpu_kernels.executions("window_forward", "TPU v5 lite", T=8192, H=2)["window_forward"]
    assert forward == tpu_kernels.Executions(bodies=(6, 2), rows=0, heads=2)  # blocks of 2048
    sinks = tpu_kernels.executions("window_forward", "TPU v5 lite", T=8192, num_sink_tokens=128)
    assert sum(sinks["window_forward"].bodies) == 4
    backward = tpu_kernels.executions("window_backward", "TPU v5 lite", T=8192)["window_backward"]
    assert backward == tpu_kernels.Executions(bodies=(7, 1), rows=1, heads=1)
    # Four heads a step, two of them (of 40 units each) in one piece of code.
    backward = tpu_kernels.executions("window_backward", "TPU v5 lite", T=8192, H=8, K=2)["window_backward"]
    assert backward == tpu_kernels.Executions(bodies=(28, 8), rows=16, heads=2)


def test_executions_over_documents_are_the_blocks_that_no_edge_crosses_and_small_ones(monkeypatch):
    """Of 4096 tokens, with an edge in each of the two blocks of 2048."""
    monkeypatch.setattr(documents, "SMALL_BLOCK", 1024)

    def bodies(**options):
        return tpu_kernels.executions("full_forward", "TPU v6 lite", T=4096, **options)["scheduled_forward"].bodies

    assert bodies(packed=True) == (*bodies(), 0, 0, 0)
    ids = bench_rows.segment_ids(4096, 2048)
    assert np.flatnonzero(np.diff(ids[0])).tolist() == [777, 2825]
    # Small blocks of 1024: the first and the third have an edge inside. No pair is plain; the bodies for whole blocks
    # do not run.
    crossed = [(1, 0), (2, 0), (2, 1), (3, 2)]
    assert bodies(documents=2048) == (0, 0, len(crossed), 0, 4)


def test_scalars_are_zero_for_rows_of_one_document():
    assert tpu_kernels.scalars_are_zero("full_forward", packed=True, T=4096)
    assert not tpu_kernels.scalars_are_zero("full_forward", documents=1024, T=4096)
    assert not tpu_kernels.scalars_are_zero("window_forward", packed=True)


def test_executions_of_the_scheduled_kernels_are_their_visits():
    forward = tpu_kernels.executions("full_forward", "TPU v6 lite", T=4096, H=2)["scheduled_forward"]
    assert forward == tpu_kernels.Executions(bodies=(2 * 1, 2 * 2), rows=4, heads=2)  # throughout, diagonal
    backward = tpu_kernels.executions("full_backward", "TPU v6 lite", T=4096)["scheduled_backward"]
    assert backward == tpu_kernels.Executions(bodies=(1, 2), rows=2, heads=1)
    window = tpu_kernels.executions("window_forward", "TPU v6 lite", T=16384, window=9000, num_sink_tokens=0)
    # 3 blocks lie in the window throughout, the diagonal's half, and two others in parts of 9000 keys.
    assert window["scheduled_forward"].bodies == (sum(8 - d for d in range(1, 4)), 4, 8, 3)
    hybrid = tpu_kernels.executions("head_hybrid_forward", "TPU v6 lite", T=4096)
    assert sum(hybrid["window_forward"].bodies) == 6 * 4
    assert sum(hybrid["scheduled_forward"].bodies) == 2 * 10


@pytest.mark.parametrize("window", [None, 1024, 100])
@pytest.mark.parametrize("num_sink_tokens", [0, 4])
def test_executions_of_decoding_are_the_listed_visits(window, num_sink_tokens):
    """One for each block that some entry of a filled cache is seen in."""
    T, B, kind = 5000, 3, "TPU v6 lite"
    runs = tpu_kernels.executions("decode", kind, B=B, T=T, window=window, num_sink_tokens=num_sink_tokens)["decode"]
    spec = AttentionSpec(window, num_sink_tokens)
    heads, block = choose_steps(spec, T, 8, 2 * 128 * 2, kind, False)
    where = coordinates(1, T, q_positions=jnp.full((B, 1), T - 1))
    kv_pos = jnp.pad(jnp.broadcast_to(where.kv_pos, (B, T)), [(0, 0), (0, -T % block)], constant_values=-1)
    visits = list_visits(spec, where._replace(kv_pos=kv_pos), block)
    assert runs == tpu_kernels.Executions((8 // heads * int(visits.used),), 8 // heads * B, int(visits.used))


def test_executions_of_full_rows_are_the_blocks_that_hold_some():
    shape = {"T": 4096, "H": 2, "packed": True}  # keys up to 3071 lie outside the window of the last query
    forward, backward = (
        functools.partial(tpu_kernels.executions, f"window_{name}", "TPU v6 lite", **shape)
        for name in ("forward", "backward")
    )
    some = forward(full_from=4032)["scheduled_forward"]
    # Two heads in a step. Half of the last 128 queries: the others do not make a mask of what these see whole.
    assert some == tpu_kernels.Executions(bodies=(1, 2), rows=1, heads=1)
    whole = forward(full_from=3840)["scheduled_forward"]
    # Two blocks of queries: the last 1024 of these keys are seen in part, the others throughout.
    assert whole == tpu_kernels.Executions(bodies=(2, 4), rows=2, heads=2)
    gradients = backward(full_from=3840)["scheduled_backward"]
    # And four blocks of keys, whose gradients are written.
    assert gradients == tpu_kernels.Executions(bodies=(2 * 1, 2 * 2), rows=4, heads=1 + 4)
    # Too many keys for VMEM: a list made at run time decides.
    assert "scheduled_backward" not in backward(T=65536, full_from=100)


def test_executions_are_not_guessed_where_data_decide():
    assert tpu_kernels.executions("routed_forward", "TPU v6 lite") == {}
    assert tpu_kernels.executions("window_backward", "TPU v6 lite", packed=True, num_sink_tokens=4) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", tpu_kernels.FUNCTIONS)
def test_every_function_takes_the_same_arguments(name):
    shape = {"H": 2, "K": 1, "T": T, "D": 128, "window": WINDOW, "num_sink_tokens": 0, "dtype": "bfloat16"}
    function, arguments = tpu_kernels.FUNCTIONS[name](**shape)
    assert all(argument.shape for argument in arguments)
    jax.eval_shape(function, *arguments)
    if name.startswith("full"):  # the window is left unread
        plain = {key: value for key, value in shape.items() if key != "window"}
        assert launches("TPU v6e", function, arguments) == launches("TPU v6e", *tpu_kernels.FUNCTIONS[name](**plain))


@pytest.mark.parametrize("ratio", [0.0, 0.13, 0.6, 0.75, 1.0])
def test_the_given_share_of_rows_is_routed(ratio):
    rows = bench_rows.routed_rows(1000, ratio)
    assert rows.shape == (1000,)
    assert rows.sum() == round(1000 * ratio)
    assert abs(rows[:500].sum() - 500 * ratio) <= 1  # evenly
