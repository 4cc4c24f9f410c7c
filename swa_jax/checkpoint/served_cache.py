"""What the key/value cache of one sequence takes in the servers that run an export.

`model.cache` keeps whole sequences where a layer needs them and rings elsewhere. A server's memory is shared by many
sequences and handed out in blocks, so that a pattern may save less there, or nothing: `servers.allocation` says how.
For single full KV heads, layers are cut into modules of one size, which are handed out like layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.servers import SERVERS, Served, check_target, find_served, served_config, unserved
from swa_jax.checkpoint.servers.allocation import Blocks, Pools, better_grouping, ceil_share, grouped_entries
from swa_jax.checkpoint.servers.common import Cache, ServerClass
from swa_jax.model.cache import cache_bytes
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

STEPS = 16  # at least, in which a prompt is read where nothing is said: in fewer, windows save little


def modules(pattern: AttentionPattern, num_kv_heads: int) -> tuple[int, int]:
    """How many attention modules keep the whole sequence, and how many a window.

    A module is a layer, or with single full KV heads so many heads of one as divide the heads of each kind everywhere.
    """
    size = math.gcd(num_kv_heads, *pattern.full_head_counts)
    whole = int(pattern.full_cache_heads(num_kv_heads).sum()) // size
    return whole, pattern.num_layers * num_kv_heads // size - whole


# ---- a budget ----


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where the cache of a sequence is counted, and for how long a sequence: here, or as a server allocates it.

    Attributes:
      config: the model; hf_config: its `config.json`, by which a server's class is found.
      length: tokens of the sequence.
      server: one of `servers.TARGETS`; None counts as `model.cache` allocates. transformers allocates as we do.
      batched_tokens: tokens of prompts that the server computes at once. None takes the device's own number, or so many
        that the sequence takes `STEPS` steps, if that is less.
      device: where the server runs, one of those in its record; None takes the first.

    Raises:
      ConfigError: a name is not known, or the memory of the server does not depend on what is given.
    """

    config: ModelConfig
    hf_config: Mapping[str, Any]
    length: int
    server: str | None = None
    batched_tokens: int | None = None
    device: str | None = None
    _classes: dict[tuple[Any, ...], ServerClass | None] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        check_target(self.server)
        if self._cache is None:
            for option, given in (("--batched-tokens", self.batched_tokens), ("--device", self.device)):
                if given is not None:
                    raise ConfigError(f"{option} is of {', '.join(SERVERS)}, whose caches depend on it: leave it out")
            return
        devices = self._cache.devices
        device = next(iter(devices)) if self.device is None else self.device
        if device not in devices:
            raise ConfigError(f"--device is '{device}'; {self.server} runs on: {', '.join(devices)}")
        object.__setattr__(self, "device", device)
        own = self._cache.batched_tokens(device, self.length, self.length // STEPS)
        object.__setattr__(self, "batched_tokens", self.batched_tokens or own)

    @property
    def _cache(self) -> Cache | None:
        return SERVERS[self.server].cache if self.server in SERVERS else None

    @property
    def blocks(self) -> Blocks | None:
        """How the server hands out memory; None where that is no matter of blocks."""
        if self._cache is None:
            return None
        device = str(self.device)
        in_flight = self._cache.devices[device].batches * int(self.batched_tokens or 0)
        return Blocks(self._cache.block_tokens(device, self.length), in_flight)

    @property
    def place(self) -> str:
        """Who holds the cache, in a word or two."""
        return "here" if self.server is None else f"in {self.server}"

    @property
    def steps(self) -> str:
        """What the batched tokens cost, a sentence for below each share; "" where the cache does not depend on them."""
        if self.batched_tokens is None:
            return ""
        count = -(-self.length // self.batched_tokens)
        return (
            f"On {self.device} (--device), at {self.batched_tokens} batched tokens (--batched-tokens), a prompt of "
            f"{self.length} takes {count} step{'s' if count > 1 else ''}; more tokens: fewer steps and more memory."
        )

    def describe(self, pattern: AttentionPattern) -> str:
        """What the cache takes under a pattern with windows, in a sentence or two; "" without windows.

        Raises:
          ConfigError: the server cannot run the pattern.
        """
        if pattern.is_full:
            return ""
        share = f"takes {self.share(pattern):.1%} of what full attention takes, counted {self.place}."
        steps = self.steps if self.frees(pattern) else ""
        return f"The cache of a sequence of {self.length} tokens {share} {steps}".strip()

    def command(self, served: Served, folder: str | Path) -> str:
        """What starts the server, with the sizes that windows were counted with; "" where there is none to start."""
        command = served.command.format(folder=folder)
        pattern, blocks = served.pattern, self.blocks
        if blocks is None or not served.runs.frees or pattern.is_full:
            return command
        server = SERVERS[str(self.server)]
        pools, ratio = server.cache.entries, 1.0
        if isinstance(pools, Pools):
            ratio = pools.ratio(pattern.sliding_window or 0, self.length, blocks)
        sizes = server.sizes.format(length=self.length, batched=self.batched_tokens, ratio=ratio)
        return f"{command} {sizes}"

    def notes(self, served: Served, folder: str | Path) -> list[str]:
        """What a user should know of an export in `folder`: who runs it, what its cache takes, what starts it."""
        command = self.command(served, folder)
        start = f"Start it with: {command}" if command else ""
        return [*filter(None, (served.describe(str(self.server)), self.describe(served.pattern), self.padding, start))]

    @property
    def padding(self) -> str:
        """A sentence for where the server's kernels take no heads of the model's size."""
        padded = int if self._cache is None else self._cache.padded
        sizes = sorted({head_dim for _, head_dim in self.config.head_shapes if padded(head_dim) != head_dim})
        return " ".join(
            f"Heads of {size} channels take the memory of {padded(size)} {self.place}, with zeros at their ends."
            for size in sizes
        )

    def better_full_layers(self, pattern: AttentionPattern) -> int | None:
        """The nearest number of full layers that the server groups without much waste; None if it is the pattern's."""
        windowed = pattern.layer_types.count(WINDOW)
        grouped = self._cache is not None and self._cache.entries is grouped_entries
        if self.blocks is None or not grouped or not windowed or pattern.sliding_window is None:
            return None
        if pattern.full_attention_decode or any(pattern.full_kv_heads):
            return None
        full = pattern.num_layers - windowed
        return better_grouping(full, windowed, pattern.sliding_window, self.length, self.blocks)

    def served(self, pattern: AttentionPattern) -> Served | None:
        """How the server runs a pattern; None without a server. `ConfigError` where it cannot."""
        return None if self.server is None else served_config(self.server, self.hf_config, pattern)

    def runs(self, pattern: AttentionPattern) -> bool:
        """Whether the server can run a pattern; much quicker than `served`."""
        return self.server is None or self._class(pattern) is not None

    def frees(self, pattern: AttentionPattern) -> bool:
        """Whether the server frees what windowed layers no longer need."""
        return self.server is None or (runs := self._class(pattern)) is None or runs.frees

    def _class(self, pattern: AttentionPattern) -> ServerClass | None:
        assert self.server is not None
        if unserved(self.server, pattern) is not None:
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
        return self.at_least(AttentionPattern.everywhere(FULL, self.config))

    def at_least(self, pattern: AttentionPattern) -> int:
        """What it takes in a class of the server that frees what windowed layers no longer need."""
        return self._allocated(pattern, ServerClass(""))

    def share(self, pattern: AttentionPattern) -> float:
        """What a pattern takes of that. `ConfigError` where the server cannot run it."""
        return self.bytes(pattern) / self.full

    def _allocated(self, pattern: AttentionPattern, runs: ServerClass) -> int:
        """Of layers with heads of several shapes, each counts as their mean; those that read others' keys have none."""
        cache, blocks = self._cache, self.blocks
        if cache is None or blocks is None:
            return cache_bytes(self.config, pattern, 1, self.length, 2)
        own = [layer for layer, source in enumerate(self.config.kv_sources) if layer == source]
        full, windowed = layers = modules(pattern.of_layers(own), self.config.num_key_value_heads)
        kinds = layers if runs.frees else (full + windowed, 0)
        entries = cache.entries(*kinds, pattern.sliding_window, self.length, blocks, pattern.num_sink_tokens)
        shapes = [self.config.head_shapes[layer] for layer in own]
        numbers = sum(kv_heads * cache.padded(head_dim) for kv_heads, head_dim in shapes)
        return entries * 2 * numbers * 2 // (full + windowed)  # keys and values, of 2 bytes


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
    windowed = [pattern for pattern in candidates if not pattern.is_full]
    for pattern in sorted(windowed, key=memory.at_least):
        if memory.runs(pattern):
            raise BudgetError(budget, memory.share(pattern), memory, memory.frees(pattern))
    memory.served(windowed[0])
    raise AssertionError("what a server does not run, it refuses")


class BudgetError(ConfigError):
    """No pattern takes as little memory as was asked for."""

    def __init__(self, budget: float, smallest: float, memory: Memory, frees: bool):
        self.smallest = smallest
        super().__init__(
            f"--kv-budget {budget:g} cannot be met: {memory.place}, the cache of a sequence of {memory.length} tokens "
            f"takes at least {ceil_share(smallest):g} of full attention's{_advice(memory, frees)}"
        )


def _advice(memory: Memory, frees: bool) -> str:
    if not frees:
        return ". It computes the windows of this model, but keeps the caches of windowed layers whole"
    if memory.batched_tokens is not None:
        return (
            ". Windowed layers also hold the tokens of a prompt that are computed at once: take a smaller --window, a "
            "smaller --batched-tokens, or longer sequences (--serve-length)"
        )
    return ": take a smaller --window, or longer sequences (--serve-length)"
