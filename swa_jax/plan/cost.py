"""What a training step would take under given settings, by formula: the search compiles what looks best here.

Per device, with B rows of T tokens, split in b by batch and c by sequence, t the size of `tensor`, e that of `expert`,
g pieces of a weight over `fsdp` and `context`, a pieces of the batch (`accumulate`), d, H, K, D, f the model's sizes
(of experts, f of those that a token meets), L layers, and p the bytes of a number that is computed with (2 in bf16):
n = B T / (b c) tokens, of which n / a are in memory at a time.

Memory:
  weights and moments   4 bytes for each of the device's weights, 8 (AdamW) or 4 (a matrix under Muon) for its moments
  gradients             4 bytes for each trained weight, twice where a > 1, and p for the copy that is computed with
  gathered              p for the weights of two layers, and twice p for embedding and head, all by t
  activations           n / a L times what remat keeps of a token: `kept_bytes`; of "offload" nothing
  working               n / a times what a layer's backward pass reads; the logits of a chunk; the keys and values of
                        whole rows, with their gradients, where a layer gathers them
A device keeps a row for each token of its `expert` axis and expert that the token meets, also for experts elsewhere.
Time, in sums: nothing runs beside anything else.
  matmuls               2 n / t operations for each weight of a matrix, 3 times (forward, and twice back), once more
                        where remat computes them again; the head 4 times; at the share of the peak that XLA reaches
  attention             visible keys of the busiest device, as in a plan; the forward pass twice under "layer"
  computed again        where layers are compiled by themselves and all is to be kept: what a chip has no room for
  memory                what the rest of a layer reads and writes: `PASSES` times what its backward pass reads, or of a
                        layer by itself `UNROLLED` times; what is kept, written and read; what windowed layers copy
                        where the sequence is split (`HALO_PASSES`); logits, and the optimizer's update; by the memory's
                        bandwidth
  weights               each piece gathers a layer's weights twice (forward, backward) and scatters their gradients;
                        over all devices of a slice it sums them (see `chips`), and so what `data` repeats; between
                        slices at the speed of their network
  keys                  full, hybrid and routed layers gather keys and values of the row (again in the backward pass,
                        but under "none") and scatter their gradients; windowed layers send a window's reach
  tensor                all-reduces of [n, d], two of a layer forward and back, and where remat computes it again
  experts               [e n, d] is gathered and scattered, by each layer that has experts, forward and back, and where
                        remat computes it again; gradients of what is no expert's are summed over `expert`
  teacher               its weights where they are not the student's frozen ones, its hidden states, and its logits of a
                        chunk; of each sum of time the forward part, and the head twice
A ring of m devices sends (m - 1) / m of what is gathered or scattered, and twice that of what is summed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from swa_jax.base.chips import CHIPS, GIB, TARGETS, Target
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import SWITCH, WINDOW
from swa_jax.model.loss import CHUNK
from swa_jax.model.parameters import Parameter, parameters
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.remat import Remat
from swa_jax.model.sequence_order import in_zigzag
from swa_jax.model.sharding import Partition
from swa_jax.plan.candidates import RunChanges
from swa_jax.plan.kernels import busiest_device, kernels
from swa_jax.plan.step_time import ROUTED_SHARE
from swa_jax.train.config import StageConfig, TrainConfig

# Over what a layer's backward pass reads, forward and backward together, beside what is kept: 4 to 14 in docs/plans.
PASSES = 6.0
# Of a layer that is compiled by itself, where nothing is computed again, and where something is: 0 to 2, and 2 to 3.
UNROLLED, UNROLLED_AGAIN = 1.1, 2.2
# Over queries, keys, values and results of a windowed layer: what XLA does around its kernels only where the sequence
# is split. From docs/plans (SWAT 760M).
HALO_PASSES = 5.0
# Times a chip's memory, by estimate, from which the compiler brings down what keeps everything by computing some again
# (SWAT 340M, its batch in one piece: 1.5 to 0.97).
COMPUTED_AGAIN = 1.7
TILE_BYTES = 32  # of a column of a tile
LOGIT_PASSES = 8.0
UPDATE_PASSES = 8.0  # over the optimizer's f32 arrays: gradient, weight and both moments, read and written


class StepEstimate(NamedTuple):
    """Seconds and bytes that one device needs, by the names of the table above."""

    seconds_by_part: dict[str, float]
    bytes_by_part: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_part.values())

    @property
    def bytes(self) -> float:
        return sum(self.bytes_by_part.values())


def least_bytes(settings: RunChanges, size: float) -> float:
    """What the compiler may bring an estimate down to."""
    return size / COMPUTED_AGAIN if settings.computed_again else size


@dataclasses.dataclass(frozen=True)
class Workload:
    """What all settings of a search have in common."""

    config: TrainConfig
    stage_number: int  # of the stage whose step is estimated
    model: ModelConfig
    pattern: AttentionPattern
    chip_name: str  # of `CHIPS`, such as "v5e"
    devices: int  # of all slices
    teacher: AttentionPattern | None = None  # of a forward pass beside the step's own

    @property
    def patterns(self) -> list[AttentionPattern]:
        """Those that the step computes."""
        return [self.pattern] if self.teacher is None else [self.pattern, self.teacher]

    @property
    def stage(self) -> StageConfig:
        return self.config.stages[self.stage_number]

    @property
    def chip(self) -> Target:
        return TARGETS[self.chip_name]

    @property
    def peak(self) -> float:
        """Operations a second of one device."""
        return CHIPS[self.chip_name].peak_flops

    @property
    def number_bytes(self) -> int:
        """Of what is computed with."""
        return 2 if self.config.bfloat16 else 4

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return parameters(self.model, routed=SWITCH in self.pattern.layer_types)

    @functools.cached_property
    def attention(self) -> tuple[np.ndarray, float, float]:
        """Forward operations of each token of a row [T], and a token's mean seconds forward and backward."""
        positions = np.arange(self.stage.sequence_length)
        found = kernels(self.chip_name, self.model, self.pattern, positions, backward_ratio=ROUTED_SHARE)
        flops = np.sum([one.forward for one in found.flops.values()], axis=0)
        forward = sum(float(one.forward.mean()) for one in found.seconds.values())
        return flops, forward, sum(float(one.backward.mean()) for one in found.seconds.values())


