"""Does a search that a gradient leads find what scoring every layer (or head) finds, and at what price?

    python -m scripts.compare searches chains --window 32 --length 384 --budgets 2 4
    python -m scripts.compare searches chains --unit heads --window 32 --length 384 --budgets 8 16 32

Layers, or single KV heads ("layer.head" in the table), are chosen by a few needles (of `chains`: chains of one, two and
three hops), in the model's chat template where it has one, and measured on others that nothing was chosen by. The table
has a row for each scheme: what it chose, the answers' loss on the others, how much more that is than under the choice
of the exhaustive search (paired, 95 % interval), and the processor's time. Without and with sink tokens each search
begins anew; the last row runs what was found without sink tokens with them.
"""

import argparse
import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.compare.runner import Cell, Comparison, Done, key_of, markdown
from swa_jax.adapt.tasks import HOPS, RIVALS
from swa_jax.checkpoint.folder import load_model, weights_sum
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.chat import Wrap, find_wrap
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.estimates import paired_bootstrap
from swa_jax.evaluate import Example, needle_examples
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.evaluate.nll import answer_nll
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import LayerScorer, MaskEvaluator
from swa_jax.select.greedy_heads import greedy_heads
from swa_jax.select.heads import head_pattern
from swa_jax.select.nll import TRIED


class Scheme(NamedTuple):
    name: str
    tried: int | None  # layers, or heads, that a round scores; None: all
    share: int  # of the prompts, one in so many


SCHEMES = (
    Scheme("every one", None, 1),
    Scheme(f"gradient, then the best {TRIED}", TRIED, 1),
    Scheme(f"gradient, then the best {TRIED}, half the prompts", TRIED, 2),
    Scheme("gradient alone", 1, 1),
    Scheme("gradient alone, a quarter of the prompts", 1, 4),
    Scheme("every one, a quarter of the prompts", None, 4),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its name, as everywhere")
    parser.add_argument("--unit", choices=("layers", "heads"), default="layers", help="what stays full")
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a prompt with its answer")
    parser.add_argument("--budgets", type=int, nargs="+", default=[2, 4], help="full layers, or heads")
    parser.add_argument("--sink-tokens", type=int, nargs="+", default=[0])
    parser.add_argument("--prompts", type=int, default=8, help="to choose by (of chains: of each number of hops)")
    parser.add_argument("--others", type=int, default=32, help="to measure on")


def draw(name: str, folder: Path, tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[Example]:
    if name == "chains":
        cells = [ChainCell(hops, RIVALS, length) for hops in HOPS]
        each = [chain_examples(tokenizer, cell, num_examples=count, gap=length // 8, seed=seed) for cell in cells]
        return [one for group in zip(*each, strict=True) for one in group]
    wrap = find_wrap(folder, None) or Wrap()
    return needle_examples(tokenizer, length=length, num_examples=count, wrap=wrap, seed=seed)


def ranked(
    unit: str, model: Decoder, examples: Sequence[Example], budget: int, tried: int | None, window: Window
) -> list[Any]:
    """Layers, or pairs of a layer and a KV head, in the order in which the search makes them full."""
    if unit == "layers":
        rounds = LayerScorer(model, examples, window).greedy(budget, tried=tried)
        return [int(layer) for scores in rounds for layer in scores.picked]
    evaluate = MaskEvaluator(model, examples, window)
    order = greedy_heads(evaluate, budget, tried=tried or math.prod(evaluate.shape)).order
    return [[int(layer), int(head)] for layer, head in order]


def with_full(unit: str, config: ModelConfig, full: Sequence[Any], window: Window) -> AttentionPattern:
    if unit == "layers":
        return AttentionPattern.from_full_layers(full, config.num_hidden_layers, **window.fields)
    mask = np.zeros((config.num_hidden_layers, config.common_kv_heads), bool)
    mask[tuple(np.transpose(full))] = True
    return head_pattern(mask, window)


def comparison(options: argparse.Namespace) -> Comparison:
    folder = model_folder(options.model)
    load = functools.cache(lambda: load_model(folder, dtype="float32"))
    choosing, others = (
        draw(options.model, folder, load_tokenizer(folder), options.length, count, seed)
        for seed, count in enumerate((options.prompts, options.others))
    )

    def window(sinks: int) -> Window:
        return Window(options.window, sinks, False)

    def losses(order: list[Any], sinks: int) -> list[list[float]]:
        """Of each budget, each prompt's."""
        windowed = [with_full(options.unit, load().config, order[:n], window(sinks)) for n in options.budgets]
        found = [answer_nll(load().with_pattern(one), others, full_attention_decode=False) for one in windowed]
        return [np.asarray(loss, float).tolist() for loss in found]

    def work(scheme: Scheme, sinks: int) -> dict[str, Any]:
        model, some = load(), choosing[:: scheme.share]
        begin = time.process_time()
        order = ranked(options.unit, model, some, max(options.budgets), scheme.tried, window(sinks))
        took = time.process_time() - begin
        again = {str(n): losses(order, n) for n in options.sink_tokens[1:]} if sinks == options.sink_tokens[0] else {}
        return {"order": order, "took": took, "losses": losses(order, sinks), "with sink tokens": again}

    named = ("unit", "window", "length", "budgets", "sink_tokens", "prompts", "others")
    settings = functools.cache(lambda: [weights_sum(folder), *(getattr(options, name) for name in named)])
    cells = [
        Cell((scheme.name, sinks), functools.partial(work, scheme, sinks), settings)
        for sinks in options.sink_tokens
        for scheme in SCHEMES
    ]
    return Comparison("searches", cells, lambda done: (table(done, options.sink_tokens, options.budgets), []))


def table(done: Done, sink_tokens: Sequence[int], budgets: Sequence[int]) -> str:
    rows = []

    def add(sinks: int, name: str, line: dict[str, Any], losses: Sequence[Sequence[float]], took: str) -> None:
        exact = done[key_of(SCHEMES[0].name, sinks)]["losses"]
        for budget, loss, least in zip(budgets, losses, exact, strict=True):
            more = paired_bootstrap(np.array(loss), np.array(least))
            interval = "" if more.interval is None else f" [{more.interval[0]:.3f}, {more.interval[1]:.3f}]"
            which = ", ".join(".".join(map(str, np.ravel(one))) for one in sorted(line["order"][:budget]))
            rows.append([str(sinks), name, which, f"{np.mean(loss):.3f}", f"{more.mean:+.3f}{interval}", took])

    first = done.get(key_of(SCHEMES[0].name, sink_tokens[0]))
    for sinks in sink_tokens:
        for scheme in SCHEMES:
            if line := done.get(key_of(scheme.name, sinks)):
                add(sinks, scheme.name, line, line["losses"], f"{line['took']:.0f} s")
        if first and str(sinks) in first["with sink tokens"] and key_of(SCHEMES[0].name, sinks) in done:
            add(sinks, "every one, chosen without sink tokens", first, first["with sink tokens"][str(sinks)], "")
    return markdown(["sink tokens", "scheme", "full", "loss", "more than by every one", "processor time"], rows)
