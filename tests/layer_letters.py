"""Layers by letters: F full, w window, c chunks, h head hybrid, S switch, L linear."""

from swa_jax.model.layer_types import CHUNKED, FULL, HYBRID, LINEAR, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern

KINDS = {"F": FULL, "w": WINDOW, "c": CHUNKED, "h": HYBRID, "S": SWITCH, "L": LINEAR}
LETTERS = {kind: letter for letter, kind in KINDS.items()}


def types_of(letters: str, layers: int | None = None) -> tuple[str, ...]:
    """The letters again and again, until every layer has one; None: there are as many layers as letters."""
    row = letters if layers is None else (letters * layers)[:layers]
    return tuple(KINDS[letter] for letter in row)


def letters_of(pattern: AttentionPattern) -> str:
    return "".join(LETTERS[kind] for kind in pattern.layer_types)
