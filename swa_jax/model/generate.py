"""Generation: a batch of unequal prompts into the caches, then one token at a time until every sequence has stopped.

`generate` is the whole of it. `prepare`, `prefill` and `decode` are its three steps, for callers who time them or look
at the cache. Prefill and decode are compiled once for each pattern and (rounded) shape; sampling settings, seeds and
stop tokens are data.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.model.cache import CacheLayout, KVCache, allocate, cache_bytes, cache_layouts
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.device_jit import device_jit
from swa_jax.model.memory import check_fits
from swa_jax.model.sharding import Partition, check_model, constrain

SMALLEST_TEMPERATURE = 1e-5  # below it logits could overflow; the likeliest token would be drawn anyway
NOTHING = -1  # in a row of new tokens: the sequence had ended


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
    max_length: int | None = None,
    partition: Partition | None = None,
) -> list[list[int]]:
    """Continue each prompt. Returns only the new tokens, without the stop token that ended them.

    The continuation of a prompt does not depend on the other prompts of the batch. Greedy or sampled, it is the one
    that the prompt alone would get, up to rounding in the logits. Equal prompts in a batch draw different samples.

    Args:
      model: the decoder, with its pattern.
      prompts: lists of token ids, each with at least one id. Their lengths may differ.
      max_new_tokens: at most so many tokens are added to each prompt.
      temperature: below 1e-5 the likeliest token is taken. Otherwise logits are divided by it and a token is sampled.
      top_k: sample only among the k likeliest tokens.
      top_p: sample among the fewest likeliest tokens whose probabilities (after temperature and top_k) reach p.
      stop_tokens: ids that end a sequence.
      seed: the seed of the samples.
      max_length: how many tokens the caches can hold. None takes the longest prompt and `max_new_tokens`, rounded up.
      partition: the mesh on which the model's parameters lie; the caches are split by KV heads and by prompts.

    Returns:
      A list of new token ids for each prompt.

    Raises `ConfigError`: an argument is out of its range; the sentence names it.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(f"model must be a loaded model, such as load_model returns, got {model!r:.40}")
    check_prompts(prompts, max_new_tokens, model.config)
    model.config.check_tokens(stop_tokens, "stop_tokens")
    rules = drawing(sampling(temperature, top_k, top_p), stop_tokens, seed)
    replies: dict[int, list[int]] = {}
    for group in by_rope_length(model, prompts, max_new_tokens, max_length):
        chosen = [prompts[i] for i in group]
        batch = prepare(model, chosen, max_new_tokens, max_length=max_length, partition=partition)
        new, _ = decode(model, batch, *prefill(model, batch), max_new_tokens, rules)
        for i, row in zip(group, np.asarray(new).tolist(), strict=False):  # a mesh may have more rows
            replies[i] = [token for token in row if token != NOTHING]
    return [replies[i] for i in range(len(prompts))]


class Batch(NamedTuple):
    """Prompts, right-padded to a rounded length."""

    tokens: jax.Array  # [B, T] int32
    lengths: jax.Array  # [B] int32
    keys: jax.Array  # [B] uint32: what tells one sequence's samples from another's
    max_length: int  # T_max of the caches
    partition: Partition | None = None


class Sampling(NamedTuple):
    """How a token is drawn; all data. What is None is not compiled, and no temperature means greedy."""

    temperature: jax.Array | None = None  # f32
    top_k: jax.Array | None = None  # int32
    top_p: jax.Array | None = None  # f32


GREEDY = Sampling()


class GenerationSetup(NamedTuple):
    """What the programs of generation are compiled for."""

    graph: Any  # the model without its weights
    max_length: int  # T_max of the caches
    partition: Partition | None

    def build(self, weights: nnx.State) -> tuple[Decoder, tuple[CacheLayout, ...]]:
        """The model, and the layouts of its caches."""
        model: Decoder = nnx.merge(self.graph, weights)
        return model, layouts_of(model, self.max_length, self.partition)


