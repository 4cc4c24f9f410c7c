"""Gated DeltaNet, which mixes tokens in linear layers (Yang et al., arXiv:2412.06464).

In place of keys and values a head keeps a state S [Dk, Dv]. Of token t, with a query q and a key k of length 1, a value
v, a decay a = exp(g) and a step b, both between 0 and 1, it computes (Eq. 10)

    S_t = a S_{t-1} + k u^T,  u = b (v - a S_{t-1}^T k),  o = S_t^T q / sqrt(Dk).

q, k and v are a projection of the layer's input x behind a causal convolution over the last W tokens, channel by
channel, and a SiLU; g = -exp(A_log) softplus(x W_a + dt_bias) and b = sigmoid(x W_b), for each head. The layer gives
what heads say, normed by its root mean square and multiplied by a scale and silu(x W_z), through a projection.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from swa_jax.model.config import ModelConfig
from swa_jax.model.layers import drawn, linear, rms_normed

CHUNK = 64  # tokens whose updates are solved for together
_EPS = 1e-6  # below the length of queries and keys
_HIGHEST = lax.Precision.HIGHEST  # a TPU multiplies f32 in bf16 unless told otherwise


class LinearState(NamedTuple):
    """What a linear layer keeps of the tokens so far."""

    heads: jax.Array  # [B, H, Dk, Dv] f32: S
    inputs: jax.Array  # [B, W - 1, C]: the last inputs of the convolution, 0 where there was no token


class Updates(NamedTuple):
    """What the delta rule is given of each token, all f32."""

    q: jax.Array  # [B, H, T, Dk]; divided by sqrt(Dk) already
    k: jax.Array  # [B, H, T, Dk]
    v: jax.Array  # [B, H, T, Dv]
    g: jax.Array  # [B, H, T]
    b: jax.Array  # [B, H, T]
    runs: jax.Array  # [B, T] int32: a token reads those of its own run; they grow, and the state before is of run 0


class GatedDelta(nnx.Module):
    """The mixer of one linear layer, or of stacked ones."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        path, self.config = "layers.gated_delta", config
        self.in_proj_qkv = linear(f"{path}.in_proj_qkv", config, dtype, rngs)
        self.in_proj_z = linear(f"{path}.in_proj_z", config, dtype, rngs)
        self.in_proj_b = linear(f"{path}.in_proj_b", config, dtype, rngs)
        self.in_proj_a = linear(f"{path}.in_proj_a", config, dtype, rngs)
        self.out_proj = linear(f"{path}.out_proj", config, dtype, rngs)
        self.conv = drawn(f"{path}.conv", config, dtype, rngs)  # [C, 1, W]
        self.A_log = drawn(f"{path}.A_log", config, dtype, rngs)  # [H]
        self.dt_bias = drawn(f"{path}.dt_bias", config, dtype, rngs)  # [H]
        self.norm_scale = drawn(f"{path}.norm_scale", config, dtype, rngs)  # [Dv]

    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        before: LinearState | None = None,
        count: jax.Array | None = None,
    ) -> tuple[jax.Array, LinearState]:
        """x [B, T, d] -> output [B, T, d], and the state behind its tokens.

        Args:
          segment_ids: [B, T] int32; nothing passes from one segment to another. None: one segment.
          before: the state before the first token, which is of the first segment; None: there was no token.
          count: [B] int32, how many first tokens of each row there are; the others leave no trace. None: all.
        """
        config, (batch, length) = self.config, x.shape[:2]
        before = before or empty_state(config, batch, x.dtype)
        runs = jnp.zeros((batch, length), jnp.int32)
        if segment_ids is not None:
            runs = jnp.cumsum(jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0, axis=1, dtype=jnp.int32)
        mixed, inputs = self._convolved(self.in_proj_qkv(x), runs, before.inputs, count)
        b = nnx.sigmoid(self.in_proj_b(x).astype(jnp.float32))  # [B, T, H]
        step = self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)
        g = -jnp.exp(self.A_log[...].astype(jnp.float32)) * nnx.softplus(step)
        if count is not None:
            counted = (jnp.arange(length) < count[:, None])[..., None]  # [B, T, 1]
            g, b = jnp.where(counted, g, 0), jnp.where(counted, b, 0)
        g, b = g.swapaxes(1, 2), b.swapaxes(1, 2)  # [B, H, T]
        rule = recurrent if length == 1 else chunked
        said, heads = rule(Updates(*self._qkv(mixed), g, b, runs), before.heads)
        said = said.swapaxes(1, 2).astype(x.dtype)  # [B, T, H, Dv]
        gate = nnx.silu(self.in_proj_z(x).reshape(said.shape).astype(jnp.float32))
        said = rms_normed(said, config.rms_norm_eps) * self.norm_scale[...].astype(x.dtype)
        said = (said * gate).astype(x.dtype)
        return self.out_proj(said.reshape(batch, length, -1)), LinearState(heads, inputs)

    def _convolved(
        self, x: jax.Array, runs: jax.Array, before: jax.Array, count: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, C] -> what queries, keys and values are cut from [B, T, C], and the inputs that the next reads."""
        weights, length, past = self.conv[..., 0, :], x.shape[1], before.shape[1]
        inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)  # [B, W - 1 + T, C]
        of = jnp.pad(runs, ((0, 0), (past, 0)))
        mixed = jnp.zeros(x.shape, jnp.float32)
        for tap in range(past + 1):
            same = (of[:, tap : tap + length] == runs)[..., None]
            mixed += jnp.where(same, inputs[:, tap : tap + length] * weights[:, tap], 0).astype(jnp.float32)
        last = jnp.full(x.shape[0], length) if count is None else count
        kept = jnp.take_along_axis(inputs, (last[:, None] + jnp.arange(past))[..., None], axis=1)
        return nnx.silu(mixed).astype(x.dtype), kept

    def _qkv(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, T, C] -> q, k and v [B, H, T, D] f32."""
        config = self.config
        heads, width = config.linear_num_key_heads, config.linear_key_head_dim
        each = config.linear_num_value_heads // heads

        def cut(first: int, heads: int, width: int) -> jax.Array:
            part = mixed[..., first : first + heads * width].astype(jnp.float32)
            return part.reshape(*part.shape[:2], heads, width).swapaxes(1, 2)

        q, k = (_unit(cut(i * heads * width, heads, width)).repeat(each, axis=1) for i in range(2))
        v = cut(2 * heads * width, config.linear_num_value_heads, config.linear_value_head_dim)
        return q * width**-0.5, k, v


