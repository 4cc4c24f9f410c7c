"""Collectives beside other work: worked by hand on texts as the TPU compiler writes them."""

from pathlib import Path

import pytest

from swa_jax.plan import hlo, timeline
from swa_jax.plan.collectives import collectives

GATHER = "bf16[256]{0} all-gather(%a), channel_id=CHANNEL, replica_groups=[2,4]<=[8]"


def in_pieces(number: int, groups: str = "[2,4]<=[8]") -> str:
    """Computations of one all-gather that the compiler runs in pieces."""
    gather = GATHER.replace("CHANNEL", str(number)).replace("[2,4]<=[8]", groups)
    return "".join(
        f"%{name}.{number} (a: bf16[64]) -> bf16[256] {{\n  %a = bf16[64]{{0}} parameter(0)\n"
        f"  ROOT %{name}.gather.{number} = {gather}\n}}\n\n"
        for name in ("begin", "async_collective_fusion", "end")
    )


def begin(number: int) -> str:
    return f"%async-collective-start.{number} = bf16[64]{{0}} fusion(%p), kind=kCustom, calls=%begin.{number}"


def carry(number: int, cycles: int) -> str:
    return (
        f"%fusion.{number} = bf16[64]{{0}} fusion(%p), kind=kOutput, calls=%async_collective_fusion.{number}, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}'
    )


def work(name: str, cycles: int) -> str:
    return f'%{name} = bf16[64]{{0}} negate(%p), backend_config={{"estimated_cycles":"{cycles}"}}'


def end(number: int) -> str:
    return f"%async-collective-done.{number} = bf16[256]{{0}} fusion(%p), kind=kCustom, calls=%end.{number}"


def program(computations: str, *lines: str) -> hlo.HloProgram:
    body = "".join(f"  {line}\n" for line in lines)
    return hlo.parse(
        f"{computations}ENTRY %main (p: bf16[64]) -> bf16[64] {{\n  %p = bf16[64]{{0}} parameter(0)\n{body}}}\n"
    )


MESH = {"data": 2, "fsdp": 4}
ACROSS = "[4,2]<=[2,4]T(1,0)"  # groups along `data`


def played(program, seconds):
    counts = hlo.executions(program)
    sends = collectives(program, counts, MESH)
    own = timeline.work_of(program, counts, 1.0, 1.0, timeline.Passes(0.0, 0.0))
    return sends, timeline.play(program, sends, own, lambda send: seconds)


def test_what_runs_in_pieces_is_one_collective():
    lines = (begin(7), carry(7, 1000), end(7))
    (send,), _ = played(program(in_pieces(7), *lines), 1)
    assert (send.kind, send.axes, send.executions, send.asynchronous) == ("all-gather", ("fsdp",), 1, True)
    assert send.sent_bytes == 256 * 2 * 3 / 4
    assert (send.start, send.done) == ("async-collective-start.7", "async-collective-done.7")


LOOP = """
%condition (s: (s32[], bf16[64])) -> pred[] {
  %s = (s32[], bf16[64]{0}) parameter(0)
  %limit = s32[] constant(24)
  %counter = s32[] get-tuple-element(%s), index=0
  ROOT %lt = pred[] compare(%counter, %limit), direction=LT
}

%body (s: (s32[], bf16[64])) -> (s32[], bf16[64]) {
  %s = (s32[], bf16[64]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %counted = s32[] add(%counter, %one)
  %p = bf16[64]{0} get-tuple-element(%s), index=1
  CARRIED
  ROOT %next = (s32[], bf16[64]{0}) tuple(%counted, %p)
}

"""


