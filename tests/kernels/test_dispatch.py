"""The plan of a call is what the call launches, and the documentation's table is what the plan says."""

import dataclasses
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import AttentionSpec, attention, decode_attention, dispatch, routed_attention
from pallas_kernels.dispatch import plan
from pallas_kernels.pools import attend_over_pools
from pallas_kernels.request import Device, Request
from pallas_kernels.schedule import Kind
from pallas_kernels.spec import PerHead, Pools
from swa_jax.bench.compile_for_chip import kernel_name, pallas_calls

# The one warning that the project filters.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

V6E, V5E = Device("tpu", "TPU v6 lite"), Device("tpu", "TPU v5 lite")
H200, CPU = Device("gpu", "NVIDIA H200", 90), Device("cpu", "cpu")
T = 2048
FULL, WINDOW, SINKS = AttentionSpec(), AttentionSpec(300), AttentionSpec(300, 4)


def request(spec=WINDOW, *given, op="attention", device=V6E, **changes) -> Request:
    sizes = {"batch": 2, "q_length": T, "kv_length": T, "heads": 4, "kv_heads": 2, "head_dim": 128}
    if op == "decode_attention":
        sizes["q_length"], given = 1, (*given, "q_positions", "kv_positions")
    return Request(op, spec, **sizes | {"dtype": "bfloat16"} | changes, device=device, given=frozenset(given))


CALLS = {
    "full": request(FULL),
    "longer-than-a-block": request(FULL, q_length=5000, kv_length=5000),
    "window": request(),
    "window-v5e": request(device=V5E),
    "sinks": request(SINKS, "sink_logits"),
    "packed": request(SINKS, "q_segment_ids"),
    "packed-window": request(WINDOW, "q_segment_ids", "alibi_slopes"),
    "full-heads": request(WINDOW, "full_heads"),
    "chunked": request(WINDOW, "q_positions", q_length=256),
    "full-from": request(SINKS, "full_from"),
    "long": request(FULL, q_length=65536, kv_length=65536),
    "routed": request(op="routed_attention"),
    "routed-packed": request(WINDOW, "q_segment_ids", op="routed_attention"),
    "routed-inference": request(op="routed_attention", inference=True),
    "decode": request(SINKS, op="decode_attention", device=V5E),
    "gpu": request(device=H200),
    "gpu-routed": request(op="routed_attention", device=H200),
    "gpu-decode": request(op="decode_attention", device=H200),
    "gpu-decode-pools": dataclasses.replace(request(op="decode_attention", device=H200), given=frozenset({"pools"})),
}
QUICK = ("window", "full", "packed", "decode", "gpu", "gpu-decode-pools", "routed")


def traced(wanted: Request) -> set[tuple]:
    """Name and grid of every launch of the call with its gradients; a size that data decide is "data"."""
    r = wanted
    q = jax.ShapeDtypeStruct((r.batch, r.q_length, r.heads, r.head_dim), r.dtype)
    kv = jax.ShapeDtypeStruct((r.batch, r.kv_length, r.kv_heads, r.head_dim), r.dtype)
    ids, floats = jnp.ones((r.batch, r.q_length), jnp.int32), jnp.ones(r.heads)
    known = {
        "q_segment_ids": ids,
        "q_positions": ids,
        "full_from": ids[:, 0],
        "alibi_slopes": floats,
        "sink_logits": floats,
        "full_heads": jnp.arange(r.kv_heads) == 0,
    }
    options = {name: known[name] for name in r.given if name in known}

    def call(q, k, v):
        if "pools" in r.given:
            pools = Pools(*(x.transpose(2, 0, 1, 3) for x in (k, v)), jnp.arange(r.kv_heads))
            return attend_over_pools(q, pools, r.spec, PerHead(), lengths=jnp.full(r.batch, 100))
        if r.op == "decode_attention":
            return decode_attention(q, k, v, r.spec, lengths=jnp.full(r.batch, 100))
        if r.op == "attention":
            return attention(q, k, v, r.spec, **options)
        return routed_attention(q, k, v, 1.0 * ids, r.spec, inference=r.inference, **options)[0]

    def both(*arguments):
        out, pullback = jax.vjp(call, *arguments)
        return pullback(out)

    once = r.op == "decode_attention" or r.inference
    platform = "cuda" if r.device.platform == "gpu" else "tpu"
    device = AbstractDevice(device_kind=r.device.kind, num_cores=1, platform=platform)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.jit(call if once else both).trace(q, kv, kv).jaxpr.jaxpr
    return {
        (kernel_name(eqn), tuple(n if isinstance(n, int) else "data" for n in eqn.params["grid_mapping"].grid))
        for eqn in pallas_calls(jaxpr)
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CALLS]
)
def test_a_call_launches_what_its_plan_says(name):
    planned = plan(CALLS[name])
    assert {(launch.kernel, launch.grid) for launch in planned.launches} == traced(CALLS[name])


def test_masks_are_of_the_kinds_that_the_call_needs():
    def masks(*arguments, **options):
        return {launch.kernel: set(launch.masks) for launch in plan(request(*arguments, **options)).launches}

    assert masks(FULL)["scheduled_forward"] == {Kind.FULL, Kind.DIAGONAL}
    assert masks(AttentionSpec(1024))["window_forward"] == {Kind.FULL, Kind.DIAGONAL, Kind.EDGE}
    assert masks(AttentionSpec(7))["window_forward"] == {Kind.EDGE, Kind.BOTH}
    assert Kind.BY_TOKEN in masks(WINDOW, "q_segment_ids")["window_backward"]
    assert masks(SINKS, "full_from")["scheduled_backward"] == {Kind.FULL, Kind.BY_TOKEN}
    assert Kind.BY_TOKEN not in masks(SINKS, "full_from")["window_backward"]
    assert masks(op="routed_attention")["branches_forward"] >= {Kind.DIAGONAL, Kind.EDGE}


def test_the_default_falls_back_with_a_reason():
    for wanted, lacks in (
        (request(device=H200, head_dim=264), "head_dim is 264"),
        (request(device=dataclasses.replace(H200, capability=75)), r"compute capability 7\.5"),
        (request(device=dataclasses.replace(H200, no_triton="this JAX has none.")), "this JAX has none"),
        (request(device=V6E, dtype="float16"), "q is float16"),
    ):
        planned = plan(wanted)
        assert planned.implementation == "xla"
        assert re.search(lacks, planned.fallback)
        best = "triton" if wanted.device.platform == "gpu" else "tpu"
        with pytest.raises(NotImplementedError, match=f"implementation '{best}' cannot take this call: .*{lacks}"):
            plan(dataclasses.replace(wanted, implementation=best))
    assert plan(request(device=CPU)).fallback is None
    assert plan(request(device=H200)).implementation == "triton"


def test_the_api_says_why_it_falls_back(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    q = jnp.ones((1, 4, 2, 8), jnp.float16)
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        attention(q, q, q, WINDOW)
    assert "implementation 'xla' is used, because it takes float32 and bfloat16, but q is float16" in caplog.text


def test_the_table_in_the_docs_is_what_the_plans_say():
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    assert dispatch.table() in page, "paste what `pallas_kernels.dispatch.table()` returns"
