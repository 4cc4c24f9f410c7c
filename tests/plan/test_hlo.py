"""Counting in compiled programs: worked by hand on texts as the TPU compiler writes them."""

from pathlib import Path

import numpy as np
import pytest

from swa_jax.plan import hlo
from swa_jax.plan.collectives import collectives, device_groups

MESH = {"data": 1, "fsdp": 4, "context": 2, "tensor": 1}

# A loop of 24 layers: each multiplies [64, 128] by [128, 256], gathers its weights and keeps its input.
LOOP = (Path(__file__).parent / "hlo" / "loop.txt").read_text()


@pytest.fixture(scope="module")
def program():
    return hlo.parse(LOOP)


@pytest.fixture(scope="module")
def counts(program):
    return hlo.executions(program)


def test_a_loop_runs_as_often_as_its_condition_says(program, counts):
    assert program.entry == "main"
    assert counts["body"] == counts["fused_computation.1"] == 24
    assert counts["main"] == 1
    assert counts["add"] == 0  # what an all-reduce applies is not a run of its own


@pytest.mark.parametrize(
    ("change", "trips"),
    [
        (("s32[]{:T(128)} constant(1)", "s32[]{:T(128)} constant(5)"), 5),  # 0, 5, 10, 15, 20
        (("s32[]{:T(128)} constant(0)", "s32[]{:T(128)} constant(20)"), 4),
        (
            ("%counted = s32[]{:T(128)} add", "%counted = s32[]{:T(128)} copy(%sum.1)\n  %sum.1 = s32[]{:T(128)} add"),
            24,
        ),
        (("direction=LT", "direction=NE"), None),
        (("add(%counter.1, %one)", "multiply(%counter.1, %one)"), None),
    ],
)
def test_trips_of_other_loops(change, trips):
    assert change[0] in LOOP
    program = hlo.parse(LOOP.replace(*change))
    main = program.computations["main"]
    assert hlo.trip_count(program, main, main.instructions["loop"]) == trips
    counts = hlo.executions(program)
    assert counts["body"] == (trips or 1)
    assert hlo.uncounted_loops(program, counts) == (trips is None)


def test_operations_and_cycles_are_multiplied_by_the_runs(program, counts):
    assert hlo.matmul_flops(program, counts) == pytest.approx(24 * 2 * 64 * 128 * 256)
    # What says "not known" is left out.
    assert sum(hlo.cycles_by_part(program, counts, "attention", 1.0).values()) == 24 * 1100