def empty_state(config: ModelConfig, batch: int, dtype: jax.typing.DTypeLike) -> LinearState:
    """The state of one linear layer before any token, whose activations have this dtype."""
    heads = batch, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    inputs = batch, config.linear_conv_kernel_dim - 1, config.linear_channels
    return LinearState(jnp.zeros(heads, jnp.float32), jnp.zeros(inputs, dtype))


def recurrent(given: Updates, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The delta rule token by token: what heads say [B, H, T, Dv], and the state [B, H, Dk, Dv] behind, both f32."""

    def one(carry: tuple[jax.Array, jax.Array], token: Updates) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, run = carry
        kept = jnp.where(token.runs == run, 1, 0)[:, None]  # [B, 1]
        state = state * (kept * jnp.exp(token.g))[..., None, None]
        seen = jnp.einsum("bhk,bhkv->bhv", token.k, state, precision=_HIGHEST)
        update = token.b[..., None] * (token.v - seen)
        state = state + token.k[..., None] * update[..., None, :]
        return (state, token.runs), jnp.einsum("bhk,bhkv->bhv", token.q, state, precision=_HIGHEST)

    first = jnp.zeros(given.runs.shape[0], jnp.int32)
    (state, _), said = lax.scan(one, (state, first), _tokens_first(given))
    return jnp.moveaxis(said, 0, 2), state


def chunked(given: Updates, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `recurrent` computes, `CHUNK` tokens at a time.

    With G_i the sum of g up to token i of a chunk, the u of its tokens solve (I + L) u = b (v - exp(G) S^T k), where S
    is the state before the chunk and L_ij = b_i exp(G_i - G_j) k_i.k_j for j < i.
    """
    length = given.runs.shape[1]
    more = -length % CHUNK
    padded = _padded(given, more)

    def one(carry: tuple[jax.Array, jax.Array], part: Updates) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, run = carry
        total = jnp.cumsum(part.g, axis=-1)  # [B, H, C]
        same = part.runs[:, :, None] == part.runs[:, None, :]  # [B, C, C]
        old = (part.runs == run[:, None])[:, None]  # [B, 1, C]: reads the state before the chunk
        apart = jnp.where(jnp.tril(same)[:, None], total[..., None] - total[..., None, :], -jnp.inf)
        decay = jnp.exp(apart)  # [B, H, C, C]
        since = jnp.where(old, jnp.exp(total), 0)[..., None]  # [B, H, C, 1]
        alike = _dot("bhik,bhjk->bhij", part.k, part.k)
        system = jnp.eye(CHUNK) + jnp.tril(part.b[..., None] * decay * alike, -1)
        wanted = part.b[..., None] * (part.v - since * _dot("bhik,bhkv->bhiv", part.k, state))
        update = jax.scipy.linalg.solve_triangular(system, wanted, lower=True, unit_diagonal=True)  # [B, H, C, Dv]
        said = since * _dot("bhik,bhkv->bhiv", part.q, state)
        said += _dot("bhij,bhjv->bhiv", decay * _dot("bhik,bhjk->bhij", part.q, part.k), update)
        state = since[:, :, -1:] * state + _dot("bhj,bhjk,bhjv->bhkv", decay[:, :, -1], part.k, update)
        return (state, part.runs[:, -1]), said

    first = jnp.zeros(given.runs.shape[0], jnp.int32)
    (state, _), said = lax.scan(one, (state, first), _in_chunks(padded))
    said = jnp.moveaxis(said, 0, 2)  # [B, H, chunks, C, Dv]
    return said.reshape(*said.shape[:2], -1, said.shape[-1])[:, :, :length], state


def _padded(given: Updates, more: int) -> Updates:
    """With more tokens, which leave the state as it is."""
    numbers = [jnp.pad(x, [(0, more if axis == 2 else 0) for axis in range(x.ndim)]) for x in given[:5]]
    return Updates._make([*numbers, jnp.pad(given.runs, ((0, 0), (0, more)), mode="edge")])


def _tokens_first(given: Updates) -> Updates:
    return Updates._make([*(jnp.moveaxis(x, 2, 0) for x in given[:5]), given.runs.T])


def _in_chunks(given: Updates) -> Updates:
    """The tokens of each chunk next to each other, the chunks in front."""
    parts = [jnp.moveaxis(x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:]), 2, 0) for x in given[:5]]
    return Updates._make([*parts, jnp.moveaxis(given.runs.reshape(given.runs.shape[0], -1, CHUNK), 1, 0)])


def _dot(sizes: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(sizes, *arrays, precision=_HIGHEST)


def _unit(x: jax.Array) -> jax.Array:
    """x [..., D] divided by its length."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)
