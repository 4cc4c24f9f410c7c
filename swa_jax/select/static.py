"""The six static head rankings that BOSCH is compared with: how local is a head of the unchanged model?

Source: "BOSCH: Black-Box Binary Optimization for Short-Context Attention-Head Selection in LLMs", Section B.3. Each
score is that of a KV head, the mean over its query heads. Where the paper is silent or slips:

* DCAM, Eq. 7 and 8: normalising the lags' masses comes to the mean in-window mass of a query.
* APL, Eq. 9 and 10: the query is the last answer token; of equal peaks the nearest key counts.
* PROXY, Eq. 11 to 14: blocks of 64, gamma = .9; the proxy head of a layer and example has the largest mean query norm.
  Few blocks mean local; the text says the opposite and ranks this way.
* QADA, Eq. 15 to 19: logits as attention has them (after RoPE, with ALiBi), buffer of 64; q' Sigma q is the variance of
  the buffer's logits. All in logarithms. A query whose window holds everything counts 1.
* RAZOR, Eq. 20 to 22: induction looks at m - K + 1, the token *after* the earlier occurrence (Eq. 20 misprints it).
  z-scores are over all heads of the model.
* FISHER, Eq. 23 to 25: per example, of the mean loss of its answer tokens; dL/dP = dO v'. A head whose attention no
  answer depends on is local. "fisher-text" is the other reading: all tokens but the first count.

"kl" and "kl-layers" are not the paper's: see `swa_jax.select.kl`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import attention
from swa_jax.base.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import AnswerBatch, answer_batches
from swa_jax.model.attention import AttentionContext, LayerData, layer_data, model_slopes, model_spec, own_or
from swa_jax.model.block import Block, Stream
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_stacks import are_alike
from swa_jax.model.layer_types import FULL
from swa_jax.model.layers import query_scale, rope_tables
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.attention_rows import Heads, Rows, logits_of, sum_over_rows
from swa_jax.select.kl import kl_scores
from swa_jax.select.work import count_pass

StaticMethod = Literal["dcam", "apl", "proxy", "qada", "razor", "fisher", "fisher-text", "kl", "kl-layers"]

# The larger the score, the more local the head; of the others the smaller.
LARGER_IS_LOCAL: frozenset[StaticMethod] = frozenset({"dcam", "apl", "qada", "fisher", "fisher-text"})
# The same for all heads where the window holds everything.
IN_WINDOW: frozenset[StaticMethod] = frozenset({"dcam", "qada", "fisher", "fisher-text", "kl", "kl-layers"})
PROXY_BLOCK, PROXY_MASS = 64, 0.9
QADA_BUFFER = 64


def static_scores(
    model: Decoder,
    examples: Sequence[Example],
    method: StaticMethod,
    window: Window,
    *,
    batch_size: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> np.ndarray:
    """The score of every KV head under full attention (BOSCH, Section B.3): [L, K] float64.

    `LARGER_IS_LOCAL` has the methods of which a larger score means a more local head.

    Args:
      examples: prompts with answers. RAZOR uses only their length and the model's vocabulary.
      method: "dcam", "apl", "proxy", "qada", "razor", "fisher", "fisher-text", "kl" or "kl-layers".
      window: only "kl" and "kl-layers" ask for more than its size.
      seed: the seed of RAZOR's random tokens.
      progress: called with (batches done, batches in all).

    Raises:
      ConfigError: a model whose attention is not softmax, for which the scores are not defined; no examples, or one
        with an empty prompt or answer.
    """
    config = model.config
    if method in ("kl", "kl-layers"):
        whole = method == "kl-layers"
        return kl_scores(model, examples, window, whole_layers=whole, batch_size=batch_size, progress=progress)
    check_softmax(config, f"{method} scores heads")
    kv_heads = config.common_kv_heads
    if method == "fisher-text":
        method, examples = "fisher", [Example(e.prompt[:1], [*e.prompt[1:], *e.answer], []) for e in examples]
    if method == "fisher" and not are_alike(config):
        raise ConfigError("fisher goes through layers that are all alike, the model's layers differ")
    graph, weights = nnx.split(model)
    if method == "razor":
        return _by_group(_razor(graph, weights, examples, config.vocab_size, seed), kv_heads)
    batches = list(answer_batches(examples, batch_size))
    by_batch, tokens = [], 0
    for done, (index, batch) in enumerate(batches):
        of_loss = method == "fisher"
        count_pass(batch.tokens, back=of_loss, logits=3 * of_loss * batch.labels.size)
        if method == "fisher":
            values = fisher_masses(graph, weights, batch, window.keys)
        else:
            values = layer_statistics(graph, weights, batch.tokens, batch.segment_ids, (method, window.keys))
        by_batch.append(np.asarray(values, np.float64)[:, : len(index)])  # [L, B, H] or [L, B, H, 2]
        tokens += int(batch.segment_ids[: len(index)].sum())
        progress(done + 1, len(batches))
    values = np.concatenate(by_batch, axis=1)
    if method == "apl":
        scores = 1 - np.minimum(1, np.median(values, axis=1) / window.keys)
    elif method == "fisher":
        inside, total = np.moveaxis(values.sum(1), -1, 0)
        scores = np.where(total > 0, inside / np.where(total > 0, total, 1), 1)
    else:
        scores = values.sum(1) / tokens
    return _by_group(scores, kv_heads)


def check_softmax(config: ModelConfig, what: str) -> None:
    """Raise `ConfigError`, which begins with `what`, unless attention is softmax, whose mass the scores are shares of,
    and all layers have as many query heads."""
    if config.attention_activation != "softmax":
        raise ConfigError(f"{what} of softmax attention, the model has {config.attention_activation} attention")
    if config.sink_logits:
        raise ConfigError(f"{what} whose keys share all of the mass, the model gives part of it to sink logits")
    if len(counts := sorted({*config.query_heads})) > 1:
        raise ConfigError(
            f"{what} where all layers have as many query heads, the model's have {' or '.join(map(str, counts))}: "
            "choose by nll"
        )


def _by_group(scores: np.ndarray, kv_heads: int) -> np.ndarray:
    """Query heads' scores [L, H] -> their groups' means [L, K]."""
    return scores.reshape(len(scores), kv_heads, -1).mean(-1)


# ---- one layer's statistics: [B, H], summed over the real queries ----


def dcam(heads: Heads, window: int) -> jax.Array:
    """Eq. 7 and 8: the attention mass inside the window."""
    return sum_over_rows(lambda rows: _inside(rows.weights, rows, window), heads)


def apl(heads: Heads, window: int) -> jax.Array:
    """Eq. 9: how far back from the last token the largest weight lies, [B, H], no sum."""
    length, last = heads.q.shape[1], heads.lengths - 1  # [B]
    lag = last[:, None, None] - jnp.arange(length)  # [B, 1, T]
    row = jnp.take_along_axis(heads.q, last[:, None, None, None], axis=1)  # [B, 1, H, D]
    logits = logits_of(heads, row, lag)[..., 0, :]  # [B, K, G, T]
    nearest = length - 1 - jnp.argmax(logits[..., ::-1], axis=-1)
    return (last[:, None, None] - nearest).reshape(len(last), -1)


def proxy(heads: Heads, window: int) -> jax.Array:
    """Eq. 11 to 14: the share of its blocks a head needs for most of its mass, in the proxy head's order."""
    batch, length, count, _ = heads.q.shape
    real = (jnp.arange(length) < heads.lengths[:, None])[..., None]  # [B, T, 1]
    norms = jnp.linalg.norm(heads.q.astype(jnp.float32), axis=-1)  # [B, T, H]
    chosen = jnp.where(real, norms, 0).sum(1).argmax(-1)[:, None, None, None]  # [B, 1, 1, 1]
    padding = -length % PROXY_BLOCK

    def share(rows: Rows) -> jax.Array:
        weights = jnp.pad(rows.weights, [(0, 0)] * 4 + [(0, padding)])
        masses = weights.reshape(batch, count, weights.shape[3], -1, PROXY_BLOCK).sum(-1)  # [B, H, R, blocks]
        begun = rows.lag[:, ::PROXY_BLOCK] >= 0  # [R, blocks]
        ranking = jnp.where(begun, jnp.take_along_axis(masses, chosen, axis=1), -1)  # [B, 1, R, blocks]
        order = jnp.argsort(-ranking, axis=-1, stable=True)
        reached = jnp.cumsum(jnp.take_along_axis(masses, order, axis=-1), axis=-1)
        needed = (reached < PROXY_MASS * masses.sum(-1, keepdims=True)).sum(-1) + 1  # [B, H, R]
        return (needed / begun.sum(-1)).reshape(*rows.logits.shape[:3], -1)

    return sum_over_rows(share, heads)


