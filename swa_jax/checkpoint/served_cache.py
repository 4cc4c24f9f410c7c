"""What the key/value cache of one sequence takes in the servers that run an export.

`model.cache` keeps whole sequences where a layer needs them and rings elsewhere. A server's memory is shared by many
sequences and handed out in blocks, so that a pattern may save less there, or nothing.

vLLM (and tpu-inference, which plans with vLLM's code) sorts the layers into groups of one kind and of equal size, so
that a block of any group takes the same memory. The size is that of the rarer kind, or of the other kind where that has
fewer than 1.5 times as many layers; a group that is not full is paid for as if it were (`kv_cache_planning.py` of vLLM
0.33.0). SGLang keeps a pool for windowed layers for gpt-oss alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from swa_jax.checkpoint.servers import SERVERS, Served, ServerClass, check_target, find_served, served_config
from swa_jax.errors import ConfigError
from swa_jax.families import inexpressible
from swa_jax.model.cache import cache_bytes
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

WASTE = 1.15  # times what the layers need: from here on a grouping is worth a warning
_SGLANG_RATIO = 0.8  # tokens of the windowed layers' pool to those of the other one: `--swa-full-tokens-ratio`


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


def grouped_entries(full: int, windowed: int, window: int | None, length: int, blocks: Blocks) -> tuple[int, Groups]:
    """Entries (tokens times layers) that vLLM's planner grants a sequence of `length` tokens, and the groups."""
    groups = group_layers(full, windowed)
    whole = -(-length // blocks.tokens)
    short = 0
    if windowed:
        assert window is not None
        # A window need not begin where a block does.
        short = -(-min(window - 1 + blocks.in_flight, length) // blocks.tokens) + 1
    return groups.layers * blocks.tokens * (groups.full * whole + groups.windowed * short), groups


def served_bytes(
    server: str, served: Served, config: ModelConfig, length: int, itemsize: int = 2, in_flight: int | None = None
) -> int:
    """Bytes that the cache of a sequence of `length` tokens takes in a server.

    Args:
      server: one of `servers.SERVERS`.
      served: what the export says to it; its pattern has full and windowed layers only.
      config: layers that read the keys of others have no cache; heads of several shapes count as their mean.
      itemsize: bytes of a number in the cache.
      in_flight: tokens of a prompt that are worked on at once; None for the server's own number.
    """
    own = [layer for layer, source in enumerate(config.kv_sources) if layer == source]
    windowed = sum(served.pattern.layer_types[layer] == WINDOW for layer in own)
    full, window = len(own) - windowed, served.pattern.sliding_window
    unit = 1
    if blocks := BLOCKS.get(server):
        blocks = blocks if in_flight is None else blocks._replace(in_flight=in_flight)
        entries, _ = grouped_entries(full, windowed, window, length, blocks)
        unit = blocks.head_dim_unit
    elif served.runs.frees and full:
        entries = round(length * (full + _SGLANG_RATIO * windowed))
    else:
        entries = length * len(own)
    shapes = [config.head_shapes[layer] for layer in own]
    numbers = sum(kv_heads * -(-head_dim // unit) * unit for kv_heads, head_dim in shapes)
    return entries * 2 * numbers * itemsize // len(own)


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
    fitting = [n for n in range(layers + 1) if (found := taken_and_needed(n))[0] <= min(taken, WASTE * found[1])]
    return min(fitting, key=lambda n: (abs(n - full), -n), default=None)


# ---- a budget ----


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where the cache of a sequence is counted, and for how long a sequence: here, or as a server allocates it.

    Attributes:
      config: the model; hf_config: its `config.json`, by which a server's class is found.
      length: tokens of the sequence.
      server: one of `servers.TARGETS`; None counts as `model.cache` allocates. transformers allocates as we do.
      prefill_chunk: tokens of a prompt that the server works on at once (`--max-num-batched-tokens` of vLLM); None
        for the server's own number.
    """

    config: ModelConfig
    hf_config: Mapping[str, Any]
    length: int
    server: str | None = None
    prefill_chunk: int | None = None
    _classes: dict[tuple[Any, ...], ServerClass | None] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        check_target(self.server)

    @property
    def place(self) -> str:
        """Who holds the cache, in a word or two."""
        return "here" if self.server is None else f"in {self.server}"

    def served(self, pattern: AttentionPattern) -> Served | None:
        """How the server runs a pattern; None without a server. `ConfigError` where it cannot."""
        return None if self.server is None else served_config(self.server, self.hf_config, pattern)

    def runs(self, pattern: AttentionPattern) -> bool:
        """Whether the server can run a pattern; much quicker than `served`."""
        return self.server is None or self._class(pattern) is not None

    def _class(self, pattern: AttentionPattern) -> ServerClass | None:
        assert self.server is not None
        if inexpressible(pattern) is not None:
            return None
        # Windows of more than one key make no difference to which class runs them.
        kind = pattern.layer_types, min(pattern.sliding_window or 0, 2)
        if kind not in self._classes:
            found = find_served(self.server, self.hf_config, pattern)
            self._classes[kind] = None if found is None else found.runs
        return self._classes[kind]

    def bytes(self, pattern: AttentionPattern) -> int:
        """What the cache of the sequence takes, at 2 bytes a number. `ConfigError` where the server cannot run it."""
        if self.server is None:
            return cache_bytes(self.config, pattern, 1, self.length, 2)
        runs = self._class(pattern) or served_config(self.server, self.hf_config, pattern).runs
        return self._allocated(pattern, runs)

    @functools.cached_property
    def full(self) -> int:
        """What it takes with full attention in every layer, whether or not a class of the server runs that."""
        return self.at_least(AttentionPattern((FULL,) * self.config.num_hidden_layers))

    def at_least(self, pattern: AttentionPattern) -> int:
        """What it takes in a class of the server that frees what windowed layers no longer need."""
        return self._allocated(pattern, ServerClass(""))

    def share(self, pattern: AttentionPattern) -> float:
        """What a pattern takes of that. `ConfigError` where the server cannot run it."""
        return self.bytes(pattern) / self.full

    def _allocated(self, pattern: AttentionPattern, runs: ServerClass) -> int:
        if self.server not in SERVERS:
            return cache_bytes(self.config, pattern, 1, self.length, 2)
        served = Served({}, "", pattern, runs, "")
        return served_bytes(self.server, served, self.config, self.length, in_flight=self.prefill_chunk)


def most_within(memory: Memory, budget: float, most: int, make: Callable[[int], AttentionPattern]) -> AttentionPattern:
    """Of `make(most)`, `make(most - 1)`, ... `make(0)` the first that takes at most `budget` of full attention's cache.

    Patterns that the server cannot run are passed over.

    Raises:
      ConfigError: the server runs none of them, or none is within the budget; the sentence names the smallest budget.
    """
    candidates = [make(count) for count in range(most, -1, -1)]
    for pattern in candidates:
        if memory.at_least(pattern) > budget * memory.full:
            continue  # there is no need to ask the server, which takes a while
        if memory.runs(pattern) and memory.share(pattern) <= budget:
            return pattern
    windowed = [pattern for pattern in candidates if set(pattern.layer_types) != {FULL}]
    for pattern in sorted(windowed, key=memory.at_least):
        if memory.runs(pattern):
            raise BudgetError(budget, memory.share(pattern), memory)
    memory.served(windowed[0])
    raise AssertionError("what a server does not run, it refuses")


class BudgetError(ConfigError):
    """No pattern takes as little memory as was asked for."""

    def __init__(self, budget: float, smallest: float, memory: Memory):
        self.smallest = smallest
        super().__init__(
            f"--kv-budget {budget:g} cannot be met: {memory.place}, the cache of a sequence of {memory.length} tokens "
            f"takes at least {_ceil(smallest):g} of full attention's{_advice(memory, smallest)}"
        )


def _ceil(share: float) -> float:
    """Three decimals, rounded up, so that a budget of this much can be met."""
    return -(-share * 1000 // 1) / 1000


def _advice(memory: Memory, smallest: float) -> str:
    if memory.server in BLOCKS:
        chunk = memory.prefill_chunk or BLOCKS[memory.server].in_flight
        smaller = "" if memory.prefill_chunk is None else ", a smaller --prefill-chunk,"
        return (
            f". Windowed layers also hold the {chunk} tokens of a prompt that are worked on at once: take a smaller "
            f"--window{smaller} or longer sequences (--serve-length)"
        )
    if memory.server in SERVERS and smallest >= 1:
        return ". It computes the windows of this model, but keeps the caches of windowed layers whole"
    return ": take a smaller --window, or longer sequences (--serve-length)"
