"""Models whose long-range heads are known, at many placements: alone, in chains, in pairs of which one or both count.

The heads that matter lie where they are told to; all others, and what these say to other tokens, add noise. A prompt
is hay, tokens that hold values far back, and a question token at the end. What answers a question is a unit:

  one     a head copies the value of its class
  either  two heads do so; one of them is enough
  both    two heads do so, each too weakly to win over a decoy alone
  chain   a head copies which entry the class points to, and a head of a later layer copies that entry's value

Weights are written by hand. The residual stream is one-hot tokens, then answers, then what chains point to.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from swa_jax.evaluate import Example
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern

LAYERS, KV_HEADS, WINDOW_SIZE = 8, 4, 8
HAY, VALUES, LENGTH = 8, 4, 64
FULL_HEADS = 8  # that a placement needs
WEAK, DECOY = 0.7, 1.0  # logits: what a head of "both" writes, and what stands against it
Kind = Literal["one", "either", "both", "chain"]
Head = tuple[int, int]  # layer, KV head


class Unit(NamedTuple):
    """What answers one class."""

    kind: Kind
    heads: tuple[Head, ...]

    @property
    def needed(self) -> int:
        """How many of its heads must stay full."""
        return 1 if self.kind in ("one", "either") else 2

    def found(self, full: np.ndarray) -> int:
        """How many of those it needs are full in a mask [L, K]."""
        return min(self.needed, sum(bool(full[head]) for head in self.heads))


def placement(name: str, seed: int) -> list[Unit]:
    """The units of a placement; which heads they are is drawn by the seed."""
    rng = np.random.default_rng([seed, *name.encode()])
    shape = _SHAPES.get(name)
    if shape is not None:  # so many heads in each of so many layers
        layers = rng.permutation(LAYERS)[: len(shape)].tolist()
        if name == "first layers":
            layers = [0, 1, 2]
        if name == "last layers":
            layers = [5, 6, 7]
        heads = [(a, int(b)) for a, n in zip(layers, shape, strict=True) for b in rng.permutation(KV_HEADS)[:n]]
        return [Unit("one", (head,)) for head in heads]
    cells = [divmod(int(cell), KV_HEADS) for cell in rng.permutation(LAYERS * KV_HEADS)]
    if name == "anywhere":
        return [Unit("one", (head,)) for head in cells[:FULL_HEADS]]
    kinds = _KINDS[name]
    units: list[Unit] = []
    for kind in kinds:
        if kind == "one":
            units.append(Unit(kind, (cells.pop(),)))
            continue
        first = cells.pop()
        later = next(i for i, cell in enumerate(cells) if cell[0] != first[0] or kind != "chain")
        units.append(Unit(kind, tuple(sorted((first, cells.pop(later))))))
    return units


_SHAPES = {
    "whole layers": (4, 4),
    "one a layer": (1,) * 8,
    "four layers of two": (2,) * 4,
    "quarters": (3, 3, 1, 1),  # what BOSCH's buckets hold: one layer in eight quarters at each step
    "three and five": (3, 1, 1, 1, 1, 1),
    "four and four": (4, 1, 1, 1, 1),
    "first layers": (3, 3, 2),
    "last layers": (3, 3, 2),
}
_KINDS: dict[str, tuple[Kind, ...]] = {
    "chains": ("chain",) * 4,
    "redundant pairs": ("either",) * 8,
    "conjunctions": ("both",) * 4,
    "mixed": ("one", "one", "either", "either", "both", "chain"),
}
PLACEMENTS = (*_SHAPES, "anywhere", *_KINDS)


@dataclasses.dataclass(frozen=True)
class Plant:
    """A model, and what its placement needs."""

    units: list[Unit]

    @property
    def entries(self) -> int:
        """Tokens of a class: values, or a pointer to each entry and the entries' values."""
        return VALUES + VALUES * VALUES if any(unit.kind == "chain" for unit in self.units) else VALUES

    def value(self, c: int, value: int) -> int:
        return HAY + c * self.entries + value

    def entry(self, c: int, pointer: int, value: int) -> int:
        return HAY + c * self.entries + VALUES + pointer * VALUES + value

    def question(self, c: int) -> int:
        return HAY + len(self.units) * self.entries + c

    def decoy(self, c: int) -> int:
        return self.question(c) + len(self.units)

    @property
    def vocab(self) -> int:
        return self.decoy(len(self.units) - 1) + 1

    @property
    def pointed(self) -> int:
        """Where the residual stream says what each class points to."""
        return 2 * self.vocab

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab,
            hidden_size=2 * self.vocab + len(self.units) * VALUES,
            intermediate_size=8,
            num_hidden_layers=LAYERS,
            num_attention_heads=2 * KV_HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=8,
            position_embedding="none",
        )

    def hits(self, full: np.ndarray) -> float:
        """The share of the heads needed that are full in a mask [L, K]."""
        return sum(unit.found(full) for unit in self.units) / sum(unit.needed for unit in self.units)

    def model(self, noise: float = 0.002, seed: int = 0) -> Decoder:
        config = self.config
        model = Decoder(config, AttentionPattern.from_recipe("full", LAYERS), rngs=nnx.Rngs(0))
        rng = np.random.default_rng(seed)
        width, size = config.hidden_size, config.head_dim
        weights = _Weights(
            *(
                rng.normal(0, spread, shape).astype(np.float32)
                for spread, shape in (
                    (0.1, (LAYERS, width, 2 * KV_HEADS * size)),
                    (0.1, (LAYERS, width, KV_HEADS * size)),
                    (0.1, (LAYERS, width, KV_HEADS * size)),
                    (noise, (LAYERS, 2 * KV_HEADS * size, width)),
                )
            )
        )
        for c, unit in enumerate(self.units):
            asked = self.question(c)
            values = [(self.value(c, v), self.vocab + self.value(c, v)) for v in range(VALUES)]
            if unit.kind == "chain":
                points = [(self.value(c, v), self.pointed + c * VALUES + v) for v in range(VALUES)]
                weights.write(unit.heads[0], {asked: 0}, {t: (0, to, 1.0) for t, to in points})
                found = {
                    self.entry(c, p, v): (p, self.vocab + self.value(c, v), 1.0)
                    for p in range(VALUES)
                    for v in range(VALUES)
                }
                weights.write(unit.heads[1], {self.pointed + c * VALUES + p: p for p in range(VALUES)}, found)
                continue
            strength = WEAK if unit.kind == "both" else 1.0
            for head in unit.heads:
                weights.write(head, {asked: 0}, {token: (0, to, strength) for token, to in values})
        attention = model.layers.attention
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        for name, kernel in zip(names, weights, strict=True):
            getattr(attention, name).kernel[...] = jnp.asarray(kernel)
        model.layers.mlp.down_proj.kernel[...] = jnp.zeros_like(model.layers.mlp.down_proj.kernel[...])
        model.embedding[...] = jnp.eye(self.vocab, width)
        head = np.zeros((width, self.vocab), np.float32)
        head[self.vocab : 2 * self.vocab] = np.eye(self.vocab)
        for c in range(len(self.units)):
            head[self.question(c), self.decoy(c)] = DECOY if self.units[c].kind == "both" else 0
        model.lm_head.kernel[...] = jnp.asarray(head)
        return model

    def examples(self, count: int = 4 * FULL_HEADS, seed: int = 0, length: int = LENGTH) -> list[Example]:
        """Questions about each class in turn, whose tokens lie beyond the window of the question."""
        rng = np.random.default_rng(seed)
        examples = []
        for i in range(count):
            prompt = rng.integers(HAY, size=length).tolist()
            told: list[int] = []
            answers = []
            for c, unit in enumerate(self.units):
                value = int(rng.integers(VALUES))
                told.append(self.value(c, value))
                if unit.kind == "chain":
                    of = rng.permutation(VALUES)
                    told += [self.entry(c, p, int(of[p])) for p in range(VALUES)]
                    value = int(of[value])
                answers.append(self.value(c, value))
            places = rng.choice(length - 2 * WINDOW_SIZE, len(told), replace=False)
            for token, place in zip(told, places.tolist(), strict=True):
                prompt[place] = token
            asked = i % len(self.units)
            prompt[-1] = self.question(asked)
            examples.append(Example(prompt, [answers[asked]], []))
        return examples


class _Weights(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray

    def write(self, head: Head, asks: dict[int, int], tells: dict[int, tuple[int, int, float]]) -> None:
        """A head that looks up and copies, beside what it does already.

        Args:
          asks: by dimension of the residual stream, the channel of the query that it sets.
          tells: by token, the channel of the key that it sets, the dimension it is copied to, and how strongly.
        """
        layer, number = head
        size = self.k.shape[2] // KV_HEADS
        own = slice(number * size, (number + 1) * size)
        first = number * 2 * size  # of the group's first query head
        self.q[layer, :, first : first + size] = 0
        self.k[layer, :, own], self.v[layer, :, own] = 0, 0
        self.o[layer, first : first + size] = 0
        for dimension, channel in asks.items():
            self.q[layer, dimension, first + channel] = 1
        copied = sorted({to for _, to, _ in tells.values()})
        for token, (channel, to, strength) in tells.items():
            self.k[layer, token, number * size + channel] = 1
            self.v[layer, token, number * size + copied.index(to)] = 1
            # A one-hot token is as long as the root of the width once it is normed.
            self.o[layer, first + copied.index(to), to] = strength / np.sqrt(self.o.shape[2])