class _Share(NamedTuple):
    """What one device has of a step, by the letters of the table above."""

    settings: RunChanges
    partition: Partition
    tokens: float  # n
    rows: float  # B / b
    pieces: int  # a
    context: int  # c
    tensor: int  # t
    weights: float  # numbers that it holds
    trained: float
    moments: float  # numbers of the optimizer


def estimate(work: Workload, settings: RunChanges) -> StepEstimate:
    """Memory and time of a step of the workload's stage, by the formulas at the top of this file."""
    share = _share(work, settings)
    size = _bytes(work, share)
    return StepEstimate(_seconds(work, share) | _computed_again(work, share, sum(size.values())), size)


def estimate_bytes(work: Workload, settings: RunChanges) -> float:
    """Memory alone, which needs no chip that is known."""
    return sum(_bytes(work, _share(work, settings)).values())


def _share(work: Workload, settings: RunChanges) -> _Share:
    partition = settings.partition(work.config)
    rows = work.stage.batch_size / partition.size("batch")
    context, heads = partition.size("sequence"), partition.size("heads")
    tokens = rows * work.stage.sequence_length / context
    held = _held(work, partition)
    return _Share(settings, partition, tokens, rows, settings.accumulate, context, heads, *held)


# ---- weights ----


def _local(rows: tuple[Parameter, ...], partition: Partition) -> float:
    """Numbers of these parameters that a device holds."""
    return sum(row.size / math.prod(partition.size(axis) for axis in row.axes if axis is not None) for row in rows)


def _held(work: Workload, partition: Partition) -> tuple[float, float, float]:
    """Weights that a device holds, those of them that are trained, and numbers of the optimizer."""
    weights = _local(work.parameters, partition)
    if work.config.lora is not None:
        factors = tuple(one for pair in work.config.lora.factors(work.model).values() for one in pair)
        trained = _local(factors, partition)
        return weights + trained, trained, 2 * trained
    matrices = _local(tuple(row for row in work.parameters if row.matrix), partition)
    return weights, weights, 2 * weights - (matrices if work.config.optimizer.name == "muon" else 0)


def _ends(work: Workload) -> int:
    """Numbers of the embedding and the head, which are one if they are tied."""
    return sum(row.size for row in work.parameters if "vocab" in row.axes)


