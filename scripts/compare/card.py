"""The card of a model of chains: `python -m scripts.compare card runs/chains-0/stage-5`.

It says how often the model answers, by hops, rivals, length and depth, with full attention in every layer, with a
window in every layer, and with full-attention decode besides; and what it costs to give a window to one layer, or to
one KV head, and to remove it. Every score has a 95 % interval (Wilson).
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from scripts.compare.runner import Cell, Comparison, Done, key_of, markdown
from swa_jax import load_model
from swa_jax.checkpoint.folder import weights_sum
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.errors import ConfigError
from swa_jax.estimates import accuracy_interval
from swa_jax.evaluate.chains import ChainCell, chain_examples, chain_grid
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

COSTLY = 0.1  # a layer or head whose window, or removal, costs so much is needed
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
BATCH_TOKENS = 16_384


class Question(NamedTuple):
    name: str
    cell: ChainCell
    pattern: AttentionPattern
    removed: tuple[int, tuple[int, ...]] | None = None  # a layer and KV heads of it


@dataclasses.dataclass(frozen=True)
class Card:
    """What is measured."""

    hops: tuple[int, ...]
    rivals: tuple[int, ...]
    lengths: tuple[int, ...]
    window: int
    examples: int
    seed: int = 0

    @property
    def hardest(self) -> ChainCell:
        """Where depth, layers and heads are looked at: rivals in the middle of the list."""
        return ChainCell(max(self.hops), self.rivals[len(self.rivals) // 2], max(self.lengths))

    def patterns(self, layers: int) -> dict[str, AttentionPattern]:
        windowed = AttentionPattern((WINDOW,) * layers, self.window)
        return {
            "full": AttentionPattern((FULL,) * layers, self.window),
            "window": windowed,
            "window, full-attention decode": dataclasses.replace(windowed, full_attention_decode=True),
        }

    def questions(self, layers: int, kv_heads: int) -> Iterator[Question]:
        """Everything that is measured."""
        patterns, hard = self.patterns(layers), self.hardest
        by_depth = [dataclasses.replace(hard, depth=depth) for depth in DEPTHS]
        for cell in [*chain_grid(self.hops, self.rivals, self.lengths), *by_depth]:
            for name, pattern in patterns.items():
                yield Question(name, cell, pattern)
        full, every = patterns["full"], tuple(range(kv_heads))
        for layer in range(layers):
            kinds = tuple(WINDOW if i == layer else FULL for i in range(layers))
            windowed = dataclasses.replace(full, layer_types=kinds)
            yield Question(f"layer {layer}", hard, windowed)
            yield Question(f"no layer {layer}", hard, full, (layer, every))
        for layer, head in itertools.product(range(layers), every):
            kinds = tuple(HYBRID if i == layer else FULL for i in range(layers))
            others = tuple(h for h in every if h != head)
            heads = tuple(others if i == layer else () for i in range(layers))
            windowed = dataclasses.replace(full, layer_types=kinds, full_kv_heads=heads)
            yield Question(f"head {layer}.{head}", hard, windowed)
            yield Question(f"no head {layer}.{head}", hard, full, (layer, (head,)))


@contextlib.contextmanager
def without(model: Decoder, removed: tuple[int, tuple[int, ...]] | None) -> Iterator[None]:
    """What these KV heads' queries read is not added to the stream while the block runs."""
    if removed is None:
        yield
        return
    layer, heads = removed
    kernel = model.layers.attention.o_proj.kernel
    whole = kernel[...]  # [L, H * D, d]
    by_head = whole.reshape(whole.shape[0], model.config.num_key_value_heads, -1)
    kernel[...] = by_head.at[layer, jnp.array(heads)].set(0).reshape(whole.shape)
    try:
        yield
    finally:
        kernel[...] = whole


