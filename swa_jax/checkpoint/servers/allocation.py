"""What servers allocate for the keys and values of one sequence, in entries: tokens times layers.

vLLM sorts the layers into groups of one kind and of equal size, so that a block of any group takes the same memory. The
size is that of the rarer kind, or of the other kind where that has fewer than 1.5 times as many layers; a group that is
not full is paid for as if it were (`kv_cache_planning.py` of vLLM 0.33.0).

SGLang and sglang-jax have a pool for full layers and one for windowed layers, whose sizes stand in one proportion, so
that a sequence takes what the larger of its two parts asks for. An export's command sets the proportion to what a
sequence holds. Where every layer has a window, a sequence is admitted when all of it would fit.

MLX-LM gives every windowed layer a ring of its own. Between two parts of a prompt every ring still has the last part.

llama.cpp has cells for full layers, as many as a sequence is long, and cells for windowed layers, which hold a window
and the part of a prompt that is computed, both in blocks of 256 (`llama-kv-cache-iswa.cpp` of b11549).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

WASTE = 1.15  # times what the layers need: from here on a grouping is worth a warning


class Blocks(NamedTuple):
    """How a server hands out memory: the tokens of a block, and those of prompts that windowed layers hold."""

    tokens: int
    in_flight: int  # tokens of all batches that have been planned and not yet ended


# (full layers, windowed layers, window, tokens of the sequence, blocks, sink tokens) -> entries
Entries = Callable[[int, int, int | None, int, Blocks, int], int]


def ceil_share(share: float) -> float:
    """Three decimals, rounded up, so that a budget of this much can be met."""
    return -(-share * 1000 // 1) / 1000


# ---- groups ----


class Groups(NamedTuple):
    """vLLM's groups of layers: the layers of one, and how many there are of each kind."""

    layers: int
    full: int
    windowed: int


def group_layers(full: int, windowed: int) -> Groups:
    """The groups of a model with so many layers of each kind."""
    if not full or not windowed:
        return Groups(full + windowed, int(full > 0), int(windowed > 0))
    fewer, more = sorted((full, windowed))
    size = more if more < 1.5 * fewer else fewer
    return Groups(size, -(-full // size), -(-windowed // size))


def grouped_entries(
    full: int, windowed: int, window: int | None, length: int, blocks: Blocks, sink_tokens: int = 0
) -> int:
    """What vLLM's planner grants a sequence of `length` tokens."""
    groups = group_layers(full, windowed)
    whole = -(-length // blocks.tokens)
    short = 0
    if windowed:
        assert window is not None
        # A window need not begin where a block does.
        short = -(-min(window - 1 + blocks.in_flight, length) // blocks.tokens) + 1 + -(-sink_tokens // blocks.tokens)
    return groups.layers * blocks.tokens * (groups.full * whole + groups.windowed * short)


def better_grouping(full: int, windowed: int, window: int, length: int, blocks: Blocks) -> int | None:
    """The number of full layers nearest to `full` that vLLM groups without much waste and in no more memory.

    None where `full` is such a number itself.
    """

    def taken_and_needed(full: int) -> tuple[int, int]:
        kinds = (full, layers - full)
        alone = [grouped_entries(*pair, window, length, blocks) for pair in ((full, 0), (0, layers - full))]
        return grouped_entries(*kinds, window, length, blocks), sum(alone)

    layers = full + windowed
    taken, needed = taken_and_needed(full)
    if taken <= WASTE * needed:
        return None
    fitting = [n for n in range(layers + 1) if (found := taken_and_needed(n))[0] <= min(taken, WASTE * found[1])]
    return min(fitting, key=lambda n: (abs(n - full), -n), default=None)


# ---- two pools ----


@dataclasses.dataclass(frozen=True)
class Pools:
    """The two pools of a server, where `held` gives the tokens that windowed layers hold of a long sequence."""

    held: Callable[[int, Blocks], int]

    def ratio(self, window: int, length: int, blocks: Blocks) -> float:
        """What windowed layers hold of a sequence of `length` tokens, a share of all its tokens."""
        return ceil_share(min(self.held(window, blocks), length) / length)

    def __call__(
        self, full: int, windowed: int, window: int | None, length: int, blocks: Blocks, sink_tokens: int
    ) -> int:
        """The entries of a sequence of `length` tokens."""
        if not full or not windowed:
            return length * (full + windowed)
        return length * full + math.ceil(length * self.ratio(window or 0, length, blocks)) * windowed


# ---- rings ----


def ring_entries(full: int, windowed: int, window: int | None, length: int, blocks: Blocks, sink_tokens: int) -> int:
    """What MLX-LM's caches take of a sequence of `length` tokens."""
    whole = -(-length // blocks.tokens) * blocks.tokens
    return whole * full + min((window or 0) - 1 + blocks.in_flight, whole) * windowed


# ---- cells ----


def cell_entries(full: int, windowed: int, window: int | None, length: int, blocks: Blocks, sink_tokens: int) -> int:
    """What llama.cpp's caches take of a sequence of `length` tokens."""
    whole, short = (
        -(-tokens // blocks.tokens) * blocks.tokens for tokens in (length, (window or 0) + blocks.in_flight)
    )
    return whole * full + min(short, whole) * windowed
