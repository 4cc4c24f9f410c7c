"""`swa-jax evaluate harness`: tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Argument

from swa_jax.base.errors import ConfigError
from swa_jax.cli.evaluate.around import THINKING_WITHOUT_CHAT
from swa_jax.cli.evaluate.evaluation import Evaluation, MaxLength, Measurement, Rows, Run
from swa_jax.cli.generate_options import Thinking
from swa_jax.cli.options import in_chat, in_prompts


def harness(
    evaluation: Evaluation,
    tasks: Annotated[list[str], Argument(metavar="TASK...", help="Tasks such as arc_easy.")],
    folder: Annotated[Path | None, in_prompts(help="A folder with YAML files of tasks of one's own.")] = None,
    limit: Annotated[int | None, in_prompts(help="Only the first N documents of a task.", min=1)] = None,
    max_length: MaxLength = None,
    chat: Annotated[
        bool, in_chat("--chat", help="Ask in the model's chat template, each example of a few-shot prompt as a turn.")
    ] = False,
    thinking: Thinking = None,
) -> Measurement:
    """Tasks of lm-evaluation-harness; needs the extra `eval`."""
    from swa_jax.data.chat import chat_text
    from swa_jax.evaluate.harness import HarnessModel, run_harness  # an extra, [eval]
    from swa_jax.report.evaluation_tables import harness_table

    if thinking is not None and not chat:
        raise ConfigError(THINKING_WITHOUT_CHAT)
    asked = chat_text(evaluation.checkpoint, thinking) if chat else None
    tokenizer = evaluation.tokenizer

    def measure(run: Run) -> Iterator[Rows]:
        for name, model in run.models:
            adapted = HarnessModel(
                model, tokenizer, batch_size=evaluation.batch_size, max_length=max_length, chat=asked
            )
            rows = run_harness(adapted, tasks, folder=folder, limit=limit)
            run.plain["advance"](1)
            yield [{"name": name} | row for row in rows]

    return Measurement("harness", "patterns", 1, measure, harness_table, longest=max_length or 0)
