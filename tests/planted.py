"""A model with known long-range heads: each looks up the value of its own class anywhere in the prompt and copies it.

A prompt is hay, one value token of every class far back, and a question token at the end: "which value of class c?".
Class c is answered by KV head `PLANTED[c]` alone; all other heads, and what the planted heads say to other tokens, add
noise. Weights are written by hand: the residual stream is one-hot tokens in its first half and answers in its second.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.evaluate import Example
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern

LAYERS, KV_HEADS, WINDOW_SIZE = 8, 4, 8
# Three heads in two layers and one in two others: the only way of sharing 8 full heads out that BOSCH's buckets have.
PLANTED = ((2, 0), (2, 1), (2, 3), (5, 0), (5, 2), (5, 3), (3, 1), (6, 2))
HAY, CLASSES, VALUES = 8, len(PLANTED), 4
VOCAB = HAY + CLASSES * VALUES + CLASSES
HALF = VOCAB  # of the residual stream
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=2 * HALF,
    intermediate_size=8,
    num_hidden_layers=LAYERS,
    num_attention_heads=2 * KV_HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=8,
    position_embedding="none",
)


def value_token(c: int, value: int) -> int:
    return HAY + c * VALUES + value


def question_token(c: int) -> int:
    return HAY + CLASSES * VALUES + c


def planted_mask() -> np.ndarray:
    full = np.zeros((LAYERS, KV_HEADS), bool)
    full[tuple(zip(*PLANTED, strict=True))] = True
    return full


def planted_model(
    noise: float = 0.002,
    seed: int = 0,
    heads: Sequence[tuple[int, int, int]] = tuple((c, *head) for c, head in enumerate(PLANTED)),
) -> Decoder:
    """`heads`: class, layer and KV head of every head that answers; two may answer the same class."""
    model = Decoder(CONFIG, AttentionPattern.from_recipe("full", LAYERS), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(seed)
    size, group = CONFIG.head_dim, CONFIG.num_attention_heads // KV_HEADS
    embedding = np.zeros((VOCAB, 2 * HALF), np.float32)
    embedding[:, :HALF] = np.eye(VOCAB)
    q, k, v = (
        rng.normal(0, 0.1, (LAYERS, 2 * HALF, n * size)).astype(np.float32) for n in (2 * KV_HEADS, KV_HEADS, KV_HEADS)
    )
    o = rng.normal(0, noise, (LAYERS, 2 * KV_HEADS * size, 2 * HALF)).astype(np.float32)
    for c, layer, head in heads:
        own = slice(head * size, (head + 1) * size)
        first = slice(head * group * size, (head * group + 1) * size)  # the group's first query head
        q[layer, :, first], k[layer, :, own], v[layer, :, own] = 0, 0, 0
        q[layer, question_token(c), first.start] = 1
        for value in range(VALUES):
            k[layer, value_token(c, value), own.start] = 1
            v[layer, value_token(c, value), own.start + value] = 1
            o[layer, first.start + value] = 0
            o[layer, first.start + value, HALF + value_token(c, value)] = 1
    attention = model.layers.attention
    model.embedding[...] = jnp.asarray(embedding)
    for projection, kernel in (
        (attention.q_proj, q),
        (attention.k_proj, k),
        (attention.v_proj, v),
        (attention.o_proj, o),
    ):
        projection.kernel[...] = jnp.asarray(kernel)
    model.layers.mlp.down_proj.kernel[...] = jnp.zeros_like(model.layers.mlp.down_proj.kernel[...])
    model.lm_head.kernel[...] = jnp.asarray(np.roll(embedding, HALF, axis=1).T)
    return model


def planted_examples(count: int = CLASSES, length: int = 48, seed: int = 0) -> list[Example]:
    """Questions about each class in turn; values lie before the last `WINDOW_SIZE * LAYERS`-free stretch of hay."""
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(count):
        values = rng.integers(VALUES, size=CLASSES)
        prompt = rng.integers(HAY, size=length).tolist()
        places = rng.choice(length - 2 * WINDOW_SIZE, CLASSES, replace=False)
        for c, place in enumerate(places.tolist()):
            prompt[place] = value_token(c, int(values[c]))
        prompt[-1] = question_token(i % CLASSES)
        examples.append(Example(prompt, [value_token(i % CLASSES, int(values[i % CLASSES]))], []))
    return examples


def in_place_of_a_checkpoint(monkeypatch, model: Decoder, *verbs: str) -> None:
    """These verbs get the model and its examples, whatever checkpoint and needles they ask for."""
    for verb in verbs:
        monkeypatch.setattr(f"swa_jax.cli.{verb}.find_model", lambda name: name)
        monkeypatch.setattr(f"swa_jax.cli.{verb}.load_checkpoint", lambda *_: (model, None))
    monkeypatch.setattr("swa_jax.cli.options.draw_needles", lambda *_: planted_examples())
    monkeypatch.setattr("swa_jax.checkpoint.folder.weights_sum", lambda _: "planted")
    opened = SimpleNamespace(config=model.config, pattern=model.pattern, hf_config={})
    monkeypatch.setattr("swa_jax.checkpoint.folder.open_checkpoint", lambda _: opened)
