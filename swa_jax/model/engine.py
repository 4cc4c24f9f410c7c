"""Continuous batching: more prompts than slots, prompts in chunks, and prefixes that are computed once.

`Engine` holds the caches of a fixed number of sequences, its slots. A prompt goes into a free slot chunk by chunk, and
between two chunks the other slots decode. A sequence that ends makes room for the next prompt at once. What each
prompt gets is what `swa_jax.generate` gives it alone, up to rounding in the logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.model.cache import KVCache, allocate, cache_bytes
from swa_jax.model.decoder import Decoder
from swa_jax.model.device_jit import device_jit
from swa_jax.model.generate import (
    GREEDY,
    NOTHING,
    DrawRules,
    GenerationSetup,
    Sampling,
    Sequences,
    check_generation,
    check_prompts,
    decode_steps,
    draw,
    drawing,
    layouts_of,
    round_up,
    sequence_keys,
)
from swa_jax.model.memory import check_fits, has_room
from swa_jax.model.prefixes import Parts, Prefix, PrefixStore, restored, rings_of, whole_of
from swa_jax.model.sharding import Partition

SMALLEST_CHUNK = 64  # tokens: shorter prompts share its compiled program


class Piece(NamedTuple):
    """New tokens of one prompt."""

    prompt: int  # its number
    tokens: list[int]
    ended: bool  # these were the last
    end: int | None = None  # the stop token behind them


@dataclasses.dataclass
class _Slot:
    """What one slot works on."""

    prompt: int
    tokens: list[int]  # of the prompt, and those drawn
    prompt_length: int
    filled: int  # tokens of the prompt in the cache
    alike: int  # tokens that are computed alike in every prompt that begins with them: no last tokens among them
    branch: int  # where remembered sequences have branched off: a chunk ends there, and behind those tokens
    rings: dict[int, Parts] = dataclasses.field(default_factory=dict)
    logits: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    first: jax.Array | None = None  # the first new token, still on the device

    @property
    def is_filled(self) -> bool:
        return self.filled == self.prompt_length


class Engine:
    """Generation for any number of prompts over a fixed number of caches.

    Args:
      model: the decoder, with its pattern.
      slots: sequences that decode together.
      max_length: tokens that a slot holds, prompt and reply together.
      chunk: prompt tokens that are computed at once.
      prefixes: prompts and replies whose caches are remembered, so that a later prompt that begins alike continues
        from there, as far as memory is free. 0 remembers none.
      steps: tokens that are decoded between two looks at the results.
      partition: the mesh on which the model's parameters lie; the caches are split by KV heads and by slots.

    Raises `ConfigError`: an argument is out of its range.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int = 8,
        max_length: int,
        chunk: int = 512,
        prefixes: int = 0,
        steps: int = 16,
        partition: Partition | None = None,
    ):
        for name, value, least in (
            ("slots", slots, 1),
            ("max_length", max_length, 2),
            ("chunk", chunk, 1),
            ("prefixes", prefixes, 0),
            ("steps", steps, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        self.model, self.max_length, self.chunk, self.steps = model, round_up(max_length), chunk, steps
        self.computed_tokens = 0  # prompt tokens that were not found in a prefix
        if partition is not None:
            check_generation(partition, model.config)
            if slots % (pieces := partition.size("batch")):
                raise ConfigError(f"slots must be a multiple of {pieces}, into which the mesh splits them, got {slots}")
        itemsize = model.embedding[...].dtype.itemsize
        one = cache_bytes(model.config, model.pattern, 1, self.max_length, itemsize)
        self._slot_bytes = one / (1 if partition is None else partition.mesh.size)
        check_fits(
            slots * self._slot_bytes,
            f"caches of {slots} sequences with room for {self.max_length} tokens",
            "take fewer slots, or shorter sequences",
        )
        graph, self._weights = nnx.split(model)
        self._setup = GenerationSetup(graph, self.max_length, partition)
        layouts = layouts_of(model, self.max_length, partition)
        empty = functools.partial(allocate, model.config, layouts, slots, model.embedding[...].dtype, partition)
        self._cache = jax.jit(empty)()
        zeros = jnp.zeros(slots, jnp.int32)
        self._sequences = Sequences(zeros, zeros, jnp.zeros(slots, bool), jnp.zeros(slots, jnp.uint32), zeros, zeros)
        self.num_slots = slots
        self._slots: dict[int, _Slot] = {}
        rings = any(layout.ring_rows for layout in layouts) or bool(model.config.linear_layers)
        self._prefixes = PrefixStore(prefixes, rings=rings)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of all slots."""
        return self._cache.nbytes

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_tokens: Sequence[int] = (),
        seed: int = 0,
        skip: Collection[int] = (),
        keys: Sequence[int] | None = None,
    ) -> Iterator[Piece]:
        """Continue each prompt; new tokens come as they are drawn, without the stop token that ends a reply.

        The consumer may end a reply by `stop`. The arguments are those of `swa_jax.generate`; the prompts whose numbers
        are in `skip` are left out, and change nothing for the others. `keys` are the prompts' `sequence_key`, where
        their order is not to tell equal prompts apart.

        Raises `ConfigError`: an argument is out of its range; the sentence names it. Nothing has been computed then.
        """
        check_prompts(prompts, max_new_tokens, self.model.config)
        self.model.config.check_tokens(stop_tokens, "stop_tokens")
        longest = max(map(len, prompts))
        if longest + max_new_tokens > self.max_length:
            raise ConfigError(
                f"the longest prompt has {longest} tokens and max_new_tokens is {max_new_tokens}: max_length must be "
                f"at least {longest + max_new_tokens}, and is {self.max_length}"
            )
        wanted = [number for number in range(len(prompts)) if number not in skip]
        numbers = sequence_keys(prompts) if keys is None else np.asarray(keys, np.uint32)
        return self._run(prompts, wanted, numbers, max_new_tokens, drawing(sampling, stop_tokens, seed))

    def stop(self, prompt: int) -> None:
        """End the reply to a prompt; the pieces that have come are all of it."""
        for number, slot in list(self._slots.items()):
            if slot.prompt == prompt:
                self._release(number, slot)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        wanted: Sequence[int],
        keys: np.ndarray,
        max_new_tokens: int,
        drawing: DrawRules,
    ) -> Iterator[Piece]:
        waiting = deque(wanted)
        self._slots = {}  # an earlier stream may not have been read to its end
        self._sequences = dataclasses.replace(self._sequences, active=jnp.zeros(self.num_slots, bool))
        while waiting or self._slots:
            free = [number for number in range(self.num_slots) if number not in self._slots]
            # One prompt after another, for the next may begin like this one.
            while waiting and free and all(slot.is_filled for slot in self._slots.values()):
                number, prompt = free.pop(0), waiting.popleft()
                self._slots[number] = self._begin(number, prompt, list(prompts[prompt]))
            for number, slot in self._slots.items():
                if not slot.is_filled:
                    self._fill(number)
            for number, slot in self._slots.items():
                if slot.is_filled and slot.first is None and len(slot.tokens) == slot.prompt_length:
                    self._draw_first(number, slot, keys[slot.prompt], max_new_tokens, drawing)
            # While prompts come in, every slot that decodes gets a token for each chunk.
            yield from self._decode(1 if waiting and free else self.steps, drawing, bool(waiting))

    def _begin(self, number: int, prompt: int, tokens: list[int]) -> _Slot:
        """A prompt into a slot, with what is remembered of it."""
        alike = max(0, len(tokens) - self.model.pattern.num_last_tokens)
        match = self._prefixes.find(tokens[:alike])
        prefix, length = match.prefix, match.length
        whole = rings = None
        slot = _Slot(prompt, tokens, len(tokens), length, alike, match.shared)
        if prefix is not None and length:
            whole, rings = prefix.whole, prefix.rings.get(length)
            if length == len(tokens):
                slot.logits[length] = prefix.logits[length]
        self._cache = restored(self._cache, jnp.int32(number), whole, rings, jnp.int32(length))
        return slot

    def _fill(self, number: int) -> None:
        """The next chunk of a prompt."""
        slot = self._slots[number]
        ends = slot.filled + self.chunk, slot.prompt_length, slot.branch, slot.alike
        end = min(one for one in ends if one > slot.filled)
        piece = slot.tokens[slot.filled : end]
        size = min(max(round_up(len(piece)), SMALLEST_CHUNK), max(self.chunk, len(piece)))
        tokens = np.zeros(size, np.int32)
        tokens[: len(piece)] = piece
        count, row = jnp.int32(len(piece)), jnp.int32(number)
        full_from = jnp.int32(slot.alike) if self.model.pattern.num_last_tokens else None
        logits, self._cache = _extend(
            self._setup, self._weights, jnp.asarray(tokens), count, row, full_from, self._cache
        )
        slot.filled = end
        self.computed_tokens += len(piece)
        if slot.is_filled or end in (slot.branch, slot.alike):
            slot.logits[end] = logits
            if self._prefixes.size and end <= slot.alike:
                slot.rings[end] = rings_of(self._cache, jnp.int32(number))
        if end == slot.alike:
            self._remember(number, slot, end)

    def _remember(self, number: int, slot: _Slot, length: int) -> None:
        """Keep the caches of a slot's first `length` tokens for prompts to come."""
        while self._prefixes.size and not has_room(2 * self._slot_bytes):  # as much is left for what is computed
            if not self._prefixes.forget():
                return
        if self._prefixes.size:
            rounded = min(round_up(length), self.max_length)
            whole = whole_of(self._cache, jnp.int32(number), length=rounded)
            tokens = np.asarray(slot.tokens[:length], np.int32)
            self._prefixes.add(Prefix(tokens, whole, dict(slot.rings), dict(slot.logits)))

    def _draw_first(self, number: int, slot: _Slot, key: np.uint32, max_new_tokens: int, drawing: DrawRules) -> None:
        logits = slot.logits[slot.prompt_length]
        lengths = jnp.array([max_new_tokens, slot.prompt_length], jnp.int32)
        slot.first, self._sequences = _draw_first(
            self._sequences, jnp.int32(number), logits, jnp.uint32(key), lengths, drawing
        )

    def _decode(self, steps: int, drawing: DrawRules, until_one_ends: bool) -> Iterator[Piece]:
        """At most so many steps of decoding for all slots whose prompts are in."""
        ready = [(number, slot) for number, slot in self._slots.items() if slot.is_filled]
        if not ready:
            return
        new, self._cache, self._sequences = _advance(
            *(self._setup, self._weights, self._cache, self._sequences, drawing, jnp.int32(steps)),
            buffer=self.steps,
            until_one_ends=jnp.bool_(until_one_ends),
        )
        firsts = {number: slot.first for number, slot in ready}
        drawn, now, firsts = jax.device_get((new, self._sequences, firsts))
        for number, slot in ready:
            if self._slots.get(number) is not slot:  # the consumer has stopped it in the meantime
                continue
            columns = [*([] if slot.first is None else [firsts[number]]), *drawn[number]]
            tokens = [int(token) for token in columns if token != NOTHING]
            slot.first = None
            slot.tokens += tokens
            ended = not now.active[number]
            if ended:
                self._release(number, slot)
            if tokens or ended:
                end = int(now.token[number]) if ended and now.drawn[number] < now.limits[number] else None
                yield Piece(slot.prompt, tokens, ended, end)

    def _release(self, number: int, slot: _Slot) -> None:
        """Make room for the next prompt."""
        if slot.is_filled and self._prefixes.size and not self.model.pattern.full_attention_decode:
            # Under full-attention decode a reply's keys are not those that a prompt of the same tokens has.
            length = int(self._cache.lengths[number])
            if slot.prompt_length < length <= len(slot.tokens):  # else it holds what nobody was given
                slot.rings[length] = rings_of(self._cache, jnp.int32(number))
                self._remember(number, slot, length)
        active = self._sequences.active.at[number].set(False)
        self._sequences = dataclasses.replace(self._sequences, active=active)
        del self._slots[number]


@device_jit(static_argnames="setup", donate_argnames="cache")
def _extend(
    setup: GenerationSetup,
    weights: nnx.State,
    tokens: jax.Array,
    count: jax.Array,
    row: jax.Array,
    full_from: jax.Array | None,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    model, layouts = setup.build(weights)
    return model.extend(tokens, count, row, cache, layouts, full_from, partition=setup.partition)


_advance = device_jit(static_argnames=("setup", "buffer"), donate_argnames="cache")(decode_steps)


@jax.jit
def _draw_first(
    sequences: Sequences, number: jax.Array, logits: jax.Array, key: jax.Array, lengths: jax.Array, drawing: DrawRules
) -> tuple[jax.Array, Sequences]:
    """The first token of a slot whose prompt is in, from logits [V]; `lengths` are its limit and its prompt's."""
    zero, one = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    alone = Sequences(zero, zero, one, key[None], lengths[:1], lengths[1:])
    token, alone = draw(alone, logits[None], drawing)
    return token[0], jax.tree.map(lambda x, y: x.at[number].set(y[0]), sequences, alone)
