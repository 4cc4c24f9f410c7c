"""Does a search that a gradient leads find what scoring every layer (or head) finds, and at what price?

    python scripts/compare_searches.py chains --window 32 --length 384 --budgets 2,4
    python scripts/compare_searches.py checkpoints/smollm2 --window 64 --length 379 --budgets 3,5 --sink-tokens 0,4
    python scripts/compare_searches.py chains --unit heads --window 32 --length 384 --budgets 8,16,32

Layers, or single KV heads ("layer.head" in the table), are chosen by a few needles (of `chains`: chains of one, two and
three hops), in the model's chat template where it has one, and measured on others that nothing was chosen by. The table
has a row for each scheme: what it chose, the answers' loss on the others, how much more that is than under the choice
of the exhaustive search (paired, 95 % interval), and the processor's time. Without and with sink tokens each search
begins anew; the last row runs what was found without sink tokens with them.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swa_jax.adapt.tasks import HOPS, RIVALS
from swa_jax.checkpoint.folder import load_model
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.chat import Wrap, find_wrap
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.errors import UserError
from swa_jax.estimates import paired_bootstrap
from swa_jax.evaluate import Example, needle_examples
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.evaluate.nll import answer_nll
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
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


def draw(name: str, folder: Path, tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[Example]:
    if name == "chains":
        cells = [ChainCell(hops, RIVALS, length) for hops in HOPS]
        each = [chain_examples(tokenizer, cell, num_examples=count, gap=length // 8, seed=seed) for cell in cells]
        return [one for group in zip(*each, strict=True) for one in group]
    wrap = find_wrap(folder, None) or Wrap()
    return needle_examples(tokenizer, length=length, num_examples=count, wrap=wrap, seed=seed)


def ranked(
    unit: str, model: Decoder, examples: Sequence[Example], budget: int, tried: int | None, **windowed: int
) -> list[Any]:
    """Layers, or pairs of a layer and a KV head, in the order in which the search makes them full."""
    options: dict[str, Any] = {"full_attention_decode": False, **windowed}
    if unit == "layers":
        rounds = LayerScorer(model, examples, **options).greedy(budget, tried=tried)
        return [layer for scores in rounds for layer in scores.picked]
    evaluate = MaskEvaluator(model, examples, **options)
    return greedy_heads(evaluate, budget, tried=tried or math.prod(evaluate.shape)).order


def with_full(unit: str, config: ModelConfig, full: Sequence[Any], window: int, sinks: int) -> AttentionPattern:
    if unit == "layers":
        return AttentionPattern.from_full_layers(full, config.num_hidden_layers, window, num_sink_tokens=sinks)
    mask = np.zeros((config.num_hidden_layers, config.common_kv_heads), bool)
    mask[tuple(np.transpose(full))] = True
    return head_pattern(mask, window, sinks, {})


def compare(
    unit: str,
    model: Decoder,
    choosing: Sequence[Example],
    others: Sequence[Example],
    window: int,
    budgets: Sequence[int],
    sinks: Sequence[int],
) -> None:
    """Print the rows of the table."""

    def losses(full: Sequence[Any], num_sink_tokens: int) -> np.ndarray:
        pattern = with_full(unit, model.config, full, window, num_sink_tokens)
        return answer_nll(model.with_pattern(pattern), others, full_attention_decode=False)

    found: dict[int, list[Any]] = {}
    for num_sink_tokens in sinks:

        def report(
            name: str,
            order: list[Any],
            seconds: float | None,
            num_sink_tokens: int = num_sink_tokens,
            exact: dict[int, np.ndarray] = {},  # noqa: B006
        ) -> None:
            for budget in budgets:
                loss = losses(order[:budget], num_sink_tokens)
                exact.setdefault(budget, loss)
                more = paired_bootstrap(loss, exact[budget])
                took = "" if seconds is None else f"{seconds:.0f} s"
                interval = "" if more.interval is None else f" [{more.interval[0]:.3f}, {more.interval[1]:.3f}]"
                which = ", ".join(".".join(map(str, np.ravel(one))) for one in sorted(order[:budget]))
                figures = f"{loss.mean():.3f} | {more.mean:+.3f}{interval} | {took}"
                row = f"| {num_sink_tokens} | {name} | {which} | {figures} |"
                print(row, flush=True)

        for scheme in SCHEMES:
            begin = time.process_time()
            order = ranked(
                unit,
                model,
                choosing[:: scheme.share],
                max(budgets),
                scheme.tried,
                sliding_window=window,
                num_sink_tokens=num_sink_tokens,
            )
            found.setdefault(num_sink_tokens, order)
            report(scheme.name, order, time.process_time() - begin)
        if num_sink_tokens != sinks[0]:
            report("every one, chosen without sink tokens", found[sinks[0]], None)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="its name, as everywhere")
    parser.add_argument("--unit", choices=("layers", "heads"), default="layers", help="what stays full")
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of a prompt with its answer")
    parser.add_argument("--budgets", default="2,4", help="full layers, or heads")
    parser.add_argument("--sink-tokens", default="0")
    parser.add_argument("--prompts", type=int, default=8, help="to choose by (of chains: of each number of hops)")
    parser.add_argument("--others", type=int, default=32, help="to measure on")
    options = parser.parse_args(arguments)
    budgets, sinks = ([int(n) for n in text.split(",")] for text in (options.budgets, options.sink_tokens))
    folder = model_folder(options.model)
    model, tokenizer = load_model(folder, dtype="float32"), load_tokenizer(folder)
    choosing, others = (
        draw(options.model, folder, tokenizer, options.length, count, seed)
        for seed, count in enumerate((options.prompts, options.others))
    )
    print("| sink tokens | scheme | full | loss | more than by every one | processor time |")
    print("|---|---|---|---|---|---|")
    compare(options.unit, model, choosing, others, options.window, budgets, sinks)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
