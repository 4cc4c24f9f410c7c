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
        if any(len(set(heads) & set(range(kv_heads))) < len(heads) for heads in full):
            raise ValueError(f"config.json: swa_pattern names a KV head twice, or one that is not below {kv_heads}")
        return cls(**values)

    def rules(self, layer: int, kv_heads: int) -> list[Rule]:
        """What the KV heads of a layer see, module by module, full ones first.

        The modules of all layers have equally many heads. Caches of one size are handed out without padding.
        """
        size = self._module(kv_heads)
        full = Rule(full_answers=self.full_attention_decode)
        window = Rule(self.sliding_window, self.num_sink_tokens, self.full_attention_decode)
        whole = kv_heads if self.layer_types[layer] == FULL else len(self.full_kv_heads[layer])
        return [full] * (whole // size) + [window] * ((kv_heads - whole) // size)

    def order(self, layer: int, kv_heads: int, ranks: int) -> list[int]:
        """The KV heads of a layer as they should lie: those of each rank together, there the full ones first.

        Raises:
          NotImplementedError: the modules cannot be cut into so many equal parts.
        """
        size = self._module(kv_heads)
        if size % ranks:
            raise NotImplementedError(
                f"swa-jax-vllm: --tensor-parallel-size {ranks} does not divide the number of full KV heads of every "
                f"layer that has some: take a divisor of {size}"
            )
        full = sorted(self.full_kv_heads[layer])
        kinds = full, sorted(set(range(kv_heads)) - set(full))
        return [
            head
            for rank in range(ranks)
            for heads in kinds
            for head in heads[rank * len(heads) // ranks : (rank + 1) * len(heads) // ranks]
        ]

    def _module(self, kv_heads: int) -> int:
        """KV heads of a module."""
        return math.gcd(kv_heads, *map(len, self.full_kv_heads))