def qada(heads: Heads, window: int) -> jax.Array:
    """Eq. 15 to 19: the mass inside the window, that outside being estimated from the keys just before it."""

    def share(rows: Rows) -> jax.Array:
        logits, lag = rows.logits, rows.lag
        inside = jax.nn.logsumexp(jnp.where(lag < window, logits, -jnp.inf), axis=-1)
        buffer = (lag >= window) & (lag < window + QADA_BUFFER)
        size = jnp.maximum(buffer.sum(-1), 1)
        mean = jnp.where(buffer, logits, 0).sum(-1) / size
        variance = jnp.where(buffer, jnp.square(logits - mean[..., None]), 0).sum(-1) / size
        outside_keys = (lag >= window).sum(-1)
        outside = jnp.log(jnp.maximum(outside_keys, 1)) + mean + variance / 2
        return jnp.where(outside_keys > 0, jax.nn.sigmoid(inside - outside), 1)

    return sum_over_rows(share, heads)


def razor(heads: Heads, period: int) -> jax.Array:
    """Eq. 20 and 21: weight on the previous occurrence of the token and on the token after that, [B, H, 2]."""

    def echo_and_induction(rows: Rows) -> jax.Array:
        weights, again = rows.weights, rows.lag[:, 0] >= period  # the lag to key 0 is the query's position
        at = [jnp.where(rows.lag == lag, weights, 0).sum(-1) * again for lag in (period, period - 1)]
        return jnp.stack(at, axis=-1)

    return sum_over_rows(echo_and_induction, heads)


