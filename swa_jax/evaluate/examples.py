"""The evaluation example that needle tasks, answer NLL and layer selection share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Example:
    """A prompt with its gold answer, both as token ids.

    `answer` follows `prompt` directly. The first answer query, the one `full_from` names, sits at
    position `len(prompt)`. `references` are the strings a generated answer must contain.
    """

    prompt: list[int]
    answer: list[int]
    references: list[str]
    meta: dict[str, Any] = field(default_factory=dict)
