"""`swa-jax evaluate chains`: numbers that only several look-ups find, by hops, rivals, length and depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from swa_jax.cli.evaluate.evaluation import Depths, Evaluation, Examples, Lengths, Measurement, Rows, Run
from swa_jax.cli.options import HELD_OUT_SEED, check_length, fractions, in_prompts, numbers, text_files

DEFAULT_EXAMPLES = 50


def chains(
    evaluation: Evaluation,
    hops: Annotated[str, in_prompts(help="Look-ups from the name that is asked for to its number.")] = "1,2,3",
    rivals: Annotated[str, in_prompts(help="Other chains in a prompt, from 0 on.")] = "3",
    lengths: Lengths = "1024",
    depths: Depths = None,
    gap: Annotated[
        int,
        in_prompts(metavar="N", help="Least distance of the statements of a chain. Take more than the window.", min=0),
    ] = 0,
    sums: Annotated[bool, in_prompts("--sums", help="Ask for the sum of two numbers.")] = False,
    examples: Examples = DEFAULT_EXAMPLES,
    haystack: Annotated[
        Path | None, in_prompts(help="A text, or a folder of texts, between the statements. Default: filler words.")
    ] = None,
) -> Measurement:
    """Chains of statements: answers right, by hops, rivals, length and depth."""
    from swa_jax.data.haystack import Haystack
    from swa_jax.evaluate.chains import chain_examples, chain_grid, chain_scores
    from swa_jax.report.evaluation_tables import chain_table

    places = None if depths is None else fractions(depths)
    cells = chain_grid(
        numbers("--hops", hops, "1,2,3"),
        numbers("--rivals", rivals, "0,3,15", least=0),
        sorted(numbers("--lengths", lengths)),
        places,
        sums,
    )
    longest = max(cell.length for cell in cells)
    check_length(evaluation.config, longest)
    tokenizer = evaluation.tokenizer
    hay = None if haystack is None else Haystack(tokenizer, text_files(haystack))
    seed = HELD_OUT_SEED + evaluation.seed  # `select --chains` draws by the same generator
    drawn = {
        cell: chain_examples(tokenizer, cell, num_examples=examples, gap=gap, haystack=hay, seed=seed) for cell in cells
    }

    def measure(run: Run) -> Iterator[Rows]:
        for cell in cells:
            for name, model in run.models:
                for score in chain_scores(model, {cell: drawn[cell]}, **run.kept(model)):
                    plain = dataclasses.asdict(score)
                    yield [{"name": name} | plain.pop("cell") | {"gap": gap} | plain]

    return Measurement("chains", "chains, answered", len(cells) * examples, measure, chain_table, longest=longest)
