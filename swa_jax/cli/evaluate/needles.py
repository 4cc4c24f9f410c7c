"""`swa-jax evaluate needles`: the project's own needles, answered and scored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from swa_jax.cli.evaluate.around import Around
from swa_jax.cli.evaluate.evaluation import Evaluation, Examples, Measurement, Rows, Run
from swa_jax.cli.options import (
    Haystack,
    Length,
    NumKeys,
    check_length,
    draw_needles,
    fractions,
    in_prompts,
    note_whole_prompts,
)

DEFAULT_EXAMPLES = 48
DEFAULT_DEPTHS = "0,0.2,0.4,0.6,0.8,1"
MORE_TOKENS = 2  # than the longest answer has, so that an end token shows


def needles(
    evaluation: Evaluation,
    around: Around,
    examples: Examples = DEFAULT_EXAMPLES,
    length: Length = 1024,
    depths: Annotated[
        str, in_prompts(help="Where the needles lie, as fractions of the prompt, taken in turn.")
    ] = DEFAULT_DEPTHS,
    keys: NumKeys = 1,
    haystack: Haystack = None,
) -> Measurement:
    """Needles found, loss of the answers, memory and speed."""
    from swa_jax.evaluate.measure import measure_pattern, score_by_depth
    from swa_jax.report.heat_maps import needle_heat_map
    from swa_jax.report.tables import pattern_table

    places = fractions(depths)
    wrap = around.wrap(evaluation.checkpoint, "a needle's question")
    tokenizer = evaluation.tokenizer
    check_length(evaluation.config, length)
    drawn = draw_needles(tokenizer, examples, length, keys, haystack, places, evaluation.seed, wrap)
    note_whole_prompts(evaluation.patterns, max(len(example.prompt) for example in drawn))
    longest = max(len(example.answer) for example in drawn)
    by_depth: list[list[float]] = []

    def measure(run: Run) -> Iterator[Rows]:
        for name, model in run.models:
            row, answers = measure_pattern(
                name, model, tokenizer, drawn, max_new_tokens=longest + MORE_TOKENS, **run.kept(model)
            )
            by_depth.append(score_by_depth(answers.scores, len(places)))
            yield [row]

    def draw(rows: Rows, folder: Path) -> None:
        across = [f"{depth:.0%}" for depth in places]
        needle_heat_map(by_depth, [row["name"] for row in rows], across, folder / "needles.png")

    total = 2 * len(drawn)
    return Measurement("rows", "needles, answered and scored", total, measure, pattern_table, draw, longest=length)
