"""`swa-jax evaluate text`: the perplexity of a text by window and length."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from swa_jax.cli.evaluate.evaluation import Evaluation
from swa_jax.cli.options import PROMPTS, note_context, numbers

DEFAULT_LENGTH = 1024


def text(
    evaluation: Evaluation,
    file: Annotated[Path, Argument(help="A text.")],
    lengths: Annotated[
        str | None,
        Option(
            help=f"Cut the text into sequences of so many tokens, such as 512,4096. Default: {DEFAULT_LENGTH}, "
            "or the whole text where it is shorter.",
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    eval_windows: Annotated[
        str | None,
        Option(
            help="Measure under these windows, such as 128,1024,full. Default: the patterns' own.",
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None,
) -> None:
    """Perplexity of a text, cut into sequences of one or several lengths, each after the tokenizer's start token."""
    from swa_jax.evaluate.sweep import perplexity_sweep
    from swa_jax.report import loss_heat_map, sweep_heat
    from swa_jax.report.evaluation_tables import sweep_table
    from swa_jax.report.progress import counted

    sizes = numbers("--lengths", lengths) if lengths else None
    windows = numbers("--eval-windows", eval_windows, word="full") if eval_windows else None
    models = evaluation.models
    tokens, start = evaluation.tokens(file), evaluation.tokenizer.start_ids
    sizes = sizes or [max(1, min(DEFAULT_LENGTH, len(start) + len(tokens) - 1))]
    note_context(models[0][1].config, max(sizes))
    rows: list[dict[str, Any]] = []
    cells = len(models) * len(windows or [None]) * len(sizes)
    with counted("tokens of the text", cells * (len(tokens) - (not start))) as advance:
        for name, model in models:
            scores = perplexity_sweep(
                model,
                tokens,
                windows=windows,
                lengths=sizes,
                start=start,
                batch_size=evaluation.batch_size,
                advance=advance,
            )
            rows += [{"name": name} | dataclasses.asdict(score) for score in scores]
            evaluation.save("perplexity_sweep", rows)
    evaluation.finish(
        "perplexity_sweep",
        rows,
        sweep_table,
        lambda folder: loss_heat_map(
            *sweep_heat(rows),
            folder / "perplexity.png",
            title="Loss of the text by its length",
            column_title="Length (tokens)",
        ),
    )
