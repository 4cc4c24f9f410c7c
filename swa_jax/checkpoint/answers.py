"""The answers in the receipt of an export: what the model generates after a prompt, and in the next turn.

A server may treat the tokens that it generates otherwise than those of a prompt; log-probabilities of prompts do not
show it. As a server does, this takes a prompt into a cache and then goes one token at a time, by the reading's pattern.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.math.spec import NEVER
from swa_jax.checkpoint.check_server import TOP
from swa_jax.model.attention import cast_parameters
from swa_jax.model.cache import KVCache, allocate
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import layouts_of, prefill, prepare
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

NEW, TURN = 16, 8  # tokens of an answer, and of what a user says to it
CACHED = 8  # tokens of the first answer that end a block of the server's cache
BLOCKS = (128, 64, 32, 16, 8, 1)  # tokens of such a block: the longest that fits is a multiple of the others
MOST_PROMPTS = 2  # in the file
STEP = 16  # texts of one token that take as long as a step of decoding, which reads all weights


class AnswerReading(NamedTuple):
    """One way of generating after prompts that are read right.

    Attributes:
      name, sentence: as of `readings.Reading`.
      pattern: what generated tokens see,
      full: or that they see everything.
      taken_over: keys that were made for the first answer also serve the next turn, where they belong to a prompt.
    """

    name: str
    sentence: str
    pattern: AttentionPattern
    full: bool = False
    taken_over: bool = False


def answer_readings(pattern: AttentionPattern, sentence: str) -> list[AnswerReading]:
    """The right reading, which `sentence` describes, then the wrong ones."""
    window = pattern.sliding_window
    if pattern.full_attention_decode:
        return [
            AnswerReading("right", sentence, pattern, full=True),
            AnswerReading("decode dropped", "generated tokens see windows, not everything", pattern),
            AnswerReading(
                "answer taken over",
                "the next turn takes over the cached keys of the answer, which saw everything",
                pattern,
                full=True,
                taken_over=True,
            ),
        ]
    found = [AnswerReading("right", sentence, pattern)]
    if window is None or {*pattern.layer_types} == {FULL}:
        return found
    found.append(AnswerReading("full decode", "generated tokens see everything, not windows", pattern, full=True))
    for name, words, other in (("- 1", "less", window - 1), ("+ 1", "more", window + 1)):
        if other >= 1:
            said = f"generated tokens see one key {words} ({other} in place of {window})"
            changed = dataclasses.replace(pattern, sliding_window=other)
            found.append(AnswerReading(f"window {name} in decode", said, changed))
    if pattern.num_sink_tokens:
        dropped = dataclasses.replace(pattern, num_sink_tokens=0)
        said = "generated tokens do not see the sink tokens beyond the window"
        found.append(AnswerReading("sink tokens dropped in decode", said, dropped))
    for kind, name, words in ((HYBRID, "full heads", "full heads"), (FULL, "full layers", "layers of full attention")):
        if kind in pattern.layer_types and not pattern.chunked:
            types = tuple(WINDOW if one == kind else one for one in pattern.layer_types)
            heads = () if kind == HYBRID else pattern.full_kv_heads
            dropped = dataclasses.replace(pattern, layer_types=types, full_kv_heads=heads)
            found.append(AnswerReading(f"{name} dropped in decode", f"{words} have windows in decode", dropped))
    return found


def tokens_after(pattern: AttentionPattern) -> int:
    """Tokens that are generated or said after a prompt. A next turn is asked for where answers see more than prompts:
    elsewhere their keys may be taken over."""
    return NEW + TURN + NEW if pattern.full_attention_decode else NEW


def prompt_length(pattern: AttentionPattern, shortest: int, wanted: int, room: int) -> int | None:
    """Tokens of a prompt: at least `shortest`, about `wanted`, and with what follows at most `room`; None: no such.

    `CACHED` tokens later a block of the server's cache ends.
    """
    for block in BLOCKS:
        first = -(-(shortest + CACHED) // block) * block
        last = (room - tokens_after(pattern) + CACHED) // block * block
        if first <= last:
            return min(max(first, wanted // block * block), last) - CACHED
    return None


def positions_computed(pattern: AttentionPattern, prompts: int, length: int) -> int:
    """Tokens of which the computation of `answers` takes as long, for so many prompts of `length` tokens."""
    patterns = {one.pattern for one in answer_readings(pattern, "")}
    return 2 * prompts * length + (len(patterns) + 1) * tokens_after(pattern) * STEP


def answers(
    model: Decoder,
    readings: list[AnswerReading],
    texts: Sequence[Sequence[int]],
    plain: np.ndarray,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The answers as a JSON value.

    Args:
      model: the decoder in f32, under any pattern.
      readings: the right one first.
      texts: candidates of equal length for prompts, each with `TURN` tokens more: what is said to the answer.
      plain: the ids of tokens that do not end an answer.
      advance: called after each pass.
    """
    pattern = readings[0].pattern
    turns = [slice(0, NEW), slice(NEW + TURN, None)][: 1 + pattern.full_attention_decode]
    steps = tokens_after(pattern)
    prompts = [list(text[:-TURN]) for text in texts]
    said = np.zeros((len(texts), steps), np.int32)
    said[:, NEW : NEW + TURN] = [text[-TURN:] for text in texts] if len(turns) > 1 else 0

    def regimes(reading: AnswerReading) -> list[np.ndarray]:
        """Which generated tokens see everything, [S] bool for each turn: in the next turn, only its own answer."""
        step = np.arange(steps)
        later = step >= NEW + TURN if not reading.taken_over else (step < CACHED) | (step >= NEW + TURN)
        return [np.full(steps, reading.full), reading.full & later][: len(turns)]

    begun = {dtype: _Begun(model, pattern, prompts, steps, dtype) for dtype in (jnp.float32, jnp.bfloat16)}
    by_pattern = {one.pattern: [other for other in readings if other.pattern == one.pattern] for one in readings}
    leads = np.full(steps, -1)
    for turn, its in enumerate(turns):
        leads[its] = turn  # of the first rows, which are the right reading's
    tops: dict[str, list[np.ndarray]] = {}
    for number, (own, group) in enumerate(by_pattern.items()):
        rows = np.stack([row for reading in group for row in regimes(reading)])
        found = begun[jnp.float32](own, said, leads if number == 0 else np.full(steps, -1), rows)
        advance()
        if number == 0:
            said = found.tokens
        for i, reading in enumerate(group):
            tops[reading.name] = [found.top[its, len(turns) * i + turn] for turn, its in enumerate(turns)]
    rounded = begun[jnp.bfloat16](pattern, said, np.full(steps, -1), np.stack(regimes(readings[0])))
    advance()
    noise = [rounded.top[its, turn] for turn, its in enumerate(turns)]
    same = np.isin(said, plain).T[:, None] & (rounded.drawn == said.T[:, None])  # [S, turns, C]
    agreed = [np.cumprod(same[its, turn], axis=0).sum(axis=0) for turn, its in enumerate(turns)]  # [C] each
    chosen = _best(tops, agreed)
    ends = [[int(np.argmin([*np.isin(said[c, its], plain), False])) for c in range(len(texts))] for its in turns]

    def values(found: list[np.ndarray]) -> list[list[float]]:
        return [
            [round(float(x), 5) for x in found[turn][: ends[turn][c], c].ravel()]
            for c in chosen
            for turn in range(len(turns))
        ]

    return {
        "questions": [
            {
                "tokens": prompts[c] + said[c, : its.start].tolist(),
                "answer": said[c, its][: ends[turn][c]].tolist(),
                "next_turn": turn == 1,
            }
            for c in chosen
            for turn, its in enumerate(turns)
        ],
        "cached": CACHED,
        "bfloat16": values(noise),
        "readings": [
            {"name": one.name, "sentence": one.sentence, "values": values(tops[one.name])}
            for one in readings
            if one is readings[0] or _differs(tops[one.name], tops["right"])
        ],
    }


