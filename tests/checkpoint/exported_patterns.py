"""The eleven kinds of pattern that exports are tried with, and what identifies an export."""

from collections.abc import Mapping, Sequence
from typing import Any

from swa_jax.base.files import sum_of_json
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern


def patterns(layers: int) -> dict[str, AttentionPattern]:
    def of(letters: str, window: int | None = 5, **options) -> AttentionPattern:
        kinds = {"F": FULL, "w": WINDOW, "h": HYBRID, "S": SWITCH}
        row = (letters * layers)[:layers]
        heads = tuple((0,) if letter == "h" else () for letter in row)
        return AttentionPattern(tuple(kinds[letter] for letter in row), window, full_kv_heads=heads, **options)

    return {
        "full": of("F", None),
        "window": of("w"),
        "even": of("wF"),
        "odd": of("Fw"),
        "last": of("w" * (layers - 1) + "F"),
        "first": of("F" + "w" * (layers - 1)),
        "own key only": of("wF", 1),
        "sink tokens": of("wF", num_sink_tokens=2),
        "full-attention decode": of("wF", full_attention_decode=True),
        "heads": of("hF"),
        "routed": of("SF"),
    }


def fingerprint(hf: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> str:
    """A sum of an export's `config.json` and of its tensors' names and shapes."""
    return sum_of_json([hf, {name: list(shape) for name, shape in shapes.items()}])[:16]
