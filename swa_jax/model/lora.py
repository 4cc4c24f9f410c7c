"""Low-rank adaptation (LoRA, Hu et al., arXiv:2106.09685), with which SWAA trains a model to its window (4.1.3).

A projection's weights W [in, out] stay as they are; y = x W + scale * dropout(x) A B learns A [in, r] and B [r, out].
Layers are stacked, so the arrays have an axis L in front, and scanned with the rest of the layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.model.config import ModelConfig
from swa_jax.model.layers import Projection, to_heads
from swa_jax.model.parameters import Parameter, low_rank, parameters

# Every projection that can be adapted, and the part of a layer that it is in: no model's sizes change them.
_ANY_MODEL = ModelConfig(1, 1, 1, 1, 1, 1, 2, attention_gate="head")
TARGETS = {row.projection: row.path[-3] for row in parameters(_ANY_MODEL) if row.projection is not None}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Settings of the adapters that a run trains. The defaults are SWAA's."""

    rank: int = 16  # of A B
    alpha: float = 128.0  # A B is multiplied with alpha / rank
    dropout: float = 0.1  # of what goes into A, while training
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    rs_lora: bool = False  # alpha / sqrt(rank) instead (Kalajdzievski, arXiv:2312.03732)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"'lora.rank' must be at least 1, got {self.rank}")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ConfigError(f"'lora.alpha' must be a number above 0, got {self.alpha}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"'lora.dropout' must be a share from 0 to below 1, got {self.dropout}")
        if not self.targets:
            raise ConfigError(f"'lora.targets' is empty: name at least one of {', '.join(TARGETS)}")
        for name in self.targets:
            if name not in TARGETS:
                raise ConfigError(f"'lora.targets' names '{name}'{nearest(name, list(TARGETS))}")
            if self.targets.count(name) > 1:
                raise ConfigError(f"'lora.targets' names '{name}' twice")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rs_lora else self.rank)

    def num_parameters(self, model: ModelConfig) -> int:
        """The numbers in all adapters of a model."""
        return sum(factor.size for factors in self.factors(model).values() for factor in factors)

    def factors(self, model: ModelConfig) -> dict[tuple[str, ...], tuple[Parameter, Parameter]]:
        """`lora_a` and `lora_b` of each adapted projection by its path, in the order of the model's parameters."""
        return {
            row.path[:-1]: low_rank(row, self.rank)
            for row in parameters(model)
            if row.projection is not None and row.projection in self.targets
        }


class Adaptable(Protocol):
    """A model whose stacked layers can have adapters: the decoder."""

    config: ModelConfig
    lora: LoraConfig | None
    layers: Any