def key(cell: ChainCell, name: str) -> tuple[str, str]:
    depth = "" if cell.depth is None else f", depth {cell.depth:.0%}"
    return f"{cell.hops} hops, {cell.rivals} rivals, {cell.length} tokens{depth}", name


def score(model: Decoder, tokenizer: Tokenizer, card: Card, question: Question) -> dict[str, Any]:
    _, cell, pattern, removed = question
    examples = chain_examples(tokenizer, cell, num_examples=card.examples, gap=card.window, seed=card.seed)
    rows = max(1, min(len(examples), BATCH_TOKENS // cell.length))
    with without(model, removed):
        found = accuracy_interval(score_answers(model, examples, batch_size=rows, pattern=pattern).right)
    return {"score": found.mean, "interval": found.interval}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its name, as everywhere")
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rivals", type=int, nargs="+", default=[1, 3, 8, 15])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--examples", type=int, default=100)


def comparison(options: argparse.Namespace) -> Comparison:
    folder = model_folder(options.model)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    card = Card(tuple(options.hops), tuple(options.rivals), tuple(options.lengths), options.window, options.examples)
    return of_model(model, tokenizer, card, weights_sum(folder))


def of_model(model: Decoder, tokenizer: Tokenizer, card: Card, weights: str) -> Comparison:
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    cells = [
        Cell(
            key(one.cell, one.name),
            functools.partial(score, model, tokenizer, card, one),
            lambda: [weights, card.examples],
        )
        for one in card.questions(layers, heads)
    ]
    return Comparison("card", cells, lambda done: (report(card, done, layers, heads), []))


def report(card: Card, done: Done, layers: int, kv_heads: int) -> str:
    """The tables of the card."""

    def shown(cell: ChainCell, name: str) -> str:
        row = done[key_of(*key(cell, name))]
        return "{:.0f} [{:.0f}, {:.0f}]".format(*(100 * one for one in (row["score"], *row["interval"])))

    asked = [key_of(*key(one.cell, one.name)) for one in card.questions(layers, kv_heads)]
    if left := sum(one not in done for one in asked):
        raise ConfigError(f"{left} of {len(asked)} scores are left to measure: run again without --limit")
    names, hard = list(card.patterns(layers)), card.hardest
    where = f"{hard.hops} hops, {hard.rivals} rivals, {hard.length} tokens"
    least = done[key_of(*key(hard, "full"))]["score"] - COSTLY

    def needed(parts: Sequence[str]) -> str:
        costly = [part for part in parts if done[key_of(*key(hard, part))]["score"] <= least]
        told = ", ".join(f"{part.removeprefix('no ')} ({shown(hard, part)})" for part in costly)
        return f"{len(costly)} of {len(parts)}" + (f": {told}" if costly else "")

    by_cell = [
        [str(cell.hops), str(cell.rivals), str(cell.length), *(shown(cell, name) for name in names)]
        for cell in chain_grid(card.hops, card.rivals, card.lengths)
    ]
    by_depth = [
        [f"{depth:.0%}", *(shown(dataclasses.replace(hard, depth=depth), name) for name in names)] for depth in DEPTHS
    ]
    parts = [
        f"Answers right, %, of {card.examples} prompts a cell, with 95 % intervals (Wilson). The window is "
        f"{card.window}; the statements of a chain stand at least so many tokens apart.",
        markdown(["hops", "rivals", "tokens", *names], by_cell),
        f"By depth of the number ({where}):",
        markdown(["depth", *names], by_depth),
    ]
    for what, mark in (("a window", ""), ("removal", "no ")):
        by_head = [f"{mark}head {i}.{h}" for i in range(layers) for h in range(kv_heads)]
        parts += [
            f"Where {what} costs {100 * COSTLY:.0f} points or more ({where}; what is left in brackets):",
            f"- layers: {needed([f'{mark}layer {i}' for i in range(layers)])}\n- KV heads: {needed(by_head)}",
        ]
    return "\n\n".join(parts)
