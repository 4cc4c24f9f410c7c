"""What one attention call computes: `AttentionSpec`, and which key is visible to which query.

Everything in this package rests on one predicate, `visible`. It compares *positions*, not array indexes, so the
same six lines serve training (positions are indexes), packed rows (positions restart with each segment), ring
caches (keys lie in any order) and chunked prefill (queries start in the middle). The oracle and every backend call
it on whatever piece they work on: a whole [T, S] matrix, or one [block, block] tile.

Key j is visible to query i when all of these hold:

* both are real tokens (position >= 0, segment id != 0) of the same segment;
* causal: j <= i;
* window: j > i - window (so a window counts the query's own key), or with `chunked` j // window == i // window; *or* j
  is one of the first `num_sink_tokens` of the segment, *or* the query's row is full: `full_from` says so for the row,
  or `full_heads` for its KV head.

The options of a call travel in two values: `PerHead`, what differs by head, and `Packing`, which tokens the rows hold.
`coordinates` makes of the latter (segment ids, positions, `full_from`, or nothing) the integer arrays that the
predicate wants.
"""

import dataclasses
import difflib
import operator
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np


class ArgumentError(ValueError):
    """An argument, an option or a file that cannot be used; the message says what would be right."""


NEVER = np.iinfo(np.int32).max  # a `full_from` that no position reaches


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What is fixed in an attention call. It can be hashed, and so it can be a static argument of a jitted function.

    Attributes:
      window: the number of visible keys, the query's own included: query i sees key j if `i - window < j <= i`. None
        is full attention. If `causal` is False, the window reaches as far to the right.
      num_sink_tokens: how many first keys of each segment stay visible beside the window (SWAA's "keep first").
      activation: "softmax", or "sigmoid" (SWAT, Eq. 5), which has no normaliser.
      logit_softcap: c in `c * tanh(logits / c)`, applied to the scaled logits before any bias. None is no cap.
      scale: the factor on q.k. None is 1 / sqrt(head_dim).
      causal: whether keys after the query's own are hidden from it.
      chunked: a query sees of each segment's chunks of `window` tokens the one that it stands in, in place of the keys
        nearest to it (Llama 4's `chunked_attention`).

    Raises:
      ArgumentError: a field is out of its range; the sentence names it.
    """

    window: int | None = None
    num_sink_tokens: int = 0
    activation: Literal["softmax", "sigmoid"] = "softmax"
    logit_softcap: float | None = None
    scale: float | None = None
    causal: bool = True
    chunked: bool = False

    def __post_init__(self):
        if self.window is not None:
            object.__setattr__(self, "window", _integer("window", self.window, at_least=1))
        object.__setattr__(self, "num_sink_tokens", _integer("num_sink_tokens", self.num_sink_tokens, at_least=0))
        if self.activation not in ("softmax", "sigmoid"):
            raise ArgumentError(f"activation is {self.activation!r}; it must be 'softmax' or 'sigmoid'.")
        for name in ("logit_softcap", "scale"):
            value = getattr(self, name)
            if value is not None:
                try:
                    number = float(value)
                except (TypeError, ValueError):  # a traced number too
                    number = 0.0
                if not 0 < number < float("inf"):
                    raise ArgumentError(f"{name} is {value!r}; it must be a positive finite number or None.")
                object.__setattr__(self, name, number)
        for name in ("causal", "chunked"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} is {getattr(self, name)!r}; it must be True or False.")
        if self.chunked and self.window is None:
            raise ArgumentError("chunked is True, but window is None; it must be the length of a chunk.")

    @property
    def full(self) -> "AttentionSpec":
        """The same attention without a window: what full layers, full rows and full heads see."""
        return dataclasses.replace(self, window=None, num_sink_tokens=0, chunked=False)

    @property
    def banded(self) -> bool:
        """Whether the window is a band, all keys at a distance below `window`. The kernels that go by distances serve
        this alone; those that ask `visible` serve everything."""
        return not self.chunked

    @property
    def reach(self) -> int:
        """The window in units of `places`; there must be one."""
        assert self.window is not None
        return 1 if self.chunked else self.window

    def places(self, positions):
        """What a window compares of tokens at these positions (integers >= 0): the positions, or their chunks."""
        if not self.chunked:
            return positions
        assert self.window is not None
        return jax.lax.div(positions, self.window)

    def scale_for(self, head_dim: int) -> float:
        """The factor on q.k."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def mask(self, q_length: int, kv_length: int | None = None, **packing: Unpack["PackingOptions"]) -> jax.Array:
        """The dense mask, bool [B, T, S], True where a key is visible; [1, T, S] if all rows agree.

        The keyword arguments are those of `pallas_kernels.attention`. The mask of a full head is that of `full`.
        """
        (given,) = with_keywords(packing, Packing())
        return dense_mask(self, coordinates(q_length, q_length if kv_length is None else kv_length, **given._asdict()))


def _integer(name: str, value, at_least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not at_least <= number <= NEVER:
        none = " or None" if name == "window" else ""
        raise ArgumentError(f"{name} is {value!r}; it must be an integer from {at_least} to {NEVER}{none}.")
    return number


def visible(spec: AttentionSpec, q_pos, kv_pos, q_segment_ids=None, kv_segment_ids=None, full_rows=None):
    """Whether each key is visible to each query; element-wise, so arguments only need to broadcast together.

    Args:
      spec: window, chunked, num_sink_tokens and causal are read.
      q_pos, kv_pos: integer positions, counted from 0 at the first real token of the segment; a negative position
        is an empty slot or padding, which neither sees nor is seen. A tile passes [..., bq, 1] and [..., 1, bk].
      q_segment_ids, kv_segment_ids: integer segment ids, or None for one segment; 0 is padding.
      full_rows: bool per query, or None: rows that see past the window (still causal, still their own segment).

    Returns:
      bool array of the broadcast shape.
    """
    seen = kv_pos >= 0
    seen = seen & ((kv_pos <= q_pos) if spec.causal else (q_pos >= 0))
    if q_segment_ids is not None:
        seen = seen & (q_segment_ids == kv_segment_ids) & (kv_segment_ids != 0)
    if spec.window is None:
        return seen
    back = spec.places(q_pos) - spec.places(kv_pos)
    allowed = back < spec.reach
    if not spec.causal:
        allowed = allowed & (-back < spec.reach)
    if spec.num_sink_tokens:
        allowed = allowed | (kv_pos < spec.num_sink_tokens)
    if full_rows is not None:
        allowed = allowed | full_rows
    return seen & allowed


class PerHead(NamedTuple):
    """What differs by head in one call; see `pallas_kernels.attention`. None where it is not given."""

    alibi_slopes: jax.Array | None = None  # [H] floating
    sigmoid_bias: Any = None  # [H] floating; a number too, in an unchecked call
    sink_logits: jax.Array | None = None  # [H] floating
    full_heads: jax.Array | None = None  # [K] bool
    logit_scales: jax.Array | None = None  # [H] floating; in the queries already, but for the oracle


class Packing(NamedTuple):
    """Which tokens the rows of one call hold; see `pallas_kernels.attention`. None where it is not given."""

    q_segment_ids: jax.Array | None = None  # [B, T] integers
    kv_segment_ids: jax.Array | None = None  # [B, S]; those of the queries if None
    q_positions: jax.Array | None = None  # [B, T]
    kv_positions: jax.Array | None = None  # [B, S]
    full_from: jax.Array | None = None  # [B] or [B, segments]


class PerHeadOptions(TypedDict, total=False):
    """The fields of `PerHead`, as keywords of the public functions."""

    alibi_slopes: jax.Array | None
    sigmoid_bias: jax.Array | float | None
    sink_logits: jax.Array | None
    full_heads: jax.Array | None
    logit_scales: jax.Array | None


class PackingOptions(TypedDict, total=False):
    """The fields of `Packing`, as keywords of the public functions."""

    q_segment_ids: jax.Array | None
    kv_segment_ids: jax.Array | None
    q_positions: jax.Array | None
    kv_positions: jax.Array | None
    full_from: jax.Array | None


class AttentionOptions(PerHeadOptions, PackingOptions):
    """The fields of `PerHead` and `Packing`."""


def with_keywords(options: Mapping[str, Any], *values: Any) -> tuple[Any, ...]:
    """Values such as `PerHead`, with the options put in that are fields of theirs.

    Raises:
      TypeError: an option is no field of any; the sentence names the nearest one.
    """
    known = [name for value in values for name in value._fields]
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else "."
            raise TypeError(f"{name} is no keyword of this function{hint}")
    return tuple(x._replace(**{name: y for name, y in options.items() if name in x._fields}) for x in values)


class Coordinates(NamedTuple):
    """Where the tokens of one call are. Leading axis B, or 1 when all rows of the batch agree.

    `*_order` is what a schedule may measure distances in: inside a segment it differs from the position by a
    constant. With default positions it is the array index, which (unlike the position) also grows from segment to
    segment, so that a block's minimum and maximum bound it tightly.
    """

    q_pos: jax.Array  # [B, T] int32, -1 where padding
    kv_pos: jax.Array  # [B, S] int32, -1 where padding
    q_order: jax.Array  # [B, T] int32
    kv_order: jax.Array  # [B, S] int32
    q_segment_ids: jax.Array | None = None  # [B, T] int32
    kv_segment_ids: jax.Array | None = None  # [B, S] int32
    full_rows: jax.Array | None = None  # [B, T] bool
    # [B, T, D] f32, of queries that are still to be rotated: `Rotation.cos` and `sin`
    q_cos: jax.Array | None = None
    q_sin: jax.Array | None = None


class Pools(NamedTuple):
    """Caches [rows, B, entries, D], the row of each KV head [K], and the positions [B, entries] if not the indices."""

    k: jax.Array
    v: jax.Array
    slots: jax.Array
    positions: jax.Array | None = None


def coordinates(q_length: int, kv_length: int, **packing: Unpack[PackingOptions]) -> Coordinates:
    """Fills in the defaults of the arguments of `pallas_kernels.attention` (see there for their meaning)."""
    q_segment_ids, kv_segment_ids, q_positions, kv_positions, full_from = Packing(**packing)
    if kv_segment_ids is None:
        kv_segment_ids = q_segment_ids
    # Index distances equal position distances only if both sides number the same segments from the same places.
    indexed = q_positions is None and kv_positions is None
    indexed = indexed and (q_segment_ids is None or kv_segment_ids is q_segment_ids)
    q_pos, kv_pos = (
        _positions(length, positions, segment_ids)
        for length, positions, segment_ids in (
            (q_length, q_positions, q_segment_ids),
            (kv_length, kv_positions, kv_segment_ids),
        )
    )
    order = (_index(q_length), _index(kv_length)) if indexed else (q_pos, kv_pos)
    q_segment_ids, kv_segment_ids = (
        None if ids is None else jnp.asarray(ids, jnp.int32) for ids in (q_segment_ids, kv_segment_ids)
    )
    full_rows = None
    if full_from is not None:
        full_from = jnp.asarray(full_from, jnp.int32)
        full_from = full_from.reshape(full_from.shape[0], -1)  # [B, segments]
        if q_segment_ids is None:
            first_full = full_from[:, :1]
        else:
            column = jnp.clip(q_segment_ids - 1, 0, full_from.shape[1] - 1)
            first_full = jnp.take_along_axis(full_from, column, axis=1)
        full_rows = (q_pos >= first_full) & (q_pos >= 0)
    return Coordinates(q_pos, kv_pos, *order, q_segment_ids, kv_segment_ids, full_rows)


def _index(length: int) -> jax.Array:
    # NumPy, so that even under jit an implementation can see that the positions are the default ones.
    return np.arange(length, dtype=np.int32)[None]  # type: ignore[return-value]  # [1, length]


def _positions(length: int, positions, segment_ids) -> jax.Array:
    if positions is None:
        if segment_ids is None:
            return _index(length)
        positions = segment_positions(segment_ids)
    positions = jnp.asarray(positions, jnp.int32)
    return positions if segment_ids is None else jnp.where(jnp.asarray(segment_ids) == 0, -1, positions)


def segment_positions(segment_ids) -> jax.Array:
    """The position of each token in its own segment, counted from 0: [B, T] integers -> [B, T] int32.

    A segment is one contiguous run of an id. Padding (id 0) is numbered in the same way.
    """
    segment_ids = jnp.asarray(segment_ids)
    index = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    starts = jnp.diff(segment_ids, axis=-1, prepend=segment_ids[..., :1]) != 0
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=starts.ndim - 1)


def dense_mask(spec: AttentionSpec, where: Coordinates) -> jax.Array:
    """`visible` on every pair of tokens: [B or 1, T, S] bool."""

    def row(array):
        return None if array is None else array[:, :, None]

    def column(array):
        return None if array is None else array[:, None, :]

    return visible(
        spec,
        row(where.q_pos),
        column(where.kv_pos),
        row(where.q_segment_ids),
        column(where.kv_segment_ids),
        row(where.full_rows),
    )
