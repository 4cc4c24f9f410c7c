"""The answers in the receipt of an export: what the model generates after a prompt, and in the next turn.

A server may treat the tokens that it generates otherwise than those of a prompt; log-probabilities of prompts do not
show it. As a server does, this takes a prompt into a cache and then goes one token at a time. What each token sees is
data: one compiled program generates, and reads what was generated in every way.
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

from pallas_kernels import attention
from pallas_kernels.math.spec import Packing, visible
from pallas_kernels.pools import write_token
from swa_jax.checkpoint.check_server import TOP
from swa_jax.model.attention import LayerData, cast_parameters, layer_data, model_spec
from swa_jax.model.block import Block, Stream
from swa_jax.model.cache import CachePools, KVCache, cache_bytes
from swa_jax.model.cached_attention import LayerPlace, layer_places
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import layouts_of, prefill, prepare
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH
from swa_jax.model.pattern import AttentionPattern

NEW, TURN = 16, 8  # tokens of an answer, and of what a user says to it
CACHED = 8  # tokens of the first answer that end a block of the server's cache
BLOCKS = (128, 64, 32, 16, 8, 1)  # tokens of such a block: the longest that fits is a multiple of the others
MOST_PROMPTS = 2  # in the file
CLEAR = 2.0  # times what bfloat16 changes: how far apart the two likeliest tokens are where rounding keeps their order
ROOM = 2**29  # bytes of caches, or a quarter of what the weights take
STEP = 16  # positions that take as long as a step of decoding, which reads all weights


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
    right = AnswerReading("right", sentence, pattern, full=pattern.full_attention_decode)
    window = pattern.sliding_window
    if window is None or pattern.is_full:
        return [right]
    if right.full:
        taken_over = "the next turn takes over the cached keys of the answer, which saw everything"
        return [
            right,
            AnswerReading("decode dropped", "generated tokens see windows, not everything", pattern),
            AnswerReading("answer taken over", taken_over, pattern, full=True, taken_over=True),
        ]
    found = [right, AnswerReading("full decode", "generated tokens see everything, not windows", pattern, full=True)]

    def also(name: str, sentence: str, **fields: Any) -> None:
        found.append(AnswerReading(f"{name} in decode", sentence, dataclasses.replace(pattern, **fields)))

    for name, words, other in (("window - 1", "less", window - 1), ("window + 1", "more", window + 1)):
        if other >= 1:
            also(name, f"generated tokens see one key {words} ({other} in place of {window})", sliding_window=other)
    if pattern.num_sink_tokens:
        also("sink tokens dropped", "generated tokens do not see the sink tokens beyond the window", num_sink_tokens=0)
    if HYBRID in pattern.layer_types:
        also("full heads dropped", "the full heads have windows for generated tokens", full_kv_heads=())
    return found


def tokens_after(pattern: AttentionPattern) -> int:
    """Tokens that are generated or said after a prompt. A next turn is asked for where answers see more than prompts:
    elsewhere their keys may be taken over."""
    return turns_of(pattern)[-1].stop


def turns_of(pattern: AttentionPattern) -> list[slice]:
    """Where among these the answers stand."""
    return [slice(0, NEW), slice(NEW + TURN, NEW + TURN + NEW)][: 1 + pattern.full_attention_decode]


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
    """Positions of a text that take as long as `answers` to so many prompts of `length` tokens."""
    runs = (len(answer_readings(pattern, "")) + 1) * len(turns_of(pattern))
    return 2 * prompts * length + runs * tokens_after(pattern) * max(STEP, prompts)


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
      advance: called after each reading, and after the right one in bfloat16.
    """
    pattern = readings[0].pattern
    turns, steps = turns_of(pattern), tokens_after(pattern)
    whole = dataclasses.replace(pattern, full_attention_decode=True)  # its caches keep everything
    size = cache_bytes(model.config, whole, 1, len(texts[0]) + steps, 4)
    weights = 4 * sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    texts = texts[: max(1, max(weights // 4, ROOM) // size)]
    prompts = [list(text[:-TURN]) for text in texts]
    said = np.zeros((len(texts), steps), np.int32)  # [C, S]
    if len(turns) > 1:
        said[:, NEW : NEW + TURN] = [text[-TURN:] for text in texts]

    begun = _Begun(model.with_pattern(whole), prompts, steps)
    tops: list[list[np.ndarray]] = []  # [S, C, TOP] by reading and turn
    for reading in readings:
        tops.append([])
        for turn, its in enumerate(turns):
            run = begun.go_on(reading, turn, said, its if reading is readings[0] else slice(0))
            said = run.tokens
            tops[-1].append(run.top[its])
        advance()
    graph, state = nnx.split(begun.model)
    begun = _Begun(nnx.merge(graph, cast_parameters(state, jnp.bfloat16)), prompts, steps)
    rounded = [begun.go_on(readings[0], turn, said, slice(0)) for turn in range(len(turns))]
    noise = [run.top[its] for run, its in zip(rounded, turns, strict=True)]
    advance()
    rounding = np.mean([np.abs(a - b).mean() for a, b in zip(noise, tops[0], strict=True)])
    usable = np.isin(said, plain).T  # [S, C]
    clear = [
        usable[its] & (run.likeliest[its] == said.T[its]) & (right[..., 0] - right[..., 1] > CLEAR * rounding)
        for its, run, right in zip(turns, rounded, tops[0], strict=True)
    ]
    chosen = _best(tops, list(map(_leading, clear)))
    ends = [_leading(usable[its]) for its in turns]
    # A server keeps a whole block of the first answer once it has generated one token more.
    places = [(c, turn) for c in chosen for turn in range(len(turns)) if turn == 0 or ends[0][c] > CACHED]

    def values(found: list[np.ndarray]) -> list[list[float]]:
        return [[round(float(x), 5) for x in found[turn][: ends[turn][c], c].ravel()] for c, turn in places]

    return {
        "questions": [
            {
                "tokens": prompts[c] + said[c, : turns[turn].start].tolist(),
                "answer": said[c, turns[turn]][: ends[turn][c]].tolist(),
                "next_turn": turn == 1,
            }
            for c, turn in places
        ],
        "cached": CACHED,
        "bfloat16": values(noise),
        "readings": [
            {"name": one.name, "sentence": one.sentence, "values": values(found)}
            for one, found in zip(readings, tops, strict=True)
            if found is tops[0] or any(np.abs(a - b).max() > 1e-4 for a, b in zip(found, tops[0], strict=True))
        ],
    }


def _leading(true: np.ndarray) -> np.ndarray:
    """[S, C] bool -> [C], how many are true before the first that is not."""
    return np.cumprod(true, axis=0).sum(axis=0)


def _best(tops: list[list[np.ndarray]], agreed: list[np.ndarray]) -> list[int]:
    """The candidates whose answers separate the readings best where they do worst, counting the tokens up to the first
    that rounding may change, and the next turn only behind a whole block of the first answer.

    Args:
      tops: [S, C, TOP] by reading and turn.
      agreed: [C] by turn, the tokens that rounding does not change.
    """
    counted = [np.arange(len(top))[:, None] <= same for top, same in zip(tops[0], agreed, strict=True)]  # [S, C] each
    counted[1:] = [later & (agreed[0] > CACHED) for later in counted[1:]]
    apart = [
        sum((np.abs(a - b).sum(2) * some).sum(0) for a, b, some in zip(found, tops[0], counted, strict=True))
        for found in tops[1:]
    ]  # [C] each
    score = np.min([one / max(one.max(), 1e-9) for one in apart] or [agreed[0]], axis=0)
    return np.argsort(-score, kind="stable")[:MOST_PROMPTS].tolist()


# ---- going on after prompts ----


class _Run(NamedTuple):
    tokens: np.ndarray  # [C, S]
    likeliest: np.ndarray  # [S, C], the token that would be drawn
    top: np.ndarray  # [S, C, TOP], the log-probabilities of the likeliest, falling


class _Begun:
    """Prompts in caches that keep everything, and so serve all readings."""

    def __init__(self, model: Decoder, prompts: list[list[int]], steps: int):
        self.model, self.start, self.steps = model, len(prompts[0]), steps
        self.logits, self.cache = prefill(model, prepare(model, prompts, steps, max_length=self.start + steps))

    def go_on(self, reading: AnswerReading, turn: int, given: np.ndarray, drawn: slice) -> _Run:
        """What follows the prompts: the tokens in `given` [C, S], and those that are `drawn`, as `turn` is read."""
        config, pattern, step = self.model.config, reading.pattern, np.arange(self.steps)
        keys = np.arange(self.start + self.steps)
        answered = (step >= NEW + TURN) | (reading.taken_over & (step < CACHED)) if turn else step >= 0
        sees = visible(
            model_spec(config, pattern), keys[self.start :, None], keys, full_rows=(answered & reading.full)[:, None]
        )  # [S, T]
        full = np.array([kind == FULL for kind in pattern.layer_types])[:, None]  # [L, 1]
        heads = full | np.asarray(layer_data(pattern, config).full_heads)  # [L, K]
        draws = np.zeros(self.steps, bool)
        draws[drawn] = True
        run = _steps(*nnx.split(self.model), self.logits, self.cache, given, draws, np.asarray(sees), heads)
        return _Run(*map(np.asarray, run))


@functools.partial(jax.jit, static_argnames="graph")
def _steps(
    graph: Any,
    weights: Any,
    logits: jax.Array,
    cache: KVCache,
    given: jax.Array,
    draws: jax.Array,
    sees: jax.Array,
    heads: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A `_Run` after the logits [C, V] and the cache of the prompts.

    Args:
      given: [C, S], the tokens that follow where none is drawn.
      draws: [S] bool, where the likeliest one is.
      sees: [S, T] bool, the keys that windowed heads see.
      heads: [L, K] bool, the heads that see all.
    """
    model: Decoder = nnx.merge(graph, weights)
    count, length = given.shape[0], sees.shape[1]
    places = tuple(map(layer_places, layouts_of(model, length)))
    dtype = model.embedding[...].dtype

    def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
        (logits, pools, position), (given, draw, seen) = carry, now
        log_probs = jax.nn.log_softmax(logits.astype(dtype).astype(jnp.float32))  # servers round logits as well
        likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        token = jnp.where(draw, likeliest, given)  # [C]
        positions = jnp.full((count, 1), position)
        context = model.context(token[:, None], positions=positions, rope_length=length)

        def layer(carry: tuple, block: Block, scanned: tuple) -> tuple[tuple, None]:
            (stream, pools), (row, places, full) = carry, scanned
            place = places[block.group]
            mixed, own, made = _attend(block, stream, row, context, pools[block.group], place, seen, full)
            pools = tuple(own if i == block.group else other for i, other in enumerate(pools))
            x, _ = block.after_attention(stream.x, mixed, row)
            return (stream.behind(block, x, *made), pools), None

        stream, data = model.begin(token[:, None])
        (stream, pools), _ = model.scan(layer, (stream, pools), (data, places, heads))
        after = model.logits(model.norm(stream.x[:, 0]))
        return (after, pools, position + 1), (token, likeliest, jax.lax.top_k(log_probs, TOP)[0])

    begun = logits, cache.pools, cache.lengths[0]
    _, (tokens, likeliest, top) = jax.lax.scan(step, begun, (given.T, draws, sees))
    return tokens.T, likeliest, top


def _attend(
    block: Block,
    stream: Stream,
    row: LayerData,
    context: Any,
    pools: CachePools,
    place: LayerPlace,
    seen: jax.Array,
    full: jax.Array,
) -> tuple[jax.Array, CachePools, tuple]:
    """The attention of one new token a sequence: its output [B, 1, d], the caches with its key in, and that key and
    value. `seen` [T] bool: the keys that windowed heads see; `full` [K] bool: the heads that see all."""
    own, x = block.attention, block.attention_input(stream.x)
    q, k, v = own.qkv(x, row, context)
    if k is not None and v is not None:
        entry = context.positions[:, 0]
        k_whole = write_token(pools.k_whole, place.whole_slots, k, entry)
        v_whole = write_token(pools.v_whole, place.whole_slots, v, entry)
        pools = dataclasses.replace(pools, k_whole=k_whole, v_whole=v_whole)
    kv_heads = own.config.num_key_value_heads
    slots = place.whole_slots[:kv_heads]
    keys, values = (pool[slots].transpose(1, 2, 0, 3) for pool in (pools.k_whole, pools.v_whole))  # [B, T, K, D]

    def over(seen: jax.Array) -> jax.Array:
        """[B, 1, H, D]; a negative position is an empty entry."""
        positions = jnp.broadcast_to(jnp.where(seen, jnp.arange(len(seen)), -1), (len(q), len(seen)))
        packing = Packing(q_positions=context.positions, kv_positions=positions)
        return attention(
            q, keys, values, context.spec.full, per_head=own.per_head(), packing=packing, implementation="xla"
        )

    _, gate = own.route(x)  # [B, 1]
    routed = (row.kind == row.kinds.index(SWITCH)) & (gate > 0.5) if SWITCH in row.kinds else False
    wide = jnp.repeat(full[:kv_heads] | routed, q.shape[2] // kv_heads, axis=-1)[..., None, :, None]
    mixed = jnp.where(wide, over(jnp.ones_like(seen)), over(seen))
    return own.output(mixed, x), pools, (k, v)
