"""Caches of prompts and replies that have been computed, so that what begins alike is not computed twice.

A whole cache holds every prefix of what it holds; a ring, or the state of a linear layer, only the one that it stands
at. So a remembered sequence
keeps its whole caches once and its rings at a few lengths: where the prompt ends, where the reply ends, and where
another prompt has branched off.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.model.cache import KVCache
from swa_jax.model.gated_delta import LinearState

MOST_RINGS = 4  # lengths at which a sequence's rings are kept: those that were made or used last
# Keys and values of one sequence, [heads, entries, D] each, for each of the cache's pools. Behind the rings come the
# states of linear layers, if there are any.
Parts = tuple[tuple[jax.Array, jax.Array], ...]


@dataclasses.dataclass(eq=False)  # a sequence is itself, not another with the same tokens
class Prefix:
    """A sequence whose caches are remembered."""

    tokens: np.ndarray  # [N] int32
    whole: Parts  # at least N entries
    rings: dict[int, Parts]  # by length, its own first, then those that were used last
    logits: dict[int, jax.Array]  # what follows the first so many tokens: [V] f32


class Match(NamedTuple):
    """What of a prompt is remembered."""

    prefix: Prefix | None
    length: int  # tokens that need not be computed
    shared: int  # tokens that are alike; more than `length` where no ring stands there


class PrefixStore:
    """The last `size` sequences. `rings`: whether the model has ring caches, or linear layers."""

    def __init__(self, size: int, *, rings: bool):
        self.size, self.has_rings = size, rings
        self._prefixes: list[Prefix] = []  # the newest last

    def find(self, prompt: Sequence[int]) -> Match:
        """The remembered sequence that spares the most of a prompt."""
        tokens = np.asarray(prompt, np.int32)
        best = Match(None, 0, 0)
        for prefix in self._prefixes:
            shared = _shared(prefix.tokens, tokens)
            lengths = prefix.rings if self.has_rings else range(shared + 1)
            usable = [n for n in lengths if n <= shared and (n < len(tokens) or n in prefix.logits)]
            best = max(best, Match(prefix, max(usable, default=0), shared), key=lambda match: match[1:])
        if best.prefix is not None:
            self._prefixes.remove(best.prefix)
            self._prefixes.append(best.prefix)
            used, rings = best.length, best.prefix.rings
            best.prefix.rings = {used: rings[used]} | rings if used in rings else rings
        return best

    def forget(self) -> bool:
        """Drop the sequence that lay unused for longest; False where there is none."""
        found = bool(self._prefixes)
        del self._prefixes[:1]
        return found

    def add(self, prefix: Prefix) -> None:
        """Remember a sequence. What is known of its beginnings goes over to it, and beginnings alone are forgotten."""
        for other in self._prefixes[::-1]:
            shared = _shared(other.tokens, prefix.tokens)
            prefix.rings |= {n: rings for n, rings in other.rings.items() if n <= shared and n not in prefix.rings}
            prefix.logits |= {n: logits for n, logits in other.logits.items() if n <= shared and n not in prefix.logits}
            if shared == len(other.tokens):
                self._prefixes.remove(other)
        prefix.rings = dict([*prefix.rings.items()][:MOST_RINGS])
        prefix.logits = {n: prefix.logits[n] for n in prefix.rings if n in prefix.logits}
        self._prefixes = [*self._prefixes, prefix][-self.size :]


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens that two sequences begin with alike."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


@functools.partial(jax.jit, static_argnames="length")
def whole_of(cache: KVCache, row: jax.Array, *, length: int) -> Parts:
    """The first `length` entries of one sequence's whole caches."""
    return tuple((p.k_whole[:, row, :length], p.v_whole[:, row, :length]) for p in cache.pools)


@jax.jit
def rings_of(cache: KVCache, row: jax.Array) -> Parts:
    """One sequence's ring caches, and its states."""
    states = () if cache.states is None else ((cache.states.heads[:, row], cache.states.inputs[:, row]),)
    return tuple((p.k_ring[:, row], p.v_ring[:, row]) for p in cache.pools) + states


@functools.partial(jax.jit, donate_argnums=0)
def restored(cache: KVCache, row: jax.Array, whole: Parts | None, rings: Parts | None, length: jax.Array) -> KVCache:
    """The cache with `length` tokens of a remembered sequence in one row; with none, an empty row."""

    def put(pool: jax.Array, values: jax.Array) -> jax.Array:
        first = [jnp.int32(0), row, *[jnp.int32(0)] * (pool.ndim - 2)]
        return jax.lax.dynamic_update_slice(pool, values[:, None], first) if pool.size else pool

    pools, states = cache.pools, cache.states
    if whole is not None:
        pools = tuple(
            dataclasses.replace(p, k_whole=put(p.k_whole, k), v_whole=put(p.v_whole, v))
            for p, (k, v) in zip(pools, whole, strict=True)
        )
    if rings is not None:
        if states is not None:
            states = LinearState(*map(put, states, rings[len(pools)]))
        pools = tuple(
            dataclasses.replace(p, k_ring=put(p.k_ring, k), v_ring=put(p.v_ring, v))
            for p, (k, v) in zip(pools, rings[: len(pools)], strict=True)
        )
    return KVCache(pools, cache.lengths.at[row].set(length), states)