# ---- memory ----


def _mlp_width(model: ModelConfig, expert: int) -> float:
    """Numbers of a token between an MLP's matrices, those of its gate included: the mean of all layers, on one of so
    many devices."""
    rows = expert * model.num_experts_per_tok * model.moe_intermediate_size + model.shared_expert_intermediate_size
    layers = model.num_hidden_layers if model.experts_beside_mlp else len(model.dense_layers)
    dense = layers * model.intermediate_size
    return ((1 + model.gated_mlp) * dense + 2 * len(model.sparse_layers) * rows) / model.num_hidden_layers


def needed_bytes(work: Workload, settings: RunChanges, tensor: int = 1) -> float:
    """What the backward pass of a layer reads of a token."""
    model, p = work.model, work.number_bytes
    d, (queries, keys) = model.hidden_size, (width / tensor for width in _head_channels(model))
    norms = 2 * d * (4 + p) + (queries + keys) * (4 + p) * model.qk_norm
    products = _mlp_width(model, settings.expert) / tensor * p
    return kept_bytes(work, settings, "projections", tensor) + norms + (d + queries + keys) * p + products


def kept_bytes(work: Workload, settings: RunChanges, remat: Remat, tensor: int = 1) -> float:
    """What the forward pass keeps of a token and layer on the chip, or on its host under "offload"."""
    model, p = work.model, work.number_bytes
    d, mlp = model.hidden_size, _mlp_width(model, settings.expert) / tensor
    queries, keys = (width / tensor for width in _head_channels(model))
    # A routed layer has the results of two branches. In a loop, layers of every kind keep what any kind needs.
    kinds = work.pattern.layer_types
    kinds_kept = {*kinds} if settings.scan_layers else kinds
    launches = sum(1 + (kind == SWITCH) for kind in kinds_kept) / (1 if settings.scan_layers else len(kinds))
    attention = launches * (queries * p + 4 * model.num_attention_heads / tensor)
    if remat == "layer":
        return d * p
    if remat in ("attention", "offload"):
        return d * p + attention
    matrices = (queries + 2 * keys + mlp) * p
    if remat == "projections":
        return d * p + attention + matrices
    # Of a layer by itself, what is cheap is computed in whatever reads it: norms, activation functions, products.
    if settings.computed_again and work.chip_name in TARGETS:
        return d * p + attention + matrices + (d + queries + keys) * p
    return needed_bytes(work, settings, tensor)


def _head_channels(model: ModelConfig) -> tuple[float, float]:
    """Channels of all heads, and of all KV heads, the mean of all layers."""
    shapes, layers = model.head_shapes, model.num_hidden_layers
    keys = sum(kv_heads * head_dim for kv_heads, head_dim in shapes)
    return model.num_attention_heads * sum(head_dim for _, head_dim in shapes) / layers, keys / layers


def _bytes(work: Workload, share: _Share) -> dict[str, float]:
    model, p, settings = work.model, work.number_bytes, share.settings
    layers, tokens = model.num_hidden_layers, share.tokens / share.pieces
    lora = work.config.lora is not None
    frozen = (share.weights - share.trained) * (p if lora else 4)
    matrices = sum(_gathered(row, share) for row in work.parameters if row.matrix) / layers
    logits = min(CHUNK, tokens) * model.vocab_size / share.tensor * 4
    gathers = share.context > 1 and _windowed(work) < work.pattern.num_layers
    whole_rows = 4 * _row_of_keys(work, share) / share.pieces if gathers else 0.0
    return {
        "weights": 4 * share.trained + frozen,
        "moments": 4 * share.moments,
        "gradients": share.trained * 4 * (2 if share.pieces > 1 else 1) + (p * share.weights if p < 4 else 0),
        "gathered": (2 * matrices + 2 * _ends(work)) * p / share.tensor,
        "activations": 0.0
        if settings.remat == "offload"
        else tokens * layers * kept_bytes(work, settings, settings.remat, share.tensor),
        "working": tokens * needed_bytes(work, settings, share.tensor) + 2 * logits + whole_rows,
    } | ({} if work.teacher is None else {"teacher": _teacher_bytes(work, share, tokens, logits)})


