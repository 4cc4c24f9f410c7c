"""Seconds of attention kernels by type of layer, by hand from a table of cycles."""

import dataclasses

import numpy as np
import pytest

from swa_jax.base.chips import CHIPS
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.plan import kernel_cycles
from swa_jax.plan.kernel_cycles import MeasuredCall
from swa_jax.plan.kernels import busiest_device, kernels, missing_calls
from swa_jax.plan.step_time import TEACHER, StepWork, attention_of
from swa_jax.plan.text import kernel_lines

MODEL = ModelConfig(1024, 256, 512, 4, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
PATTERN = AttentionPattern((WINDOW, FULL, HYBRID, SWITCH), 512, full_kv_heads=((), (), (1,), ()))
T = 4096


def row(function, window, cycles, chip="v6e", length=T, **changes):
    call = {"chip": chip, "function": function, "head_dim": 128, "packed": True, "num_sink_tokens": 0, "group": 1}
    return call | {"window": window, "cycles": cycles, "length": length} | changes


TABLE = [
    row("window_forward", 512, 2000),
    row("window_backward", 512, 4000),
    row("full_forward", None, 10000),
    row("full_backward", None, 18000),
    row("routed_forward", 512, 11000),
]


def test_seconds_are_the_cycles_of_the_table_by_type_of_layer():
    """The table's own length and window: cycles per 1024 rows and head, times 4 heads and 4 blocks of 1024 rows.

    RoPE adds 300 forward and 640 backward; routed rows come rotated, which adds 280.
    """
    found = kernels("v6e", MODEL, PATTERN, np.arange(T), backward_ratio=0.25, rows=TABLE)
    unit = 4 * (T / 1024) / 1.75e9
    seconds = {kind: (one.forward.sum() / unit, one.backward.sum() / unit) for kind, one in found.seconds.items()}
    assert seconds[WINDOW] == pytest.approx((2300, 4640))
    assert seconds[FULL] == pytest.approx((10300, 18640))
    assert seconds[HYBRID] == pytest.approx((2300 / 2 + 10300 / 2, 4640 / 2 + 18640 / 2))
    # Backward: the window of every token, and for a quarter of the tokens the keys outside. Of each row of 256 bytes,
    # the memory reads q and its cotangent, and reads and writes dq; of a quarter it writes or reads three more.
    moved = (4 + 3 / 4) * 256 * 1024 / 1640e9 * 1.75e9
    inside = np.minimum(np.arange(T) + 1, 512).sum() / (np.arange(T) + 1).sum()
    assert seconds[SWITCH] == pytest.approx((11300, 4640 + 0.25 * 18000 * (1 - inside) + moved + 280))
    assert not found.assumed
    assert set(found.measured) == {
        "window_forward (head_dim 128, window 512)",
        "window_backward (head_dim 128, window 512)",
        "full_forward (head_dim 128)",
        "full_backward (head_dim 128)",
        "routed_forward (head_dim 128, window 512)",
    }


def test_query_heads_that_share_keys_take_the_row_of_such_a_group():
    window = AttentionPattern((WINDOW,) * 4, 512)
    table = [*TABLE, row("window_backward", 512, 3000, group=2)]
    found = kernels("v6e", MODEL, window, np.arange(T), rows=table)  # 4 query heads over 2 KV heads
    assert found.seconds[WINDOW].backward.sum() == pytest.approx(3640 / 1.75e9 * 4 * 4 * 4)


def test_cores_share_the_heads():
    table = [row("full_forward", None, 10000, chip="v5p"), row("full_backward", None, 18000, chip="v5p")]
    full = AttentionPattern((FULL,) * 4)
    found = kernels("v5p", MODEL, full, np.arange(T), rows=table)
    assert found.seconds[FULL].forward.sum() == pytest.approx(4 * 10300 / 2 * 4 * 4 / 1.75e9)


def test_what_was_not_measured_takes_the_chips_share():
    found = kernels("v6e", MODEL, PATTERN, np.arange(T), rows=TABLE[:1])
    flops, seconds = found.flops[FULL], found.seconds[FULL]
    forward, backward = CHIPS["v6e"].target.kernel_share
    assert seconds.forward.sum() == pytest.approx(flops.forward.sum() / (918e12 * forward))
    assert seconds.backward.sum() == pytest.approx(flops.backward.sum() / (918e12 * backward))
    assert set(found.measured) == {"window_forward (head_dim 128, window 512)"}
    assert "full_backward (head_dim 128)" in found.assumed
    sigmoid = dataclasses.replace(MODEL, attention_activation="sigmoid")
    window = AttentionPattern((WINDOW,) * 4, 512)
    other = kernels(
        "v6e", sigmoid, window, np.arange(T), rows=[*TABLE, row("sigmoid_forward", 512, 2500, packed=False)]
    )
    assert set(other.measured) == {"sigmoid_forward (head_dim 128, window 512)"}
    assert set(other.assumed) == {"sigmoid_backward (head_dim 128, window 512)"}


def test_calls_that_the_table_lacks_are_named_and_their_rows_are_added(monkeypatch):
    """A row of another window would stand in; what cannot be simulated is not asked for."""
    monkeypatch.setattr(kernel_cycles, "_shipped", lambda: tuple(TABLE[:1]))
    monkeypatch.setattr(kernel_cycles, "_added", [])

    def missing(step, model=MODEL):
        return {(one.call.function, one.window) for one in missing_calls("v6e", model, PATTERN, 0.13, step)}

    others = {("window_backward", 512), ("full_forward", None), ("full_backward", None), ("routed_forward", 512)}
    assert missing("train") == others
    assert missing("prefill") == {("full_forward", None)}  # routed rows are known before a prefill attends
    sigmoid = dataclasses.replace(MODEL, attention_activation="sigmoid")
    assert missing("train", sigmoid) == {("sigmoid_forward", 512), ("sigmoid_backward", 512)}
    (call,) = (one.call for one in missing_calls("v6e", MODEL, PATTERN, 0.13, "prefill"))
    assert call == MeasuredCall("v6e", "full_forward", 128, packed=True, group=2)
    kernel_cycles.add_rows(TABLE[1:])
    assert missing("train") == set()


def test_the_busiest_device_of_a_causal_row():
    seen = np.arange(1, 4097.0)
    assert busiest_device(seen, 4, zigzagged=False) == pytest.approx(1.75, abs=1e-3)
    assert busiest_device(seen, 4, zigzagged=True) == pytest.approx(1, abs=1e-3)
    assert busiest_device(seen, 1, zigzagged=False) == 1


def work(**changes) -> StepWork:
    mesh = {"data": 1, "fsdp": 2, "context": 2, "tensor": 1}
    plain = StepWork("train", "v6e", MODEL, PATTERN, None, "attention", 8, T, mesh, 1, True)
    return plain._replace(**changes)


def test_a_step_has_its_share_of_the_rows_and_runs_attention_again_under_layer():
    found = attention_of(work())
    again = attention_of(work(remat="layer"))
    assert again.flops.forward == 2 * found.flops.forward
    assert again.flops.backward == found.flops.backward
    half = attention_of(work(rows=4))
    assert half.seconds[FULL].forward == pytest.approx(found.seconds[FULL].forward / 2)
    plain = attention_of(work(zigzag=False))
    assert plain.busiest > 1.3 > found.busiest
    assert plain.seconds[WINDOW].forward == pytest.approx(found.seconds[WINDOW].forward * plain.busiest / found.busiest)
    assert plain.flops == found.flops


@pytest.mark.parametrize("remat", ["attention", "layer"])
def test_a_teacher_is_a_forward_pass_more(remat):
    full = AttentionPattern((FULL,) * 4)
    plain, taught = attention_of(work(remat=remat)), attention_of(work(remat=remat, teacher=full))
    theirs = kernels("v6e", MODEL, full, np.arange(T))
    rows = 8 / 4  # of each of four devices
    once = rows * float(theirs.flops[FULL].forward.sum())
    assert taught.flops.forward == pytest.approx(plain.flops.forward + once)
    assert taught.flops.backward == plain.flops.backward
    lasting = taught.busiest * rows * float(theirs.seconds[FULL].forward.sum())
    assert taught.seconds[TEACHER] == pytest.approx((lasting, 0.0))
    assert taught.seconds[FULL].backward == pytest.approx(plain.seconds[FULL].backward * taught.busiest / plain.busiest)


def test_a_decoding_step_takes_no_figures_of_the_table():
    found = attention_of(work(step="decode", rows=2, mesh={"data": 1, "fsdp": 1, "context": 1, "tensor": 1}))
    assert not found.measured
    assert found.flops.backward == 0


def test_the_text_has_a_line_where_there_are_several_types():
    by_type = {WINDOW: {"forward": 0.25, "backward": 0.5}, FULL: {"forward": 1.0, "backward": 2.0}}
    assert kernel_lines(by_type) == [
        "  attention kernels by type of layer: sliding_attention 0.75 s, full_attention 3 s"
    ]
    assert kernel_lines({WINDOW: by_type[WINDOW]}) == []
