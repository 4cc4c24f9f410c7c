"""The attention pattern of an export, as its `config.json` says it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

VERSION = 1
FULL, WINDOW, HYBRID = "full_attention", "sliding_attention", "head_hybrid_attention"


class Rule(NamedTuple):
    """What the queries of some heads see."""

    window: int | None = None  # visible keys, the query's own included; None: all
    num_sink_tokens: int = 0  # first keys that stay visible beside the window
    full_answers: bool = False  # queries of the answer see everything, so that the whole sequence is kept

    @property
    def is_stock(self) -> bool:
        """Whether vLLM's own backends compute it."""
        return self.window is None or not (self.num_sink_tokens or self.full_answers)


class Part(NamedTuple):
    """Some KV heads of a layer that attend by one rule."""

    heads: tuple[int, ...]
    rule: Rule


@dataclass(frozen=True)
class Pattern:
    """The fields are those of swa-jax's `AttentionPattern`."""

    layer_types: tuple[str, ...]
    sliding_window: int | None
    num_sink_tokens: int
    full_attention_decode: bool
    full_kv_heads: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, said: Mapping[str, Any], layers: int, kv_heads: int) -> "Pattern":
        """The pattern of a model with so many layers and KV heads. Raises `ValueError` where it is none of these."""
        names = {field.name for field in fields(cls)}
        if said.get("version") != VERSION or said.keys() - {"version"} != names:
            raise ValueError(
                f"config.json: swa_pattern has version {said.get('version')} and the keys {sorted(said)}; this "
                f"swa-jax-vllm reads version {VERSION} with {sorted(names)}"
            )
        values = {name: said[name] for name in names}
        types = values["layer_types"] = tuple(said["layer_types"])
        full = values["full_kv_heads"] = tuple(map(tuple, said["full_kv_heads"]))
        if len(types) != layers or len(full) != layers:
            raise ValueError(f"config.json: swa_pattern is of {len(types)} layers, the model has {layers}")
        if unknown := set(types) - {FULL, WINDOW, HYBRID}:
            raise ValueError(f"config.json: swa_pattern has layer_types {sorted(unknown)}, which do not run here")
        if any(not 0 <= head < kv_heads for heads in full for head in heads):
            raise ValueError(f"config.json: swa_pattern names KV heads that the model has not: it has {kv_heads}")
        return cls(**values)

    def parts(self, layer: int, kv_heads: int) -> list[Part]:
        """How the KV heads of a layer attend.

        The parts of all layers have one size. Caches of one size are handed out without padding.
        """
        full = Rule(full_answers=self.full_attention_decode)
        window = Rule(self.sliding_window, self.num_sink_tokens, self.full_attention_decode)
        kind = self.layer_types[layer]
        whole = set(range(kv_heads)) if kind == FULL else set(self.full_kv_heads[layer])
        size = math.gcd(kv_heads, *map(len, self.full_kv_heads))
        parts = []
        for heads, rule in ((sorted(whole), full), (sorted(set(range(kv_heads)) - whole), window)):
            parts += [Part(tuple(heads[i : i + size]), rule) for i in range(0, len(heads), size)]
        return parts