def _teacher_bytes(work: Workload, share: _Share, tokens: float, logits: float) -> float:
    assert work.config.distill is not None
    weights = 0.0 if work.config.lora is not None else share.weights * work.number_bytes
    states = 1 + (work.model.num_hidden_layers if work.config.distill.hidden else 0)
    return weights + states * tokens * work.model.hidden_size * work.number_bytes + logits


def _gathered(row: Parameter, share: _Share) -> float:
    """Numbers of a weight that a layer gathers; a device's experts stay its own."""
    return row.size / (share.partition.size("expert") if "expert" in row.axes else 1)


# ---- time ----


def _seconds(work: Workload, share: _Share) -> dict[str, float]:
    model, settings, chip = work.model, share.settings, work.chip
    again = settings.remat not in ("none", "projections")
    lora = work.config.lora
    projections = [row for row in work.parameters if row.matrix]
    matrices = sum(row.active_size for row in projections)
    # The result of the last matrix is not needed again.
    down = sum(row.active_size for row in projections if "down_proj" in row.path)
    head = sum(row.size for row in work.parameters if row.output)
    products = (2 if lora else 3) * matrices + again * (matrices - down) + (3 if lora else 4) * head
    if model.uses_rope:
        heads = model.num_attention_heads
        products += (2 + again) * sum((heads + kv_heads) * size**2 for kv_heads, size in model.head_shapes)
    if lora is not None:
        products += 3 * lora.num_parameters(model)
    passes = PASSES if settings.scan_layers else UNROLLED if settings.remat == "none" else UNROLLED_AGAIN
    passes *= needed_bytes(work, settings, share.tensor)
    passes += 2 * kept_bytes(work, settings, settings.remat, share.tensor)
    logits = share.tokens * model.vocab_size / share.tensor * 4
    moved = share.tokens * model.num_hidden_layers * passes + LOGIT_PASSES * logits
    if share.context > 1:
        rows = 2 * sum(_head_channels(model)) / share.tensor
        halo = HALO_PASSES * rows * work.number_bytes
        moved += share.tokens * _windowed(work) * halo
    moved += UPDATE_PASSES * 4 * share.trained + share.pieces * 12 * share.trained * (share.pieces > 1)
    return {
        "matmuls": 2 * share.tokens * products / share.tensor / (work.peak * chip.matmul_share),
        "attention": _attention(work, share),
        "memory": moved / chip.hbm_bytes,
        "weights": _exchange_of_weights(work, share),
        "keys": _exchange_of_keys(work, share),
        "tensor": _exchange_of_activations(work, share, again),
        "experts": _exchange_of_experts(work, share, again),
    } | ({} if work.teacher is None else {"teacher": _teacher_seconds(work, share)})


def _computed_again(work: Workload, share: _Share, size: float) -> dict[str, float]:
    """Each number that the compiler has no room to keep is computed again by a product over the stream's d channels."""
    if not share.settings.computed_again:
        return {}
    numbers = share.pieces * max(0.0, size - work.chip.hbm_gib * GIB) / work.number_bytes
    return {"computed again": 2 * numbers * work.model.hidden_size / (work.peak * work.chip.matmul_share)}


def _teacher_seconds(work: Workload, share: _Share) -> float:
    model, chip, p = work.model, work.chip, work.number_bytes
    assert work.teacher is not None
    positions = np.arange(work.stage.sequence_length)
    attention = kernels(work.chip_name, model, work.teacher, positions).seconds.values()
    products = sum((row.matrix + 2 * row.output) * row.active_size for row in work.parameters)
    passes = (PASSES if share.settings.scan_layers else UNROLLED) / 3 * model.num_hidden_layers
    passes *= needed_bytes(work, share.settings, share.tensor)
    logits = LOGIT_PASSES / 2 * model.vocab_size / share.tensor * 4
    a_token = 2 * products / share.tensor / (work.peak * chip.matmul_share) + (passes + logits) / chip.hbm_bytes
    a_token += sum(float(one.forward.mean()) for one in attention) / share.tensor
    group = share.partition.size("embed")
    split = _local(tuple(row for row in work.parameters if "embed" in row.axes), share.partition)
    states = share.tokens * model.hidden_size * p
    whole = sum(kind != WINDOW for kind in work.teacher.layer_types)
    return (
        share.tokens * a_token
        + _ring(work, p * split * group, group, share.pieces)
        + (_ring(work, _row_of_keys(work, share), share.context, whole) if share.context > 1 else 0.0)
        + _ring(work, states, share.tensor, 4 * model.num_hidden_layers)
        + _ring(work, share.settings.expert * states, share.settings.expert, 2 * len(model.sparse_layers))
    )


