"""What is static in one attention call (`Request`), and what an implementation launches for it (`Dispatched`)."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.math.schedule import Kind
from pallas_kernels.math.spec import AttentionSpec, Coordinates, Packing, PerHead

Op = Literal["attention", "routed_attention", "decode_attention"]


@dataclasses.dataclass(frozen=True)
class Device:
    """What a call is compiled for.

    Attributes:
      platform: "tpu", "gpu" or "cpu".
      kind: as `jax.Device.device_kind` says it.
      capability: of a GPU, 90 for 9.0; None elsewhere.
      no_triton: why JAX has no Triton lowering here; None if it has, or if nobody asked.
      cudnn: whether the process has an NVIDIA GPU, and with it cuDNN.
    """

    platform: str
    kind: str
    capability: int | None = None
    no_triton: str | None = None
    cudnn: bool = False


@dataclasses.dataclass(frozen=True)
class Request:
    """What is static in one call.

    Attributes:
      given: the names of the options that are given, of the fields of `PerHead` and `Packing`; "kv_segment_ids" only
        if they are others than the queries', "return_lse" if it is asked for, and "pools" if a step of decoding reads
        the pools of a model's cache.
      inference: as in `routed_attention`.
    """

    op: Op
    spec: AttentionSpec
    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: Device
    given: frozenset[str] = frozenset()
    inference: bool = False
    implementation: str | None = None

    @classmethod
    def of(
        cls,
        op: Op,
        q: jax.Array,
        k: jax.Array,
        spec: AttentionSpec,
        device: Device,
        given: frozenset[str],
        implementation: str | None,
        inference: bool,
    ) -> "Request":
        (batch, q_length, heads, head_dim), (kv_length, kv_heads) = q.shape, k.shape[1:3]
        return cls(
            *(op, spec, batch, q_length, kv_length, heads, kv_heads, head_dim, jnp.dtype(q.dtype).name),
            *(device, given, inference, implementation),
        )

    def abstract_coordinates(self) -> Coordinates:
        """`spec.coordinates` of the call: shapes in place of arrays that are data, NumPy indices where it has those."""

        def tokens(length: int, dtype=jnp.int32):
            return jax.ShapeDtypeStruct((self.batch, length), dtype)

        queries, keys = tokens(self.q_length), tokens(self.kv_length)
        packed, placed = "q_segment_ids" in self.given, {"q_positions", "kv_positions"} & self.given
        q_index, kv_index = (np.arange(n, dtype=np.int32)[None] for n in (self.q_length, self.kv_length))
        indexed = not placed and "kv_segment_ids" not in self.given
        full_rows = tokens(self.q_length, jnp.bool_) if "full_from" in self.given else None
        return Coordinates(
            q_index if not packed and "q_positions" not in self.given else queries,  # type: ignore[arg-type]
            kv_index if not packed and "kv_positions" not in self.given else keys,  # type: ignore[arg-type]
            q_index if indexed else queries,  # type: ignore[arg-type]
            kv_index if indexed else keys,  # type: ignore[arg-type]
            queries if packed else None,
            keys if packed else None,
            full_rows,
        )


def given_options(per_head: PerHead, packing: Packing, *, return_lse: bool = False) -> frozenset[str]:
    """`Request.given` of a call."""
    given = {name for name, x in (per_head._asdict() | packing._asdict()).items() if x is not None}
    if packing.kv_segment_ids is packing.q_segment_ids:
        given.discard("kv_segment_ids")
    if return_lse:
        given.add("return_lse")
    return frozenset(given)


class LaunchFacts(NamedTuple):
    """One launch of a kernel, as it is printed.

    Attributes:
      kernel: the name that it has in compiled programs.
      grid: its steps along each dimension; a word where data decide how many.
      tiles: how it cuts queries and keys, as the implementation says it.
      masks: the kinds of tiles that it visits.
      keys: "visible" (those that the spec sees), "outside" (those that full attention sees beside them) or "all".
      backward: whether it computes gradients.
    """

    kernel: str
    grid: tuple[int | str, ...]
    tiles: Any
    masks: tuple[Kind, ...]
    keys: str = "visible"
    backward: bool = False


class Dispatched(NamedTuple):
    """What computes a call.

    Attributes:
      implementation: "tpu", "triton", "cudnn", "xla" or "reference".
      launches: of kernels, forward and then backward; none where XLA does without.
      blocks: tokens of a block of queries and of keys, for "xla".
      fallback: why a better implementation for the device was not taken; None if it was.
    """

    implementation: str
    launches: tuple[LaunchFacts, ...] = ()
    blocks: tuple[int, int] | None = None
    fallback: str | None = None
