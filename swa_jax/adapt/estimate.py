"""`swa-jax adapt --plan`: what the stages would do, how long that may take, and what they would write."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.adapt.job import STAGES, Adaptation
from swa_jax.adapt.search import BY_HEADS, EFFORTS, HOW, Effort, fitting
from swa_jax.adapt.tasks import ROWS_OF_TEXT, EvalTask, num_examples
from swa_jax.checkpoint.canary import choose_size
from swa_jax.checkpoint.readings import readings_of
from swa_jax.model.attention import layer_data
from swa_jax.model.block import Block, Stream
from swa_jax.model.decoder import Decoder
from swa_jax.model.flops import attention_flops, matrix_parameters, output_flops
from swa_jax.model.layer_stacks import layer_stacks
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.select.nll import shares, tried_by_depth

COPY_SPEED = 200e6  # bytes a second: reading, summing and writing a checkpoint, on a common disk
READ_SPEED = 10e9  # bytes a second: weights from memory, for each token that is decoded
COMPILING = 4.0  # seconds for each program: one for each shape of examples
CANARY_SHARE = 0.04  # of the other stages' operations; its small batches run at half their speed
TIMED = 0.5  # seconds that a layer is timed


class Work(NamedTuple):
    """What a stage computes."""

    full: float = 0.0  # examples through one layer of full attention
    windowed: float = 0.0  # and through one windowed layer
    labels: float = 0.0  # tokens whose logits are computed
    programs: int = 0
    seconds: float = 0.0  # of what is not computing

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        computed = (self.full + other.full, self.windowed + other.windowed, self.labels + other.labels)
        return Work(*computed, self.programs + other.programs, self.seconds + other.seconds)

    def times(self, count: float) -> Work:
        computed = (self.full * count, self.windowed * count, self.labels * count)
        return Work(*computed, self.programs, self.seconds)

    def computed(self, each: Clock) -> float:
        """In seconds, or operations."""
        return self.full * each.full + self.windowed * each.windowed + self.labels * each.label


class Clock(NamedTuple):
    """Seconds, or operations, of an example in a layer of each kind, and of a label."""

    full: float
    windowed: float
    label: float


def work(job: Adaptation, effort: Effort) -> dict[str, Work]:
    """What each stage has to do."""
    config, settings, source = job.source.config, job.settings, job.source
    layers = config.num_hidden_layers
    measuring, choosing = (_through(job.tasks.choosing, count, layers) for count in (effort.examples, effort.choose_by))
    ranking = _through(job.tasks.choosing, effort.rank_by, layers, least=1)
    copied = source.weight_bytes / COPY_SPEED
    tune = Work()
    if settings.tune:
        steps = Work(windowed=3.0 * settings.tune * settings.batch_size * layers, programs=1, seconds=2 * copied)
        drawn = 0 if job.replies is None else 2 * len(job.replies.samples)  # drawn, and read for their probabilities
        tune = steps + Work(full=drawn * layers)
    token = 2 * matrix_parameters(config) / READ_SPEED  # f32 or bf16, and both models
    requests = (settings.repeats + 1) * settings.new_tokens * 2 * token
    answers = _through([task for task in job.tasks.choosing if task.answers], effort.examples, layers)
    candidates = job.space.num_candidates(effort.turns)
    return {
        "original": measuring + choosing + Work(programs=4, seconds=copied),
        "search": _ranked(job, effort, ranking) + _mixed(job, choosing).times(candidates),
        "tune": tune,
        "adapted": _mixed(job, measuring) + _windowed(answers),
        "efficiency": Work(layers * (settings.repeats + 1), layers * (settings.repeats + 1), 0, 4, requests),
        "export": Work(seconds=copied if settings.server else 0.0),
    }


def _through(tasks: Sequence[EvalTask], count: int, layers: int, least: int = 2) -> Work:
    """So many examples of each task, and their share of rows of text, through the model as it was."""
    total = Work()
    for task in tasks:
        rows = count if task.answers else max(least, count // ROWS_OF_TEXT)
        total += Work(full=rows * layers, labels=rows * float(np.mean([len(one.answer) for one in task.examples])))
    return total


def _windowed(passes: Work) -> Work:
    return passes._replace(full=0.0, windowed=passes.full)


def _mixed(job: Adaptation, passes: Work) -> Work:
    """The same with as many full layers as the budget leaves."""
    heads = job.source.config.common_kv_heads if job.settings.unit == "heads" else 1
    share = job.space.most / heads / job.source.config.num_hidden_layers
    return passes._replace(full=passes.full * share, windowed=passes.full * (1 - share))


def _ranked(job: Adaptation, effort: Effort, passes: Work) -> Work:
    """The ranking of layers, or heads; `passes` is one over the examples that it goes by."""
    layers, windows = job.source.config.num_hidden_layers, _windowed(passes)
    by_heads = job.space.start.layout == BY_HEADS
    tried = effort.tried if by_heads else tried_by_depth(layers, effort.tried)
    takes = shares(job.space.most, effort.rounds) if job.space.most else []
    if tried is None and not by_heads:  # from the layer on that is made full, on average half of them
        each = windows._replace(windowed=windows.windowed * (layers + 3) / 2, labels=passes.labels * (layers + 1))
        return each.times(len(takes)) + Work(programs=4)
    # A gradient goes forward through both kinds of attention, again for the way back, and back through the windows.
    total = (passes.times(2) + windows.times(1.5)).times(len(takes)) + Work(programs=6)
    every = layers * job.source.config.most_kv_heads
    for take in takes:
        scored = min(every, (tried or every) + take - 1)
        total += passes.times(scored) if by_heads else windows.times(1 + scored / 2)
    return total


# ---- in seconds, and in operations ----


def estimate(job: Adaptation, clock: Clock, effort: Effort | None = None) -> dict[str, float]:
    """Seconds of each stage."""
    found = {
        name: one.computed(clock) + one.programs * COMPILING + one.seconds
        for name, one in work(job, effort or job.effort).items()
    }
    canary = 0.0
    if job.settings.canary and job.settings.server is not None:
        per_operation = clock.windowed / operations(job).windowed
        canary = _canary_operations(job) * 2 * per_operation + 2 * COMPILING
    return found | {"canary": canary}


def operations(job: Adaptation) -> Clock:
    """Of an example in a layer of each kind, and of a label."""
    config, length = job.source.config, job.length
    head = output_flops(config)
    matrices = (2.0 * matrix_parameters(config) - head) * length / config.num_hidden_layers
    window = AttentionPattern.everywhere(WINDOW, config, job.space.start.window.size)
    full = AttentionPattern.everywhere(FULL, config)
    attention = [
        float(attention_flops(config, pattern, np.arange(length)).sum()) / config.num_hidden_layers
        for pattern in (full, window)
    ]
    return Clock(matrices + attention[0], matrices + attention[1], head)


def canary_budget(job: Adaptation) -> float:
    """Operations that the receipt of the export may cost."""
    each = operations(job)
    return CANARY_SHARE * sum(one.computed(each) for one in work(job, job.effort).values())


def _canary_operations(job: Adaptation) -> float:
    config, memory = job.source.config, job.memory
    pattern = fitting(job.space.start, memory, job.settings.kv_budget)
    served = memory.served(pattern)
    if served is None:
        return 0.0
    readings = readings_of(config, served.pattern, served.hf)
    size = choose_size(config, served.pattern, readings, canary_budget(job), memory.length)
    return 0.0 if size is None else size.operations(config, readings)


def time_layers(job: Adaptation, length: int) -> Clock:
    """Seconds of an example of so many tokens in a layer of each kind, timed on the device at hand, and of a label.

    Where layers differ, it is one of those that are most."""
    config, dtype = job.source.config, jnp.dtype(job.dtype)
    window = min(job.space.start.window.keys, length)
    pattern = AttentionPattern.everywhere(WINDOW, config, window)
    kinds = (FULL, WINDOW)
    data = layer_data(pattern, config, kinds)
    like = max((one for one in layer_stacks(config) if "shared" not in one.name), key=lambda one: len(one.layers))
    row = jax.tree.map(lambda x: x[like.layers[0]], data)
    decoder = nnx.eval_shape(lambda: Decoder(config, pattern, dtype=dtype, rngs=nnx.Rngs(0)))
    block = Block(like, False, dtype, num_experts=config.num_experts, rngs=nnx.Rngs(0))
    graph, weights = nnx.split(block)
    rows = min(2, job.settings.batch_size)
    tokens = jnp.zeros((rows, length), jnp.int32)
    x = jax.random.normal(jax.random.key(0), (rows, length, config.hidden_size), dtype)

    @jax.jit
    def layer(weights: nnx.State, x: jax.Array, kind: jax.Array) -> jax.Array:
        context = decoder.context(tokens, jnp.ones_like(tokens))
        inputs = jnp.zeros((*tokens.shape, config.hidden_size_per_layer_input), dtype)
        return nnx.merge(graph, weights)(Stream(x), dataclasses.replace(row, kind=kind, inputs=inputs), context)[0].x

    full, windowed = (_timed(functools.partial(layer, weights, x, jnp.int32(kind))) / rows for kind in (0, 1))
    matrix = jnp.ones((config.hidden_size, config.vocab_size), dtype)
    some = jnp.ones((256, config.hidden_size), dtype)
    product = jax.jit(jnp.matmul)
    return Clock(full, windowed, _timed(functools.partial(product, some, matrix)) / len(some))


def _timed(run: Callable[[], jax.Array]) -> float:
    """Seconds of a call, the least of those that `TIMED` has room for; the first compiles and does not count."""
    jax.block_until_ready(run())
    begin, best = time.perf_counter(), float("inf")
    while best == float("inf") or time.perf_counter() - begin < TIMED:
        start = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best


# ---- in words ----


def estimate_report(job: Adaptation) -> dict[str, Any]:
    """What the stages would do, in order, with the seconds of each, and what would be faster: plain JSON values."""
    clock = time_layers(job, job.length)
    seconds = estimate(job, clock)
    total = sum(seconds.values())
    settings, server = job.settings, job.settings.server
    titles = {
        "original": f"measure the model as it is: {_described(job.tasks.measuring)}",
        "search": f"search under {settings.kv_budget:.0%} of the cache: {_searched(job)}",
        "tune": f"fine-tune by LoRA: {settings.tune} steps{_trained_on(job)}" if settings.tune else "no fine-tuning",
        "adapted": "measure the adapted model on the same examples, and plain windows",
        "efficiency": f"time both in turn: {settings.repeats} requests each",
        "export": f"export for {server}" if server else "no export, without --for",
        "canary": f"make the receipt of the export for {server}" if server and settings.canary else "no receipt",
    }
    return {
        "model": job.source.name,
        "out": str(settings.out),
        "cache": f"counted {job.memory.place}",
        "batched_tokens": job.memory.steps,
        "stages": [{"stage": name, "does": titles[name], "seconds": seconds[name]} for name in STAGES],
        "left_out": list(job.space.left_out),
        "half_made": [str(folder) for folder in job.half_made],
        "seconds": total,
        "length": job.length,
        "seconds_in_a_layer": {"full": clock.full, "windowed": clock.windowed},
        "bytes_written": job.written_bytes,
        "faster": _faster(job, clock, total),
    }


def estimate_text(report: Mapping[str, Any]) -> str:
    """The same in lines."""
    layer = report["seconds_in_a_layer"]
    faster = ", ".join(f"{option} (about {duration(seconds)})" for option, seconds in report["faster"].items())
    lines = [f"{report['model']} to {report['out']}, cache {report['cache']}:"]
    lines += [f"  {report['batched_tokens']}"] if report["batched_tokens"] else []
    lines += [
        f"  {number}. {one['does']}" + (f" (about {duration(one['seconds'])})" if one["seconds"] >= 1 else "")
        for number, one in enumerate(report["stages"], start=1)
    ]
    lines += [f"  left out: {line}" for line in report["left_out"]]
    lines += [f"  half made by an interrupted run, to be removed: {folder}" for folder in report["half_made"]]
    return "\n".join(
        [
            *lines,
            f"In all about {duration(report['seconds'])} on this machine, where {report['length']} tokens take "
            f"{layer['full']:.2g} s in a layer of full attention and {layer['windowed']:.2g} s in a windowed one.",
            f"It would write {report['bytes_written'] / 2**20:.0f} MiB to {report['out']}.",
            *([f"Faster, each alone: {faster}."] if faster else []),
            "This is an estimate: nothing was run, and nothing but the import was written.",
        ]
    )


def _faster(job: Adaptation, clock: Clock, total: float) -> dict[str, float]:
    """Options that would take less time, each alone, and the seconds: the fastest first."""
    settings, values = job.settings, job.space.values
    ways: dict[str, float] = {}
    if settings.effort != "quick":
        ways["--effort quick"] = sum(estimate(job, clock, EFFORTS["quick"]).values())
    shorter = job.length // 2
    if shorter >= 256 and min(values["size"]) < shorter:
        ways[f"--length {shorter}"] = sum(estimate(job, time_layers(job, shorter)).values())
    if len(values["size"]) > 1:
        window = job.space.start.window.size
        space = dataclasses.replace(job.space, values={**values, "size": (window,)})
        ways[f"--window {window}"] = sum(estimate(dataclasses.replace(job, space=space), clock).values())
    if settings.server is not None and settings.canary:
        ways["--no-canary"] = total - estimate(job, clock)["canary"]
    kept = sorted(ways.items(), key=lambda way: way[1])
    return {option: seconds for option, seconds in kept if seconds < 0.95 * total}


def _trained_on(job: Adaptation) -> str:
    if job.replies is None:
        return ""
    return f", on {len(job.replies.samples)} replies of the model to the prompts of {job.replies.where}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _described(tasks: list[EvalTask]) -> str:
    return ", ".join(f"{task.title.lower()} ({len(task.examples)})" for task in tasks)


def _searched(job: Adaptation) -> str:
    values = job.space.values
    windows = ", ".join(map(str, values["size"]))
    kinds = [
        f"windows of {windows}",
        f"full {job.settings.unit} {' or '.join(HOW.get(layout, 'nowhere') for layout in values['layout'])}",
        *(["with and without sink tokens"] if len(values["sink_tokens"]) > 1 else []),
        *(["with and without full-attention decode"] if len(values["full_decode"]) > 1 else []),
    ]
    count, examples = job.space.num_candidates(job.effort.turns), num_examples(job.tasks.choosing)
    return "; ".join([*kinds, f"about {count} candidates on {examples} examples"])