def test_what_a_loop_carries_on_is_sent_once():
    loop = in_pieces(7) + LOOP.replace("CARRIED", carry(7, 1000))
    state = "%first = (s32[], bf16[64]{0}) tuple(%zero, %p)"
    run = "%loop = (s32[], bf16[64]{0}) while(%first), condition=%condition, body=%body"
    lines = (begin(7), "%zero = s32[] constant(0)", state, run, end(7))
    made = program(loop, *lines)
    assert hlo.executions(made)["body"] == 24
    (send,) = collectives(made, hlo.executions(made), MESH)
    assert (send.executions, send.computation) == (1, "main")


def test_a_collective_without_work_beside_it_is_synchronous():
    (send,), elapsed = played(program("", work("w", 3), f"%g = {GATHER.replace('%a', '%p')}"), 5)
    assert not send.asynchronous
    assert elapsed == (3, 5)


@pytest.mark.parametrize(("seconds", "waiting"), [(2, 0), (3, 0), (5, 2)])
def test_the_step_waits_for_what_the_work_beside_it_does_not_hide(seconds, waiting):
    in_parts = program(in_pieces(1), begin(1), carry(1, 3), end(1), work("after", 4))
    assert played(in_parts, seconds)[1] == (7, waiting)
    permute = "collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}"
    plain = program(
        "",
        f"%s = (bf16[64]{{0}}, bf16[64]{{0}}) {permute}",
        work("beside", 3),
        "%d = bf16[64]{0} collective-permute-done(%s)",
        work("after", 4),
    )
    assert played(plain, seconds)[1] == (7, waiting)


@pytest.mark.parametrize(("groups", "waiting"), [("[2,4]<=[8]", 5), (ACROSS, 1)])
def test_two_at_a_time_share_the_links_of_one_axis(groups, waiting):
    """Each takes 4 s, beside 3 s of work in all."""
    both = in_pieces(1) + in_pieces(2, groups)
    lines = (begin(1), begin(2), carry(1, 2), carry(2, 1), end(1), end(2))
    assert played(program(both, *lines), 4)[1] == (3, waiting)


@pytest.mark.parametrize(
    ("second", "hops", "waiting"),
    [([1, 2, 3, 0], 1, 5), ([3, 0, 1, 2], -1, 1), ([2, 3, 0, 1], 2, 5), ([1, 0, 3, 2], 0, 5)],
)
def test_shifts_in_opposite_directions_do_not_share_links(second, hops, waiting):
    """Each takes 4 s, beside 3 s of work in all; the first goes to the next device along `fsdp`."""
    lines = []
    for number, targets in enumerate(([1, 2, 3, 0], second)):
        pairs = ",".join(f"{{{at + i},{at + target}}}" for at in (0, 4) for i, target in enumerate(targets))
        start = f"collective-permute-start(%p), channel_id={number + 1}, source_target_pairs={{{pairs}}}"
        lines.append(f"%s.{number} = (bf16[64]{{0}}, bf16[64]{{0}}) {start}")
    lines.append(work("beside", 3))
    lines += [f"%d.{number} = bf16[64]{{0}} collective-permute-done(%s.{number})" for number in range(2)]
    sends, elapsed = played(program("", *lines), 4)
    assert [send.hops for send in sends] == [1, hops]
    assert elapsed == (3, waiting)


def test_the_kernels_of_a_pass_share_its_time_by_their_runs():
    kernel = 'custom-call(%q), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/WHERE/pallas_call"}'
    places = ("jvp()", "transpose(jvp())/rematted_computation", "transpose(jvp())")
    kernels = [f"%k{i} = bf16[64]{{0}} {kernel.replace('WHERE', place)}" for i, place in enumerate(places)]
    branches = "".join(
        f"%b{i} (q: bf16[64]) -> bf16[64] {{\n  %q = bf16[64]{{0}} parameter(0)\n  {line}\n}}\n\n"
        for i, line in enumerate(kernels)
    )
    call = "%c = bf16[64]{0} conditional(%p, %p, %p, %p), branch_computations={%b0, %b1, %b2}"
    text = program(branches, call)
    counts = hlo.executions(text, lambda n: [0.5, 0.25, 0.25])
    own = timeline.work_of(text, counts, 1.0, 1.0, timeline.Passes(forward=6.0, backward=10.0))
    assert [own(text.computations[f"b{i}"].instructions[f"k{i}"]) for i in range(3)] == [8.0, 8.0, 40.0]


