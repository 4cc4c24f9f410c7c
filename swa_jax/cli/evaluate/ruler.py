"""`swa-jax evaluate ruler`: RULER's tasks by length and depth."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, echo

from swa_jax.base.errors import ConfigError
from swa_jax.cli.evaluate.around import Around
from swa_jax.cli.evaluate.evaluation import Depths, Evaluation, Examples, Lengths, MaxNewTokens, Measurement, Rows, Run
from swa_jax.cli.groups import Options
from swa_jax.cli.options import Haystack, check_length, fractions, in_prompts, numbers, text_files

if TYPE_CHECKING:
    from swa_jax.data.chat import Wrap
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate.examples import Example
    from swa_jax.evaluate.ruler import Cell

DEFAULT_EXAMPLES = 20
ALL, QA = "all", "qa"


@dataclasses.dataclass
class RulerPrompts(Options):
    """How RULER's prompts are made."""

    lengths: Lengths = "1024"
    max_new_tokens: MaxNewTokens = None
    haystack: Haystack = None
    squad: Annotated[Path | None, in_prompts(help="SQuAD's JSON, for the task qa_1.")] = None
    hotpotqa: Annotated[Path | None, in_prompts(help="HotpotQA's JSON, for the task qa_2.")] = None

    def grid(self, tasks: Sequence[str], depths: str | None, num_examples: int, seed: int, wrap: Wrap) -> Grid:
        """The prompts. Raises `ConfigError` for what `tasks` and `fractions` refuse."""
        from swa_jax.evaluate.ruler_qa import READERS

        chosen = self.chosen(tasks, depths is not None)
        files = self.files()
        options: dict[str, Any] = {
            "haystack": None if self.haystack is None else text_files(self.haystack),
            "questions": {task: READERS[task](files[task]) for task in chosen if task in files},
            "max_new_tokens": self.max_new_tokens,
            "wrap": wrap,
            "seed": seed,
        }
        places = None if depths is None else fractions(depths)
        unnamed = frozenset(chosen) - {*tasks, *(files if QA in tasks else ())}
        return Grid(chosen, numbers("--lengths", self.lengths), places, num_examples, options, unnamed)

    def files(self) -> dict[str, Path]:
        """The files of questions, by task."""
        given = {"qa_1": self.squad, "qa_2": self.hotpotqa}
        return {task: file for task, file in given.items() if file is not None}

    def chosen(self, names: Sequence[str], at_depths: bool) -> list[str]:
        """The tasks that the names stand for; "all" has those that need no file and, at given depths, have a depth.

        Raises:
          ConfigError: an unknown task, one that has no depth though depths are asked for, or a file that is missing or
            that no task takes.
        """
        from swa_jax.evaluate.ruler import RULER_TASKS, ruler_task

        files, chosen = self.files(), []
        for name in names:
            if name == ALL:
                for task, kind in RULER_TASKS.items():
                    if not kind.needs_file and (kind.has_depth or not at_depths):
                        chosen.append(task)
            elif name == QA:
                if not files:
                    raise ConfigError(
                        "the task qa needs questions: name your copy of SQuAD's JSON with --squad, of HotpotQA's with "
                        "--hotpotqa, or both"
                    )
                chosen += files
            else:
                if ruler_task(name).needs_file and name not in files:
                    option = {"qa_1": "SQuAD's JSON with --squad", "qa_2": "HotpotQA's JSON with --hotpotqa"}
                    raise ConfigError(f"the task {name} needs questions: name your copy of {option[name]}")
                chosen.append(name)
        for task in chosen:
            if at_depths and not ruler_task(task).has_depth:
                raise ConfigError(
                    f"--depths: the task {task} has no depth, because what it asks for is all over the prompt: leave "
                    "out --depths, or the task"
                )
        if idle := [task for task in files if task not in chosen]:
            raise ConfigError(f"a file for {idle[0]} is given, but that task is not asked for: add it to the tasks")
        return list(dict.fromkeys(chosen))


@dataclasses.dataclass(frozen=True)
class Grid:
    """Prompts of RULER's tasks: of which tasks and lengths, at which depths, and how they are made."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float] | None
    num_examples: int
    options: dict[str, Any]  # of `ruler_grid`
    unnamed: frozenset[str] = frozenset()  # tasks that may be left out

    @property
    def num_prompts(self) -> int:
        depths = 1 if self.depths is None else len(self.depths)
        return len(self.tasks) * len(self.lengths) * depths * self.num_examples

    def fitting(self, tokenizer: Tokenizer) -> Grid:
        """The same without the unnamed tasks that a length is too short for, of which a line says so.

        Tried before the first prompt is answered, not after the hours that the others take: what the prompts of needles
        must have is about the same for all, and of the others all prompts are tried.

        Raises:
          ConfigError: a length is too short for a task that was named, or for all.
        """
        from swa_jax.evaluate.ruler import ruler_grid
        from swa_jax.evaluate.ruler_counts import SHORT
        from swa_jax.evaluate.ruler_needles import NEEDLE_TASKS
        from swa_jax.evaluate.ruler_prompts import TooShort

        # Lists of words need more from `SHORT` on.
        short, long = ([n for n in self.lengths if (n < SHORT) == wanted] for wanted in (True, False))
        shortest = [min(lengths) for lengths in (short, long) if lengths]
        left_out: set[str] = set()
        for task in self.tasks:
            some = 1 if task in NEEDLE_TASKS else self.num_examples
            try:
                ruler_grid(tokenizer, [task], lengths=shortest, depths=self.depths, num_examples=some, **self.options)
            except TooShort as error:
                if task not in self.unnamed or len(left_out) + 1 == len(self.tasks):
                    raise
                left_out.add(task)
                echo(f"the task {task} is left out: {error}", err=True)
        return dataclasses.replace(self, tasks=[task for task in self.tasks if task not in left_out])

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
        list[str] | None,
        Argument(
            metavar="[TASK]...",
            help="Tasks such as niah_single_2, vt, cwe or fwe; qa_1 and qa_2 (or qa) with your files. Default: all "
            "without a file that the lengths have room for, and with --depths those that have a depth.",
        ),
    ] = None,
    depths: Depths = None,
    examples: Examples = DEFAULT_EXAMPLES,
) -> Measurement:
    """RULER's tasks: how much of what is asked for the answers have."""
    from swa_jax.evaluate.ruler_scores import ruler_scores
    from swa_jax.report.evaluation_tables import ruler_table
    from swa_jax.report.heat_maps import needle_heat_map, ruler_heat

    wrap = around.wrap(evaluation.checkpoint, "RULER's prompts")
    tokenizer = evaluation.tokenizer
    grid = prompts.grid(tasks or [ALL], depths, examples, evaluation.seed, wrap)
    check_length(evaluation.models[0][1].config, max(grid.lengths))
    grid = grid.fitting(tokenizer)

    def measure(run: Run) -> Iterator[Rows]:
        for cells in grid.cells(tokenizer):
            for name, model in run.models:
                scores = ruler_scores(model, tokenizer, cells, **run.kept(model))
                yield [{"name": name} | dataclasses.asdict(score) for score in scores]

    def draw(rows: Rows, folder: Path) -> None:
        across = "Length (tokens)" if grid.depths is None else "Depth of the needle in the prompt"
        needle_heat_map(*ruler_heat(rows), folder / "ruler.png", title="RULER", column_title=across)

    longest = max(grid.lengths)
    return Measurement("ruler", "RULER's prompts", grid.num_prompts, measure, ruler_table, draw, longest)
