"""Which implementation takes a call, the launches that are listed for it, and the documentation's table of them."""

import dataclasses
import logging
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from pallas_kernels import AttentionSpec, attention, dispatch
from pallas_kernels.dispatch import dispatched
from pallas_kernels.math.schedule import Kind
from pallas_kernels.request import Device, Request

# The one warning that the project filters.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

V6E = Device("tpu", "TPU v6 lite")
H200, CPU = Device("gpu", "NVIDIA H200", 90), Device("cpu", "cpu")
T = 2048
FULL, WINDOW, SINKS = AttentionSpec(), AttentionSpec(300), AttentionSpec(300, 4)


def request(spec=WINDOW, *given, op="attention", device=V6E, **changes) -> Request:
    sizes = {"batch": 2, "q_length": T, "kv_length": T, "heads": 4, "kv_heads": 2, "head_dim": 128}
    if op == "decode_attention":
        sizes["q_length"], given = 1, (*given, "q_positions", "kv_positions")
    return Request(op, spec, **sizes | {"dtype": "bfloat16"} | changes, device=device, given=frozenset(given))


def test_masks_are_of_the_kinds_that_the_call_needs():
    def masks(*arguments, **options):
        return {launch.kernel: set(launch.masks) for launch in dispatched(request(*arguments, **options)).launches}

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
        found = dispatched(wanted)
        assert found.implementation == "xla"
        assert re.search(lacks, found.fallback)
        best = "triton" if wanted.device.platform == "gpu" else "tpu"
        with pytest.raises(NotImplementedError, match=f"implementation '{best}' cannot take this call: .*{lacks}"):
            dispatched(dataclasses.replace(wanted, implementation=best))
    assert dispatched(request(device=CPU)).fallback is None
    assert dispatched(request(device=H200)).implementation == "triton"


def test_the_api_says_why_it_falls_back(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    q = jnp.ones((1, 4, 2, 8), jnp.float16)
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        attention(q, q, q, WINDOW)
    assert "implementation 'xla' is used, because it takes float32 and bfloat16, but q is float16" in caplog.text


def test_the_table_in_the_docs_is_what_is_dispatched():
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    assert dispatch.table() in page, "paste what `pallas_kernels.dispatch.table()` returns"
