"""Negative log-likelihood of known text: of answers after a prompt, and of plain text (perplexity).

Everything is teacher-forced: one forward pass a batch, no generation. Logits are computed only where a label is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.math.spec import NEVER
from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import Estimate, bootstrap
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.samples import NO_SAMPLES, Samples
from swa_jax.model.attention import LayerData, kinds_of, layer_data
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition
from swa_jax.model.window import OWN, Window

SHORT_ANSWER = 64  # tokens: answers up to here share batches; longer ones with those up to the next power of two
LENGTH_STEP = 64  # padded lengths are multiples of it, so that lengths near each other share one compilation


class AnswerScores(NamedTuple):
    """What a teacher-forced pass says of each answer."""

    nll: np.ndarray  # [N] f64, nats a token: the mean over the answer's tokens
    right: np.ndarray  # [N] bool: every token of the value (`Example.value`) is the likeliest one


def score_answers(
    model: Decoder,
    examples: Sequence[Example],
    *,
    batch_size: int = 8,
    pattern: AttentionPattern | None = None,
    partition: Partition | None = None,
    samples: Samples = NO_SAMPLES,
    advance: Callable[[int], None] = lambda _: None,
) -> AnswerScores:
    """The mean negative log-likelihood of each example's answer tokens given its prompt, and whether it is right.

    Prompt and answer go through the model in one pass. Under full-attention decode, the query *at* the first answer
    token is the first that sees everything. The query before it, which predicts that token, is still a prompt query.

    An answer counts by its value, such as the digits of a number: how a model words the sentence around it says nothing
    of what it has found. What stands before the value in the answer is given.

    The model runs under `pattern` if it is given, or else under its own pattern.

    Patterns of full and windowed layers with the same window and sink tokens share one compilation for each padded
    length, and so do those with per-head layers: the layer map, the heads and the boundary of full-attention decode
    are data. Batches that `samples` knows are not scored again, and the others are kept there. `advance` is called with
    how many more examples are scored.

    Raises:
      ConfigError: no examples, one whose prompt or answer is empty, or an id that the model does not have.
    """
    for i, example in enumerate(examples):
        model.config.check_tokens([*example.prompt, *example.answer], f"examples[{i}]")
    pattern = model.pattern if pattern is None else pattern
    kinds = kinds_of(pattern)
    if pattern.sliding_window is not None and set(kinds) <= {FULL, WINDOW}:
        kinds = (FULL, WINDOW)
    elif SWITCH not in kinds and HYBRID in kinds and not pattern.nope_full_layers:
        pattern, kinds = _by_heads(pattern, model.config), (HYBRID,)
    data = layer_data(pattern, model.config, kinds)
    graph, weights = _shared_graph(model, pattern, kinds)
    nll, right = np.empty(len(examples)), np.empty(len(examples), bool)
    settings = [batch_size, pattern.full_attention_decode, pattern.num_last_tokens]
    for index, batch in answer_batches(examples, batch_size, pattern.window, partition):
        rows = [examples[i] for i in index]
        known = samples.find("likelihood", rows, settings)
        if known is None:
            mean, found = (np.asarray(x)[: len(index)] for x in score_batch(graph, weights, batch, data, partition))
            known = [{"nll": float(x), "right": bool(y)} for x, y in zip(mean, found, strict=True)]
            samples.add("likelihood", rows, settings, known)
        nll[index] = [record["nll"] for record in known]
        right[index] = [record["right"] for record in known]
        advance(len(index))
    return AnswerScores(nll, right)


def _shared_graph(model: Decoder, pattern: AttentionPattern, kinds: tuple[str, ...]) -> tuple[Any, nnx.State]:
    """The model split for jit, its pattern (which is static) reduced to what the layer map does not say."""
    if kinds in ((FULL, WINDOW), (HYBRID,)) and not pattern.nope_full_layers:  # which goes by the layer map
        seen = pattern.sliding_window, pattern.num_sink_tokens
        pattern = AttentionPattern.everywhere(kinds[-1], model.config, seen[0], num_sink_tokens=seen[1])
    return nnx.split(model if model.pattern == pattern else model.with_pattern(pattern))


def _by_heads(pattern: AttentionPattern, config: ModelConfig) -> AttentionPattern:
    """The same attention with every layer a per-head hybrid."""
    heads = tuple(
        tuple(range(kv_heads)) if kind == FULL else heads
        for kind, heads, (kv_heads, _) in zip(
            pattern.layer_types, pattern.full_kv_heads, config.head_shapes, strict=True
        )
    )
    types = AttentionPattern.everywhere(HYBRID, config, pattern.sliding_window).layer_types
    return dataclasses.replace(pattern, layer_types=types, full_kv_heads=heads)


class AnswerBatch(NamedTuple):
    """Prompts with their answers, right-padded; rows that only fill up the batch repeat the last example."""

    tokens: jax.Array  # [B, T] int32
    segment_ids: jax.Array  # [B, T] int32: 1, and 0 on padding
    full_from: jax.Array  # [B] int32
    queries: jax.Array  # [B, A] int32: the position that predicts each label
    labels: jax.Array  # [B, A] int32
    weights: jax.Array  # [B, A] f32: 1, and 0 on padding
    value: jax.Array  # [B, A] f32: 1 on the labels by which the answer is right or wrong


def check_examples(examples: Sequence[Example]) -> None:
    """Raise `ConfigError` if there is none, or one whose prompt or answer is empty."""
    if not examples:
        raise ConfigError("examples is empty: give at least one example")
    for i, example in enumerate(examples):
        for name, tokens in (("prompt", example.prompt), ("answer", example.answer)):
            if len(tokens) == 0:
                raise ConfigError(f"examples[{i}] has an empty {name}")


def answer_batches(
    examples: Sequence[Example], batch_size: int, window: Window = OWN, partition: Partition | None = None
) -> Iterator[tuple[np.ndarray, AnswerBatch]]:
    """Batches of one size, by length, each with the indices of its examples; long answers have batches of their own.

    On a mesh, rows and padded lengths are rounded up to what divides among its devices.

    Args:
      window: says from which query on everything is seen.
    """
    check_examples(examples)
    # Every row of a batch has logits at as many labels: one row of text, whose labels are all its tokens, costs the
    # others dear.
    sizes = np.array([max(SHORT_ANSWER, 1 << (len(e.answer) - 1).bit_length()) for e in examples])
    for size in np.unique(sizes):
        alike = np.flatnonzero(sizes == size)
        group = [examples[i] for i in alike.tolist()]
        for index, batch in _batches_of(group, batch_size, window, partition):
            yield alike[index], batch


def _batches_of(
    examples: Sequence[Example], batch_size: int, window: Window, partition: Partition | None
) -> Iterator[tuple[np.ndarray, AnswerBatch]]:
    """`answer_batches` of examples whose answers are about as long."""
    length_step = LENGTH_STEP
    lengths = [len(e.prompt) + len(e.answer) for e in examples]
    order = np.argsort(lengths, kind="stable")
    batch_size = min(batch_size, len(examples))
    if partition is not None:
        batch_size = _round_up(batch_size, partition.size("batch"))
        length_step = math.lcm(length_step, partition.size("sequence"))
    answer_length = max(len(e.answer) for e in examples)
    for start in range(0, len(order), batch_size):
        index = order[start : start + batch_size]
        rows = [examples[i] for i in index] + [examples[index[-1]]] * (batch_size - len(index))
        length = _round_up(max(len(e.prompt) + len(e.answer) for e in rows), length_step)
        tokens, segments = np.zeros((batch_size, length), np.int32), np.zeros((batch_size, length), np.int32)
        shape = (batch_size, answer_length)
        queries, labels = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights, value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for row, example in enumerate(rows):
            prompt, answer = len(example.prompt), len(example.answer)
            tokens[row, : prompt + answer] = [*example.prompt, *example.answer]
            segments[row, : prompt + answer] = 1
            queries[row, :answer] = np.arange(prompt - 1, prompt + answer - 1)
            labels[row, :answer] = example.answer
            weights[row, :answer] = 1
            value[row, range(answer) if example.value is None else list(example.value)] = 1
        begins = [window.full_from(len(e.prompt)) for e in rows]
        boundary = [NEVER if place is None else place for place in begins]
        arrays = (tokens, segments, np.array(boundary, np.int32), queries, labels, weights, value)
        if partition is None:
            yield index, AnswerBatch(*map(jnp.asarray, arrays))
        else:
            rows_only, tokens_too = partition.sharding("batch"), partition.sharding("batch", "sequence")
            places = (tokens_too, tokens_too, *[rows_only] * 5)
            yield index, AnswerBatch(*map(jax.device_put, arrays, places))


@functools.partial(jax.jit, static_argnames=("graph", "partition"))
def score_batch(
    graph: Any, weights: nnx.State, batch: AnswerBatch, data: LayerData, partition: Partition | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mean NLL of the labels of each row [B] f32, and whether those of its value are all the likeliest [B] bool."""
    model: Decoder = nnx.merge(graph, weights)
    hidden, *_ = model.features(
        batch.tokens, segment_ids=batch.segment_ids, full_from=batch.full_from, data=data, partition=partition
    )
    hidden = jnp.take_along_axis(hidden, batch.queries[:, :, None], axis=1)  # [B, A, d]
    return answer_loss(model, hidden, batch)


