"""What `swa-jax evaluate` measures, one function a kind: all patterns measured, a table printed, a picture to draw."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from swa_jax.data.tokenizer import Tokenizer
from swa_jax.estimates import Estimate, in_brackets
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.judges import find_judge
from swa_jax.evaluate.measure import measure_pattern
from swa_jax.evaluate.nll import perplexity
from swa_jax.evaluate.question_scores import score_questions
from swa_jax.evaluate.questions import Question
from swa_jax.evaluate.routing import routing_by_depth, routing_row, text_routing
from swa_jax.evaluate.ruler import Cell
from swa_jax.evaluate.ruler_scores import ruler_scores
from swa_jax.evaluate.sweep import block_interval, perplexity_sweep
from swa_jax.files import write_json
from swa_jax.model.decoder import Decoder
from swa_jax.report import (
    loss_heat_map,
    needle_heat_map,
    pattern_table,
    routing_chart,
    ruler_heat,
    sweep_heat,
)
from swa_jax.report.evaluation_tables import (
    harness_table,
    questions_table,
    routing_table,
    ruler_table,
    sweep_table,
)
from swa_jax.report.progress import counted

type Models = Sequence[tuple[str, Decoder]]


class Measured(NamedTuple):
    """One kind of measurement of all patterns."""

    key: str  # in results.json
    rows: list[dict[str, Any]]
    draw: Callable[[Path], None]  # its picture, into a folder


def measure_needles(
    console: Console,
    models: Models,
    tokenizer: Tokenizer,
    drawn: Sequence[Example],
    places: Sequence[float],
    tokens: Sequence[int],
    context: int,
    batch_size: int,
) -> Measured:
    """The project's own needles, and the perplexity of a text at one length."""
    longest = max((len(example.answer) for example in drawn), default=1)
    rows: list[dict[str, Any]] = [{"name": name} for name, _ in models]
    heat: list[list[float]] = []
    if drawn:
        with counted("needles, answered and scored", 2 * len(drawn) * len(models)) as advance:
            for row, (name, model) in zip(rows, models, strict=True):
                measured, answers = measure_pattern(
                    name, model, tokenizer, drawn, max_new_tokens=longest + 2, batch_size=batch_size,
                    advance=advance,
                )  # fmt: skip
                row |= measured
                by_place = [answers.scores[i :: len(places)] for i in range(len(places))]
                heat.append([float(part.mean()) if len(part) else float("nan") for part in by_place])
    if tokens:
        with counted("tokens of the text", (len(tokens) - 1) * len(models)) as advance:
            for row, (_, model) in zip(rows, models, strict=True):
                scored = perplexity(model, tokens, context=context, batch_size=batch_size, advance=advance)
                nll, _ = block_interval(scored.token_nll)  # passes may be few
                row |= {
                    "perplexity": scored.perplexity,
                    "perplexity_interval": nll.map(math.exp).interval,
                    "text_tokens": scored.num_tokens,
                }
    if drawn:
        console.print(pattern_table(rows))
    for row in rows if tokens else []:
        interval = in_brackets(row["perplexity_interval"], "{:.2f}")
        console.print(
            f"{row['name']}: perplexity {row['perplexity']:.2f}{interval} over {row['text_tokens']} tokens"
        )

    def draw(folder: Path) -> None:
        if drawn:
            names = [name for name, _ in models]
            needle_heat_map(heat, names, [f"{depth:.0%}" for depth in places], folder / "needles.png")

    return Measured("rows", rows, draw)


def measure_ruler(
    console: Console,
    models: Models,
    tokenizer: Tokenizer,
    grids: Iterable[dict[Cell, list[Example]]],
    num_prompts: int,
    max_new_tokens: int,
    batch_size: int,
    save: Callable[[str, list[dict[str, Any]]], None],
) -> Measured:
    """RULER's needle tasks; `num_prompts` are in all grids together."""
    by_model: list[list[dict[str, Any]]] = [[] for _ in models]
    rows: list[dict[str, Any]] = []
    with counted("RULER's prompts", num_prompts * len(models)) as advance:
        for grid in grids:
            for (name, model), mine in zip(models, by_model, strict=True):
                scores = ruler_scores(
                    model,
                    tokenizer,
                    grid,
                    max_new_tokens=max_new_tokens,
                    batch_size=batch_size,
                    advance=advance,
                )
                mine += [{"name": name} | dataclasses.asdict(score) for score in scores]
            rows = [row for mine in by_model for row in mine]
            save("ruler", rows)
    console.print(ruler_table(rows))

    def draw(folder: Path) -> None:
        across = "Length (tokens)" if rows[0]["depth"] is None else "Depth of the needle in the prompt"
        needle_heat_map(*ruler_heat(rows), folder / "ruler.png", title="RULER", column_title=across)

    return Measured("ruler", rows, draw)


