"""What is known of a server: its classes, how it is started, and how it keeps keys and values."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from swa_jax.checkpoint.families import inexpressible
from swa_jax.checkpoint.servers.allocation import Entries
from swa_jax.model.config import ModelConfig
from swa_jax.model.pattern import AttentionPattern

if TYPE_CHECKING:
    from swa_jax.checkpoint.gguf.graphs import Described


class Reads(enum.Enum):
    """How a class finds out which layers have a window."""

    LAYER_TYPES = "by layer_types"
    MIXED = "by layer_types, where some are full"
    BOTH = "by layer_types, where some are full and some have it"
    EVEN = "layers 0, 2, 4 and so on have it"
    ALIKE = "all layers, or none"
    NEVER = "no layer has one"
    PATTERN = "by the pattern itself, with sink tokens, full-attention decode and single full KV heads"


def any_model(config: ModelConfig) -> bool:
    """A class that runs every model of its type right."""
    return True


@dataclasses.dataclass(frozen=True)
class ServerClass:
    """A class of a server that runs one `model_type`.

    Attributes:
      surplus: how many keys more than `sliding_window` says a windowed query sees.
      alone: it reads `layer_types` where transformers' class of that name has no such windows.
      keys: what `config.json` must say besides.
      spelled: it has defaults of its own, or reads RoPE as transformers 4 wrote it, so that every key is written.
      only: which models of that type it runs right.
      full_flags: of the command that serves it where no layer has a window.
      frees: whether the caches of windowed layers keep the window only, where other layers are full.
      pooled: it frees where `is_hybrid_swa` and `hybrid_layer_pattern` (1 for a window, 0 for none) say so.
    """

    name: str
    reads: Reads = Reads.NEVER
    surplus: int = 0
    alone: bool = False
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spelled: bool = False
    only: Callable[[ModelConfig], bool] = any_model
    full_flags: str = ""
    frees: bool = True
    pooled: bool = False


Classes = Mapping[str, tuple[ServerClass, ...]]


def native(name: str, reads: Reads = Reads.LAYER_TYPES, **options: Any) -> tuple[ServerClass, ...]:
    """The one class that runs a `model_type`."""
    return (ServerClass(name, reads, **options),)


def unbiased(config: ModelConfig) -> bool:
    """No projection has a bias."""
    return not (config.attention_bias or config.attention_out_bias or config.mlp_bias)


def untied(config: ModelConfig) -> bool:
    """The output matrix is not the embedding."""
    return not config.tie_word_embeddings


def as_afmoe(config: ModelConfig) -> bool:
    """The servers' classes have no biases, and an output matrix of their own."""
    return unbiased(config) and untied(config)


def rotated_as_olmo3(config: ModelConfig) -> bool:
    """One theta for all layers, and its scaling in full layers alone."""
    if config.rope_layers:
        return config.local_rope_theta == config.rope_theta
    return config.rope_scaling is None


def whole_lanes(head_dim: int) -> int:
    """The channels of a head in the memory of a TPU."""
    return -(-head_dim // 128) * 128


class Device(NamedTuple):
    """How a server reads prompts on a device, unless it is told otherwise."""

    batched_tokens: int  # of prompts, computed at once: `--max-num-batched-tokens`, `--chunked-prefill-size`
    # Where the next batch is planned before the last has ended (async scheduling), windowed layers hold both.
    batches: int = 2
    block_tokens: int = 16


class Cache(NamedTuple):
    """How a server keeps the keys and values of a sequence.

    Attributes:
      layout: how it allocates memory, as the end of "allocates memory in".
      entries: what that is for one sequence.
      devices: the first is meant where none is named.
      pages: {tokens of the longest sequence: tokens of a block}, where a block goes by that and not by the device.
      least_batch: of prompts, in tokens; None: a block.
      whole_pages: whether a batch is a multiple of a block.
      padded: {channels of a head: those that it takes}, with zeros at its end.
    """

    layout: str
    entries: Entries
    devices: Mapping[str, Device]
    pages: Callable[[int], int] | None = None
    least_batch: int | None = None
    whole_pages: bool = False
    padded: Callable[[int], int] = int

    def block_tokens(self, device: str, length: int) -> int:
        """Tokens of a block, of a server that takes sequences of up to `length` tokens."""
        return self.devices[device].block_tokens if self.pages is None else self.pages(length)

    def batched_tokens(self, device: str, length: int, most: int) -> int:
        """Tokens of prompts that are computed at once: the device's own number, or `most` if that is less."""
        block = self.block_tokens(device, length)
        batched = max(self.least_batch or block, min(self.devices[device].batched_tokens, most))
        return batched - batched % block if self.whole_pages else batched


@dataclasses.dataclass(frozen=True)
class Server:
    """An inference server: all that is known of it, from the source of one version.

    Attributes:
      title: its name in a sentence.
      package: the distribution whose version is meant.
      version, released: the version that was read, and the day it came out.
      command: starts it; "{folder}" stands for the export.
      sizes: what the command says of {length}, {batched} tokens and the {ratio} of two pools.
      classes: what runs each `model_type`.
      no_class: {model_type: why no class runs it}, as the end of a sentence; what `classes` has it has not.
      port: where it listens unless it is told otherwise; None: no receipt can ask it.
      environment: variables before the command.
      lacks: what no class of it knows of a pattern, None if nothing.
      describes: finds how its own file has a model with a pattern, where an export is one; None if it cannot.
    """

    title: str
    package: str
    version: str
    released: str
    command: str
    sizes: str
    classes: Classes
    cache: Cache
    no_class: Mapping[str, str] = dataclasses.field(default_factory=dict)
    port: int | None = None
    environment: str = ""
    lacks: Callable[[AttentionPattern], str | None] = inexpressible
    describes: Callable[[ModelConfig, AttentionPattern], Described | None] | None = None