class LoraLinear(Projection):
    """A projection with its adapter; `kernel` and `bias` are those of the projection it is made from, at their paths.

    `lora_a` [L, in, r] and `lora_b` [L, r, out] are f32 and computed in the output's dtype; `lora_b` begins as zero, so
    that a new adapter changes nothing.
    """

    def __init__(self, base: Projection, config: LoraConfig, factors: tuple[Parameter, Parameter], key: jax.Array):
        super().__init__(base.in_features, base.out_features, **_shape_only(base))
        self.kernel = base.kernel
        if base.bias is not None:
            self.bias = base.bias
        a, b = (factor.init(key, factor.stacked_shape, jnp.float32) for factor in factors)
        self.lora_a, self.lora_b = nnx.LoRAParam(a), nnx.LoRAParam(b)
        self.lora = config
        self.dropout_key: jax.Array | None = nnx.data(None)  # set for one training pass by `seed_dropout`

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        """x [..., in] -> [..., out]."""
        y = super().__call__(x, out_sharding)
        return y + self.lora.scale * (self.inner(x, y.dtype) @ self.lora_b[...].astype(y.dtype))

    def to_heads(self, x: jax.Array, head_dim: int, *, side_by_side: bool = False) -> jax.Array:
        y = super().to_heads(x, head_dim, side_by_side=side_by_side)
        outer = self.lora_b[...].astype(y.dtype)
        return y + self.lora.scale * to_heads(self.inner(x, y.dtype), outer, head_dim, side_by_side)

    def from_heads(self, x: jax.Array) -> jax.Array:
        y = super().from_heads(x)
        inner = self.inner(x.reshape(*x.shape[:2], -1), y.dtype)
        return y + self.lora.scale * (inner @ self.lora_b[...].astype(y.dtype))

    def inner(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """x [..., in] -> [..., r], some of it dropped in training."""
        x = x.astype(dtype)
        if self.dropout_key is not None:
            kept = jax.random.bernoulli(self.dropout_key, 1 - self.lora.dropout, x.shape)
            x = jnp.where(kept, x / (1 - self.lora.dropout), 0)
        return x @ self.lora_a[...].astype(dtype)

    def merged(self) -> Projection:
        """The projection with weights W + scale A B, added in f32 and rounded to W's dtype."""
        plain = Projection(self.in_features, self.out_features, **_shape_only(self))
        a, b, kernel = self.lora_a[...], self.lora_b[...], self.kernel[...]
        change = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        plain.kernel = nnx.Param((kernel.astype(jnp.float32) + self.lora.scale * change).astype(kernel.dtype))
        if self.bias is not None:
            plain.bias = self.bias
        return plain


def with_lora[M: Adaptable](model: M, config: LoraConfig, rngs: nnx.Rngs) -> M:
    """The model with new adapters, which change nothing yet; its arrays are shared.

    Raises `ConfigError` if it has adapters already, or lacks one of the projections.
    """
    if model.lora is not None:
        raise ConfigError("the model has LoRA adapters already: merge them into its weights first")
    adapted = nnx.merge(*nnx.split(model))
    adapters = config.factors(model.config)
    for name in config.targets:
        if name not in {path[-1] for path in adapters}:
            raise ConfigError(f"'lora.targets' names '{name}', which a {model.config.model_type} model does not have")
    for (*parents, name), factors in adapters.items():  # whatever the order of `targets`: equal seeds, equal draws
        parent = functools.reduce(getattr, parents, adapted)
        setattr(parent, name, LoraLinear(getattr(parent, name), config, factors, rngs.params()))
    adapted.lora = config
    return adapted


def merge_lora[M: Adaptable](model: M) -> M:
    """The plain model of the same function: W + scale A B in place of each adapted W. Other arrays are shared."""
    merged = nnx.merge(*nnx.split(model))
    for *parents, name in () if model.lora is None else model.lora.factors(model.config):
        parent = functools.reduce(getattr, parents, merged)
        setattr(parent, name, getattr(parent, name).merged())
    merged.lora = None
    return merged


def trained_and_frozen(model: Adaptable) -> tuple[nnx.State, nnx.State]:
    """(what training changes, what it leaves): everything and nothing, or, with adapters, those and the routers.

    The first is f32, the second as it is.
    """
    if model.lora is None:
        return nnx.state(model, nnx.Param), nnx.State({})
    trained, frozen = nnx.state(model, nnx.Any(nnx.LoRAParam, nnx.PathContains("router")), ...)
    return jax.tree.map(lambda x: x.astype(jnp.float32), trained), frozen


def seed_dropout(block: nnx.Module, key: jax.Array) -> None:
    """Have one layer's adapters drop inputs, each its own, until the block is thrown away."""
    modules = [getattr(getattr(block, part, None), name, None) for name, part in TARGETS.items()]
    for i, projection in enumerate(module for module in modules if isinstance(module, LoraLinear)):
        projection.dropout_key = jax.random.fold_in(key, i)


def _shape_only(base: Projection) -> dict[str, Any]:
    """Arguments of a Linear whose own arrays are about to be replaced."""
    zeros = nnx.initializers.zeros
    kept = {name: getattr(base, name) for name in ("use_bias", "param_dtype", "dot_general")}
    return kept | {"kernel_init": zeros, "rngs": nnx.Rngs(0)}
