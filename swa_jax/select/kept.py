"""Scores that outlive an interruption: a JSON file of them, with the settings they hold for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swa_jax.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.files import read_json, sum_of_json, write_json


class KeptScores:
    """Scores by key; with `file`, those an earlier run wrote there are found again.

    Args:
      settings: what the scores depend on, plain JSON values.
      kind: what the file holds, for messages: "scores of masks".

    Raises:
      ConfigError: the file is none of these, or its settings are others.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any], kind: str):
        self.scores: dict[str, Any] = {}
        self.saved = time.monotonic()
        self._file, self._settings, self._started = file, dict(settings), time.monotonic()
        if file is None or not file.exists():
            return
        stored = _read(file, kind)
        for name, value in self._settings.items():
            if stored["settings"].get(name) != value:
                there = f"{name} = {stored['settings'].get(name)}, this search has {value}"
                if name == "examples":  # hashes
                    there = "other examples (--length, --examples, --keys, --haystack, --prompts or --seed differ)"
                raise ConfigError(
                    f"{file} holds scores made with {there}: name another file, or remove this one to start over"
                )
        self.scores = stored["scores"]
        self._started -= stored["seconds"]

    @property
    def seconds(self) -> float:
        """Since this was made, and what the runs before it took by their file."""
        return time.monotonic() - self._started

    def save(self) -> None:
        """Write what is known to the file, if there is one."""
        self.saved = time.monotonic()
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json(
                self._file, {"settings": self._settings, "seconds": self.seconds, "scores": self.scores}
            )

    def other_model(self, setting: str, known: float, now: float) -> ConfigError:
        """Weights are too large to compare; what they make of the same examples is not."""
        return ConfigError(
            f"{self._file} holds scores of another model: its answers have a likelihood of {known:.4f} nats a token "
            f"{setting}, this one's {now:.4f}; name another file, or remove this one to start over"
        )


def digest(examples: Sequence[Example]) -> str:
    return sum_of_json([[list(map(int, e.prompt)), list(map(int, e.answer))] for e in examples])[:16]


def _read(file: Path, kind: str) -> dict[str, Any]:
    stored = read_json(file)
    if not {"settings", "seconds", "scores"} <= stored.keys():
        raise ConfigError(f"{file} holds no {kind}: it is not a file that this search wrote")
    return stored
