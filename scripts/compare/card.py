"""Which layers and KV heads a model of chains needs: `python -m scripts.compare card chains --window 32`.

It says what it costs to give a window to one layer, or to one KV head, and what it costs to remove it, with a 95 %
interval (Wilson). `swa-jax evaluate chains` says how often the model answers, by hops, rivals, length and depth.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from scripts.compare.runner import Cell, Comparison, Done, key_of, told
from swa_jax import load_model
from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import Estimate, accuracy_interval
from swa_jax.checkpoint.folder import weights_sum
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

COSTLY = 0.1  # a layer or head whose window, or removal, costs so much is needed
BATCH_TOKENS = 16_384


class CardQuestion(NamedTuple):
    name: str
    pattern: AttentionPattern
    removed: tuple[int, tuple[int, ...]] | None = None  # a layer and KV heads of it


def questions(layers: int, kv_heads: int, window: int) -> Iterator[CardQuestion]:
    """Everything that is measured: full attention first."""
    full, every = AttentionPattern((FULL,) * layers, window), tuple(range(kv_heads))
    yield CardQuestion("full", full)
    for layer in range(layers):
        kinds = tuple(WINDOW if i == layer else FULL for i in range(layers))
        yield CardQuestion(f"layer {layer}", dataclasses.replace(full, layer_types=kinds))
        yield CardQuestion(f"no layer {layer}", full, (layer, every))
    for layer, head in itertools.product(range(layers), every):
        kinds = tuple(HYBRID if i == layer else FULL for i in range(layers))
        others = tuple(h for h in every if h != head)
        heads = tuple(others if i == layer else () for i in range(layers))
        yield CardQuestion(f"head {layer}.{head}", dataclasses.replace(full, layer_types=kinds, full_kv_heads=heads))
        yield CardQuestion(f"no head {layer}.{head}", full, (layer, (head,)))


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


def score(model: Decoder, examples: Sequence[Example], length: int, question: CardQuestion) -> dict[str, Any]:
    rows = max(1, min(len(examples), BATCH_TOKENS // length))
    with without(model, question.removed):
        found = accuracy_interval(score_answers(model, examples, batch_size=rows, pattern=question.pattern).right)
    return {"score": found.mean, "interval": found.interval}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its name, as everywhere")
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--rivals", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--examples", type=int, default=100)


def comparison(options: argparse.Namespace) -> Comparison:
    folder = model_folder(options.model)
    cell = ChainCell(options.hops, options.rivals, options.length)
    examples = chain_examples(load_tokenizer(folder), cell, num_examples=options.examples, gap=options.window, seed=0)
    return of_model(load_model(folder), examples, cell, options.window, weights_sum(folder))


def of_model(model: Decoder, examples: Sequence[Example], cell: ChainCell, window: int, weights: str) -> Comparison:
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    settings = [weights, dataclasses.asdict(cell), window, len(examples)]
    cells = [
        Cell((one.name,), functools.partial(score, model, examples, cell.length, one), lambda: settings)
        for one in questions(layers, heads, window)
    ]
    where = f"{cell.hops} hops, {cell.rivals} rivals, {cell.length} tokens"
    return Comparison("card", cells, lambda done: (report(where, done, layers, heads), []))


def report(where: str, done: Done, layers: int, kv_heads: int) -> str:
    """Two lists: what a window costs, and what removal costs."""

    def needed(parts: Sequence[str]) -> str:
        costly = [part for part in parts if done[key_of(part)]["score"] <= least]
        left = {part: done[key_of(part)] for part in costly}
        each = [
            f"{part.removeprefix('no ')} ({told(Estimate(r['score'], *r['interval']))})" for part, r in left.items()
        ]
        return f"{len(costly)} of {len(parts)}" + (f": {', '.join(each)}" if each else "")

    if len(done) < 1 + 2 * layers * (1 + kv_heads):
        raise ConfigError("scores are left to measure: run again without --limit and --only")
    least = done[key_of("full")]["score"] - COSTLY
    parts = []
    for what, mark in (("a window", ""), ("removal", "no ")):
        by_head = [f"{mark}head {i}.{h}" for i in range(layers) for h in range(kv_heads)]
        parts += [
            f"Where {what} costs {100 * COSTLY:.0f} points or more ({where}; what is left in brackets):",
            f"- layers: {needed([f'{mark}layer {i}' for i in range(layers)])}\n- KV heads: {needed(by_head)}",
        ]
    return "\n\n".join(parts)
