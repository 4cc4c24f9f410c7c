"""The parts of a decoder layer that are not attention: RMSNorm, rotary embeddings, gated MLP."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from swa_jax.errors import ConfigError
from swa_jax.model.config import ModelConfig, RopeScaling
from swa_jax.model.parameters import declared


class RMSNorm(nnx.Module):
    """Root-mean-square norm, in f32 whatever the input's dtype."""

    def __init__(self, path: str, config: ModelConfig, dtype: jnp.dtype):
        """`path` is the module's place in the decoder: what is declared there says its size."""
        scale = declared(config)[f"{path}.scale"]
        self.scale = nnx.Param(scale.init(jax.random.key(0), scale.shape, dtype))  # the same for every key
        self.unit_offset = config.norm_unit_offset
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., d]; or [..., H, D], normed over all heads if the scale has H * D numbers."""
        axes = (-1,) if self.scale.shape[-1] == x.shape[-1] else (-2, -1)
        scale = self.scale[...].reshape([x.shape[axis] for axis in axes])
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=axes, keepdims=True) + self.eps)
        if self.unit_offset:
            return (normed * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * scale.astype(x.dtype)


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, x [B, T, d]: SwiGLU with "silu", GeGLU with "gelu_tanh"."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.gate_proj = linear("layers.mlp.gate_proj", config, dtype, rngs)
        self.up_proj = linear("layers.mlp.up_proj", config, dtype, rngs)
        self.down_proj = linear("layers.mlp.down_proj", config, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(activated(self.gate_proj(x), self.up_proj(x), self.config))


def activated(gate: jax.Array, up: jax.Array, config: ModelConfig) -> jax.Array:
    """What a gated MLP makes of its two halves, [..., f] each; gpt-oss cuts them off and adds 1 to the second."""
    if config.swiglu_limit is not None:
        gate = jnp.minimum(gate, config.swiglu_limit)
        up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return gate * nnx.sigmoid(config.swiglu_alpha * gate) * (up + 1)
    return (nnx.silu(gate) if config.hidden_act == "silu" else nnx.gelu(gate, approximate=True)) * up


class Projection(nnx.Linear):
    """A linear map, which may lead to heads or from them.

    On a TPU the product then lies in memory as the attention kernels read and write it, head by head. A product of
    merged heads that is reshaped afterwards has to be copied.
    """

    def to_heads(self, x: jax.Array, head_dim: int) -> jax.Array:
        """x [B, T, d] -> [B, T, H, D]."""
        kernel = self.kernel[...]
        y = jnp.einsum("btd,dhk->bthk", x, kernel.reshape(kernel.shape[0], -1, head_dim))
        return y if self.bias is None else y + self.bias[...].reshape(-1, head_dim)

    def from_heads(self, x: jax.Array) -> jax.Array:
        """x [B, T, H, D] -> [B, T, d]."""
        y = jnp.einsum("bthk,hkd->btd", x, self.kernel[...].reshape(*x.shape[2:], -1))
        return y if self.bias is None else y + self.bias[...]


def linear(path: str, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> Projection:
    """The linear map at a place in the decoder, such as "layers.mlp.up_proj", as `parameters` declares it."""
    rows = declared(config)
    kernel, bias = rows[f"{path}.kernel"], rows.get(f"{path}.bias")
    zeros = nnx.initializers.zeros
    return Projection(
        *kernel.shape, use_bias=bias is not None, kernel_init=kernel.init, bias_init=bias.init if bias else zeros,
        param_dtype=dtype, rngs=rngs,
    )  # fmt: skip


def rope_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [R, B, T, D] f32 at integer positions [B, T], one of each for the R `config.rope_kinds`.

    Channels c and c + D/2 turn together; both columns are there, so that nothing needs to be cut in halves.
    """
    tables = []
    for kind in config.rope_kinds:
        theta, scaling = config.rope_theta, config.rope_scaling
        if kind == "local":
            theta, scaling = config.local_rope_theta, None
        frequencies, factor = rope_frequencies(theta, config.head_dim, scaling, config)
        if kind == "none":
            frequencies, factor = np.zeros_like(frequencies), 1.0  # turned by nothing
        angles = positions[..., None].astype(jnp.float32) * np.tile(frequencies, 2)  # [B, T, D]
        tables.append((jnp.cos(angles) * factor, jnp.sin(angles) * factor))
    cos, sin = (jnp.stack(table) for table in zip(*tables, strict=True))
    return cos, sin


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate channel pairs (c, c + D/2) of x [B, T, H, D]; cos and sin [B, T, D].

    The other channel of each pair comes from a product with a matrix of 0, 1 and -1, which is exact. A TPU does it
    beside the rest; halves of a row, which are less than a register's width, would cost it several passes over x.
    """
    half = x.shape[-1] // 2
    swap = np.zeros((2 * half, 2 * half), np.float32)
    swap[np.arange(half, 2 * half), np.arange(half)] = -1
    swap[np.arange(half), np.arange(half, 2 * half)] = 1
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    other = jnp.matmul(x, swap.astype(x.dtype), precision=exact, preferred_element_type=jnp.float32)
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, T, 1, D]
    return (x.astype(jnp.float32) * cos + other * sin).astype(x.dtype)


def rope_frequencies(
    theta: float, head_dim: int, scaling: RopeScaling | None, config: ModelConfig
) -> tuple[np.ndarray, float]:
    """Angular frequencies [D/2] f32 in radians a token, and the factor on cos and sin (YaRN's attention factor)."""
    plain = (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)
    if scaling is None:
        return plain, 1.0
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        # Long wavelengths are interpolated, short ones kept, those between blended (Llama 3.1).
        wavelength = 2 * np.pi / plain
        blend = (original / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = np.clip(blend, 0, 1)
        return ((1 - blend) * plain / scaling.factor + blend * plain).astype(np.float32), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(theta, head_dim, scaling, original, plain)
    raise ConfigError(
        f"rope_scaling.rope_type '{scaling.rope_type}' is not supported: use linear, llama3 or yarn"
    )


def _yarn(
    theta: float, head_dim: int, scaling: RopeScaling, original: int, plain: np.ndarray
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., arXiv:2309.00071): interpolate the channels that turn less than `beta_slow` times."""

    def channel(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3), 0, 1)
    frequencies = plain / scaling.factor * ramp + plain * (1 - ramp)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    factor = scaling.attention_factor
    if factor is None and scaling.mscale and scaling.mscale_all_dim:
        factor = temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return frequencies.astype(np.float32), temperature(1.0) if factor is None else factor
