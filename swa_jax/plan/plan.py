"""Plans a run without a pod: compiles its real step for a TPU topology on this host, and reads what came out.

`plan` gives what each chip holds, computes and sends. Memory is what the TPU compiler allots; operations and
collectives are counted in the compiled program (`swa_jax.plan.hlo`); the time is an estimate, whose assumptions the
report states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from swa_jax.base.chips import COMPILE_ONLY, GIB, TARGETS, Target, check_libtpu, chip_name, find_chip
from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.settings import load_config
from swa_jax.model.attention import kinds_of
from swa_jax.model.cache import POOL, allocate, cache_layouts
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.flops import some_positions, work_by_position
from swa_jax.model.generate import check_generation
from swa_jax.model.lora import trained_and_frozen, with_lora
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sequence_order import in_zigzag
from swa_jax.model.sharding import MeshConfig, Partition, check_batch, check_model, make_mesh, state_shardings
from swa_jax.plan import hlo
from swa_jax.plan.collectives import Collective, collectives
from swa_jax.plan.step_time import ROUTED_SHARE, Step, StepWork, attention_of, step_flops, step_time
from swa_jax.train.compiler import check_options
from swa_jax.train.config import ModelChanges, StageConfig, TrainConfig
from swa_jax.train.optimizer import make_optimizer
from swa_jax.train.patterns import Start, find_start, stage_patterns
from swa_jax.train.step import TrainState, init_state, make_step
from swa_jax.train.teacher import find_teacher, kept_weights


class TracedStep(NamedTuple):
    """A step that is traced but not compiled, and what it holds."""

    program: jax.stages.Traced
    held: dict[str, Any]  # its arguments, by what they are
    mesh: Mesh
    model: Decoder
    batch: dict[str, int]
    zigzag: bool = False  # whether rows lie in zig-zag order over `context`
    teacher: AttentionPattern | None = None  # of distillation in the step


def plan(
    config: TrainConfig,
    topology: str,
    *,
    step: Step = "train",
    stage: int = 0,
    batch_size: int = 8,
    length: int | None = None,
) -> dict[str, Any]:
    """Compile one step of a run, with nothing left open, for a topology; the report, plain JSON. Bytes are a chip's.

    Args:
      topology: such as "v5p:4x4x8".
      step: "train" is the step of the run. "prefill" and "decode" are generation's in bf16, on one chip, or with
        `mesh.tensor` or `mesh.fsdp` above 1 on as many; other chips would each do the same for prompts of their own.
      stage: of the run's stages.
      batch_size, length: of a prefill or decode step: prompts, and tokens of a prompt (or of the caches).

    Raises:
      ConfigError: the topology, or what the run asks of it, is not possible.
      CheckpointError: the run starts from a checkpoint that is not there.
    """
    check_stage(config, stage)
    slices = config.mesh.slices if step == "train" else 1
    devices = topology_devices(topology, slices)
    start = planned_start(config)
    if step == "train":
        check_options(config.xla_options, devices[0])
        return {"topology": topology} | plan_training(config, start, devices, stage)
    traced = trace_generation(config, config.stages[stage], start, devices, step, batch_size=batch_size, length=length)
    return {"topology": topology} | _report(traced, config, step, devices, slices=1)


def plan_training(config: TrainConfig, start: Start, devices: Sequence[Any], stage: int) -> dict[str, Any]:
    """The report on a stage's step for all the devices of a run, whether they are here or not."""
    traced = trace_training(config, config.stages[stage], start, devices)
    return _report(traced, config, "train", devices, config.mesh.slices)


def _report(traced: TracedStep, config: TrainConfig, step: Step, devices: Sequence[Any], slices: int) -> dict[str, Any]:
    kind = devices[0].device_kind
    target = target_of(kind)
    report: dict[str, Any] = {
        "slices": slices,
        "chip": kind,
        "devices": len(devices),
        "step": step,
        "mesh": dict(traced.mesh.shape),
        "batch": traced.batch,
        "pattern": str(traced.model.pattern),
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(traced.model))),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
    }
    if traced.teacher is not None:
        report["teacher"] = str(traced.teacher)
    if step != "train":
        report["by_position"] = _by_position(traced)
        report["cache_read_seconds"] = _cache_read_seconds(traced, report["by_position"], target)
    held = {name: _local_bytes(tree) for name, tree in traced.held.items()}
    began = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(traced.mesh.abstract_mesh):
            compiled = traced.program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return report | {"memory": _does_not_fit(str(error), held, target)}
    report["compile_seconds"] = round(time.perf_counter() - began, 1)
    return report | _counted(compiled, traced, held, config, step, slices)


