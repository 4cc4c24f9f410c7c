"""What the key/value cache of one sequence takes in the servers that run an export.

`model.cache` keeps whole sequences where a layer needs them and rings elsewhere. A server's memory is shared by many
sequences and handed out in blocks, so that a pattern may save less there, or nothing.

vLLM (and tpu-inference, which plans with vLLM's code) sorts the layers into groups of one kind and of equal size, so
that a block of any group takes the same memory. The size is that of the rarer kind, or of the other kind where that has
fewer than 1.5 times as many layers; a group that is not full is paid for as if it were (`kv_cache_planning.py` of vLLM
0.33.0). SGLang keeps a pool for windowed layers for gpt-oss alone.
"""

from __future__ import annotations

from typing import NamedTuple

from swa_jax.checkpoint.servers import Served
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import WINDOW

WASTE = 1.15  # times what the layers need: from here on a grouping is worth a warning
_SGLANG_RATIO = (
    0.8  # tokens of the windowed layers' pool to those of the other one: `--swa-full-tokens-ratio`
)


class Blocks(NamedTuple):
    """How a server hands out memory: the tokens of a block, and those of a prompt that are worked on at once."""

    tokens: int
    in_flight: int
    head_dim_unit: int = 1  # a head is padded to a multiple of it


# In flight: `--max-num-batched-tokens` of `vllm serve` on a GPU of 80 GB; of a v6e.
BLOCKS = {"vllm": Blocks(16, 8192), "tpu-inference": Blocks(16, 1024, head_dim_unit=128)}


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
    full: int, windowed: int, window: int | None, length: int, blocks: Blocks
) -> tuple[int, Groups]:
    """Entries (tokens times layers) that vLLM's planner grants a sequence of `length` tokens, and the groups."""
    groups = group_layers(full, windowed)
    whole = -(-length // blocks.tokens)
    short = 0
    if windowed:
        assert window is not None
        # A window need not begin where a block does.
        short = -(-min(window - 1 + blocks.in_flight, length) // blocks.tokens) + 1
    return groups.layers * blocks.tokens * (groups.full * whole + groups.windowed * short), groups


def served_bytes(server: str, served: Served, config: ModelConfig, length: int, itemsize: int = 2) -> int:
    """Bytes that the cache of a sequence of `length` tokens takes in a server.

    Args:
      server: one of `servers.SERVERS`.
      served: what the export says to it; its pattern has full and windowed layers only.
      itemsize: bytes of a number in the cache.
    """
    windowed = served.pattern.layer_types.count(WINDOW)
    full, window = config.num_hidden_layers - windowed, served.pattern.sliding_window
    head_dim = config.head_dim
    if blocks := BLOCKS.get(server):
        entries, _ = grouped_entries(full, windowed, window, length, blocks)
        head_dim = -(-head_dim // blocks.head_dim_unit) * blocks.head_dim_unit
    elif served.runs.frees and full:
        entries = round(length * (full + _SGLANG_RATIO * windowed))
    else:
        entries = length * config.num_hidden_layers
    return entries * config.num_key_value_heads * 2 * head_dim * itemsize


def better_grouping(full: int, windowed: int, window: int, length: int, blocks: Blocks) -> int | None:
    """The number of full layers nearest to `full` that vLLM groups without much waste and in no more memory.

    None where `full` is such a number itself.
    """

    def taken_and_needed(full: int) -> tuple[int, int]:
        windowed = layers - full
        taken, _ = grouped_entries(full, windowed, window, length, blocks)
        alone = [grouped_entries(*kinds, window, length, blocks)[0] for kinds in ((full, 0), (0, windowed))]
        return taken, sum(alone)

    layers = full + windowed
    taken, needed = taken_and_needed(full)
    if taken <= WASTE * needed:
        return None
    fitting = [
        n for n in range(layers + 1) if (found := taken_and_needed(n))[0] <= min(taken, WASTE * found[1])
    ]
    return min(fitting, key=lambda n: (abs(n - full), -n), default=None)
