"""The plant of most tests: each of eight classes is answered by a KV head of its own, and prompts have 48 tokens."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from plants import KV_HEADS, LAYERS, Plant, Unit

from swa_jax.evaluate import Example
from swa_jax.model.decoder import Decoder

# Three heads in two layers and one in two others: the only way of sharing 8 full heads out that BOSCH's buckets have.
PLANTED = ((2, 0), (2, 1), (2, 3), (5, 0), (5, 2), (5, 3), (3, 1), (6, 2))
CLASSES = len(PLANTED)
PLANT = Plant([Unit("one", (head,)) for head in PLANTED])


def planted_mask() -> np.ndarray:
    full = np.zeros((LAYERS, KV_HEADS), bool)
    full[tuple(zip(*PLANTED, strict=True))] = True
    return full


def planted_model(noise: float = 0.002, seed: int = 0, units: Sequence[Unit] = PLANT.units) -> Decoder:
    return Plant([*units]).model(noise, seed)


def planted_examples(count: int = CLASSES, seed: int = 0) -> list[Example]:
    return PLANT.examples(count, seed, length=48)


def in_place_of_a_checkpoint(monkeypatch, model: Decoder, *verbs: str) -> None:
    """These verbs get the model and its examples, whatever checkpoint and needles they ask for."""
    opened = SimpleNamespace(config=model.config, pattern=model.pattern, hf_config={})
    for verb in verbs:
        monkeypatch.setattr(f"swa_jax.cli.{verb}.find_model", lambda name: name)
    monkeypatch.setattr("swa_jax.cli.compare.open_model", lambda _: (opened, None))
    monkeypatch.setattr("swa_jax.cli.select.find_tokenizer", lambda _: None)
    monkeypatch.setattr("swa_jax.cli.options.draw_needles", lambda *_: planted_examples())
    monkeypatch.setattr("swa_jax.checkpoint.folder.weights_sum", lambda _: "planted")
    monkeypatch.setattr("swa_jax.checkpoint.folder.open_checkpoint", lambda _: opened)
    monkeypatch.setattr("swa_jax.checkpoint.folder.load_model", lambda *_, **__: model)