def _counted(
    compiled: Any, traced: TracedStep, held: dict[str, int], config: TrainConfig, step: Step, slices: int
) -> dict[str, Any]:
    """What a compiled step holds, sends and computes, and the time that it takes."""
    model, mesh, kind = traced.model, dict(traced.mesh.shape), traced.mesh.devices.flat[0].device_kind
    shares = _branch_shares(model.pattern)
    program = hlo.parse(compiled.as_text())
    counts = hlo.executions(program, shares)
    kept: int | None = 0
    if step == "train":
        kept = hlo.stacked_outputs(program, model.config.num_hidden_layers) if not config.training.unroll else None
    sends = collectives(program, counts, mesh, slices)
    of_model = model.config, model.pattern, model.lora, config.training.remat
    rows, length = traced.batch["rows"], traced.batch["length"]
    work = StepWork(step, chip_name(kind) or kind, *of_model, rows, length, mesh, slices, traced.zigzag, traced.teacher)
    attention = attention_of(work)
    flops = step_flops(work, attention, hlo.matmul_flops(program, counts, mesh["expert"]))
    times = step_time(work, attention, flops["model"], program, counts, sends, shares)
    if uncounted := hlo.uncounted_loops(program, counts):
        times["assumptions"].append(f"{uncounted} loops whose number of runs is not in the program are counted once")
    memory = _memory(compiled.memory_analysis(), held, kept, target_of(kind))
    return {"memory": memory, "collectives": _by_kind(sends), "flops": flops, "time": times}


def _by_position(traced: TracedStep) -> list[dict[str, Any]]:
    """The work for one token, of the whole model."""
    config, pattern = traced.model.config, traced.model.pattern
    rows = work_by_position(config, pattern, some_positions(traced.batch["length"]), ROUTED_SHARE)
    return [row._asdict() for row in rows]


def _cache_read_seconds(traced: TracedStep, rows: list[dict[str, Any]], chip: Target) -> float:
    """How long a chip reads, at the published bandwidth of its memory, what decoding the last token of all sequences
    reads of the caches in bf16."""
    entry = 2 * 2 * sum(kv_heads * size for kv_heads, size in traced.model.config.head_shapes)  # bytes of a token
    return traced.batch["rows"] * rows[-1]["kv_tokens_read"] * entry / traced.mesh.size / chip.hbm_bytes


def check_stage(config: TrainConfig, stage: int) -> None:
    """Raises `ConfigError` for a stage that the run does not have."""
    if not 0 <= stage < len(config.stages):
        raise ConfigError(f"--stage is {stage}: the run has stages 0 to {len(config.stages) - 1}")


# ---- the topology ----


def topology_devices(name: str, slices: int = 1) -> list[Any]:
    """The devices of so many slices of a TPU topology that is not here.

    Raises `ConfigError`: libtpu is not installed, or does not know the topology.
    """
    for variable, value in COMPILE_ONLY.items():
        os.environ.setdefault(variable, value)
    check_libtpu()
    try:
        with _silent_stderr():
            known_as = name.replace("v7x:", "tpu7x:")  # the other tools' name for it
            topology = topologies.get_topology_desc(platform="tpu", topology_name=known_as, num_slices=slices)
        devices: list[Any] = list(topology.devices)
    except Exception as error:
        raise ConfigError(
            f"--topology is '{name}', which libtpu does not know: write a kind and its "
            "chips, such as v5e:16x16, v5p:4x4x8, v6e:16x16 or tpu7x:4x4x4"
        ) from error
    target_of(devices[0].device_kind)
    return devices


