"""`swa-jax evaluate routing`: where a routed (SwiAttn) model takes full attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swa_jax.base.errors import ConfigError
from swa_jax.cli.evaluate.around import Around
from swa_jax.cli.evaluate.evaluation import Depths, Evaluation, Measurement, Rows, Run
from swa_jax.cli.evaluate.needles import DEFAULT_DEPTHS
from swa_jax.cli.evaluate.needles import DEFAULT_EXAMPLES as NEEDLES
from swa_jax.cli.evaluate.ruler import DEFAULT_EXAMPLES as RULER_PROMPTS
from swa_jax.cli.evaluate.ruler import Grid, RulerPrompts
from swa_jax.cli.groups import Options
from swa_jax.cli.options import Haystack, NumKeys, check_length, draw_needles, few_prompts, fractions, in_prompts, panel

if TYPE_CHECKING:
    from swa_jax.data.chat import Wrap
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate.examples import Example
    from swa_jax.evaluate.ruler import Cell

in_text = panel("Text")


@dataclasses.dataclass
class Text(Options):
    """A text to look at, beside the prompts."""

    text: Annotated[Path | None, in_text(help="Also look at this text, layer by layer.")] = None
    text_length: Annotated[int, in_text(help="Cut the text into sequences of so many tokens.", min=1)] = 1024

    def tokens(self, evaluation: Evaluation) -> list[int]:
        return [] if self.text is None else evaluation.tokens(self.text)


def routing(
    evaluation: Evaluation,
    prompts: RulerPrompts,
    around: Around,
    plain: Text,
    ruler: Annotated[
        list[str] | None, in_prompts(help="Look at prompts of this RULER task, repeatable. Default: at needles.")
    ] = None,
    depths: Depths = None,
    examples: Annotated[
        int | None,
        in_prompts(
            metavar="N",
            help=f"Prompts of each length ({NEEDLES} needles), or of each task, length and depth of RULER "
            f"({RULER_PROMPTS}). 0: the text alone.",
            min=0,
            callback=few_prompts,
        ),
    ] = None,
    keys: NumKeys = 1,
    haystack: Haystack = None,
) -> Measurement:
    """Where a routed (switch) model takes full attention: by layer on a text, by the needle's depth on prompts."""
    from swa_jax.evaluate.routing import check_routed, measure_routing
    from swa_jax.report.evaluation_tables import routing_table
    from swa_jax.report.layer_charts import routing_chart

    if examples == 0 and plain.text is None:
        raise ConfigError("--examples 0 leaves nothing to look at: name a text with --text")
    count = (RULER_PROMPTS if ruler else NEEDLES) if examples is None else examples
    wrap = around.wrap(evaluation.checkpoint, "the prompts")
    grid = prompts.grid(ruler or [], depths, count, evaluation.seed, wrap)
    tokenizer = evaluation.tokenizer
    for _, pattern in evaluation.patterns:
        check_routed(pattern)
    tokens = plain.tokens(evaluation)
    check_length(evaluation.config, max(plain.text_length if tokens else 0, *(grid.lengths if count else (0,))))
    cells = _cells(tokenizer, grid, keys, haystack, evaluation.seed, wrap) if count else {}
    start, charts = tokenizer.start_ids, []

    def measure(run: Run) -> Iterator[Rows]:
        for name, model in run.models:
            measured = measure_routing(name, model, tokens, cells, length=plain.text_length, start=start, **run.plain)
            charts.append((measured.by_layer, measured.by_depth))
            yield measured.rows

    def draw(rows: Rows, folder: Path) -> None:
        for number, (by_layer, by_depth) in enumerate(charts, start=1):
            if by_layer or by_depth:
                name = "routing.png" if number == 1 else f"routing-{number}.png"
                routing_chart(by_layer, by_depth, folder / name)

    total = len(tokens) // max(1, plain.text_length - len(start)) + sum(map(len, cells.values()))
    longest = max([plain.text_length if tokens else 0, *(cell[1] for cell in cells)])
    return Measurement("routing", "sequences", total, measure, routing_table, draw, longest)


def _cells(
    tokenizer: Tokenizer, grid: Grid, keys: int, haystack: Path | None, seed: int, wrap: Wrap
) -> dict[Cell, list[Example]]:
    """Prompts by length and depth: of RULER's tasks, or without any the needles that `evaluate needles` draws."""
    cells: dict[Cell, list[Example]] = {}
    if grid.tasks:
        grid.check(tokenizer)
        for made in grid.cells(tokenizer):
            cells |= made
        return cells
    depths = grid.depths or fractions(DEFAULT_DEPTHS)
    count = grid.num_examples
    for length in grid.lengths:
        drawn = draw_needles(tokenizer, count, length, keys, haystack, depths, seed, wrap)
        cells |= {("needle", length, depth): drawn[i :: len(depths)] for i, depth in enumerate(depths[:count])}
    return cells
