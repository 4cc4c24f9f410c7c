"""What chips that are not here would take to answer (SWAA's Table 5), from the plans of a prefill and a decode step."""

from __future__ import annotations

from typing import Any


def serving(prefill: dict[str, Any], decode: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """Time to the first token, time of each further one, throughput and memory of a batch of equal prompts.

    Args:
      prefill, decode: reports of `swa_jax.plan.plan.plan` on the same mesh, with equal `batch_size`; the decode step's
        caches have room for the prompt and the answer, and are read in full at each step.
      new_tokens: of each answer.

    Returns:
      As `swa_jax.evaluate.efficiency.measure_efficiency` names them: `first_token_seconds`, `token_seconds`,
      `tokens_per_second` (prompts and answers) and `kv_cache_bytes` (of a chip, a sequence); also `memory_bytes`, the
      most that a chip holds. Times are missing where a step does not fit.
    """
    found: dict[str, Any] = {
        "fits": prefill["memory"]["fits"] and decode["memory"]["fits"],
        "kv_cache_bytes": decode["memory"]["cache"] // decode["batch"]["rows"],
        "memory_bytes": max(report["memory"]["total"] for report in (prefill, decode)),
    }
    if "time" in prefill and "time" in decode:
        first = prefill["time"]["seconds"]
        rest = decode["time"]["seconds"] + decode["cache_read_seconds"]  # which the step's own time leaves out
        tokens = prefill["batch"]["rows"] * (prefill["batch"]["length"] + new_tokens)
        found |= {
            "first_token_seconds": first,
            "token_seconds": rest,
            "tokens_per_second": tokens / (first + (new_tokens - 1) * rest),
        }
    return found


def describe_serving(found: dict[str, Any], new_tokens: int) -> str:
    """The same as lines to read."""
    lines = [f"{new_tokens} tokens of answer to each prompt of the batch, as scheduled, with reading the caches:"]
    if "token_seconds" in found:
        lines += [
            f"  time to the first token    {found['first_token_seconds']:.4g} s",
            f"  each further token         {1000 * found['token_seconds']:.4g} ms",
            f"  throughput                 {found['tokens_per_second']:,.0f} tokens/s",
        ]
    else:
        lines.append("  no times: a step does not fit")
    lines += [
        f"  memory of a chip           {found['memory_bytes'] / 2**30:.2f} GiB, of it for each sequence's cache "
        f"{found['kv_cache_bytes'] / 2**30:.3f} GiB"
    ]
    return "\n".join(lines)
