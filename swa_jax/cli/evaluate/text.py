"""`swa-jax evaluate text`: the perplexity of a text by window and length."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Argument

from swa_jax.cli.evaluate.evaluation import Evaluation, Measurement, Rows, Run
from swa_jax.cli.options import in_prompts, numbers

DEFAULT_LENGTH = 1024


def text(
    evaluation: Evaluation,
    file: Annotated[Path, Argument(help="A text.")],
    lengths: Annotated[
        str | None,
        in_prompts(
            help=f"Cut the text into sequences of so many tokens, such as 512,4096. Default: {DEFAULT_LENGTH}, "
            "or the whole text where it is shorter."
        ),
    ] = None,
    eval_windows: Annotated[
        str | None, in_prompts(help="Measure under these windows, such as 128,1024,full. Default: the patterns' own.")
    ] = None,
) -> Measurement:
    """Perplexity of a text, cut into sequences of one or several lengths, each after the tokenizer's start token."""
    from swa_jax.evaluate.sweep import perplexity_sweep, with_window
    from swa_jax.report.evaluation_tables import sweep_table
    from swa_jax.report.heat_maps import loss_heat_map, sweep_heat

    sizes = numbers("--lengths", lengths) if lengths else None
    windows = numbers("--eval-windows", eval_windows, word="full") if eval_windows else None
    for (_, pattern), window in itertools.product(evaluation.patterns, windows or []):
        with_window(pattern, window)  # a pattern that has none to change is refused before the others are measured
    tokens, start = evaluation.tokens(file), evaluation.tokenizer.start_ids
    sizes = sizes or [max(1, min(DEFAULT_LENGTH, len(start) + len(tokens) - 1))]

    def measure(run: Run) -> Iterator[Rows]:
        for name, model in run.models:
            scores = perplexity_sweep(model, tokens, windows=windows, lengths=sizes, start=start, **run.plain)
            yield [{"name": name} | dataclasses.asdict(score) for score in scores]

    def draw(rows: Rows, folder: Path) -> None:
        titles = {"title": "Loss of the text by its length", "column_title": "Length (tokens)"}
        loss_heat_map(*sweep_heat(rows), folder / "perplexity.png", **titles)

    total = len(windows or [None]) * len(sizes) * (len(tokens) - (not start))
    return Measurement("perplexity_sweep", "tokens of the text", total, measure, sweep_table, draw, longest=max(sizes))
