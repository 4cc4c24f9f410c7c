"""The verbs `swa-jax evaluate KIND CHECKPOINT`: patterns of one model measured, one file a kind of measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from swa_jax.cli.evaluate import chains, efficiency, harness, needles, questions, routing, ruler, text
from swa_jax.cli.evaluate.evaluation import Evaluation, Measurement
from swa_jax.cli.groups import Options, expand


def _carried_out(declare: Callable[..., Measurement]) -> Callable[..., None]:
    """The command of a kind: what it declares is carried out, and its options go into results.json."""

    @functools.wraps(declare)
    def run(evaluation: Evaluation, **given: Any) -> None:
        settings: dict[str, Any] = {}
        for name, value in given.items():
            settings |= vars(value) if isinstance(value, Options) else {name: value}
        with evaluation.in_folder():
            evaluation.begin(declare.__name__, **settings)
            evaluation.carry_out(declare(evaluation, **given))

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
    app.command()(expand(_carried_out(_kind)))
