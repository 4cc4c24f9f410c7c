"""The content that scores are made from, by which they are kept: weights, examples and options."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from swa_jax.base.files import Store, digest
from swa_jax.base.settings import to_dict
from swa_jax.checkpoint.folder import fetch
from swa_jax.evaluate.examples import Example
from swa_jax.model.decoder import Decoder

VERSION = 4  # of scores and choices: raise it when the same content would be scored, or chosen by, otherwise


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


def score_store(file: Path | None, kind: str, model: Decoder, examples: Sequence[Example], **content: Any) -> Store:
    """The scores of one content (see `content_key`) in a file, which may keep those of others too."""
    return Store(file, kind, part="" if file is None else digest(content_key(model, examples, **content)))


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
