"""Device meshes and where every array lies on them: the axes, the rules, and the checks that name what does not fit.

Five mesh axes. `data` repeats the parameters and splits the batch; `fsdp` splits both; `expert` splits the batch and
the experts of a layer; `context` splits the sequence (and, like fsdp, the parameters); `tensor` splits heads, the
MLP's width and the vocabulary. Several slices (pods joined by a slower network) extend `data`, the axis that
communicates least.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from swa_jax.base.errors import ConfigError
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import Parameter, declared, low_rank, map_parameters
from swa_jax.model.sequence_order import SequenceOrder

AXES = ("data", "fsdp", "expert", "context", "tensor")
Auto = Literal["auto"]  # chosen by `plan.choose`
AUTO: Auto = "auto"


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1, for one axis at most, takes those that remain. `data` counts one slice's.

    What is "auto" is chosen for the devices (`plan.choose`); without such a choice, `fsdp` takes what remains.
    """

    data: int | Auto = AUTO  # splits rows
    fsdp: int | Auto = AUTO  # splits rows, and every matrix
    context: int | Auto = AUTO  # splits the tokens of a row, and every matrix
    tensor: int | Auto = AUTO  # splits heads, MLP width and vocabulary
    slices: int = 1  # multiplies `data`, across pods
    expert: int | Auto = AUTO  # splits rows, and the experts of a layer

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size != AUTO and size < 1 and not (size == -1 and name in AXES):
                raise ConfigError(f"'mesh.{name}' must be at least 1 (or -1: what remains), got {size}")
        if [getattr(self, name) for name in AXES].count(-1) > 1:
            raise ConfigError("'mesh' has -1 for more than one axis: only one can take what remains")

    @property
    def sizes(self) -> dict[str, int]:
        """The axes with what "auto" is without a choice."""
        given = {axis: getattr(self, axis) for axis in AXES}
        rest = 1 if -1 in given.values() else -1
        return {axis: (rest if axis == "fsdp" else 1) if size == AUTO else size for axis, size in given.items()}


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Which mesh axes split which dimension. A dimension's name stands for it in every tensor that has it."""

    batch: tuple[str, ...] = ("data", "fsdp", "expert")
    sequence: tuple[str, ...] = ("context",)
    embed: tuple[str, ...] = ("fsdp", "context")  # of parameters; activations keep theirs whole
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    mlp: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)
    expert: tuple[str, ...] = ("expert",)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            for axis in getattr(self, field.name):
                if axis not in AXES:
                    raise ConfigError(f"'sharding.{field.name}' names mesh axis '{axis}'; known: {', '.join(AXES)}")
        if self.heads != self.kv_heads:
            raise ConfigError(
                "'sharding.heads' and 'sharding.kv_heads' must be split alike, so that a query finds its keys"
            )
        if any(len(axes) > 1 for axes in (self.sequence, self.heads, self.vocab, self.expert)):
            raise ConfigError("'sharding.sequence', 'heads', 'vocab' and 'expert' take one mesh axis each")

    def axes(self, dimension: str | None) -> tuple[str, ...]:
        return () if dimension is None else getattr(self, dimension)

    def spec(self, tensor: str, dimensions: Sequence[str | None]) -> P:
        """The PartitionSpec of a tensor whose dimensions are named; an axis that would split two of them raises."""
        owner: dict[str, str] = {}
        for dimension in dimensions:
            for axis in self.axes(dimension):
                if axis in owner:
                    raise ConfigError(
                        f"{tensor}: mesh axis '{axis}' would split both '{owner[axis]}' and '{dimension}'; take it out "
                        f"of 'sharding.{owner[axis]}' or 'sharding.{dimension}'"
                    )
                owner[axis] = str(dimension)
        return P(*(self.axes(dimension) or None for dimension in dimensions))


