"""`swa-jax adapt --plan`: what the stages would do, how long that may take, and what they would write."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.adapt.job import Job
from swa_jax.adapt.stages import STAGES
from swa_jax.adapt.tasks import Task, num_examples
from swa_jax.model.config import ModelConfig
from swa_jax.model.flops import attention_flops, forward_flops
from swa_jax.model.pattern import AttentionPattern

COPY_SPEED = 200e6  # bytes a second: reading, summing and writing a checkpoint, on a common disk
COMPILING = 6.0  # seconds for each program: one for each shape of examples
EFFICIENCY = 0.35  # of the speed of large products: what a whole model reaches
TIMED = 0.2  # seconds of products timed


def plan_text(job: Job) -> str:
    """The stages in order, a line each, and what they add up to."""
    speed = products_per_second(job.source.config, job.dtype)
    seconds = estimate(job, speed)
    titles = {
        "original": f"measure the model as it is: {_described(job.tasks.measuring)}",
        "search": f"search under {job.settings.kv_budget:.0%} of the cache: {_searched(job)}",
        "tune": f"fine-tune by LoRA: {job.settings.tune_steps} steps{_trained_on(job)}"
        if job.settings.tune_steps
        else "no fine-tuning",
        "adapted": "measure the adapted model on the same examples",
        "efficiency": f"time both in turn: {job.settings.repeats} requests each",
        "export": f"export for {job.settings.server}" if job.settings.server else "no export, without --for",
    }
    lines = [f"{job.source.name} to {job.settings.out}, cache counted {job.memory.place}:"]
    lines += [
        f"  {number}. {titles[name]}" + (f" (about {duration(seconds[name])})" if seconds[name] >= 1 else "")
        for number, name in enumerate(STAGES, start=1)
    ]
    lines += [f"  left out: {line}" for line in job.space.left_out]
    lines += [
        f"In all about {duration(sum(seconds.values()))} on this machine, which does {speed / 1e9:.0f} billion "
        "operations a second in products of this model's sizes.",
        f"Written to {job.settings.out}: {written_bytes(job) / 2**20:.0f} MiB.",
        "Nothing was done.",
    ]
    return "\n".join(lines)


def _trained_on(job: Job) -> str:
    if job.replies is None:
        return ""
    return f", on {len(job.replies.samples)} replies of the model to the prompts of {job.replies.where}"


def estimate(job: Job, speed: float) -> dict[str, float]:
    """Seconds of each stage, from operations and the speed of products."""
    config, length = job.source.config, job.length
    full = _pass_flops(config, job.source.pattern, length) / (EFFICIENCY * speed)
    window = AttentionPattern.from_full_layers((), config.num_hidden_layers, job.space.start.sliding_window)
    windowed = _pass_flops(config, window, length) / (EFFICIENCY * speed)
    measuring, choosing = num_examples(job.tasks.measuring), num_examples(job.tasks.choosing)
    programs = len(job.tasks.measuring) * COMPILING
    copied = job.source.weight_bytes / COPY_SPEED
    settings = job.settings
    scoring = job.space.num_scorings * (config.num_hidden_layers + 3) / 2 * choosing * windowed
    if settings.unit == "heads":
        scoring = 2 * settings.iterations * config.num_hidden_layers * len(job.space.values["sliding_window"])
        scoring *= choosing * windowed
    tune = 3 * settings.tune_steps * settings.batch_size * windowed
    if job.replies is not None:  # each twice: drawn, and read again for its probabilities; a few at once
        tune += 2 * len(job.replies.samples) * full
    return {
        "original": (measuring + choosing) * full + 2 * programs,
        "search": scoring + job.space.num_candidates * choosing * windowed + 2 * programs,
        "tune": tune + COMPILING + 2 * copied if settings.tune_steps else 0.0,
        "adapted": measuring * windowed + programs,
        "efficiency": (settings.repeats + 1) * 2 * (full + windowed) + 4 * COMPILING,
        "export": copied if settings.server else 0.0,
    }


def written_bytes(job: Job) -> int:
    """What the run leaves on the disk: the fine-tuned model with its checkpoints, the export."""
    copies = int(job.settings.server is not None)
    copies += 3 * int(job.settings.tune_steps > 0)  # f32 of what may be bf16, and adapters with their moments
    return copies * job.source.weight_bytes + 2**20  # and the results


def products_per_second(config: ModelConfig, dtype: str) -> float:
    """Operations a second in products of the size of this model's MLP, timed on the device at hand."""
    tokens, wide = 1024, max(config.intermediate_size, 1)
    x, w = jnp.ones((tokens, config.hidden_size), dtype), jnp.ones((config.hidden_size, wide), dtype)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, w))
    begin, rounds = time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - begin < TIMED:
        jax.block_until_ready(product(x, w))
        rounds += 1
    return rounds * 2.0 * tokens * config.hidden_size * wide / (time.perf_counter() - begin)


def _pass_flops(config: ModelConfig, pattern: AttentionPattern, length: int) -> float:
    """Operations of an example."""
    attention = attention_flops(config, pattern, np.arange(length)).sum()
    return float(forward_flops(config, 0.0) * length + attention)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _described(tasks: list[Task]) -> str:
    return ", ".join(f"{task.title.lower()} ({len(task.examples)})" for task in tasks)


def _searched(job: Job) -> str:
    values = job.space.values
    windows = ", ".join(map(str, values["sliding_window"]))
    kinds = [
        f"windows of {windows}",
        f"{job.settings.unit} by {', '.join(values['layout'])}",
        *(["with and without sink tokens"] if len(values["num_sink_tokens"]) > 1 else []),
        *(["with and without full-attention decode"] if len(values["full_attention_decode"]) > 1 else []),
    ]
    count = f"about {job.space.num_candidates} candidates on {num_examples(job.tasks.choosing)} examples"
    return "; ".join([*kinds, count])
