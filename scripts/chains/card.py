"""The card of a model of chains: `python -m scripts.chains card runs/chains-0/stage-5 --out runs/chains-0/card`.

`card.json` and `card.md` in that folder say how often the model answers, by hops, rivals, length and depth, with full
attention in every layer, with a window in every layer, and with full-attention decode besides; and what it costs to
give a window to one layer, or to one KV head, and to remove it. Every score has a 95 % interval (Wilson). Started
again, it measures what is left.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from swa_jax import load_model
from swa_jax.checkpoint.folder import weights_sum
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.errors import ConfigError
from swa_jax.estimates import accuracy_interval
from swa_jax.evaluate.chains import ChainCell, chain_examples, chain_grid
from swa_jax.evaluate.nll import score_answers
from swa_jax.files import read_json, write_json, write_text
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_types import FULL, HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern

COSTLY = 0.1  # a layer or head whose window, or removal, costs so much is needed
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
Measured = dict[str, dict[str, Any]]  # by what was measured: "score", "interval", "n"


class Question(NamedTuple):
    key: str
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
                yield Question(key_of(cell, name), cell, pattern)
        full, every = patterns["full"], tuple(range(kv_heads))
        for layer in range(layers):
            kinds = tuple(WINDOW if i == layer else FULL for i in range(layers))
            windowed = dataclasses.replace(full, layer_types=kinds)
            yield Question(key_of(hard, f"layer {layer}"), hard, windowed)
            yield Question(key_of(hard, f"no layer {layer}"), hard, full, (layer, every))
        for layer, head in itertools.product(range(layers), every):
            kinds = tuple(HYBRID if i == layer else FULL for i in range(layers))
            others = tuple(h for h in every if h != head)
            heads = tuple(others if i == layer else () for i in range(layers))
            windowed = dataclasses.replace(full, layer_types=kinds, full_kv_heads=heads)
            yield Question(key_of(hard, f"head {layer}.{head}"), hard, windowed)
            yield Question(key_of(hard, f"no head {layer}.{head}"), hard, full, (layer, (head,)))


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


def key_of(cell: ChainCell, name: str) -> str:
    depth = "" if cell.depth is None else f", depth {cell.depth:.0%}"
    return f"{cell.hops} hops, {cell.rivals} rivals, {cell.length} tokens{depth}: {name}"


def measure(
    model: Decoder,
    tokenizer: Tokenizer,
    card: Card,
    known: Measured,
    save: Callable[[Measured], None] = lambda _: None,
    batch_tokens: int = 16_384,
) -> Measured:
    """The score of everything that the card has and is not `known`; `save` is called with each new one."""
    measured = dict(known)
    config = model.config
    for key, cell, pattern, removed in card.questions(config.num_hidden_layers, config.num_key_value_heads):
        if key not in measured:
            examples = chain_examples(tokenizer, cell, num_examples=card.examples, gap=card.window, seed=card.seed)
            rows = max(1, min(len(examples), batch_tokens // cell.length))
            with without(model, removed):
                right = score_answers(model, examples, batch_size=rows, pattern=pattern).right
            found = accuracy_interval(right)
            measured[key] = {"score": found.mean, "interval": found.interval, "n": len(examples)}
            save(measured)
    return measured


def markdown(card: Card, measured: Measured, layers: int, kv_heads: int) -> str:
    """The tables of the card."""

    def score(cell: ChainCell, name: str) -> str:
        row = measured[key_of(cell, name)]
        low, high = row["interval"]
        return f"{100 * row['score']:.0f} [{100 * low:.0f}, {100 * high:.0f}]"

    names = list(card.patterns(layers))
    lines = [
        f"Answers right, %, of {card.examples} prompts a cell, with 95 % intervals (Wilson). The window is "
        f"{card.window}; the statements of a chain stand at least so many tokens apart.",
        "",
        f"| hops | rivals | tokens | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for cell in chain_grid(card.hops, card.rivals, card.lengths):
        scores = " | ".join(score(cell, name) for name in names)
        lines.append(f"| {cell.hops} | {cell.rivals} | {cell.length} | {scores} |")
    hard = card.hardest
    where = f"{hard.hops} hops, {hard.rivals} rivals, {hard.length} tokens"
    lines += ["", f"By depth of the number ({where}):", "", f"| depth | {' | '.join(names)} |"]
    lines.append("|---|" + "---|" * len(names))
    for depth in DEPTHS:
        cell = dataclasses.replace(hard, depth=depth)
        lines.append(f"| {depth:.0%} | {' | '.join(score(cell, name) for name in names)} |")
    least = measured[key_of(hard, "full")]["score"] - COSTLY

    def needed(parts: Sequence[str]) -> str:
        costly = [part for part in parts if measured[key_of(hard, part)]["score"] <= least]
        told = ", ".join(f"{part.removeprefix('no ')} ({score(hard, part)})" for part in costly)
        return f"{len(costly)} of {len(parts)}" + (f": {told}" if costly else "")

    for what, mark in (("a window", ""), ("removal", "no ")):
        lines += [
            "",
            f"Where {what} costs {100 * COSTLY:.0f} points or more ({where}; what is left in brackets):",
            "",
            f"- layers: {needed([f'{mark}layer {i}' for i in range(layers)])}",
            f"- KV heads: {needed([f'{mark}head {i}.{h}' for i in range(layers) for h in range(kv_heads)])}",
        ]
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> None:
    def listed(text: str) -> tuple[int, ...]:
        return tuple(int(item) for item in text.split(","))

    parser = argparse.ArgumentParser(prog="python -m scripts.chains card", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="its name, as everywhere")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hops", type=listed, default=(1, 2, 3))
    parser.add_argument("--rivals", type=listed, default=(1, 3, 8, 15))
    parser.add_argument("--lengths", type=listed, default=(256, 1024))
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--examples", type=int, default=100)
    given = parser.parse_args(arguments)
    card = Card(given.hops, given.rivals, given.lengths, given.window, given.examples)
    file, folder = given.out / "card.json", model_folder(given.model)
    about = json.loads(json.dumps({"weights": weights_sum(folder)} | dataclasses.asdict(card)))
    kept = read_json(file) if file.exists() else {"about": about, "measured": {}}
    if kept["about"] != about:
        raise ConfigError(f"{file} is of another model, or of other prompts: name another folder with --out")
    given.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    measured = measure(model, tokenizer, card, kept["measured"], lambda new: write_json(file, kept | {"measured": new}))
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    write_text(given.out / "card.md", markdown(card, measured, layers, heads))
    print(given.out / "card.md")
