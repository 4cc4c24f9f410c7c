"""A model of few layers under full attention, by whole matrices: what scores of attention are held to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import alibi_slopes
from swa_jax.model.attention import layer_data
from swa_jax.model.layer_types import FULL


def whole_attention(model, tokens, probes=None):
    """One text [T]: logits [T, V], attention's logits and probabilities [L, H, T, T], and queries [L, T, H, D].

    `probes` [L, H, T, T] are added to the probabilities.
    """
    probes = np.zeros((model.config.num_hidden_layers, 1, 1, 1), np.float32) if probes is None else probes
    return _whole(*nnx.split(model), jnp.asarray(tokens), probes)


@functools.partial(jax.jit, static_argnames="graph")
def _whole(graph, weights, tokens, probes):
    model = nnx.merge(graph, weights)
    config = model.config
    block_graph, stacked = nnx.split(model.layers)
    context, data = model.context(tokens[None]), layer_data(model.pattern, config, (FULL,))
    lag = np.subtract.outer(np.arange(len(tokens)), np.arange(len(tokens)))
    scale, group = config.attention_scale or config.head_dim**-0.5, config.num_attention_heads // config.common_kv_heads
    x, found = model.embed(tokens[None]), []
    for layer in range(config.num_hidden_layers):
        own, row = jax.tree.map(lambda w, layer=layer: w[layer], (stacked, data))
        block = nnx.merge(block_graph, own)
        q, k, v = (t[0] for t in block.attention.qkv(block.attention_input(x), row, context))
        k, v = (jnp.repeat(t, group, axis=1) for t in (k, v))
        logits = jnp.einsum("thd,shd->hts", q, k, precision="highest") * scale
        if (cap := config.attention_softcap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        if config.uses_alibi:
            logits += alibi_slopes(3, 1, "press")[:, None, None] * lag
        weights_ = jax.nn.softmax(jnp.where(lag >= 0, logits, -jnp.inf), axis=-1)
        found.append((logits, weights_, q))
        mixed = jnp.einsum("hts,shd->thd", weights_ + probes[layer], v, precision="highest")[None]
        x, _ = block.after_attention(x, block.attention.output(mixed, block.attention_input(x)), row)
    return model.logits(model.norm(x))[0], *(jnp.stack(one) for one in zip(*found, strict=True))
