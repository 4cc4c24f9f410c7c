"""`swa-jax evaluate ruler`: RULER's tasks by length and depth."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from swa_jax.base.errors import ConfigError
from swa_jax.cli.evaluate.around import Around
from swa_jax.cli.evaluate.evaluation import Depths, Evaluation, Examples, Lengths, MaxNewTokens, Measurement, Rows, Run
from swa_jax.cli.groups import Options
from swa_jax.cli.options import check_length, fractions, in_prompts, numbers

if TYPE_CHECKING:
    from swa_jax.data.chat import Wrap
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate.examples import Example
    from swa_jax.evaluate.ruler import Cell
    from swa_jax.evaluate.ruler_scores import RulerScore

DEFAULT_EXAMPLES = 20


@dataclasses.dataclass
class RulerPrompts(Options):
    """How RULER's prompts are made."""

    lengths: Lengths = "1024"
    max_new_tokens: MaxNewTokens = None
    data: Annotated[Path, in_prompts(help="The folder of RULER's data, as `make ruler-data` brings it.")] = Path(
        "data/ruler"
    )

    def grid(self, tasks: Sequence[str], depths: str | None, num_examples: int, seed: int, wrap: Wrap) -> Grid:
        """The prompts.

        Raises `ConfigError`: an unknown task, one whose data is not there or that has no depth though depths are given.
        """
        from swa_jax.evaluate.ruler import ruler_task
        from swa_jax.evaluate.ruler_data import RulerData

        data = RulerData(self.data)
        for task in tasks:
            kind = ruler_task(task)
            if depths is not None and not kind.has_depth:
                raise ConfigError(
                    f"--depths: the task {task} has no depth, because what it asks for is all over the prompt: leave "
                    "out --depths, or the task"
                )
            data.check(task, kind.files)
        options: dict[str, Any] = {"data": data, "max_new_tokens": self.max_new_tokens, "wrap": wrap, "seed": seed}
        places = None if depths is None else fractions(depths)
        return Grid(list(dict.fromkeys(tasks)), numbers("--lengths", self.lengths), places, num_examples, options)


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

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises `ConfigError` for a length that is too short for a task, or beyond its data.

        Before the first prompt is answered, not after the hours that the others take.
        """
        from swa_jax.evaluate.ruler import ruler_grid
        from swa_jax.evaluate.ruler_counts import SHORT

        # Lists of words need more from `SHORT` on.
        short, long = ([n for n in self.lengths if (n < SHORT) == wanted] for wanted in (True, False))
        shortest = [min(lengths) for lengths in (short, long) if lengths]
        for lengths, count in ((shortest, self.num_examples), ([max(self.lengths)], 1)):
            ruler_grid(tokenizer, self.tasks, lengths=lengths, depths=self.depths, num_examples=count, **self.options)

    def cells(self, tokenizer: Tokenizer) -> Iterator[dict[Cell, list[Example]]]:
        """One task and length at a time: all prompts of a long run together would fill the memory."""
        from swa_jax.evaluate.ruler import ruler_grid

        for task, length in itertools.product(self.tasks, self.lengths):
            yield ruler_grid(
                tokenizer, [task], lengths=[length], depths=self.depths, num_examples=self.num_examples, **self.options
            )


def ruler(
    evaluation: Evaluation,
    prompts: RulerPrompts,
    around: Around,
    tasks: Annotated[
        list[str] | None, Argument(metavar="[TASK]...", help="Tasks such as niah_single_2, vt, cwe, fwe or qa_1.")
    ] = None,
    all_tasks: Annotated[bool, in_prompts("--all", help="All 13 tasks.")] = False,
    depths: Depths = None,
    examples: Examples = DEFAULT_EXAMPLES,
) -> Measurement:
    """RULER's tasks: how much of what is asked for the answers have. --seed 42 takes RULER's own prompts."""
    from swa_jax.evaluate.ruler import RULER_TASKS
    from swa_jax.evaluate.ruler_scores import against, average, ruler_scores
    from swa_jax.report.evaluation_tables import ruler_table
    from swa_jax.report.heat_maps import needle_heat_map, ruler_heat

    if bool(tasks) == all_tasks:
        raise ConfigError("name the tasks to measure, or take all 13 with --all")
    wrap = around.wrap(evaluation.checkpoint, "RULER's prompts")
    tokenizer = evaluation.tokenizer
    grid = prompts.grid(tasks or list(RULER_TASKS), depths, examples, evaluation.seed, wrap)
    check_length(evaluation.config, max(grid.lengths))
    grid.check(tokenizer)

    def measure(run: Run) -> Iterator[Rows]:
        by_length: dict[int, dict[str, list[RulerScore]]] = {length: {} for length in grid.lengths}
        first = run.models[0][0]
        for cells in grid.cells(tokenizer):
            measured = by_length[next(iter(cells))[1]]
            for name, model in run.models:
                scores = ruler_scores(model, tokenizer, cells, **run.kept(model))
                if name != first:
                    scores = against(scores, measured[first][-len(scores) :])
                measured.setdefault(name, []).extend(scores)
                yield [{"name": name} | dataclasses.asdict(score) for score in scores]
        if len(grid.tasks) > 1 and grid.depths is None:
            for measured in by_length.values():
                for name, scores in measured.items():
                    mean = average(scores, None if name == first else measured[first])
                    yield [{"name": name} | dataclasses.asdict(mean)]

    def draw(rows: Rows, folder: Path) -> None:
        across = "Task" if grid.depths is None else "Depth of the needle in the prompt"
        needle_heat_map(*ruler_heat(rows), folder / "ruler.png", title="RULER", column_title=across)

    longest = max(grid.lengths)
    return Measurement("ruler", "RULER's prompts", grid.num_prompts, measure, ruler_table, draw, longest)
