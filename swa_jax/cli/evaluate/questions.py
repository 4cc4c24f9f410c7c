"""`swa-jax evaluate questions`: LongBench, LongBench v2, LongMemEval and problems from local files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from swa_jax.base.errors import ConfigError
from swa_jax.cli.evaluate.around import Around
from swa_jax.cli.evaluate.evaluation import Evaluation, MaxLength, MaxNewTokens, Measurement, Rows, Run
from swa_jax.cli.groups import Options
from swa_jax.cli.options import in_prompts, panel

if TYPE_CHECKING:
    from swa_jax.evaluate.questions import Question

in_files = panel("Files of questions")


@dataclasses.dataclass
class Sets(Options):
    """Sets of questions by their files."""

    longbench: Annotated[
        Path | None, in_files(help="LongBench: a .jsonl, or a folder of them. It needs --longbench-prompts.")
    ] = None
    longbench_prompts: Annotated[Path | None, in_files(help="LongBench's dataset2prompt.json.")] = None
    longbench_v2: Annotated[Path | None, in_files(help="LongBench v2's JSON.")] = None
    longmemeval: Annotated[Path | None, in_files(help="LongMemEval's JSON. It needs --judge.")] = None
    problems: Annotated[
        Path | None,
        in_files(
            help="Problems as of GSM8K: JSON lines with question, answer and maybe group. The number at the end of an "
            "answer must be right, or --judge decides."
        ),
    ] = None
    max_new_tokens: MaxNewTokens = None

    def read(self, judged: bool) -> list[Question]:
        """All questions. Raises `ConfigError` where there are none, or what belongs to a set is missing."""
        from swa_jax.evaluate import questions as sets

        found: list[Question] = []
        if self.longbench is not None:
            if self.longbench_prompts is None:
                raise ConfigError("--longbench needs --longbench-prompts, the dataset2prompt.json that comes with it")
            found += sets.longbench(self.longbench, self.longbench_prompts)
        if self.longbench_v2 is not None:
            found += sets.longbench_v2(self.longbench_v2)
        if self.longmemeval is not None:
            found += sets.longmemeval(self.longmemeval)
        if self.problems is not None:
            found += sets.problems(self.problems, judged=judged)
        if not found:
            raise ConfigError("no questions: name a file with --longbench, --longbench-v2, --longmemeval or --problems")
        if self.max_new_tokens is None:
            return found
        return [dataclasses.replace(question, max_new_tokens=self.max_new_tokens) for question in found]


def questions(
    evaluation: Evaluation,
    sets: Sets,
    around: Around,
    judge: Annotated[
        str | None,
        in_files(
            help="A program that reads answers as JSON lines and prints yes, no or 0 to 1 for each. Or URL#MODEL, an "
            "OpenAI-compatible endpoint."
        ),
    ] = None,
    max_length: MaxLength = None,
    cut_middle: Annotated[
        bool,
        in_prompts(
            "--cut-middle", help="Cut the middle out of texts that are too long. Default: leave their questions out."
        ),
    ] = False,
) -> Measurement:
    """Questions about long texts, from LongBench, LongBench v2 and LongMemEval, and problems, from your files."""
    from swa_jax.base.files import write_json
    from swa_jax.evaluate.judges import find_judge
    from swa_jax.evaluate.question_scores import score_questions
    from swa_jax.report.evaluation_tables import questions_table

    asked = sets.read(judged=judge is not None)
    verdict = None if judge is None else find_judge(judge)
    wrap = around.wrap(evaluation.checkpoint)
    tokenizer = evaluation.tokenizer
    answers: dict[str, Rows] = {}

    def keep(name: str, records: Rows) -> None:
        answers[name] = records
        if evaluation.out is not None:
            write_json(evaluation.out / "answers.json", answers)

    def measure(run: Run) -> Iterator[Rows]:
        for name, model in run.models:
            scores, records = score_questions(
                model,
                tokenizer,
                asked,
                max_length=max_length or model.config.max_position_embeddings,
                cut_middle=cut_middle,
                wrap=wrap,
                judge=verdict,
                keep=functools.partial(keep, name),
                **run.kept(model),
            )
            keep(name, records)
            yield [{"name": name} | dataclasses.asdict(score) for score in scores]

    return Measurement("questions", "questions", len(asked), measure, questions_table, longest=max_length or 0)