@dataclasses.dataclass(frozen=True)
class Partition:
    """A mesh and the rules by which arrays lie on it. Hashable: a static argument of what is compiled.

    With `zigzag`, rows whose tokens are split lie in zig-zag order (`sequence_order`), and positions must be given.
    """

    mesh: Mesh
    rules: ShardingRules = ShardingRules()
    zigzag: bool = False

    def size(self, dimension: str) -> int:
        """Pieces that a dimension is split into."""
        return math.prod(self.mesh.shape[axis] for axis in self.rules.axes(dimension))

    def spec(self, *dimensions: str | None, tensor: str = "activation") -> P:
        return self.rules.spec(tensor, dimensions)

    def sharding(self, *dimensions: str | None, tensor: str = "activation") -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(*dimensions, tensor=tensor))

    @property
    def of_one_row(self) -> Partition:
        """The same for a batch of one row, which is not split."""
        return dataclasses.replace(self, rules=dataclasses.replace(self.rules, batch=()))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())


def constrain(x: jax.Array, partition: Partition | None, *dimensions: str | None) -> jax.Array:
    """Asks the compiler to lay `x` out by the rules; nothing to ask without a mesh."""
    if partition is None:
        return x
    return jax.lax.with_sharding_constraint(x, partition.sharding(*dimensions))


def laid_out(x: Any, sharding: Sharding | None, may_alias: bool | None = None) -> jax.Array:
    """`device_put` of an array, which may be one that every process has whole.

    JAX's own would then gather the arrays of all processes on every device, to compare them.
    """
    shared = isinstance(x, jax.Array) and not x.is_fully_addressable
    if shared or sharding is None or sharding.is_fully_addressable:
        return jax.device_put(x, sharding, may_alias=may_alias)
    own = np.asarray(x)
    return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])


def whole(x: jax.Array, partition: Partition, dimension: str, axis: int) -> jax.Array:
    """Inside `shard_map`: `x` with all of a dimension, of which each device holds a part.

    Its gradient comes back in parts too, each summed where it lies, which sends half of what summing all of it does.
    """
    axes = tuple(name for name in partition.rules.axes(dimension) if partition.mesh.shape[name] > 1)
    if not axes:
        return x
    # The TPU compiler scatters along a dimension of its own; along another it would sum all of it on every device. In
    # front of the one it is a part of, it joins that without a copy.
    parts = jax.lax.all_gather(jnp.moveaxis(x, axis, 0), axes)  # [pieces, its part, ...]
    return jnp.moveaxis(parts.reshape(-1, *parts.shape[2:]), 0, axis)


