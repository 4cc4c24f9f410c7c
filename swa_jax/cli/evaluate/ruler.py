"""`swa-jax evaluate ruler`: RULER's needle tasks by length and depth."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from swa_jax.cli.evaluate.evaluation import Evaluation
from swa_jax.cli.groups import Options
from swa_jax.cli.options import PROMPTS, Haystack, fractions, note_context, numbers, text_files

if TYPE_CHECKING:
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate.examples import Example
    from swa_jax.evaluate.ruler import Cell

DEFAULT_EXAMPLES = 20
Template = Annotated[
    Path | None,
    Option(
        "--template",
        help="What a chat model wants around a question: a file that holds {prompt}.",
        rich_help_panel=PROMPTS,
    ),
]


@dataclasses.dataclass
class RulerPrompts(Options):
    """How RULER's prompts are made."""

    lengths: Annotated[
        str,
        Option(help="Tokens of a prompt with its answer, such as 4096,8192.", rich_help_panel=PROMPTS),
    ] = "1024"
    max_new_tokens: Annotated[int, Option(help="Tokens of an answer.", min=1, rich_help_panel=PROMPTS)] = 128
    template: Template = None
    haystack: Haystack = None

    def grid(self, tasks: Sequence[str], depths: str | None, num_examples: int, seed: int) -> Grid:
        """The prompts. Raises `ConfigError` for an unknown task, and for what is no list of numbers."""
        from swa_jax.data.haystack import read_text
        from swa_jax.evaluate.ruler import RULER_TASKS, ruler_task

        for name in tasks:
            if name != "all":
                ruler_task(name)
        options: dict[str, Any] = {
            "haystack": None if self.haystack is None else text_files(self.haystack),
            "max_new_tokens": self.max_new_tokens,
            "wrap": "{prompt}" if self.template is None else read_text([self.template]),
            "seed": seed,
        }
        return Grid(
            list(RULER_TASKS) if "all" in tasks else list(dict.fromkeys(tasks)),
            numbers("--lengths", self.lengths),
            None if depths is None else fractions(depths),
            num_examples,
            options,
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """Prompts of RULER's tasks: of which tasks and lengths, at which depths, and how they are made."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float] | None
    num_examples: int
    options: dict[str, Any]  # of `ruler_grid`

    @property
    def num_prompts(self) -> int:
        depths = 1 if self.depths is None else len(self.depths)
        return len(self.tasks) * len(self.lengths) * depths * self.num_examples

    def cells(self, tokenizer: Tokenizer) -> Iterator[dict[Cell, list[Example]]]:
        """One task and length at a time: all prompts of a long run together would fill the memory.

        A length that is too short for a task is said before the first, not after the hours that the others take.
        """
        from swa_jax.evaluate.ruler import ruler_grid

        grid = partial(ruler_grid, tokenizer, depths=self.depths, **self.options)
        for task in self.tasks:
            grid(tasks=[task], lengths=[min(self.lengths)], num_examples=1)
        for task, length in itertools.product(self.tasks, self.lengths):
            yield grid(tasks=[task], lengths=[length], num_examples=self.num_examples)


def ruler(
    evaluation: Evaluation,
    prompts: RulerPrompts,
    tasks: Annotated[
        list[str] | None,
        Argument(metavar="[TASK]...", help="Tasks such as niah_single_2. Default: all of them."),
    ] = None,
    depths: Annotated[
        str | None,
        Option(
            help="A grid of these depths, such as 0,0.5,1. Default: drawn as RULER does.",
            show_default=False,
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    examples: Annotated[
        int, Option(help="Prompts for each task, length and depth.", min=1, rich_help_panel=PROMPTS)
    ] = DEFAULT_EXAMPLES,
) -> None:
    """RULER's needle tasks: how much of what is hidden the answers repeat."""
    from swa_jax.evaluate.ruler_scores import ruler_scores
    from swa_jax.report import needle_heat_map, ruler_heat
    from swa_jax.report.evaluation_tables import ruler_table
    from swa_jax.report.progress import counted

    grid = prompts.grid(tasks or ["all"], depths, examples, evaluation.seed)
    models, tokenizer = evaluation.models, evaluation.tokenizer
    note_context(models[0][1].config, max(grid.lengths))
    by_model: list[list[dict[str, Any]]] = [[] for _ in models]
    rows: list[dict[str, Any]] = []
    with counted("RULER's prompts", grid.num_prompts * len(models)) as advance:
        for cells in grid.cells(tokenizer):
            for (name, model), scored in zip(models, by_model, strict=True):
                scores = ruler_scores(
                    model, tokenizer, cells, max_new_tokens=prompts.max_new_tokens, batch_size=evaluation.batch_size,
                    samples=evaluation.samples(model), advance=advance,
                )  # fmt: skip
                scored += [{"name": name} | dataclasses.asdict(score) for score in scores]
            rows = list(itertools.chain(*by_model))
            evaluation.save("ruler", rows)
    across = "Length (tokens)" if grid.depths is None else "Depth of the needle in the prompt"
    evaluation.finish(
        "ruler",
        rows,
        ruler_table,
        lambda folder: needle_heat_map(
            *ruler_heat(rows), folder / "ruler.png", title="RULER", column_title=across
        ),
    )