def answer_loss(model: Decoder, hidden: jax.Array, batch: AnswerBatch) -> tuple[jax.Array, jax.Array]:
    """What `score_batch` returns, from the normed hidden states of the label-predicting positions [B, A, d]."""
    loss = model.token_loss(hidden, batch.labels, batch.weights)
    right = (loss.correct * batch.value).sum(1) == batch.value.sum(1)
    return loss.nll.sum(1) / batch.weights.sum(1), right


# ---- plain text ----


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Perplexity of a text. `nll`, nats a token, is the mean with its 95 % interval over the passes.

    A pass counts by the tokens that it scores; one pass alone gives no interval."""

    perplexity: float
    nll: Estimate
    num_tokens: int  # tokens scored: all, but for the first where no start token stands before it
    token_nll: np.ndarray  # [num_tokens] f64: of those tokens in turn


def perplexity(
    model: Decoder,
    tokens: Sequence[int],
    *,
    context: int,
    start: Sequence[int] = (),
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda _: None,
) -> Perplexity:
    """Perplexity of one text; every token is scored exactly once, but for the first where there is no start token.

    The attention window is that of the model's pattern; `model.with_pattern` sets another one. `context` is how many
    tokens one pass reads, start tokens included: they stand before every pass, and are not scored. Without them a pass
    begins with the text's token before those that it scores. Passes do not overlap: their first tokens have little
    context.

    Args:
      tokens: the text, at least 2 token ids, without start tokens.
      context: tokens a pass.
      start: what the model expects before a text (`Tokenizer.start_ids`).
      advance: called with how many more tokens are scored.

    Raises:
      ConfigError: too few tokens, an id that the model does not have, or a context that holds no text.
    """
    text = np.asarray(tokens, np.int32)
    if text.ndim != 1 or text.size < 2:
        raise ConfigError(f"tokens must be a list of at least 2 ids, got shape {text.shape}")
    labels_of = text if start else text[1:]
    most = context - max(len(start), 1) + 1  # labels of a pass
    if most < 1:
        raise ConfigError(
            f"context is {context} tokens, all of which are start tokens: it must be at least {len(start)}"
        )
    most = min(most, labels_of.size)
    model.config.check_tokens(text, "tokens")
    graph, state = nnx.split(model)
    by_pass: list[np.ndarray] = []
    inputs, labels, weights = _passes(text, start, most)
    passes = len(inputs)
    for first in range(0, passes, batch_size):
        rows = np.arange(first, min(first + batch_size, passes))
        padded = np.resize(rows, min(batch_size, passes))
        nll = np.asarray(_text_nll(graph, state, inputs[padded], labels[padded], weights[padded]), np.float64)
        for one, values in zip(rows, nll, strict=False):
            by_pass.append(values[weights[one] > 0])
            advance(len(by_pass[-1]))
    token_nll = np.concatenate(by_pass)
    mean = bootstrap([values.mean() for values in by_pass], weights=weights.sum(1))
    return Perplexity(math.exp(mean.mean), mean, token_nll.size, token_nll)


def _passes(text: np.ndarray, start: Sequence[int], most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, labels and weights of the passes, each of at most `most` labels: [passes, T] int32, int32, f32.

    The weights are 1 on the labels.
    """
    labels_of = text if start else text[1:]
    shift = max(len(start), 1) - 1  # tokens of a pass before the one that predicts its first label
    shape = (-(-labels_of.size // most), most + shift)
    inputs, labels, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row in range(shape[0]):
        first = row * most
        end = min(first + most, labels_of.size)
        head = list(start) if start else text[first : first + 1]
        inputs[row, : end - first + shift] = [*head, *labels_of[first : end - 1]]
        labels[row, shift : shift + end - first] = labels_of[first:end]
        weights[row, shift : shift + end - first] = 1
    return inputs, labels, weights


@functools.partial(jax.jit, static_argnames="graph")
def _text_nll(graph: Any, state: nnx.State, tokens: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    model: Decoder = nnx.merge(graph, state)
    hidden, *_ = model.features(tokens)
    return model.token_loss(hidden, labels, weights).nll


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step