def _attention(work: Workload, share: _Share) -> float:
    flops, forward, backward = work.attention
    length, pieces = work.stage.sequence_length, share.context
    zigzagged = in_zigzag(work.config.sequence_order, work.patterns, length, pieces)
    forward *= 2 if share.settings.remat == "layer" else 1
    busiest = busiest_device(flops, pieces, zigzagged)  # keeps the others waiting
    return busiest * share.tokens / share.tensor * (forward + backward)


def _ring(work: Workload, total: float, devices: float, times: int = 1) -> float:
    """Seconds of sending (m - 1) / m of so many bytes `times` times, among m devices of a slice."""
    if devices <= 1:
        return 0.0
    dimensions = work.chip.torus if devices == work.devices // work.config.mesh.slices else 1
    return times * total * (devices - 1) / devices / (2 * dimensions * work.chip.link_bytes)


def _exchange_of_weights(work: Workload, share: _Share) -> float:
    p, pieces = work.number_bytes, share.pieces
    split = tuple(row for row in work.parameters if "embed" in row.axes)
    group = share.partition.size("embed")
    gathered = p * _local(split, share.partition) * group
    ends = p * _local(tuple(row for row in split if "vocab" in row.axes), share.partition) * group
    seconds = _ring(work, gathered * 2 - ends, group, pieces)  # embedding and head are gathered once
    trained, slices = p * share.trained * group, work.config.mesh.slices
    # Without SparseCores, parts of whole tiles of a register alone are scattered; all else is summed on every chip.
    in_tiles = work.model.hidden_size // group % (TILE_BYTES // p) == 0
    beside = work.chip.sparse_cores or group < work.devices // slices
    scatters = work.chip.sparse_cores or (in_tiles and beside)
    seconds += _ring(work, trained, group, (1 if scatters else 2) * pieces)
    if beside and not share.settings.scan_layers:
        seconds *= work.chip.shown_share
    seconds += _ring(work, p * share.trained, share.settings.data, 2 * pieces)
    if slices > 1:
        seconds += pieces * 2 * p * share.trained * (slices - 1) / slices / work.chip.dcn_bytes
    return seconds


def _windowed(work: Workload) -> int:
    """Layers that need no more than a window's reach of the row."""
    return 0 if work.pattern.full_attention_decode else work.pattern.layer_types.count(WINDOW)


def _row_of_keys(work: Workload, share: _Share) -> float:
    """Bytes of the keys and values of a device's rows in whole, of one layer."""
    keys = 2 * _head_channels(work.model)[1] / share.tensor
    return share.rows * work.stage.sequence_length * keys * work.number_bytes


def _exchange_of_keys(work: Workload, share: _Share) -> float:
    if share.context == 1:
        return 0.0
    whole, pattern = _row_of_keys(work, share), work.pattern
    windowed = _windowed(work)
    gathers = 1 if share.settings.remat == "none" else 2
    seconds = _ring(work, whole, share.context, (gathers + 1) * (pattern.num_layers - windowed))
    reach = min((pattern.sliding_window or 0) / work.stage.sequence_length, 1.0)
    halo = whole * reach * windowed * (gathers + 1)
    return seconds + halo / (2 * work.chip.link_bytes)


def _exchange_of_activations(work: Workload, share: _Share, again: bool) -> float:
    size = share.tokens * work.model.hidden_size * work.number_bytes
    return _ring(work, size, share.tensor, 2 * ((4 + again) * work.model.num_hidden_layers + 1))


def _exchange_of_experts(work: Workload, share: _Share, again: bool) -> float:
    expert = share.settings.expert
    size = expert * share.tokens * work.model.hidden_size * work.number_bytes
    seconds = _ring(work, size, expert, (4 + 2 * again) * len(work.model.sparse_layers))
    shared = _local(tuple(row for row in work.parameters if "expert" not in row.axes), share.partition)
    gradients = min(shared, share.trained) * work.number_bytes
    return seconds + _ring(work, gradients, expert, 2 * share.pieces)
