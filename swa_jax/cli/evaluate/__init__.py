"""The verbs `swa-jax evaluate KIND CHECKPOINT`: patterns of one model measured, one file a kind of measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from swa_jax.cli.evaluate import chains, efficiency, harness, needles, questions, routing, ruler, text
from swa_jax.cli.evaluate.evaluation import Evaluation
from swa_jax.cli.groups import Options, expand


def _recorded(measure: Callable[..., None]) -> Callable[..., None]:
    """The measurement, whose options go into results.json."""

    @functools.wraps(measure)
    def run(evaluation: Evaluation, **given: Any) -> None:
        settings: dict[str, Any] = {}
        for name, value in given.items():
            settings |= vars(value) if isinstance(value, Options) else {name: value}
        evaluation.begin(measure.__name__, **settings)
        measure(evaluation, **given)

    return run


app = typer.Typer(
    no_args_is_help=True,
    help="Measure patterns of a model: needles, RULER, chains, perplexity, questions, problems, routing, speed, "
    "lm-eval tasks.",
)
for _kind in (
    needles.needles,
    ruler.ruler,
    chains.chains,
    text.text,
    questions.questions,
    routing.routing,
    efficiency.efficiency,
    harness.harness,
):
    app.command()(expand(_recorded(_kind)))
