"""Scores that outlive an interruption: a JSON file of them, under the content of what they were made from.

A name or a path may stand for something else tomorrow. So scores belong to contents: to the sums of weights and
examples and to the options that decide, as `content_key` has them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from swa_jax.checkpoint.folder import fetch
from swa_jax.errors import ConfigError
from swa_jax.evaluate.examples import Example
from swa_jax.files import read_json, write_json
from swa_jax.model.decoder import Decoder
from swa_jax.settings import to_dict

SUM = "sha256"
VERSION = 3  # of how scores are made: raise it when the same content would be scored otherwise


def content_key(
    model: Decoder, examples: Sequence[Example], *, weights: str | None = None, **options: Any
) -> dict[str, Any]:
    """What the scores of a model on examples depend on, as plain JSON values: equal keys, equal scores.

    The model's own pattern is not part of it: give what is used of it as options.

    Args:
      weights: `weights_sum` of the folder that the model was loaded from, which is there already; None sums
        the model's arrays, every one of which is then brought to this host.
      options: whatever else decides, such as window, sink tokens and full-attention decode; plain JSON values.
    """
    return {
        "version": VERSION,
        "weights": arrays_sum(model) if weights is None else weights,
        "config": digest(to_dict(model.config)),
        "dtype": model.embedding[...].dtype.name,
        "examples": examples_sum(examples),
        **options,
    }


def digest(data: Any) -> str:
    """32 hexadecimal digits of the SHA-256 of plain JSON values; the order of a mapping's keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def examples_sum(examples: Sequence[Example]) -> str:
    """The sum of the examples' tokens, prompts, answers and values, in their order."""
    return digest([[list(map(int, e.prompt)), list(map(int, e.answer)), e.value] for e in examples])


def arrays_sum(model: Decoder) -> str:
    """The SHA-256 of a model's parameters with their names, dtypes and shapes; one is on the host at a time."""
    total = hashlib.sha256()
    for path, variable in sorted(nnx.to_flat_state(nnx.state(model)), key=lambda item: str(item[0])):
        array = np.ascontiguousarray(fetch(variable[...]))
        total.update(f"{path} {array.dtype} {array.shape}".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


class ScoreFile:
    """Scores by key; with `file`, those an earlier run wrote there are found again.

    Args:
      content: what the scores depend on, as `content_key` makes it.
      kind: what the file holds, for messages: "scores of masks".

    Raises:
      ConfigError: the file is none of these, or its scores were made from other content.
    """

    def __init__(self, file: Path | None, content: Mapping[str, Any], kind: str):
        self.scores: dict[str, Any] = {}
        self.saved = time.monotonic()
        self._file, self._content, self._started = file, dict(content), time.monotonic()
        if file is None or not file.exists():
            return
        stored = _read(file, kind)
        for name, value in self._content.items():
            if stored["settings"].get(name) != value:
                raise ConfigError(
                    f"{file} holds {_difference(name, stored['settings'].get(name), value)}: name another file, or "
                    "remove this one to start over"
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
            stored = {"settings": self._content, "seconds": self.seconds, "scores": self.scores}
            write_json(self._file, {**stored, SUM: _sum(stored)})


def _difference(name: str, before: Any, now: Any) -> str:
    """What scores the file holds, where its content differs from what is asked for."""
    sums = {
        "version": "scores made by another version of this library",
        "weights": "scores of another model: its weights differ",
        "config": "scores of another model: its configuration differs, by which --yarn also counts",
        "examples": "scores made with other examples (--length, --examples, --keys, --haystack, --prompts or --seed "
        "differ)",
    }
    return sums.get(name, f"scores made with {name} = {before}, this search has {now}")


def _read(file: Path, kind: str) -> dict[str, Any]:
    start_over = "remove it to start over, or name another file"
    try:
        stored = read_json(file)
    except ConfigError as error:
        raise ConfigError(f"{error}: {start_over}") from None
    if stored.keys() != {"settings", "seconds", "scores", SUM}:
        raise ConfigError(f"{file} holds no {kind}: it is not a file that this search wrote")
    if stored[SUM] != _sum(stored):
        raise ConfigError(f"{file} is damaged, what it holds is not what was written: {start_over}")
    return stored


def _sum(stored: Mapping[str, Any]) -> str:
    """The sum of everything else in the file."""
    return digest({key: value for key, value in stored.items() if key != SUM})