# ---- meshes ----


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices` (default: all), neighbours on the chips' network being neighbours on the mesh.

    Raises `ConfigError` where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    inside = (shape[0] // config.slices, *shape[1:])
    by_slice: dict[Any, list[Any]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", None), []).append(device)
    # Of devices without slices, such as CPUs, a block in order stands for one.
    found = len(by_slice) == config.slices
    slices = list(by_slice.values()) if found else np.split(np.asarray(devices), config.slices)
    grid = np.concatenate([_slice_grid(inside, one) for one in slices])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slice_grid(shape: tuple[int, ...], devices: Sequence[Any] | np.ndarray) -> np.ndarray:
    sizes = dict(zip(AXES, shape, strict=True))
    if sizes["fsdp"] * sizes["context"] == len(devices) and all(hasattr(device, "coords") for device in devices):
        # In this order the compiler gathers and scatters over the whole slice along all links at once; in that of
        # `create_device_mesh` it goes round one ring.
        return np.asarray(sorted(devices, key=lambda device: (device.coords, device.core_on_chip))).reshape(shape)
    return mesh_utils.create_device_mesh(shape, list(devices), allow_split_physical_axes=True)


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
    """Sizes along `AXES`; `data` counts the slices too."""
    sizes = config.sizes
    known = config.slices * math.prod(size for size in sizes.values() if size != -1)
    free = [name for name, size in sizes.items() if size == -1]
    text = f"slices {config.slices}, {_listed(sizes, ', ')}"
    if (num_devices % known if free else num_devices != known) != 0:
        raise ConfigError(
            f"'mesh' ({text}) asks for {'a multiple of ' if free else ''}{known} devices, but there are {num_devices}: "
            "change its sizes, or set one of them to -1"
        )
    if free:
        sizes[free[0]] = num_devices // known
    return config.slices * sizes["data"], *(sizes[name] for name in AXES[1:])


def _listed(sizes: Mapping[str, int], between: str) -> str:
    """The axes by name and size; models without experts need not hear of theirs."""
    return between.join(f"{name} {size}" for name, size in sizes.items() if (name, size) != ("expert", 1))


# ---- parameters ----


def state_shardings(state: Any, partition: Partition, config: ModelConfig) -> Any:
    """A sharding for every leaf of `state`: parameters, and whatever carries a parameter's path and rank, such as an
    optimizer's moments. Norms, routers, output biases, and what is not declared, such as counters, are whole."""
    rows = declared(config)
    for parameter in list(rows.values()):
        if parameter.projection is not None:
            rows |= {factor.name: factor for factor in low_rank(parameter, rank=1)}

    def place(parameter: Parameter | None, leaf: Any) -> NamedSharding:
        if parameter is None or not any(parameter.axes) or len(parameter.stacked_axes) != leaf.ndim:
            return partition.replicated
        return NamedSharding(partition.mesh, _parameter_spec(parameter, leaf.shape, partition))

    return map_parameters(place, state, rows)


def _parameter_spec(parameter: Parameter, shape: tuple[int, ...], partition: Partition) -> P:
    """How a parameter of this shape lies; `ConfigError` names the axis that cannot be split as the rules say."""
    for i, dimension in enumerate(parameter.stacked_axes):
        pieces = 1 if dimension is None else partition.size(dimension)
        if dimension is not None and shape[i] % pieces:
            raise ConfigError(
                f"parameter {parameter.name}, axis {i} ({dimension}), is {shape[i]} long and cannot be split in "
                f"{pieces} ({_sizes(partition, dimension)}): change 'mesh' so that it can, or set "
                f"'sharding.{dimension}' to []"
            )
    return partition.rules.spec(parameter.name, parameter.stacked_axes)


def _sizes(partition: Partition, dimension: str) -> str:
    return _listed({axis: partition.mesh.shape[axis] for axis in partition.rules.axes(dimension)}, " x ")


def check_model(config: ModelConfig, partition: Partition) -> None:
    """Heads must be split whole, every parameter must divide, and linear layers need whole sequences; `ConfigError`
    names the count and the axis."""
    if partition.size("sequence") > 1:
        config.refuse_linear("a mesh that splits sequences ('mesh.context')")
    for dimension, name in (
        ("heads", "num_attention_heads"),
        ("kv_heads", "num_key_value_heads"),
        ("heads", "num_global_attention_heads"),
        ("kv_heads", "num_global_key_value_heads"),
    ):
        count = getattr(config, name)
        if count is not None and count % partition.size(dimension):
            raise ConfigError(
                f"{name} is {count}, which 'mesh.tensor' = {partition.size(dimension)} does not divide: heads are "
                "split whole, so make it a divisor"
            )
    for parameter in declared(config).values():
        _parameter_spec(parameter, parameter.stacked_shape, partition)


def check_batch(partition: Partition, batch: int, length: int, where: str, *, order: SequenceOrder = "auto") -> None:
    """Rows and tokens of one step's batch [batch, length] must divide among the devices; `where` names the setting."""
    for dimension, size, name in (("batch", batch, "batch_size / accumulate"), ("sequence", length, "sequence_length")):
        pieces = partition.size(dimension)
        if dimension == "sequence" and order == "zigzag" and pieces > 1:
            pieces *= 2
        if size % pieces:
            raise ConfigError(
                f"'{where}': {name} = {size} cannot be split in {pieces} ({_sizes(partition, dimension)}): make it a "
                f"multiple of {pieces}, or change 'mesh'"
            )
