"""Window: what a windowed query sees, as one value from the command line and YAML to the kernel's spec."""

from __future__ import annotations

import dataclasses
from typing import Any

from swa_jax.base.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Window:
    """What a windowed query sees; None is what was not given, which `of` takes from the model's own pattern.

    Attributes:
      size: visible keys, the query's own included (`AttentionPattern.sliding_window`).
      sink_tokens: first keys of a segment that stay visible beside them (`num_sink_tokens`).
      full_decode: whether the queries of the answer see everything (`full_attention_decode`).
      last_tokens: last tokens of a prompt that see everything then, too (`num_last_tokens`).
    """

    size: int | None = None
    sink_tokens: int | None = None
    full_decode: bool | None = None
    last_tokens: int | None = None

    def of(self, own: Window, *, needed: bool = True) -> Window:
        """The same, and what was not given as `own` has it; no last tokens where full-attention decode is turned off.

        Raises `ConfigError` where neither says a size, unless none is `needed`.
        """
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(own), strict=True)
        found = Window(*(theirs if ours is None else ours for ours, theirs in pairs))
        if self.full_decode is False and self.last_tokens is None:
            found = dataclasses.replace(found, last_tokens=0)
        if needed and found.size is None:
            raise ConfigError("no window is given (--window), and the model's own pattern has none")
        return found

    @property
    def keys(self) -> int:
        """The size of a window that must have one."""
        assert self.size is not None
        return self.size

    @property
    def fields(self) -> dict[str, Any]:
        """What was given, as `AttentionPattern`, results and the keys of stores name it."""
        names = ("sliding_window", "num_sink_tokens", "full_attention_decode", "num_last_tokens")
        values = zip(names, dataclasses.astuple(self), strict=True)
        return {name: value for name, value in values if value is not None}

    def full_from(self, prompt_length: int) -> int | None:
        """The first query of so long a prompt, and its answer, that sees everything; None: none does."""
        return max(0, prompt_length - (self.last_tokens or 0)) if self.full_decode else None

    def holds(self, tokens: int) -> bool:
        """Whether the last of so many tokens sees all of them, in a window as in full attention."""
        return self.size is None or tokens <= self.size + (self.sink_tokens or 0)


OWN = Window()  # nothing given: the model's own