def target_of(device_kind: str) -> Target:
    """What is known of a TPU that is compiled for."""
    chip = find_chip(device_kind)
    if chip is None or chip.target is None:
        raise ConfigError(f"no plan can be made for {device_kind}; known: {', '.join(TARGETS)}")
    return chip.target


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """libtpu writes a warning of no use here straight to the file descriptor."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


# ---- the steps ----


def planned_start(config: TrainConfig) -> Start:
    """`find_start`, which takes `plan_model` where the model that the run starts from is not there."""
    start = _start(config)
    start.config.refuse_linear("a plan")
    return start


def _start(config: TrainConfig) -> Start:
    try:
        return find_start(config)
    except (CheckpointError, FileNotFoundError) as error:
        if config.plan_model is None:
            raise CheckpointError(
                f"{error}; a plan needs the model's shapes only: plan_model=configs/models/NAME.yaml"
            ) from error
    model = config.model_changes.apply(load_config(ModelConfig, config.plan_model))
    return find_start(
        dataclasses.replace(config, model=model, init_from=None, model_changes=ModelChanges(), distill=None)
    )


def trace_training(config: TrainConfig, stage: StageConfig, start: Start, devices: Sequence[Any]) -> TracedStep:
    """The step of a run on devices that need not be here; a batch has the stage's sizes."""
    model_config = start.config
    mesh = make_mesh(config.mesh, devices)
    partition = Partition(mesh, config.sharding)
    check_batch(
        partition, stage.batch_size // stage.pieces, stage.sequence_length, "stages", order=config.sequence_order
    )
    check_model(model_config, partition)
    pattern = stage_patterns(config, start, stage)[0]  # where its steps take several in turn, the first

    def draw() -> Decoder:
        plain = Decoder(model_config, pattern, dtype=config.start_dtype, rngs=nnx.Rngs(0))
        return plain if config.lora is None else with_lora(plain, config.lora, nnx.Rngs(0))

    model, teacher = nnx.eval_shape(draw), find_teacher(config, start)
    optimizer = make_optimizer(config.optimizer, config.total_steps, model_config, config.rate_factors)
    graph, weights = nnx.split(model)

    def begin(weights: nnx.State) -> TrainState:
        trained, frozen = trained_and_frozen(nnx.merge(graph, weights))
        return init_state(trained, optimizer, frozen, kept_weights(config, teacher, trained))

    shapes: TrainState = jax.eval_shape(begin, weights)
    state = jax.tree.map(_placed, shapes, state_shardings(shapes, partition, model_config))
    rows = partition.sharding("batch", "sequence")
    size = (stage.batch_size, stage.sequence_length)
    dtypes = {"tokens": jnp.int32, "segment_ids": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(size, dtype, sharding=rows) for name, dtype in dtypes.items()}
    if pattern.full_attention_decode:
        one_each = partition.sharding("batch", None)
        batch["full_from"] = jax.ShapeDtypeStruct((stage.batch_size, 1), jnp.int32, sharding=one_each)
    if config.top_k is not None:
        for name, dtype in (("top_tokens", jnp.int32), ("top_logprobs", jnp.float32)):
            batch[name] = jax.ShapeDtypeStruct((*size, config.top_k), dtype, sharding=rows)
    run: Any = make_step(model, optimizer, config, partition, teacher)
    held = {"parameters": (state.params, state.frozen), "optimizer": (state.optimizer, state.norm_mean), "batch": batch}
    if teacher is not None:
        held["teacher"] = state.teacher
    described = {"rows": size[0], "length": size[1], "accumulate": stage.pieces}
    pieces = partition.size("sequence")
    theirs = None if teacher is None else teacher.pattern
    computed = [pattern] if theirs is None else [pattern, theirs]
    reordered = in_zigzag(config.sequence_order, computed, stage.sequence_length, pieces)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = run.trace(state, batch, stage.pieces)
    return TracedStep(program, held, mesh, model, described, reordered, theirs)