EXPERTS = """
HloModule step, is_scheduled=true

ENTRY %main (x.1: bf16[4096,1024], w.1: bf16[16,1024,512], n.1: s32[16]) -> bf16[16,1024,512] {
  %x.1 = bf16[4096,1024]{1,0} parameter(0)
  %w.1 = bf16[16,1024,512]{2,1,0} parameter(1)
  %n.1 = s32[16]{0} parameter(2)
  %ragged-dot-metadata = s32[17]{0} custom-call(%n.1), custom_call_target="tpu_custom_call"
  %ragged-dot-none = bf16[4096,512]{1,0} custom-call(%ragged-dot-metadata, %x.1, %w.1), custom_call_target="tpu_custom_call"
  ROOT %ragged-dot-none.1 = bf16[16,1024,512]{2,1,0} custom-call(%ragged-dot-metadata, %x.1, %ragged-dot-none), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


def test_products_of_experts_count_their_rows_once():
    program = hlo.parse(EXPERTS)
    counts = hlo.executions(program)
    forward = 2 * 4096 * 1024 * 512
    assert hlo.matmul_flops(program, counts) == pytest.approx(2 * forward)
    assert hlo.matmul_flops(program, counts, expert_devices=4) == pytest.approx(2 * forward / 4)
    assert not any(hlo.is_kernel(one) for one in program.computations["main"].instructions.values())


def test_cycles_are_told_apart_by_what_they_are_for(program, counts):
    assert hlo.cycles_by_part(program, counts, "mixing", 1.0) == {"matmuls": 24000, "mixing": 0, "other": 2400}
    text = LOOP
    for cycles in (100, 1000):  # a copy, then a matrix product inside the scope, whose member is
        plain = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
        assert text.count(plain) == 1
        text = text.replace(plain, f'metadata={{op_name="jit(step)/mixing/copy"}}, {plain}')
    dot = "dim_labels=bf_io->bf"
    for within in ("jit(step)/mixing/dot", "jit(step)/transpose(jvp(mixing))/dot", "jit(step)/mlp/dot"):
        changed = hlo.parse(text.replace(dot, f'{dot}, metadata={{op_name="{within}"}}'))
        parts = hlo.cycles_by_part(changed, hlo.executions(changed), "mixing", 1.0)
        product = "mixing" if "mixing" in within else "matmuls"
        assert parts == {"matmuls": 0, "mixing": 2400, "other": 0, product: 24000 + 2400 * (product == "mixing")}


def test_a_kernel_that_passes_over_memory_takes_its_bytes():
    cost = 'backend_config={"custom_call_config":{"cost_estimate":{"flops":"FLOPS","bytes_accessed":"6000"}}}'
    kernel = f'%c = bf16[8]{{0}} custom-call(%p), custom_call_target="tpu_custom_call", {cost}'
    for flops, cycles, kernels in (("0", 1500, 0), ("1024", 0, 1)):
        text = f"ENTRY %main (p: bf16[8]) -> bf16[8] {{\n  %p = bf16[8]{{0}} parameter(0)\n  {kernel}\n}}\n"
        program = hlo.parse(text.replace("FLOPS", flops))
        assert hlo.cycles_by_part(program, {"main": 1}, "mixing", 4.0)["other"] == cycles
        assert sum(map(hlo.is_kernel, program.computations["main"].instructions.values())) == kernels


def test_a_constant_of_the_scope_makes_no_operation_a_part_of_it():
    """The compiler shares constants among operations of all places."""
    root, scope = "  ROOT %convolution.1", 'metadata={op_name="jit(step)/mixing/slice"}'
    assert LOOP.count(root) == LOOP.count("convolution(") == 1
    for opcode, part in (("constant(0)", "other"), ("iota()", "mixing")):
        text = LOOP.replace("convolution(", "copy(").replace(root, f"  %n = s32[] {opcode}, {scope}\n{root}")
        program = hlo.parse(text)
        assert hlo.cycles_by_part(program, hlo.executions(program), "mixing", 1.0)[part] >= 24000


def test_kept_activations_are_what_the_loop_writes_not_what_passes_through(program):
    assert hlo.stacked_outputs(program, 24) == 24 * 64 * 128 * 2
    assert hlo.stacked_outputs(program, 22) == 0


def test_collectives_say_what_each_device_sends_and_along_which_axes(program, counts):
    gather, reduce, permute = sorted(collectives(program, counts, MESH), key=lambda c: c.kind)
    assert (gather.kind, reduce.kind, permute.kind) == ("all-gather", "all-reduce", "collective-permute")
    assert (gather.axes, gather.group, gather.executions) == (("fsdp",), 4, 24)
    assert gather.sent_bytes == 128 * 256 * 2 * 3 / 4
    assert reduce.axes == ("fsdp", "context")
    assert reduce.sent_bytes == 2 * 8 * 128 * 4 * 7 / 8
    assert permute.axes == ("context",)
    assert permute.sent_bytes == 8 * 128 * 4


def line(text):
    return f"ENTRY %main (p: f32[4]) -> f32[4] {{\n  %p = f32[4]{{0}} parameter(0)\n  {text}\n}}\n"


@pytest.mark.parametrize(
    ("operation", "kind", "sent"),
    [
        ("%r = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}", "reduce-scatter", 48),
        ("%r = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8]", "all-gather", 48),
        ("%r = f32[4]{0} all-reduce-start(%p), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 24),
        ("%r = f32[4]{0} all-to-all(%p), replica_groups=[2,4]<=[8], dimensions={0}", "all-to-all", 12),
        (
            "%r = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            16,
        ),
    ],
)
def test_bytes_of_every_kind(operation, kind, sent):
    program = hlo.parse(line(operation))
    (found,) = collectives(program, hlo.executions(program), {"fsdp": 8})
    assert (found.kind, found.sent_bytes) == (kind, sent)


def test_an_all_reduce_that_only_a_slice_reads_is_a_reduce_scatter():
    text = (
        "%fusion.all-reduce-scatter (a: f32[8]) -> f32[2] {\n  %a = f32[8]{0} parameter(0)\n"
        "  %whole = f32[8]{0} all-reduce(%a), replica_groups=[2,4]<=[8], to_apply=%add\n"
        "  ROOT %part = f32[2]{0} dynamic-slice(%whole, %a), dynamic_slice_sizes={2}\n}\n"
    ) + line("ROOT %r = f32[2]{0} fusion(%p), kind=kCustom, calls=%fusion.all-reduce-scatter")
    program = hlo.parse(text)
    (found,) = collectives(program, hlo.executions(program), {"fsdp": 8})
    assert (found.kind, found.sent_bytes) == ("reduce-scatter", 8 * 4 * 3 / 4)


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, x", [[0, 2], [1, 3]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups={}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_groups_in_every_spelling(attributes, groups):
    np.testing.assert_array_equal(device_groups(attributes, 8), groups)


def test_branches_are_taken_in_shares():
    branches = "".join(
        f"%{name} (a: f32[]) -> f32[] {{\n  ROOT %a.{name} = f32[] parameter(0)\n}}\n\n" for name in "uvw"
    )
    three = branches + line("ROOT %r = f32[] conditional(%p, %p, %p, %p), branch_computations={%u, %v, %w}")
    counts = hlo.executions(hlo.parse(three), lambda n: [0.5, 0.25, 0.25])
    assert (counts["u"], counts["v"], counts["w"]) == (0.5, 0.25, 0.25)
    two = branches + line("ROOT %r = f32[] conditional(%p, %p, %p), true_computation=%u, false_computation=%v")
    counts = hlo.executions(hlo.parse(two), lambda n: [0.9, 0.1])  # index 0 is false
    assert (counts["u"], counts["v"]) == (0.1, 0.9)