class DrawRules(NamedTuple):
    """How all sequences of a batch draw and what ends them; all data."""

    sampling: Sampling
    stop_tokens: jax.Array  # [N] int32; `NOTHING` is none
    seed: jax.Array  # uint32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """A batch in the middle of generation."""

    token: jax.Array  # [B] int32: the newest, not yet in the cache; the stop token that ended a sequence
    drawn: jax.Array  # [B] int32: new tokens so far
    active: jax.Array  # [B] bool: a sequence that has ended, or has not begun, leaves its cache as it is
    keys: jax.Array  # [B] uint32: what tells one sequence's samples from another's
    limits: jax.Array  # [B] int32: new tokens at most
    prompt_lengths: jax.Array  # [B] int32: where full-attention decode begins


def prepare(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    max_length: int | None = None,
    partition: Partition | None = None,
) -> Batch:
    """Check and pad the prompts. Raises `ConfigError` as `generate` does.

    On a mesh that splits the prompts, the last one is repeated until they can be split.
    """
    check_prompts(prompts, max_new_tokens, model.config)
    longest = max(map(len, prompts))
    if max_length is None:
        max_length = round_up(longest + max_new_tokens)
    elif longest + max_new_tokens > max_length:
        raise ConfigError(
            f"max_length is {max_length}, but the longest prompt has {longest} tokens and max_new_tokens is "
            f"{max_new_tokens}: it must be at least {longest + max_new_tokens}"
        )
    if partition is not None:
        check_generation(partition, model.config)
        prompts = [*prompts, *[prompts[-1]] * (-len(prompts) % partition.size("batch"))]
    size = cache_bytes(model.config, model.pattern, len(prompts), max_length, model.embedding[...].dtype.itemsize)
    check_fits(
        (size + 4 * len(prompts) * max_length) / (1 if partition is None else partition.mesh.size),
        f"caches and answers of {len(prompts)} prompts with room for {max_length} tokens",
        "lower max_new_tokens or max_length, or give fewer prompts at a time",
    )
    padded = min(round_up(longest), max_length)
    tokens = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    return Batch(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(sequence_keys(prompts)), max_length, partition)


def by_rope_length(
    model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, max_length: int | None = None
) -> list[list[int]]:
    """The numbers of the prompts that may share a cache: its length decides what LongRoPE does to all of them."""
    limit = model.config.long_rope_after if max_length is None else None  # which all share
    long = [limit is not None and round_up(len(prompt) + max_new_tokens) > limit for prompt in prompts]
    groups = [[i for i, one in enumerate(long) if one == kind] for kind in (False, True)]
    return [group for group in groups if group]


def sampling(temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None) -> Sampling:
    """Check the settings (see `generate`). Raises `ConfigError`."""
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 (greedy) or a positive number, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, got {top_p}")
    if temperature < SMALLEST_TEMPERATURE:
        return GREEDY
    return Sampling(
        jnp.float32(temperature),
        None if top_k is None else jnp.int32(top_k),
        None if top_p is None or top_p == 1 else jnp.float32(top_p),  # all tokens need not be sorted
    )


