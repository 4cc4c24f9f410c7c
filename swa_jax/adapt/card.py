"""The card of an adapted model, `README.md` in its export: what it lost, how to serve it, how to make it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from swa_jax.adapt.job import Adaptation, command_line
from swa_jax.adapt.report import check_command, memory_cells, quality_cells, sentences, tuned
from swa_jax.adapt.stages import StageResults
from swa_jax.base.files import write_text
from swa_jax.checkpoint.sources import HUB_ID


def write_card(job: Adaptation, results: StageResults) -> None:
    """Write the card into the export, if there is one. Model hubs show it as the model's page."""
    if job.export_folder is not None:
        write_text(job.export_folder / "README.md", "\n".join(_card(job, results)) + "\n")


def _card(job: Adaptation, results: StageResults) -> Iterator[str]:
    given = job.settings.model
    hub = None if Path(given).expanduser().exists() else HUB_ID.fullmatch(given)
    base = hub[1] if hub else Path(given).name
    trained = f", {words}" if (words := tuned(results.found["tune"])) else ""
    yield from ("---", *([f"base_model: {base}"] if hub else []), "tags:", "- sliding-window-attention", "---", "")
    yield from (f"# {base} with sliding windows", "", " ".join(sentences(job, results)), "")
    yield from (f"The weights are those of {base}{trained}. Its license holds for them.", "")
    served = job.memory.served(results.pattern)
    if served is not None and (command := job.memory.command(served, ".")):
        yield from ("## Serve it", "", "In this folder:", "", "```sh", command, *check_command(job, Path()), "```", "")
    quality = [[task, *figures] for task, _, *figures in quality_cells(job, results)]
    yield from ("## What it lost", "", *_table("task", "original", "adapted", "difference", "examples", rows=quality))
    yield from ("", "In brackets: 95 % intervals. The difference is paired, example by example.", "")
    memory = memory_cells(job, results)
    yield from ("## The cache of a sequence", "", *_table("where", "full attention", "adapted", "share", rows=memory))
    yield from ("", "## Make it again", "", "```sh", command_line(job.settings), "```")


def _table(*head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *([first.replace("\n", ", "), *figures] for first, *figures in rows)]
    return [f"| {' | '.join(line)} |".replace("\n", " ") for line in lines]
