"""Rematerialisation: what the backward pass finds saved of a layer, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.cudnn import FORWARD
from pallas_kernels.math.parts import LSE, OUT

Remat = Literal["none", "layer", "projections", "attention", "offload"]
LAYER_INPUT = "layer_input"
PROJECTED = "projected"  # what a linear map makes of the stream: queries, keys, values, the hidden layer of an MLP


class TrainingPass(NamedTuple):
    """How a forward pass that is differentiated is computed.

    Attributes:
      remat: what the backward pass computes again rather than finding it saved; see `rematerialised`.
      unroll: compile every layer for itself in place of one loop over the layers. The step is faster on a TPU: what is
        saved for the backward pass needs no copies, and weights are gathered beside the layer before. Compiling takes
        longer, in proportion to the layers.
      dropout_key: a JAX key; LoRA adapters drop inputs by it, each layer its own. None: none are dropped.
    """

    remat: Remat = "none"
    unroll: bool = False
    dropout_key: jax.Array | None = None


PLAIN = TrainingPass()


_POLICIES = jax.checkpoint_policies


def _results_of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """cuDNN's log-sum-exp is inside JAX's own function, where nothing of ours can name it."""
    return primitive.name == FORWARD


_ATTENTION = _POLICIES.save_from_both_policies(_POLICIES.save_only_these_names(OUT, LSE), _results_of_cudnn)


def rematerialised(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`layer`, whose first argument is its input [B, T, d], with a choice of what is saved for the backward pass.

    Args:
      remat: "none" saves everything. "layer" saves the layer's input only, so that attention's forward kernels run
        twice. "attention" also saves what attention's backward kernels need of them: the output and lse, of both
        branches where a layer is routed. "projections" also saves what linear maps make of the
        stream, but not what they add to it. "offload" is "attention" with all of it in the host's memory (cuDNN's
        forward pass runs twice then).
    """
    if remat == "none":
        return layer
    if remat == "layer":
        return jax.checkpoint(layer)
    if remat == "attention":
        return jax.checkpoint(layer, policy=_ATTENTION)
    if remat == "projections":
        # By name: `dots_saveable` would keep RoPE's products too.
        both = _POLICIES.save_from_both_policies(_POLICIES.save_only_these_names(PROJECTED), _ATTENTION)
        return jax.checkpoint(layer, policy=both)

    def with_named_input(x: jax.Array, *others: Any) -> Any:
        return layer(checkpoint_name(x, LAYER_INPUT), *others)

    to_host = _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT, OUT, LSE],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(with_named_input, policy=to_host)