def drawing(sampling: Sampling = GREEDY, stop_tokens: Sequence[int] = (), seed: int = 0) -> DrawRules:
    """How sequences draw and what ends them, as arrays (see `generate`)."""
    # Any few stop tokens are the same program: what is left of them stands for no token.
    padded = np.full(-(-max(len(stop_tokens), 1) // 8) * 8, NOTHING, np.int32)
    padded[: len(stop_tokens)] = stop_tokens
    return DrawRules(sampling, jnp.asarray(padded), jnp.uint32(seed % 2**32))


def prefill(model: Decoder, batch: Batch) -> tuple[jax.Array, KVCache]:
    """The prompts through the model: logits [B, V] f32 of what follows each, and the filled caches."""
    graph, weights = nnx.split(model)
    return _prefill(GenerationSetup(graph, *batch[-2:]), weights, batch.tokens, batch.lengths)


def decode(
    model: Decoder, batch: Batch, logits: jax.Array, cache: KVCache, max_new_tokens: int, rules: DrawRules | None = None
) -> tuple[jax.Array, KVCache]:
    """Draw up to `max_new_tokens` after a prefill: [B, max_new_tokens] int32, `NOTHING` once a sequence has ended.

    Runs one step fewer than the tokens it returns, as the first comes from the prefill's `logits`, and ends early when
    every sequence has. `cache` is consumed (its memory is reused); the caches afterwards are returned.
    `rules` are those of `drawing`; None: greedy, and nothing ends a sequence.
    """
    graph, weights = nnx.split(model)
    rows = len(batch.lengths)
    zeros, limits = jnp.zeros(rows, jnp.int32), jnp.full(rows, max_new_tokens, jnp.int32)
    sequences = Sequences(zeros, zeros, jnp.ones(rows, bool), batch.keys, limits, batch.lengths)
    setup, rules = GenerationSetup(graph, *batch[-2:]), rules or drawing()
    new, cache = _decode(setup, weights, logits, cache, sequences, rules, buffer=round_up(max_new_tokens))
    return new[:, :max_new_tokens], cache


def round_up(length: int) -> int:
    """The next of a few lengths: a multiple of 64, or of an eighth of the power of two below, at most 1/8 more."""
    step = max(64, 2 ** (length.bit_length() - 4))
    return -(-length // step) * step


@device_jit(static_argnames="setup")
def _prefill(
    setup: GenerationSetup, weights: nnx.State, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, KVCache]:
    model, layouts = setup.build(weights)
    cache = allocate(model.config, layouts, tokens.shape[0], model.embedding[...].dtype, setup.partition)
    tokens = constrain(tokens, setup.partition, "batch", "sequence")
    return model.prefill(tokens, lengths, cache, layouts, partition=setup.partition)


def layouts_of(model: Decoder, max_length: int, partition: Partition | None = None) -> tuple[CacheLayout, ...]:
    """The layouts of a model's caches."""
    shards = 1 if partition is None else partition.size("kv_heads")
    return cache_layouts(model.config, model.pattern, max_length, shards)


def check_generation(partition: Partition, config: ModelConfig) -> None:
    """Raises `ConfigError` if a mesh splits heads that cannot be split, or the sequence, which generation does not."""
    check_model(config, partition)
    if partition.size("sequence") > 1:
        raise ConfigError("generation does not split the sequence: 'mesh.context' must be 1")


@device_jit(static_argnames=("setup", "buffer"), donate_argnames="cache")
def _decode(
    setup: GenerationSetup,
    weights: nnx.State,
    logits: jax.Array,
    cache: KVCache,
    sequences: Sequences,
    drawing: DrawRules,
    *,
    buffer: int,
) -> tuple[jax.Array, KVCache]:
    first, sequences = draw(sequences, logits, drawing)
    steps = sequences.limits.max() - 1
    new, cache, _ = decode_steps(setup, weights, cache, sequences, drawing, steps, buffer=buffer)
    return jnp.concatenate([first[:, None], new], axis=1), cache


def decode_steps(
    setup: GenerationSetup,
    weights: nnx.State,
    cache: KVCache,
    sequences: Sequences,
    drawing: DrawRules,
    steps: jax.Array,
    *,
    buffer: int,
    until_one_ends: jax.Array | bool = False,
) -> tuple[jax.Array, KVCache, Sequences]:
    """At most `steps` steps of decoding, fewer if all sequences end: [B, buffer] int32 new tokens, buffer >= steps.

    `NOTHING` stands where a sequence is not active or ends.

    Args:
      until_one_ends: stop as soon as one of the active sequences has ended.
    """
    model, layouts = setup.build(weights)
    full_from = model.pattern.full_from(sequences.prompt_lengths)
    begun = sequences.active

    class Loop(NamedTuple):
        step: jax.Array
        new: jax.Array
        cache: KVCache
        sequences: Sequences

    def goes_on(now: Loop) -> jax.Array:
        sequences = now.sequences
        one_ended = (begun & ~sequences.active).any()
        return (now.step < steps) & sequences.active.any() & ~(until_one_ends & one_ended)

    def advance(now: Loop) -> Loop:
        token, active = now.sequences.token, now.sequences.active
        logits, cache = model.decode_step(
            token, now.cache, layouts, full_from, active=active, partition=setup.partition
        )
        drawn, sequences = draw(now.sequences, logits, drawing)
        return Loop(now.step + 1, now.new.at[:, now.step].set(drawn), cache, sequences)

    new = jnp.full((len(sequences.token), buffer), NOTHING, jnp.int32)
    last = jax.lax.while_loop(goes_on, advance, Loop(jnp.int32(0), new, cache, sequences))
    return last.new, last.cache, last.sequences


def draw(sequences: Sequences, logits: jax.Array, drawing: DrawRules) -> tuple[jax.Array, Sequences]:
    """The next token of each active sequence from logits [B, V] f32: [B] int32, `NOTHING` if none, and what follows."""
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(drawing.seed)))(sequences.keys)  # [B]
    token = sample(logits, jax.vmap(jax.random.fold_in)(keys, sequences.drawn), drawing.sampling)
    continues = sequences.active & ~jnp.isin(token, drawing.stop_tokens)
    drawn = sequences.drawn + continues
    newest = jnp.where(sequences.active, token, sequences.token)
    others = dataclasses.replace(sequences, token=newest, drawn=drawn, active=continues & (drawn < sequences.limits))
    return jnp.where(continues, token, NOTHING), others


def sample(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """One token a row: logits [B, V] f32 and a key each [B] -> [B] int32."""
    temperature, top_k, top_p = sampling
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is None and top_p is None:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    # Ranks, not thresholds, decide what is kept, so that ties cannot let more than k through.
    order = jnp.argsort(logits, axis=-1, descending=True)  # [B, V], likeliest first
    logits = jnp.take_along_axis(logits, order, axis=-1)
    if top_k is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < top_k, logits, -jnp.inf)
    if top_p is not None:
        shares = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares  # of the likelier tokens: 0 for the first, which is always kept
        logits = jnp.where(before < top_p, logits, -jnp.inf)
    rank = jax.vmap(jax.random.categorical)(keys, logits)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0].astype(jnp.int32)