def trace_generation(
    config: TrainConfig,
    stage: StageConfig,
    start: Start,
    devices: Sequence[Any],
    step: Step,
    *,
    batch_size: int = 8,
    length: int | None = None,
) -> TracedStep:
    """A step of generation on as many of the devices as the model is split into; the arguments are those of `plan`."""
    rows = batch_size
    length, model_config = length or stage.sequence_length, start.config
    pattern = stage_patterns(config, start, stage)[0]
    fsdp, tensor = max(config.mesh.sizes["fsdp"], 1), config.mesh.sizes["tensor"]
    split, count = MeshConfig(1, fsdp, 1, tensor), fsdp * tensor
    if count > len(devices):
        raise ConfigError(
            f"'mesh' splits the model into {count} (fsdp {fsdp}, tensor {tensor}), but the topology has "
            f"{len(devices)} chips"
        )
    mesh = make_mesh(split, devices[:count])
    partition = Partition(mesh, config.sharding)
    check_generation(partition, model_config)
    check_batch(partition, rows, length, "--batch-size")
    layouts = cache_layouts(model_config, pattern, length, partition.size("kv_heads"))
    model = nnx.eval_shape(lambda: Decoder(model_config, pattern, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(model)
    weights = jax.tree.map(_placed, shapes, state_shardings(shapes, partition, model_config))
    empty = jax.eval_shape(lambda: allocate(model_config, layouts, rows, jnp.bfloat16))
    pool, by_row = partition.sharding(*POOL), partition.sharding("batch")
    cache = jax.tree.map(lambda x: _placed(x, pool if x.ndim == len(POOL) else by_row), empty)
    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=by_row)
    prompts = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=partition.sharding("batch", None))

    def prefill(weights: Any, cache: Any, tokens: jax.Array, lengths: jax.Array) -> Any:
        model: Decoder = nnx.merge(graph, weights)
        return model.prefill(tokens, lengths, cache, layouts, partition=partition)

    def decode(weights: Any, cache: Any, tokens: jax.Array, prompt_lengths: jax.Array) -> Any:
        model: Decoder = nnx.merge(graph, weights)
        return model.decode_step(tokens, cache, layouts, pattern.full_from(prompt_lengths), partition=partition)

    function, tokens = (prefill, prompts) if step == "prefill" else (decode, numbers)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(function, donate_argnums=1).trace(weights, cache, tokens, numbers)
    held = {"parameters": weights, "cache": cache, "batch": (tokens, numbers)}
    return TracedStep(program, held, mesh, model, {"rows": rows, "length": length})


def _placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _local_bytes(tree: Any) -> int:
    """The bytes of one device's shards."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _branch_shares(pattern: AttentionPattern) -> Callable[[int], list[float]]:
    """Layers of each kind, for the branch that chooses among them; other branches are taken equally often."""
    kinds = kinds_of(pattern)

    def shares(branches: int) -> list[float]:
        if branches == len(kinds):
            return [pattern.layer_types.count(kind) / pattern.num_layers for kind in kinds]
        return [1 / branches] * branches

    return shares


# ---- what came out ----


def _memory(analysis: Any, held: dict[str, int], kept: int | None, chip: Target) -> dict[str, Any]:
    """Bytes by what they hold. `activations` are what layers keep for the backward pass, `temporaries` the rest; both
    are `temporaries` where `kept` is None, for without a loop over the layers nothing tells them apart."""
    # What XLA pads or keeps of outputs that are not written over their arguments.
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    padding = analysis.argument_size_in_bytes - sum(held.values())
    parts = held | {
        **({} if kept is None else {"activations": kept}),
        "temporaries": max(analysis.temp_size_in_bytes - (kept or 0), 0),
        "outputs_and_padding": max(new, 0) + padding,
        "program": analysis.generated_code_size_in_bytes,
    }
    total, capacity = sum(parts.values()), int(chip.hbm_gib * GIB)
    return parts | {
        "total": total,
        "capacity": capacity,
        "fits": total <= capacity,
        "free": capacity - total,
        "host": analysis.host_temp_size_in_bytes,
    }


def _does_not_fit(message: str, held: dict[str, int], chip: Target) -> dict[str, Any]:
    """The compiler's refusal; anything else that it says is raised again as it is."""
    sizes = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM", message) or re.search(
        r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message
    )
    if sizes is None:
        raise RuntimeError(message)
    total = int(float(sizes[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[sizes[2]])
    capacity = int(chip.hbm_gib * GIB)
    said = message.split("CompileTimeHbmOom:")[-1].strip().splitlines()[0]
    return held | {"total": total, "capacity": capacity, "fits": False, "free": capacity - total, "compiler": said}


def _by_kind(sends: list[Collective]) -> list[dict[str, Any]]:
    """By kind, axes and whether work runs beside them, the largest first; the bytes that a chip sends in a step."""
    totals: dict[tuple[str, str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for send in sends:
        entry = totals[send.kind, " x ".join(send.axes) or "?", send.asynchronous]
        entry[0] += send.executions
        entry[1] += send.executions * send.sent_bytes
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return [
        {"kind": kind, "axes": axes, "asynchronous": beside, "executions": round(times, 1), "bytes": round(size)}
        for (kind, axes, beside), (times, size) in ordered
    ]
