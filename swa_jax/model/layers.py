"""The parts of a decoder layer that are not attention: norms, rotary embeddings, MLP."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from swa_jax.model.config import XIELU_BETA, ModelConfig, RopeKind, RopeScaling
from swa_jax.model.layer_stacks import rope_groups
from swa_jax.model.parameters import declared
from swa_jax.model.remat import PROJECTED


def drawn(path: str, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs | None = None) -> nnx.Param:
    """The parameter that is declared at a path, as it begins; without `rngs`, where it is the same for every key."""
    row = declared(config)[path]
    return nnx.Param(row.init(jax.random.key(0) if rngs is None else rngs.params(), row.shape, dtype))


class NormForm(NamedTuple):
    """What of a norm is no array."""

    eps: float
    centred: bool = False  # LayerNorm
    unit_offset: bool = False  # the factor is 1 + scale


class Norm(nnx.Module):
    """Root-mean-square norm, or LayerNorm (`config.norm_type`), in f32 whatever the input's dtype."""

    def __init__(self, path: str, config: ModelConfig, dtype: jnp.dtype):
        """`path`: the module's place in the decoder, where its size is declared."""
        self.scale = drawn(f"{path}.scale", config, dtype)
        self.bias = drawn(f"{path}.bias", config, dtype) if config.norm_bias else None
        self.form = NormForm(config.rms_norm_eps, config.norm_type == "layer", config.norm_unit_offset)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., d]; or [..., H, D], normed over all heads if the scale has H * D numbers."""
        return normed(x, self.scale[...], None if self.bias is None else self.bias[...], self.form)


def normed(x: jax.Array, scale: jax.Array, bias: jax.Array | None, form: NormForm) -> jax.Array:
    """As `Norm` of these arrays."""
    axes = (-1,) if scale.shape[-1] == x.shape[-1] else (-2, -1)
    scale = scale.reshape([x.shape[axis] for axis in axes])
    wide = x.astype(jnp.float32)
    if form.centred:
        wide = wide - jnp.mean(wide, axis=axes, keepdims=True)
    unit = wide * lax.rsqrt(jnp.mean(wide * wide, axis=axes, keepdims=True) + form.eps)
    if bias is not None:
        factor = form.unit_offset + scale.astype(jnp.float32)
        return (unit * factor + bias.reshape(scale.shape).astype(jnp.float32)).astype(x.dtype)
    if form.unit_offset:
        return (unit * (1 + scale.astype(jnp.float32))).astype(x.dtype)
    if form.centred:
        return (unit * scale.astype(jnp.float32)).astype(x.dtype)
    return unit.astype(x.dtype) * scale.astype(x.dtype)


class XIELU(nnx.Module):
    """A parabola above 0, an exponential below, of slopes that are learned (arXiv:2411.13010), in f32."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        self.alpha_p = drawn("layers.mlp.act.alpha_p", config, dtype)
        self.alpha_n = drawn("layers.mlp.act.alpha_n", config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        above = jax.nn.softplus(self.alpha_p[...].astype(jnp.float32)) * wide * wide
        slope = XIELU_BETA + jax.nn.softplus(self.alpha_n[...].astype(jnp.float32))
        negative = jnp.where(wide > 0, 0, wide)
        below = slope * (jnp.expm1(negative) - negative)
        return (jnp.where(wide > 0, above, below) + XIELU_BETA * wide).astype(x.dtype)


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, x [B, T, d]: SwiGLU with "silu", GeGLU with "gelu_tanh"; or `down(act(up(x)))`."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs, path: str = "layers.mlp"):
        """`path`: the module's place in the decoder, where its width is declared."""
        self.config = config
        if config.gated_mlp:
            self.gate_proj = linear(f"{path}.gate_proj", config, dtype, rngs)
        if config.hidden_act == "xielu":
            self.act = XIELU(config, dtype)
        self.up_proj = linear(f"{path}.up_proj", config, dtype, rngs)
        self.down_proj = linear(f"{path}.down_proj", config, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.config.gated_mlp:
            up = self.up_proj(x)
            return self.down_proj(self.act(up) if self.config.hidden_act == "xielu" else _act(up, self.config))
        return self.down_proj(activated(self.gate_proj(x), self.up_proj(x), self.config))


def rms_normed(x: jax.Array, eps: float) -> jax.Array:
    """x [..., D] divided by its root mean square, in f32 whatever its dtype."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def activated(gate: jax.Array, up: jax.Array, config: ModelConfig) -> jax.Array:
    """What a gated MLP makes of its two halves, [..., f] each; gpt-oss cuts them off and adds 1 to the second."""
    if config.swiglu_limit is not None:
        gate = jnp.minimum(gate, config.swiglu_limit)
        up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return gate * nnx.sigmoid(config.swiglu_alpha * gate) * (up + 1)
    return _act(gate, config) * up


def _act(x: jax.Array, config: ModelConfig) -> jax.Array:
    return nnx.silu(x) if config.hidden_act == "silu" else nnx.gelu(x, approximate=True)


class Projection(nnx.Linear):
    """A linear map, which may lead to heads or from them.

    On a TPU the product then lies in memory as the attention kernels read and write it, head by head. A product of
    merged heads that is reshaped afterwards has to be copied.
    """

    def to_heads(self, x: jax.Array, head_dim: int, *, side_by_side: bool = False) -> jax.Array:
        """x [B, T, d] -> [B, T, H, D]; `side_by_side`: so the heads of a token lie in the gradient that comes back."""
        y = to_heads(x, self.kernel[...], head_dim, side_by_side)
        y = checkpoint_name(y, PROJECTED)
        return y if self.bias is None else y + self.bias[...].reshape(-1, head_dim)

    def from_heads(self, x: jax.Array) -> jax.Array:
        """x [B, T, H, D] -> [B, T, d]."""
        y = onto_stream(x, self.kernel[...].reshape(*x.shape[2:], -1))
        return y if self.bias is None else y + self.bias[...]


def to_heads(x: jax.Array, kernel: jax.Array, head_dim: int, side_by_side: bool) -> jax.Array:
    """x [B, T, d], kernel [d, H * D] -> [B, T, H, D]; see `Projection.to_heads`."""
    return (_to_heads if side_by_side else _by_head)(x, kernel, head_dim)


def _by_head(x: jax.Array, kernel: jax.Array, head_dim: int) -> jax.Array:
    return jnp.einsum("btd,dhk->bthk", x, kernel.reshape(kernel.shape[0], -1, head_dim))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _to_heads(x: jax.Array, kernel: jax.Array, head_dim: int) -> jax.Array:
    return _by_head(x, kernel, head_dim)


def _to_heads_bwd(
    head_dim: int, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    merged = cotangent.reshape(*x.shape[:2], -1)
    return jnp.einsum("btn,dn->btd", merged, kernel), jnp.einsum("btd,btn->dn", x, merged)


_to_heads.defvjp(lambda x, kernel, head_dim: (_by_head(x, kernel, head_dim), (x, kernel)), _to_heads_bwd)


@jax.custom_vjp
def onto_stream(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [B, T, ...], kernel [..., d] -> [B, T, d].

    The kernel's gradient is computed with d first. On a mesh that splits d the TPU compiler then sums each device's
    part where it lies; along a last dimension it would sum all of it on every device.
    """
    return jnp.tensordot(x, kernel, kernel.ndim - 1)


def _onto_stream_bwd(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    by_token = tuple(range(cotangent.ndim - 1))
    gradient = jnp.tensordot(cotangent, x, (by_token, by_token))  # [d, ...]
    return jnp.tensordot(cotangent, kernel, ((-1,), (-1,))), jnp.moveaxis(lax.optimization_barrier(gradient), 0, -1)


def _onto(x: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """`onto_stream` as the `dot_general` of a linear map."""
    return onto_stream(x, kernel)


def _from_stream(*operands: Any, **options: Any) -> jax.Array:
    """The `dot_general` of other linear maps."""
    return checkpoint_name(lax.dot_general(*operands, **options), PROJECTED)


onto_stream.defvjp(lambda x, kernel: (onto_stream(x, kernel), (x, kernel)), _onto_stream_bwd)


def linear(path: str, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> Projection:
    """The linear map at a place in the decoder, such as "layers.mlp.up_proj", as `parameters` declares it."""
    rows = declared(config)
    kernel, bias = rows[f"{path}.kernel"], rows.get(f"{path}.bias")
    zeros = nnx.initializers.zeros
    return Projection(
        *kernel.shape,
        use_bias=bias is not None,
        kernel_init=kernel.init,
        bias_init=bias.init if bias else zeros,
        dot_general=_onto if kernel.axes[-1] == "embed" else _from_stream,
        param_dtype=dtype,
        rngs=rngs,
    )


# cos and sin [R, B, T, D] f32 of the R rotary embeddings of layers whose heads have D channels, by D.
RopeTables = dict[int, tuple[jax.Array, jax.Array]]


def rope_tables(config: ModelConfig, positions: jax.Array, length: int, nope: bool = False) -> RopeTables:
    """What `pallas_kernels.math.rotary.Rotation` takes, at integer positions [B, T], for each of `rope_groups`.

    `length` is that of the rows, or of the cache (see `rope_frequencies`); `nope` is that of `rope_groups`.
    """
    found = {}
    for head_dim, kinds in rope_groups(config, nope).items():
        tables = [_rope_table(config, kind, head_dim, positions, length) for kind in kinds]
        cos, sin = (jnp.stack(table) for table in zip(*tables, strict=True))
        found[head_dim] = cos, sin
    return found


def _rope_table(
    config: ModelConfig, kind: RopeKind, head_dim: int, positions: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    theta, scaling = config.rope_theta, config.rope_scaling
    if kind == "local":
        theta, scaling = config.local_rope_theta, None
    share = config.partial_rotary_factor
    if kind == "global" and config.heads_differ:
        share = config.global_partial_rotary_factor or share
    if (head_dim, share) != (config.head_dim, config.partial_rotary_factor):
        config = dataclasses.replace(config, head_dim=head_dim, partial_rotary_factor=share)
    frequencies, factor = rope_frequencies(theta, scaling, config, length)
    rotated = config.rotary_dim
    if kind == "none":
        frequencies, factor = np.zeros_like(frequencies), 1.0
    both = np.repeat(frequencies, 2) if config.rope_interleaved else np.tile(frequencies, 2)
    is_first = np.arange(head_dim) // rope_distance(config) % 2 == 0
    signs = np.where(is_first, -1, 1).astype(np.float32)
    factors: float | np.ndarray = factor
    if rotated < head_dim:
        others = head_dim - rotated
        both = np.pad(both, (0, others))
        factors = np.pad(np.full(rotated, factor, np.float32), (0, others), constant_values=1)
    angles = positions[..., None].astype(jnp.float32) * both  # [B, T, D]
    return jnp.cos(angles) * factors, jnp.sin(angles) * (signs * factors)


def query_scale(config: ModelConfig, positions: jax.Array) -> jax.Array | None:
    """The factor on queries at integer positions [B, T], f32; None where positions change nothing."""
    scaling = config.rope_scaling
    if scaling is None or not scaling.llama_4_scaling_beta:
        return None
    assert scaling.original_max_position_embeddings is not None  # it needs it
    rounds = positions // scaling.original_max_position_embeddings
    return 1 + scaling.llama_4_scaling_beta * jnp.log1p(rounds.astype(jnp.float32))


def rope_distance(config: ModelConfig) -> int:
    """Between two channels that rotate together."""
    return 1 if config.rope_interleaved else config.rotary_dim // 2


def rope_frequencies(
    theta: float, scaling: RopeScaling | None, config: ModelConfig, length: int
) -> tuple[np.ndarray, float]:
    """Angular frequencies [rotary_dim / 2] f32 in radians a token, and the factor on cos and sin.

    `length` is how many positions a row of tokens has, or a cache has room for: LongRoPE has other frequencies where
    that is more than the model was first trained with. Hugging Face takes the last position instead; here a token's
    rotation must not depend on how many of its row are padding, nor change while a cache fills.
    """
    rotary_dim = config.rotary_dim
    plain = (1.0 / theta ** (np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim)).astype(np.float32)
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "proportional":
        rotating = int(scaling.partial_rotary_factor * rotary_dim // 2)
        return np.where(np.arange(rotary_dim // 2) < rotating, plain / scaling.factor, 0).astype(np.float32), 1.0
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    if scaling.rope_type == "llama3":
        # Long wavelengths are interpolated, short ones kept, those between blended (Llama 3.1).
        wavelength = 2 * np.pi / plain
        blend = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = np.clip(blend, 0, 1)
        return ((1 - blend) * plain / scaling.factor + blend * plain).astype(np.float32), 1.0
    if scaling.rope_type == "longrope":
        return _longrope(scaling, original, plain, length)
    return _yarn(theta, rotary_dim, scaling, original, plain)


def _longrope(scaling: RopeScaling, original: int, plain: np.ndarray, length: int) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al., arXiv:2402.13753), with the factor on cos and sin that Phi-3 gives it."""
    factors = scaling.long_factor if length > original else scaling.short_factor
    frequencies = (plain / np.asarray(factors, np.float32)).astype(np.float32)
    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    stretched = max(math.log(scaling.factor), 0.0)
    return frequencies, math.sqrt(1 + stretched / math.log(original))


def _yarn(
    theta: float, rotary_dim: int, scaling: RopeScaling, original: int, plain: np.ndarray
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., arXiv:2309.00071): interpolate the channels that rotate less than `beta_slow` times."""

    def channel(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1)
    frequencies = plain / scaling.factor * ramp + plain * (1 - ramp)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    factor = scaling.attention_factor
    if factor is None and scaling.mscale and scaling.mscale_all_dim:
        factor = temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return frequencies.astype(np.float32), temperature(1.0) if factor is None else factor
