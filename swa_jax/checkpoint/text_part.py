"""The tensors of a folder's language model, under the names that they have in a folder of its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.safetensors_files import StoredTensor
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import EMBEDDING, HEAD

_FRONT = "model."  # of all names but the head's
# Within a whole model: as transformers writes it, and as it names the modules.
_IN_A_WHOLE = re.compile(r"(?:language_model\.model|model\.language_model)\.(.+)")
_HEAD_IN_A_WHOLE = f"language_model.{HEAD}"


class TextTensors(NamedTuple):
    """The tensors of a language model by name, whether its embedding makes the logits too, and what a user should
    know of what was found, in sentences."""

    tensors: dict[str, StoredTensor]
    tied: bool
    notes: list[str]


def text_tensors(found: Mapping[str, StoredTensor], config: ModelConfig, *, whole: str | None) -> TextTensors:
    """The language model in what a folder holds.

    Names may lack the `model.` in front: so are models stored that give hidden states, not logits, such as those for
    embeddings. They have no output matrix, whatever `tie_word_embeddings` says.

    Args:
      config: the language model's.
      whole: the model_type of the model for images that it is a part of, whose other tensors are left out. There
        the weights tell whether the embeddings are tied: transformers' own files say otherwise in two places. None:
        the folder is of a language model.

    Raises `CheckpointError`: the folder of a whole model holds no language model.
    """
    if whole is not None:
        return _part_of(found, whole)
    if EMBEDDING in found or EMBEDDING.removeprefix(_FRONT) not in found:
        return TextTensors(dict(found), config.tie_word_embeddings, [])
    tensors = {name if name == HEAD else _FRONT + name: tensor for name, tensor in found.items()}
    if config.tie_word_embeddings or HEAD in tensors:
        return TextTensors(tensors, config.tie_word_embeddings, [])
    note = (
        f"the weights have no output matrix ({HEAD}): they are of a model that gives hidden states; logits are made "
        "with its embedding, which was not trained for that"
    )
    return TextTensors(tensors, True, [note])


def text_name(name: str) -> str | None:
    """What a tensor of a whole model is called in its language model alone; None: it is of another part."""
    if inside := _IN_A_WHOLE.fullmatch(name):
        return _FRONT + inside[1]
    return HEAD if name in (HEAD, _HEAD_IN_A_WHOLE) else None


def part_name(name: str) -> str:
    """The part of a whole model that a tensor is of, such as `vision_tower`."""
    return name.removeprefix(_FRONT).split(".")[0]


def _part_of(found: Mapping[str, StoredTensor], whole: str) -> TextTensors:
    tensors, others = {}, Counter[str]()
    for name, tensor in found.items():
        if (own := text_name(name)) is not None:
            tensors[own] = tensor
        else:
            others[part_name(name)] += 1
    if EMBEDDING not in tensors:
        names = " or ".join(
            f"{front}.embed_tokens.weight" for front in ("language_model.model", "model.language_model")
        )
        raise CheckpointError(
            f"the weights of this {whole} model hold no tensor {names}: its language model is missing"
        )
    left_out = ", ".join(f"{part} ({count} tensors)" for part, count in sorted(others.items())) or "nothing"
    note = f"only the language model of this {whole} model is imported; left out: {left_out}"
    return TextTensors(tensors, HEAD not in tensors, [note])