def test_a_loop_plays_its_body_as_often_as_it_runs():
    text = (Path(__file__).parent / "hlo" / "loop.txt").read_text()
    looped = hlo.parse(text)
    counts = hlo.executions(looped)
    own = timeline.work_of(looped, counts, 1.0, 1.0, timeline.Passes(0.0, 0.0))
    sends = collectives(looped, counts, {"data": 1, "fsdp": 4, "context": 2, "tensor": 1})
    elapsed = timeline.play(looped, sends, own, lambda send: 10.0 if send.kind == "all-gather" else 0.0)
    assert elapsed.work == sum(hlo.cycles_by_part(looped, counts, "attention", 1.0).values()) == 24 * 1100
    assert elapsed.waiting == 24 * 10


def test_a_sparse_core_sends_from_when_it_is_given_the_operand():
    """It is called long before, and what it runs beside the step costs the step nothing."""
    called = (
        "%called.1 (a: bf16[64]) -> bf16[16] {\n  %a = bf16[64]{0} parameter(0)\n"
        "  ROOT %scatter.2 = bf16[16]{0} reduce-scatter(%a), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, "
        'to_apply=%add, backend_config={"color_strategies":[{"phase_rings":[{}]},{"phase_rings":[{}]}],'
        '"estimated_cycles":"1000"}\n}, execution_thread="sparsecore"\n\n'
    )
    lines = [
        '%s.call-start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%called.1',
        work("before", 5),
        "%s.call-update = ((bf16[64]{0}), bf16[16]{0}) call-update(%s.call-start, %before)",
        work("beside", 30),
        "%s.call-done = bf16[16]{0} call-done(%s.call-update)",
    ]
    (send,), elapsed = played(program(called, *lines), seconds=40)
    assert (send.kind, send.axes, send.rings, send.executions) == ("reduce-scatter", ("fsdp",), 2, 1)
    assert (send.start, send.done) == ("s.call-update", "s.call-done")
    assert elapsed == (35, 10)


def test_between_slices_a_send_and_a_recv_are_one_collective():
    attributes = 'frontend_attributes={_xla_host_transfer_rendezvous="NAME",_xla_megascale_transfer_type="ALL_REDUCE"}'
    one, other = (attributes.replace("NAME", name) for name in ("all-reduce.1_0", "all-reduce.2_0"))
    lines = (
        "%t = token[] after-all()",
        f"%send = (bf16[64]{{0}}, u32[], token[]) send(%p, %t), channel_id=3, is_host_transfer=true, {one}",
        f"%recv.2 = (bf16[64]{{0}}, u32[], token[]) recv(%t), channel_id=4, is_host_transfer=true, {other}",
        work("beside", 3),
        "%sent = token[] send-done(%send), channel_id=3, is_host_transfer=true",
        "%done.2 = (bf16[64]{0}, token[]) recv-done(%recv.2), channel_id=4, is_host_transfer=true",
        f"%recv = (bf16[64]{{0}}, u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, {one}",
        "%done = (bf16[64]{0}, token[]) recv-done(%recv), channel_id=2, is_host_transfer=true",
    )
    text = program("", *lines)
    counts = hlo.executions(text)
    (send,) = collectives(text, counts, MESH, slices=4)
    assert (send.kind, send.axes, send.group, send.start, send.done) == ("all-reduce", ("slices",), 4, "send", "done")
    assert send.sent_bytes == 2 * 64 * 2 * 3 / 4
    own = timeline.work_of(text, counts, 1.0, 1.0, timeline.Passes(0.0, 0.0))
    assert timeline.play(text, [send], own, lambda _: 5.0) == (3, 2)