STATISTICS = {"dcam": dcam, "apl": apl, "proxy": proxy, "qada": qada, "razor": razor}


def _inside(values: jax.Array, rows: Rows, window: int) -> jax.Array:
    return jnp.where(rows.lag < window, values, 0).sum(-1)


# ---- passes over the model ----


@functools.partial(jax.jit, static_argnames=("graph", "statistic"))
def layer_statistics(
    graph: Any,
    weights: nnx.State,
    tokens: jax.Array,
    segment_ids: jax.Array,
    statistic: tuple[str | Callable[..., jax.Array], Any],
) -> jax.Array:
    """A statistic of every layer under full attention: [L, B, H, ...] f32.

    `statistic`: a function of `Heads` and a setting, or the name of one of `STATISTICS`; and that setting.

    tokens, segment_ids [B, T]: as in `AnswerBatch`, one right-padded text a row.
    """
    model: Decoder = nnx.merge(graph, weights)
    (data, context), lengths = _full_attention(model, segment_ids), segment_ids.sum(1)

    def layer(stream: Stream, block: Block, row: LayerData) -> tuple[Stream, jax.Array]:
        out, (q, k, _) = _full_layer(block, stream, 0.0, row, context)
        function, setting = statistic
        measure = STATISTICS[function] if isinstance(function, str) else function
        return out, measure(Heads(q, k, lengths, context.spec, model_slopes(model.config)), setting)

    return model.scan(layer, *model.begin(tokens, data))[1]


