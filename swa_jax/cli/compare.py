"""The verb `compare`: patterns, and methods that choose them, on the same prompts in one run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.pattern_files import is_pattern_file
from swa_jax.cli.groups import Options
from swa_jax.cli.options import (
    HELD_OUT_SEED,
    Json,
    Model,
    PromptKind,
    Seed,
    WindowGiven,
    at_most,
    check_window,
    few_prompts,
    find_model,
    in_output,
    in_pattern,
    in_prompts,
    note_context,
    note_whole_prompts,
    open_model,
    panel,
    print_report,
    resolve_patterns,
)
from swa_jax.cli.select_options import Counted, Force, Running
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.methods import DEFAULT, METHODS, check_model, find_method
from swa_jax.select.separation import By

if TYPE_CHECKING:
    from swa_jax.checkpoint.folder import Checkpoint
    from swa_jax.checkpoint.served_cache import Memory
    from swa_jax.model.config import ModelConfig

in_choice = panel("Methods and their choice")


@dataclasses.dataclass
class Candidates(Options):
    """The patterns to compare."""

    pattern: Annotated[
        list[str] | None,
        in_pattern(metavar="PATTERN", help="A recipe or a pattern JSON, repeatable. full and window are always there."),
    ] = None
    eval_window: Annotated[
        int | None, in_pattern(metavar="N", help="Window while scoring. Default: that of the choice.", min=1)
    ] = None

    def patterns(self, given: Window, own: int | None, config: ModelConfig) -> list[tuple[str, AttentionPattern]]:
        """By name: `full`, what is named, and `window` unless all that is named brings its own window.

        `given` wins over what they say; recipes have the window `own` where it names none.
        """
        named = self.pattern or []
        own_windows = own is None and named and all(name == "full" or is_pattern_file(name) for name in named)
        sources = list(dict.fromkeys(["full", *([] if own_windows else ["window"]), *named]))
        scored = Window(self.eval_window).of(given, needed=False)
        return list(zip(sources, resolve_patterns(sources, config, scored, own), strict=True))


@dataclasses.dataclass
class Choice(Options):
    """The methods, and what they choose."""

    method: Annotated[
        list[str] | None,
        in_choice(
            metavar="METHOD",
            help="A method of `swa-jax select`, repeatable; all: every one. Default, without --pattern: "
            f"{DEFAULT['layers']}.",
        ),
    ] = None
    ratio: Annotated[
        list[float] | None,
        in_choice(
            metavar="SHARE", help="Share of the KV heads that a method windows, repeatable. Default: 0.5 and 0.75."
        ),
    ] = None
    seeds: Annotated[
        int, in_choice(metavar="N", help="Choices, each from other prompts.", min=1, callback=at_most(1000))
    ] = 3
    iterations: Annotated[int, in_choice(metavar="N", help="BOSCH: masks to try a layer of a subproblem.", min=1)] = 100
    by: Annotated[By, in_choice(metavar="SCORE", help="BOSCH: score masks by answers or loss.")] = "answers"
    against: Annotated[str | None, in_output(help="Show differences to this method.")] = None
    force: Force = False

    @property
    def ratios(self) -> list[float]:
        return self.ratio or [0.5, 0.75]

    def methods(self, patterns: bool) -> list[str]:
        """The methods, each once; the default one where neither methods nor `patterns` are named.

        Raises `ConfigError` for an unknown one, and for a ratio outside [0, 1].
        """
        default = [] if patterns else [DEFAULT["layers"]]
        methods = list(METHODS) if self.method == ["all"] else list(dict.fromkeys(self.method or default))
        for name in methods:
            find_method(name)
        if self.against is not None and self.against not in methods:
            known = ", ".join(methods) or "none"
            raise ConfigError(f"--against '{self.against}' is not among the methods: {known}")
        for share in self.ratios:
            if not 0 <= share <= 1:
                raise ConfigError(f"--ratio is {share}: the share of windowed heads must lie between 0 and 1")
        return methods

    def fitting(self, methods: list[str], config: ModelConfig) -> list[str]:
        """Of all methods those that take this model; of methods that are named, every one, to be refused if it must."""
        if self.method != ["all"]:
            return methods
        found = []
        for name in methods:
            try:
                check_model(name, config)
                found.append(name)
            except ConfigError as error:
                typer.echo(f"{name}: left out, as {error}", err=True)
        return found


@dataclasses.dataclass
class Counts(Options):
    """How many prompts to choose by, and how many to score on."""

    examples: Annotated[int, in_prompts(metavar="N", help="Prompts to choose by.", min=1, callback=few_prompts)] = 64
    held_out: Annotated[int, in_prompts(metavar="N", help="Prompts to score on.", min=1, callback=few_prompts)] = 200
    seed: Seed = 0

    def settings(self, model: Path, kind: PromptKind) -> dict[str, Any]:
        """What the rows say of their prompts."""
        return {
            "model": str(model),
            "examples": self.examples,
            "held_out": self.held_out,
            "length": kind.length,
            **kind.settings(),
            "seed": self.seed,
        }


def _memory(counted: Counted, opened: Checkpoint, length: int) -> Memory | None:
    """Where the cache is counted; None: in this library at the length of the prompts, which every row has."""
    if counted.server is None and counted.serve_length is None:
        return None
    return counted.memory(opened.config, opened.hf_config, length)


def compare(
    model: Model,
    out: Annotated[Path, in_output(help="A folder for results, patterns and the picture.")],
    candidates: Candidates,
    window: WindowGiven,
    choice: Choice,
    prompts: Counts,
    kind: PromptKind,
    counted: Counted,
    running: Running,
    as_json: Json = False,
) -> None:
    """Compare patterns and methods: how many needles (or chains) each finds, and how much memory it takes.

    The prompts are others than those that the methods choose by. Run the same command again to go on after an
    interruption, or with more methods, ratios or seeds to add them.
    """
    methods = choice.methods(bool(candidates.pattern))
    if methods and not choice.force:
        check_window(window.as_window.size, kind.length)
    from swa_jax.checkpoint.folder import load_model, weights_sum
    from swa_jax.report.progress import Progress
    from swa_jax.select.compare import PatternComparison

    model = find_model(model)
    opened, tokenizer = open_model(model)
    methods = choice.fitting(methods, opened.config)
    memory = _memory(counted, opened, kind.length)
    whole = window.as_window.of(opened.pattern.window, needed=bool(methods))
    patterns = candidates.patterns(window.as_window, whole.size, opened.config)
    kind = kind.of(model)
    scored_on = kind.draw(tokenizer, prompts.held_out, HELD_OUT_SEED + prompts.seed)
    note_context(opened.config, kind.length)
    note_whole_prompts(patterns, max(len(example.prompt) for example in scored_on))
    with Progress("patterns") as progress:
        comparison = PatternComparison(
            load_model(opened, dtype=running.dtype),
            scored_on,
            out,
            lambda number: kind.draw(tokenizer, prompts.examples, number),
            prompts.settings(model, kind),
            methods,
            choice.ratios,
            range(prompts.seed, prompts.seed + choice.seeds),
            window=whole,
            eval_window=candidates.eval_window,
            iterations=choice.iterations,
            by=choice.by,
            batch_size=running.batch_size,
            weights=weights_sum(model),
            force=choice.force,
            report=lambda line: progress.console.print(line, highlight=False, soft_wrap=True),
            progress=progress.update,
        )
        rows = comparison(patterns)
    where = "KV cache"
    if memory is not None:
        rows = _counted(rows, memory, candidates.eval_window)
        where = f"KV cache of {memory.length} tokens {memory.place}"
        typer.echo(memory.steps, nl=bool(memory.steps), err=as_json)
    from swa_jax.report.memory_charts import frontier_chart
    from swa_jax.report.tables import compare_table
    from swa_jax.select.compare import summary

    summed, title_window = summary(rows, choice.against), _title_window(patterns, whole.size)
    report = {"window": title_window, "memory": where, "rows": summed}
    print_report(report, compare_table(summed, title_window, where), as_json)
    title = "What the memory buys" + ("" if title_window is None else f" (window {title_window})")
    frontier_chart(summed, out / "frontier.png", title=title, memory=where)
    typer.echo(f"written to {out}", err=as_json)
    if comparison.refused:
        names = ", ".join(dict.fromkeys(comparison.refused))
        raise ConfigError(f"not all is there: {names} refused to choose, as is said above; the rest is in {out}")


def _counted(rows: Sequence[dict[str, Any]], memory: Memory, eval_window: int | None) -> list[dict[str, Any]]:
    """The rows with the cache that their patterns take elsewhere, without those that cannot run there."""
    found = []
    for row in rows:
        pattern = AttentionPattern.from_json(json.dumps(row["pattern"]))
        if "ratio" in row and eval_window is not None:  # what a method chose, and under which window it was scored
            pattern = pattern.with_window(Window(eval_window))
        try:
            found.append(row | {"kv_cache_bytes": memory.bytes(pattern)})
        except ConfigError as error:
            typer.echo(f"{row['name']}: not shown, as {str(error).split('; ')[0]}", err=True)
    if not found:
        raise ConfigError(f"{memory.server} runs none of these patterns: compare without --for")
    return found


def _title_window(patterns: Sequence[tuple[str, AttentionPattern]], known: int | None) -> int | None:
    """The window that recipes have; None where only files name one."""
    recipes = [pattern for name, pattern in patterns if name == "window"]
    return recipes[0].sliding_window if known is None and recipes else known