def measure_sweep(
    console: Console,
    models: Models,
    tokens: Sequence[int],
    windows: Sequence[int | None] | None,
    lengths: Sequence[int],
    batch_size: int,
) -> Measured:
    rows = []
    cells = len(models) * len(windows or [None]) * len(lengths)
    with counted("tokens of the text", cells * (len(tokens) - 1)) as advance:
        for name, model in models:
            scores = perplexity_sweep(
                model, tokens, windows=windows, lengths=lengths, batch_size=batch_size, advance=advance
            )
            rows += [{"name": name} | dataclasses.asdict(score) for score in scores]
    console.print(sweep_table(rows))

    def draw(folder: Path) -> None:
        loss_heat_map(
            *sweep_heat(rows),
            folder / "perplexity.png",
            title="Loss of the text by its length",
            column_title="Length (tokens)",
        )

    return Measured("perplexity_sweep", rows, draw)


def measure_routing(
    console: Console,
    models: Models,
    tokens: Sequence[int],
    length: int,
    cells: dict[Cell, list[Example]],
    batch_size: int,
) -> Measured:
    rows, charts = [], []
    prompts = len(tokens) // length + sum(map(len, cells.values()))
    with counted("sequences", prompts * len(models)) as advance:
        for name, model in models:
            layers: list[Estimate] = []
            lines: dict[str, list[tuple[float, Estimate]]] = {}
            if tokens:
                on_text, _ = text_routing(
                    model, tokens, length=length, batch_size=batch_size, advance=advance
                )
                layers = on_text.by_layer
                rows.append(routing_row(name, ("text", length, None), on_text, model.config))
            found = routing_by_depth(model, cells, batch_size=batch_size, advance=advance)
            for cell, routed in found.items():
                rows.append(routing_row(name, cell, routed, model.config))
                if cell[2] is not None:
                    lines.setdefault(f"{cell[0]}, {cell[1]} tokens", []).append((cell[2], routed.full_ratio))
            charts.append((layers, lines))
    console.print(routing_table(rows))

    def draw(folder: Path) -> None:
        for number, (layers, lines) in enumerate(charts):
            if layers or lines:
                routing_chart(
                    layers, lines, folder / ("routing.png" if not number else f"routing-{number + 1}.png")
                )

    return Measured("routing", rows, draw)


def measure_harness(
    console: Console,
    models: Models,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    folder: Path | None,
    limit: int | None,
    max_length: int | None,
    batch_size: int,
) -> Measured:
    from swa_jax.evaluate.harness import HarnessModel, run_harness  # an extra, [eval]

    rows = []
    for name, model in models:
        lm = HarnessModel(model, tokenizer, batch_size=batch_size, max_length=max_length)
        rows += [{"name": name} | row for row in run_harness(lm, tasks, folder=folder, limit=limit)]
    console.print(harness_table(rows))
    return Measured("harness", rows, lambda folder: None)


def measure_questions(
    console: Console,
    models: Models,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    max_length: int | None,
    cut_middle: bool,
    wrap: str,
    judge: str | None,
    batch_size: int,
    out: Path | None,
) -> Measured:
    rows: list[dict[str, Any]] = []
    answers: dict[str, list[dict[str, Any]]] = {}
    verdict = None if judge is None else find_judge(judge)
    with counted("questions", len(questions) * len(models)) as advance:
        for name, model in models:

            def keep(records: list[dict[str, Any]], name: str = name) -> None:
                answers[name] = records
                if out is not None:
                    write_json(out / "answers.json", answers)

            scores, answers[name] = score_questions(
                model,
                tokenizer,
                questions,
                max_length=max_length or model.config.max_position_embeddings,
                cut_middle=cut_middle,
                wrap=wrap,
                judge=verdict,
                keep=keep,
                batch_size=batch_size,
                advance=advance,
            )
            rows += [{"name": name} | dataclasses.asdict(score) for score in scores]
    console.print(questions_table(rows))
    return Measured("questions", rows, lambda folder: write_json(folder / "answers.json", answers))