def _razor(graph: Any, weights: nnx.State, examples: Sequence[Example], vocab_size: int, seed: int) -> np.ndarray:
    """Eq. 22 for every query head, [L, H]: a random text of a quarter of the examples' length, four times over."""
    if not examples:
        raise ConfigError("examples is empty: give at least one example")
    period = max(1, max(len(e.prompt) + len(e.answer) for e in examples) // 4)
    passage = np.random.default_rng(seed).integers(vocab_size, size=period)
    tokens = jnp.asarray(np.tile(passage, 4)[None], jnp.int32)
    count_pass(tokens)
    sums = layer_statistics(graph, weights, tokens, jnp.ones_like(tokens), ("razor", period))
    means = np.asarray(sums, np.float64)[:, 0] / (3 * period)  # [L, H, 2]
    spread = means.std((0, 1))
    z = (means - means.mean((0, 1))) / np.where(spread > 0, spread, 1)
    return z.max(-1)


@functools.partial(jax.jit, static_argnames=("graph", "window"))
def fisher_masses(graph: Any, weights: nnx.State, batch: AnswerBatch, window: int) -> jax.Array:
    """Sums of Phi = (P dL/dP)^2 (Eq. 23) inside the window and in all, for each layer and head: [L, B, H, 2] f32.

    The layers are gone through backwards by hand, so that of every layer only its input is kept.
    """
    model: Decoder = nnx.merge(graph, weights)
    assert isinstance(model.layers, Block)  # all layers are alike
    layer_graph, layers = nnx.split(model.layers)
    (data, context), lengths = _full_attention(model, batch.segment_ids), batch.segment_ids.sum(1)

    def forward(x: jax.Array, scanned: tuple[nnx.State, LayerData]) -> tuple[jax.Array, jax.Array]:
        layer_weights, row = scanned
        return _full_layer(nnx.merge(layer_graph, layer_weights), Stream(x), 0.0, row, context)[0].x, x

    def loss(x: jax.Array) -> jax.Array:
        hidden = jnp.take_along_axis(model.norm(x), batch.queries[:, :, None], axis=1)  # [B, A, d]
        nll = model.token_loss(hidden, batch.labels, batch.weights).nll
        return (nll.sum(1) / batch.weights.sum(1)).sum()  # examples do not meet: each has its own gradient

    def backward(dx: jax.Array, scanned: tuple[nnx.State, LayerData, jax.Array]) -> tuple[jax.Array, jax.Array]:
        layer_weights, row, x = scanned
        block = nnx.merge(layer_graph, layer_weights)
        config = model.config
        nothing = jnp.zeros((*x.shape[:2], config.num_attention_heads, config.head_dim), x.dtype)
        _, pull, (q, k, v) = jax.vjp(
            lambda x, probe: _full_layer(block, Stream(x), probe, row, context), x, nothing, has_aux=True
        )
        dx, d_mixed = pull(Stream(dx))

        def masses(rows: Rows) -> jax.Array:
            d_rows = rows.extra.reshape(*rows.extra.shape[:2], v.shape[2], -1, v.shape[3])
            d_weights = jnp.einsum(
                "brkgd,btkd->bkgrt", d_rows, v, preferred_element_type=jnp.float32, precision="highest"
            )
            phi = jnp.square(rows.weights * d_weights)
            return jnp.stack([_inside(phi, rows, window), phi.sum(-1)], axis=-1)

        heads = Heads(q, k, lengths, context.spec, model_slopes(config))
        return dx, sum_over_rows(masses, heads, d_mixed)

    x, inputs = jax.lax.scan(forward, model.embed(batch.tokens), (layers, data))
    return jax.lax.scan(backward, jax.grad(loss)(x), (layers, data, inputs), reverse=True)[1]


def _full_layer(
    block: Block, stream: Stream, probe: jax.Array | float, row: LayerData, context: AttentionContext
) -> tuple[Stream, tuple[jax.Array, jax.Array, jax.Array]]:
    """One layer under full attention, `probe` [B, T, H, D] being added to what its heads say; also its q, k, v."""
    read = block.attention_input(stream.x)
    q, *made = block.attention.qkv(read, row, context)
    k, v = own_or(stream.read_by(block), *made)
    mixed = attention(q, k, v, context.spec, q_segment_ids=context.segment_ids, **block.attention.per_head()._asdict())
    assert isinstance(mixed, jax.Array)
    x, _ = block.after_attention(stream.x, block.attention.output(mixed + probe, read), row)
    return stream.behind(block, x, *made), (q, k, v)


def _full_attention(model: Decoder, segment_ids: jax.Array) -> tuple[LayerData, AttentionContext]:
    """The layers' data and the context of full attention in every layer, whatever the model's own pattern says."""
    pattern = AttentionPattern.everywhere(FULL, model.config)
    length, rope, scale = segment_ids.shape[1], {}, None
    if model.config.uses_rope:
        positions = jnp.arange(length)[None]
        rope, scale = rope_tables(model.config, positions, length), query_scale(model.config, positions)
    spec = model_spec(model.config, pattern)
    context = AttentionContext(spec, rope, scale, segment_ids)
    return layer_data(pattern, model.config), context
