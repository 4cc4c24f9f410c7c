"""What the key/value cache of one sequence takes in the servers that run an export.

`model.cache` keeps whole sequences where a layer needs them and rings elsewhere. A server's memory is shared by many
sequences and handed out in blocks, so that a pattern may save less there, or nothing.

vLLM (and tpu-inference, which plans with vLLM's code) sorts the layers into groups of one kind and of equal size, so
that a block of any group takes the same memory. The size is that of the rarer kind, or of the other kind where that has
fewer than 1.5 times as many layers; a group that is not full is paid for as if it were (`kv_cache_planning.py` of vLLM
0.33.0). For the plug-in's single full KV heads, layers are cut into modules of one size, which are grouped like layers.

SGLang has a pool for full layers and one for windowed layers, whose sizes stand in one proportion, so that a sequence
takes what the larger of its two parts asks for (`pool_configurator.py` of SGLang 0.5.23). An export's command sets the
proportion to what a sequence holds. Where every layer has a window, a sequence is admitted when all of it would fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.servers import SERVERS, Served, ServerClass, check_target, find_served, served_config, unserved
from swa_jax.model.cache import cache_bytes
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

WASTE = 1.15  # times what the layers need: from here on a grouping is worth a warning
STEPS = 16  # at least, in which a prompt is read where nothing is said: in fewer, windows save little
_SGLANG_EVICTS = 128  # tokens that have left the window before they are freed: `SGLANG_SWA_EVICTION_INTERVAL`


class Device(NamedTuple):
    """How a server reads prompts on a device, unless it is told otherwise."""

    batched_tokens: int  # of prompts, computed at once: `--max-num-batched-tokens`, `--chunked-prefill-size`
    # Where the next batch is planned before the last has ended (async scheduling), windowed layers hold both.
    batches: int = 2


# `EngineArgs.get_batch_defaults` and `VllmConfig.max_in_flight_tokens`; `memory_hook.py` of SGLang. The first device is
# meant where none is named. A GPU that is not here: of 160 GiB or more as b200, of 70 or more as h100, of less as l4.
DEVICES = {
    "vllm": {
        "h100": Device(8192),
        "h200": Device(8192),
        "a100": Device(2048),
        "gb10": Device(2048),
        "l4": Device(2048),
        "l40s": Device(2048),
        "b200": Device(16384),
        "mi300x": Device(16384),
        "cpu": Device(2048, batches=1),
    },
    "vllm-plugin": {"cpu": Device(2048, batches=1)},
    "tpu-inference": {"v6e": Device(1024), "v5e": Device(512), "v5p": Device(256), "v7x": Device(2048)},
    "sglang": {
        **dict.fromkeys(("h100", "h200", "a100", "gb10"), Device(8192)),
        **dict.fromkeys(("l4", "l40s"), Device(4096)),
        **dict.fromkeys(("b200", "mi300x"), Device(16384)),
    },
    "mlx-lm": {"apple": Device(2048, batches=1)},
}
_GROUPING = ("vllm", "vllm-plugin", "tpu-inference")  # servers that plan as vLLM does
_SIZES = dict.fromkeys(_GROUPING, "--max-model-len {length} --max-num-batched-tokens {batched}")
_SIZES["mlx-lm"] = "--prefill-step-size {batched}"
_SIZES["sglang"] = "--context-length {length} --chunked-prefill-size {batched} --swa-full-tokens-ratio {ratio:g}"
_TPU_SEQUENCES = 256  # `--max-num-seqs` of a server on a TPU, unless it is told otherwise


class Blocks(NamedTuple):
    """How a server hands out memory: the tokens of a block, and those of prompts that windowed layers hold."""

    tokens: int
    in_flight: int  # tokens of all batches that have been planned and not yet ended
    head_dim_unit: int = 1  # a head is padded to a multiple of it


def _block_tokens(server: str, device: str, length: int) -> int:
    """Tokens of a block, of a server that takes sequences of up to `length` tokens.

    On a TPU the page tables lie in scalar memory, so that pages grow (`PallasAttentionBackend` of tpu-inference).
    """
    if server in ("vllm", "vllm-plugin"):
        return 128 if device == "cpu" else 16
    if server == "mlx-lm":
        return 256  # `KVCache.step`
    if server == "sglang":
        return 64 if device == "b200" else 1  # where attention is TensorRT-LLM's
    page = 16 if length > 8192 else min(max(_power_of_two(length) // 16, 16), 256)
    return max(page, _power_of_two(-(-length // (2**17 // _TPU_SEQUENCES))))


def _power_of_two(number: int) -> int:
    """The least that is not below it."""
    return 1 << (number - 1).bit_length()


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
) -> tuple[int, Groups]:
    """Entries (tokens times layers) that vLLM's planner grants a sequence of `length` tokens, and the groups."""
    groups = group_layers(full, windowed)
    whole = -(-length // blocks.tokens)
    short = 0
    if windowed:
        assert window is not None
        # A window need not begin where a block does.
        short = -(-min(window - 1 + blocks.in_flight, length) // blocks.tokens) + 1 + -(-sink_tokens // blocks.tokens)
    return groups.layers * blocks.tokens * (groups.full * whole + groups.windowed * short), groups


def modules(pattern: AttentionPattern, num_kv_heads: int) -> tuple[int, int]:
    """How many attention modules keep the whole sequence, and how many a window.

    A module is a layer, or with single full KV heads so many heads of one as divide the heads of each kind everywhere.
    """
    size = math.gcd(num_kv_heads, *pattern.full_head_counts)
    whole = int(pattern.full_cache_heads(num_kv_heads).sum()) // size
    return whole, pattern.num_layers * num_kv_heads // size - whole


def pooled_ratio(window: int, length: int, blocks: Blocks) -> float:
    """The tokens that SGLang's windowed layers hold of a sequence of `length` tokens, a share of all its tokens.

    `compute_swa_request_cap`: the window before the query, what is not freed yet, three pages, and the batches.
    """
    return _ceil(min(window - 1 + _SGLANG_EVICTS + 3 * blocks.tokens + blocks.in_flight, length) / length)


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
      batched_tokens: tokens of prompts that the server computes at once. None takes the device's own number, or so many
        that the sequence takes `STEPS` steps, if that is less.
      device: where the server runs, one of `DEVICES[server]`; None takes the first.

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
        devices = DEVICES.get(self.server or "")
        if devices is None:
            for option, given in (("--batched-tokens", self.batched_tokens), ("--device", self.device)):
                if given is not None:
                    raise ConfigError(f"{option} is of {', '.join(DEVICES)}, whose caches depend on it: leave it out")
            return
        device = next(iter(devices)) if self.device is None else self.device
        if device not in devices:
            raise ConfigError(f"--device is '{device}'; {self.server} runs on: {', '.join(devices)}")
        object.__setattr__(self, "device", device)
        least = 16 if self.server == "mlx-lm" else _block_tokens(str(self.server), device, self.length)
        own = max(least, min(devices[device].batched_tokens, self.length // STEPS))
        if self.server == "sglang":
            own -= own % least  # it wants whole pages
        object.__setattr__(self, "batched_tokens", self.batched_tokens or own)

    @property
    def blocks(self) -> Blocks | None:
        """How the server hands out memory; None where that is no matter of blocks."""
        if self.device is None:
            return None
        server, batches = str(self.server), DEVICES[str(self.server)][self.device].batches
        in_flight = batches * int(self.batched_tokens or 0)
        unit = 128 if server == "tpu-inference" else 1
        return Blocks(_block_tokens(server, self.device, self.length), in_flight, unit)

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
        if len(pattern.full_layers) == pattern.num_layers:
            return ""
        share = f"takes {self.share(pattern):.1%} of what full attention takes, counted {self.place}."
        steps = self.steps if self.frees(pattern) else ""
        return f"The cache of a sequence of {self.length} tokens {share} {steps}".strip()

    def command(self, served: Served, folder: str | Path) -> str:
        """What starts the server, with the sizes that windows were counted with; "" where there is none to start."""
        command = served.command.format(folder=folder)
        pattern, blocks = served.pattern, self.blocks
        if blocks is None or not served.runs.frees or len(pattern.full_layers) == pattern.num_layers:
            return command
        ratio = pooled_ratio(pattern.sliding_window or 0, self.length, blocks)
        sizes = _SIZES[str(self.server)].format(length=self.length, batched=self.batched_tokens, ratio=ratio)
        return f"{command} {sizes}"

    def notes(self, served: Served, folder: str | Path) -> list[str]:
        """What a user should know of an export in `folder`: who runs it, what its cache takes, what starts it."""
        command = self.command(served, folder)
        start = f"Start it with: {command}" if command else ""
        return [*filter(None, (served.describe(str(self.server)), self.describe(served.pattern), start))]

    def better_full_layers(self, pattern: AttentionPattern) -> int | None:
        """The nearest number of full layers that the server groups without much waste; None if it is the pattern's."""
        windowed = pattern.layer_types.count(WINDOW)
        if self.blocks is None or self.server not in _GROUPING or not windowed or pattern.sliding_window is None:
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
        return self.at_least(AttentionPattern((FULL,) * self.config.num_hidden_layers))

    def at_least(self, pattern: AttentionPattern) -> int:
        """What it takes in a class of the server that frees what windowed layers no longer need."""
        return self._allocated(pattern, ServerClass(""))

    def share(self, pattern: AttentionPattern) -> float:
        """What a pattern takes of that. `ConfigError` where the server cannot run it."""
        return self.bytes(pattern) / self.full

    def _allocated(self, pattern: AttentionPattern, runs: ServerClass) -> int:
        """Of layers with heads of several shapes, each counts as their mean; those that read others' keys have none."""
        if self.server not in SERVERS:
            return cache_bytes(self.config, pattern, 1, self.length, 2)
        own = [layer for layer, source in enumerate(self.config.kv_sources) if layer == source]
        full, windowed = modules(pattern.of_layers(own), self.config.num_key_value_heads)
        blocks = self.blocks
        assert blocks is not None
        unit = blocks.head_dim_unit
        whole = -(-self.length // blocks.tokens) * blocks.tokens
        if self.server in _GROUPING:
            entries, _ = grouped_entries(
                full, windowed, pattern.sliding_window, self.length, blocks, pattern.num_sink_tokens
            )
        elif self.server == "mlx-lm":  # between two parts of a prompt every ring still has the last part
            entries = whole * full + min((pattern.sliding_window or 0) - 1 + blocks.in_flight, whole) * windowed
        elif runs.frees and full and windowed:
            ratio = pooled_ratio(pattern.sliding_window or 0, self.length, blocks)
            entries = self.length * full + math.ceil(self.length * ratio) * windowed
        else:
            entries = self.length * (full + windowed)
        shapes = [self.config.head_shapes[layer] for layer in own]
        numbers = sum(kv_heads * -(-head_dim // unit) * unit for kv_heads, head_dim in shapes)
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
    windowed = [pattern for pattern in candidates if set(pattern.layer_types) != {FULL}]
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
            f"takes at least {_ceil(smallest):g} of full attention's{_advice(memory, frees)}"
        )


def _ceil(share: float) -> float:
    """Three decimals, rounded up, so that a budget of this much can be met."""
    return -(-share * 1000 // 1) / 1000


def _advice(memory: Memory, frees: bool) -> str:
    if not frees:
        return ". It computes the windows of this model, but keeps the caches of windowed layers whole"
    if memory.batched_tokens is not None:
        return (
            ". Windowed layers also hold the tokens of a prompt that are computed at once: take a smaller --window, a "
            "smaller --batched-tokens, or longer sequences (--serve-length)"
        )
    return ": take a smaller --window, or longer sequences (--serve-length)"