def sequence_keys(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """A number for each sequence from its prompt alone, but for equal prompts, which are told apart: [B] uint32."""
    seen: Counter[bytes] = Counter()
    keys = []
    for prompt in prompts:
        content = np.asarray(prompt, np.int32).tobytes()
        keys.append(sequence_key(prompt, seen[content]))
        seen[content] += 1
    return np.array(keys, np.uint32)


def sequence_key(prompt: Sequence[int], number: int) -> int:
    """What tells the samples of a prompt's `number`-th sequence from those of all others: a uint32."""
    return zlib.crc32(number.to_bytes(4), zlib.crc32(np.asarray(prompt, np.int32).tobytes()))


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: ModelConfig) -> None:
    """Raises `ConfigError` where `generate` does because of them."""
    if not isinstance(max_new_tokens, int | np.integer):
        raise ConfigError(f"max_new_tokens must be a whole number, got {max_new_tokens!r}")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if len(prompts) == 0:
        raise ConfigError("prompts is empty: give at least one prompt")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) or np.ndim(prompt) != 1:
            raise ConfigError(f"prompts[{i}] must be a list of token ids, got {prompt!r:.40}")
        if len(prompt) == 0:
            raise ConfigError(f"prompts[{i}] is empty: a prompt needs at least one token")
        config.check_tokens(prompt, f"prompts[{i}]")
