"""The plan of `swa_jax.plan.plan` as text to read."""

from __future__ import annotations

from typing import Any

from swa_jax.base.chips import GIB

_MEMORY = {
    "parameters": "parameters",
    "optimizer": "optimizer",
    "teacher": "weights of the teacher beside them",
    "cache": "key/value caches",
    "batch": "batch",
    "activations": "activations kept for the backward pass",
    "temporaries": "temporaries",
    "outputs_and_padding": "outputs and padding",
    "program": "program",
}


def describe(plan: dict[str, Any]) -> str:
    """The report of `swa_jax.plan.plan.plan` as some dozen lines."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    batch = ", ".join(f"{name} {size}" for name, size in plan["batch"].items())
    lines = [
        f"{plan['step']} step on {plan['topology']}: {plan['devices']} x {plan['chip']}",
        f"mesh: {mesh}",
        f"batch: {batch}",
        f"model: {plan['parameters'] / 1e9:.2f}B parameters; {plan['pattern'].splitlines()[0]}",
        *([f"teacher, a forward pass more: {plan['teacher'].splitlines()[0]}"] if "teacher" in plan else []),
        "",
        *_memory_lines(plan["memory"]),
    ]
    if "by_position" in plan:
        lines += [
            "",
            "position: GFLOP of the prefill there, tokens of the cache that decoding reads (mean over layers)",
        ]
        lines += [
            f"  {row['position']:8,} {row['prefill_flops'] / 1e9:12.4g} {row['kv_tokens_read']:12,.0f}"
            for row in plan["by_position"]
        ]
    if "time" in plan:
        lines += ["", *_collective_lines(plan["collectives"]), "", *_time_lines(plan)]
    return "\n".join(lines)


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    lines = ["memory of a chip                            GiB"]
    texts = _MEMORY if "activations" in memory else _MEMORY | {"temporaries": "activations and temporaries"}
    lines += [f"  {text:40} {memory[name] / GIB:6.2f}" for name, text in texts.items() if name in memory]
    if memory.get("host"):
        lines.append(f"  {'in the memory of its host':40} {memory['host'] / GIB:6.2f}")
    capacity = memory["capacity"] / GIB
    if memory["fits"]:
        lines.append(f"  {'total':40} {memory['total'] / GIB:6.2f}")
        lines.append(f"FITS: {memory['free'] / GIB:.2f} of {capacity:.2f} GiB stay free")
    else:
        # The compiler refuses by a count of its own, which can be less than the sum of the parts.
        why = (
            f"The compiler: {memory['compiler']}"
            if "compiler" in memory
            else "It was compiled, but all that it holds, its own code included, has no room."
        )
        lines.append(f"DOES NOT FIT: {-memory['free'] / GIB:.2f} GiB over the {capacity:.2f} GiB of a chip. {why}")
        lines.append(
            "Take the batch in more pieces (stages.N.accumulate), save less (remat: layer), or split more (mesh)."
        )
    return lines


def _collective_lines(collectives: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'collectives, in a step':22} {'over':24} {'':12} {'times':>8} {'GB a chip sends':>16}"]
    for c in collectives:
        how = "asynchronous" if c["asynchronous"] else "synchronous"
        lines.append(f"  {c['kind']:20} {c['axes']:24} {how:12} {c['executions']:8.0f} {c['bytes'] / 1e9:16.3f}")
    return lines if collectives else ["collectives: none"]


def _time_lines(plan: dict[str, Any]) -> list[str]:
    flops, time = plan["flops"], plan["time"]
    kernels = flops["attention_forward"] + flops["attention_backward"]
    slow, fast = time["tokens_per_second"]
    low, high = time["mfu"]
    parts = time["xla_seconds_by_part"]
    return [
        f"operations of a chip: {flops['model'] / 1e12:.2f} TFLOP asked for by the model; done: "
        f"{flops['matmuls'] / 1e12:.2f} in matrix products, {kernels / 1e12:.2f} in attention",
        f"time of a step, as scheduled: {time['seconds']:.3g} s "
        f"({time['tokens_per_second_scheduled']:,.0f} tokens/s, MFU {time['mfu_scheduled']:.0%})",
        f"  attention kernels {time['kernel_seconds']:.3g} s; matrix products {parts['matmuls']:.3g} s, what XLA does "
        f"around attention {parts['around_attention']:.3g} s, and the rest {parts['other']:.3g} s",
        *kernel_lines(time["kernel_seconds_by_layer_type"]),
        f"  collectives {time['collective_seconds']:.3g} s; the step waits for them for "
        f"{time['collective_seconds_waited']:.3g} s",
        f"  with all collectives hidden {time['seconds_hidden']:.3g} s, with none {time['seconds_shown']:.3g} s "
        f"({slow:,.0f} to {fast:,.0f} tokens/s, MFU {low:.0%} to {high:.0%})",
        "assumptions:",
        *(f"  - {assumption}" for assumption in time["assumptions"]),
    ]


def kernel_lines(by_type: dict[str, dict[str, float]]) -> list[str]:
    """Seconds of attention kernels in layers of each type, where there are several."""
    if len(by_type) == 1:
        return []
    parts = [f"{kind} {sum(passes.values()):.3g} s" for kind, passes in by_type.items()]
    return [f"  attention kernels by type of layer: {', '.join(parts)}"]
