"""Mixtures of experts: a router chooses a few MLPs for each token, and no token is dropped.

Tokens are sorted by expert, so that `jax.lax.ragged_dot` multiplies each expert's run of rows with its weights
(MegaBlocks, Gale et al., arXiv:2211.15841). Shapes do not depend on what the router chooses. On a mesh each device
gathers the tokens of its `expert` axis, computes those that chose its experts, and the devices add up what they have.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from swa_jax.model.config import ModelConfig
from swa_jax.model.layers import MLP, activated, drawn, linear
from swa_jax.model.parameters import declared
from swa_jax.model.sharding import Partition


class ExpertLoad(NamedTuple):
    """What a layer's router did with the tokens that are not padding; the load-balancing loss is made of it."""

    chosen: jax.Array  # [E] f32: tokens that chose each expert
    probability: jax.Array  # [E] f32: the sum over tokens of its share of all experts' scores


class ExpertChoice(NamedTuple):
    """The experts of each token and their weights."""

    experts: jax.Array  # [N, k] int32
    weights: jax.Array  # [N, k] f32


class StackedLinear(nnx.Module):
    """The linear maps of all experts: `kernel` [E, in, out], `bias` [E, out] or None."""

    def __init__(self, path: str, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = drawn(f"{path}.kernel", config, dtype, rngs)
        if config.mlp_bias:
            self.bias = drawn(f"{path}.bias", config, dtype, rngs)


class MixtureOfExperts(nnx.Module):
    """An MLP of experts in place of a dense one."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        wide = jnp.dtype(jnp.float32)  # as that of SwiAttn (`swa_jax.model.attention.Router`)
        router = "layers.experts.expert_router"
        self.expert_router = linear(router, config, wide, rngs)
        numbers: list[tuple[str, nnx.Rngs | None]] = [("choice_bias", rngs)] * config.router_choice_bias
        numbers += [("input_scale", None), ("expert_scale", None)] * config.experts_beside_mlp
        for name, keys in numbers:
            setattr(self.expert_router, name, drawn(f"{router}.{name}", config, wide, keys))
        for name in ("gate_up_proj", "down_proj") if config.fused_experts else ("gate_proj", "up_proj", "down_proj"):
            setattr(self, name, StackedLinear(f"layers.experts.{name}", config, dtype, rngs))
        if config.shared_expert_intermediate_size:
            self.shared_expert = MLP(config, dtype, rngs, "layers.experts.shared_expert")

    def __call__(
        self,
        x: jax.Array,
        counted: jax.Array | None = None,
        partition: Partition | None = None,
        *,
        routed_by: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad]:
        """x [B, T, d], counted [B, T] bool (which tokens are not padding) -> [B, T, d] and the load of the experts.

        `routed_by` [B, T, d] is what the router reads; None: x.
        """
        counted = jnp.ones(x.shape[:2], bool) if counted is None else counted
        y, load = self._chosen(x, x if routed_by is None else routed_by, counted, partition)
        if self.config.shared_expert_intermediate_size:
            y = y + self.shared_expert(x)
        return y if self.config.mixture_multiplier == 1 else y * self.config.mixture_multiplier, load

    def _chosen(
        self, x: jax.Array, routed_by: jax.Array, counted: jax.Array, partition: Partition | None
    ) -> tuple[jax.Array, ExpertLoad]:
        """What the experts that each token chose give."""
        weights = nnx.to_pure_dict(nnx.state(self))
        weights.pop("shared_expert", None)
        if partition is None:
            return _mixture(x, routed_by, counted, weights, self.config, None)
        rows, tokens = partition.spec("batch", "sequence"), partition.spec("batch", "sequence", None)
        sharded = jax.shard_map(
            functools.partial(_mixture, config=self.config, partition=partition),
            mesh=partition.mesh,
            in_specs=(tokens, tokens, rows, _specs(weights, self.config, partition)),
            out_specs=(tokens, P()),
            check_vma=False,  # as for the loss (`swa_jax.model.loss`)
        )
        return sharded(x, routed_by, counted, weights)


def _specs(weights: Any, config: ModelConfig, partition: Partition) -> Any:
    """Experts and their width stay split; what else splits a weight is gathered for the layer."""
    rows = declared(config)

    def spec(path: Any, _: Any) -> P:
        row = rows[".".join(["layers", "experts", *(key.key for key in path)])]
        return partition.spec(*(axis if axis in ("expert", "mlp") else None for axis in row.axes), tensor=row.name)

    return jax.tree_util.tree_map_with_path(spec, weights)


def _mixture(
    x: jax.Array,
    routed_by: jax.Array,
    counted: jax.Array,
    weights: Any,
    config: ModelConfig,
    partition: Partition | None,
) -> tuple[jax.Array, ExpertLoad]:
    """One device's tokens x [B, T, d]; inside shard_map where there is a partition."""
    tokens = x.reshape(-1, x.shape[-1])  # [N, d]
    logits = router_logits(routed_by.reshape(tokens.shape), weights["expert_router"])
    if (cap := config.router_logit_softcap) is not None:
        logits = cap * jnp.tanh(logits / cap)
    scores = jax.nn.sigmoid(logits) if config.router_scores == "sigmoid" else jax.nn.softmax(logits)
    choice = choose_experts(logits, scores, weights["expert_router"].get("choice_bias"), config)
    if config.experts_beside_mlp:
        factors = weights["expert_router"]["expert_scale"][choice.experts]
        choice = choice._replace(weights=choice.weights * factors)
    load = _load(scores, choice, counted.reshape(-1))
    if partition is None:
        return _experts(tokens, choice, weights, config).reshape(x.shape), load
    rules = partition.rules
    token_axes = (*rules.batch, *rules.sequence)
    load = lax.psum(load, token_axes)
    width, (axis,) = rules.mlp, rules.expert or ("",)
    pieces = partition.size("expert")
    gathers = pieces > 1 and axis in token_axes
    if gathers:
        tokens, choice = (lax.all_gather(part, axis, tiled=True) for part in (tokens, choice))
    first = lax.axis_index(axis) * (config.num_experts // pieces) if pieces > 1 else None
    biased = _all_first(width) if partition.size("mlp") > 1 else True
    y = _experts(tokens, choice, weights, config, first, biased)
    y = lax.psum(y, (*width, *(() if gathers or pieces == 1 else (axis,))))
    if gathers:
        y = lax.psum_scatter(y, axis, tiled=True)
    return y.reshape(x.shape), load


def _all_first(axes: tuple[str, ...]) -> jax.Array:
    """Whether this device is the first along mesh axes: what is added once is added there."""
    return functools.reduce(jnp.logical_and, [lax.axis_index(axis) == 0 for axis in axes])


def router_logits(tokens: jax.Array, router: Any) -> jax.Array:
    """tokens [N, d] of any dtype -> [N, E] f32, in f32: where two logits are near, rounding would change the choice."""
    kernel, wide = router["kernel"].astype(jnp.float32), tokens.astype(jnp.float32)
    if "input_scale" in router:
        wide = wide * router["input_scale"] * tokens.shape[-1] ** -0.5
    logits = jnp.matmul(wide, kernel, precision=lax.Precision.HIGHEST)
    return logits + router["bias"].astype(jnp.float32) if "bias" in router else logits


def choose_experts(logits: jax.Array, scores: jax.Array, bias: jax.Array | None, config: ModelConfig) -> ExpertChoice:
    """The experts that each token meets, and their weights.

    Args:
      logits, scores: [N, E] f32; the scores grow with the logits.
      bias: [E], added to the scores for the choice alone.
    """
    wanted = logits  # which differ where scores are rounded to one number
    if bias is not None or config.expert_groups > 1:
        wanted = scores if bias is None else scores + bias.astype(jnp.float32)
    if config.expert_groups > 1:
        wanted = _of_best_groups(wanted, config)
    _, experts = lax.top_k(wanted, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    return ExpertChoice(experts, weights * config.expert_multiplier)


def _of_best_groups(wanted: jax.Array, config: ModelConfig) -> jax.Array:
    """[N, E], -inf for experts of other groups than the best; a group counts as much as its two best experts."""
    grouped = wanted.reshape(len(wanted), config.expert_groups, -1)  # [N, G, E / G]
    worth = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    _, best = lax.top_k(worth, config.expert_groups_per_tok)
    among = (best[..., None] == jnp.arange(config.expert_groups)).any(1)  # [N, G]
    return jnp.where(among[..., None], grouped, -jnp.inf).reshape(wanted.shape)


def _load(scores: jax.Array, choice: ExpertChoice, counted: jax.Array) -> ExpertLoad:
    chose = (choice.experts[..., None] == jnp.arange(scores.shape[-1])).any(1)  # [N, E]
    shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    return ExpertLoad(*(jnp.sum(x * counted[:, None], axis=0) for x in (chose.astype(jnp.float32), shares)))


def _experts(
    tokens: jax.Array,
    choice: ExpertChoice,
    weights: Any,
    config: ModelConfig,
    first: jax.Array | None = None,
    biased: jax.Array | bool = True,
) -> jax.Array:
    """The weighted sum of what its experts make of each token [N, d].

    Args:
      weights: of all experts, or of those from number `first` on; tokens of others give 0.
      biased: whether the last bias is added here, where several devices have a part of the experts' width.
    """
    per_token, count = choice.experts.shape[1], weights["down_proj"]["kernel"].shape[0]
    number = choice.experts.reshape(-1) - (0 if first is None else first)  # [M]
    number = jnp.where((number >= 0) & (number < count), number, count)  # others last
    order = jnp.argsort(number)
    inverse, number = jnp.argsort(order), number[order]
    sizes = jnp.sum(number[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)  # [E]
    here = None if first is None else (number < count)[:, None]

    def only_here(x: jax.Array) -> jax.Array:
        return x if here is None else jnp.where(here, x, 0)  # rows of no group are what the memory held

    def dot(x: jax.Array, name: str, biased: jax.Array | bool = True) -> jax.Array:
        y = lax.ragged_dot(x, weights[name]["kernel"], sizes)
        if "bias" in weights[name]:
            y += only_here(jnp.where(biased, weights[name]["bias"][jnp.minimum(number, count - 1)], 0))
        return y

    x = only_here(_permuted(tokens, order, inverse, per_token))  # [M, d]
    if config.fused_experts:
        pairs = dot(x, "gate_up_proj").reshape(x.shape[0], -1, 2)
        hidden = activated(pairs[..., 0], pairs[..., 1], config)
    else:
        hidden = activated(dot(x, "gate_proj"), dot(x, "up_proj"), config)
    y = _permuted(only_here(dot(hidden, "down_proj", biased)), inverse, order)
    y = y.reshape(*choice.experts.shape, -1).astype(jnp.float32)  # [N, k, d]
    return jnp.sum(y * choice.weights[..., None], axis=1).astype(tokens.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _permuted(x: jax.Array, order: jax.Array, inverse: jax.Array, copies: int = 1) -> jax.Array:
    """`jnp.repeat(x, copies, axis=0)[order]`, order [M] a permutation and `inverse` its inverse.

    The gradient is gathered in the same way, where that of an index is a scatter that adds rows, one after the other.
    """
    return x[order // copies]


def _permuted_fwd(x: jax.Array, order: jax.Array, inverse: jax.Array, copies: int) -> tuple[jax.Array, jax.Array]:
    return x[order // copies], inverse


def _permuted_bwd(copies: int, inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    rows = cotangent[inverse]
    return rows.reshape(-1, copies, rows.shape[-1]).sum(axis=1), None, None


_permuted.defvjp(_permuted_fwd, _permuted_bwd)