def _differs(top: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return any(np.abs(a - b).max() > 1e-4 for a, b in zip(top, right, strict=True))


def _best(tops: dict[str, list[np.ndarray]], agreed: list[np.ndarray]) -> list[int]:
    """The candidates whose answers separate the readings best where they do worst, counting the tokens up to the first
    that rounding may change, and the next turn only behind a whole block of the first answer."""
    counted = [np.arange(len(top))[:, None] <= same for top, same in zip(tops["right"], agreed, strict=True)]
    if len(counted) > 1:
        counted[1] = counted[1] & (agreed[0] >= CACHED)
    apart = np.stack(
        [
            sum(
                (np.abs(a - b).sum(axis=2) * some).sum(axis=0)
                for a, b, some in zip(found, tops["right"], counted, strict=True)
            )
            for name, found in tops.items()
            if name != "right" or len(tops) == 1
        ]
    )  # [R, C]
    score = (apart / np.maximum(apart.max(axis=1, keepdims=True), 1e-9)).min(axis=0)
    return np.argsort(-score, kind="stable")[:MOST_PROMPTS].tolist()


class _Steps(NamedTuple):
    tokens: np.ndarray  # [C, S]: that were taken
    drawn: np.ndarray  # [S, R, C]: the likeliest
    top: np.ndarray  # [S, R, C, TOP]: the log-probabilities of the likeliest, falling


class _Begun:
    """Prompts in whole caches."""

    def __init__(
        self, model: Decoder, pattern: AttentionPattern, prompts: list[list[int]], steps: int, dtype: Any
    ) -> None:
        graph, weights = nnx.split(model)
        self.model = nnx.merge(graph, cast_parameters(weights, dtype))
        own = self._keeping(pattern)
        batch = prepare(own, prompts, steps, max_length=len(prompts[0]) + steps)
        self.max_length, self.begun = batch.max_length, prefill(own, batch)

    def _keeping(self, pattern: AttentionPattern) -> Decoder:
        """The model by a pattern, with caches that keep everything."""
        return self.model.with_pattern(dataclasses.replace(pattern, full_attention_decode=True))

    def __call__(self, pattern: AttentionPattern, said: np.ndarray, leads: np.ndarray, full: np.ndarray) -> _Steps:
        """Goes on after the prompts, in each of R ways.

        Args:
          pattern: what the tokens see,
          full: [R, S] bool, or that they see everything.
          said: [C, S], the tokens,
          leads: [S], or the row of `full` whose likeliest token is taken in all rows; -1: the one in `said`.
        """
        graph, weights = nnx.split(self._keeping(pattern))
        return _Steps(*map(np.asarray, _steps(graph, weights, *self.begun, said, leads, full, self.max_length)))


@functools.partial(jax.jit, static_argnames=("graph", "max_length"))
def _steps(
    graph: Any,
    weights: Any,
    logits: jax.Array,
    cache: KVCache,
    said: jax.Array,
    leads: jax.Array,
    full: jax.Array,
    max_length: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `_Begun.__call__`, after logits [C, V] and the cache of the prompts: tokens [C, S], drawn, top."""
    model = nnx.merge(graph, weights)
    layouts, dtype = layouts_of(model, max_length), model.embedding[...].dtype
    ways, count = full.shape[0], said.shape[0]
    empty = allocate(layouts, ways * count, dtype)  # its rings, which have no rows, have the window of this pattern
    pools = tuple(
        dataclasses.replace(
            rings, k_whole=jnp.tile(pool.k_whole, (1, ways, 1, 1)), v_whole=jnp.tile(pool.v_whole, (1, ways, 1, 1))
        )
        for pool, rings in zip(cache.pools, empty.pools, strict=True)
    )
    cache = KVCache(pools, jnp.tile(cache.lengths, ways))

    def step(carry: tuple[jax.Array, KVCache], now: tuple) -> tuple[tuple[jax.Array, KVCache], tuple]:
        (logits, cache), (said, lead, full) = carry, now
        log_probs = jax.nn.log_softmax(logits.astype(dtype).astype(jnp.float32))  # servers round logits as well
        drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32).reshape(ways, count)
        token = jnp.where(lead < 0, said, drawn[lead])  # [C]
        full_from = jnp.repeat(jnp.where(full, 0, NEVER).astype(jnp.int32), count)
        after = model.decode_step(jnp.tile(token, ways), cache, layouts, full_from)
        top = jax.lax.top_k(log_probs, TOP)[0].reshape(ways, count, TOP)
        return after, (token, drawn, top)

    first = jnp.tile(logits, (ways, 1))
    _, (tokens, drawn, top) = jax.lax.scan(step, (first, cache), (said.T, leads, full.T))
    return tokens.T, drawn, top
