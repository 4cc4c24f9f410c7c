"""The verb `compare`: patterns, and methods that choose them, on the same needles in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from swa_jax.cli.options import (
    OUTPUT,
    PATTERN,
    PROMPTS,
    BatchSize,
    ComputeDtype,
    Haystack,
    Length,
    Model,
    NumKeys,
    Overrides,
    Seed,
    SinkTokens,
    Window,
    draw_needles,
    load_checkpoint,
    note_context,
    note_whole_prompts,
    resolve_patterns,
)
from swa_jax.errors import ConfigError
from swa_jax.model.pattern import AttentionPattern, is_pattern_file
from swa_jax.select.method_table import METHODS
from swa_jax.settings import nearest

NO_WINDOW = "--window is missing: give it, as the model's own pattern has none"
HELD_OUT_SEED = 10**6  # far from any seed that prompts to choose by are drawn with
CHOICE = "Methods and their choice"


def compare(
    model: Model,
    out: Annotated[
        Path, Option(help="A folder for results, patterns and the picture.", rich_help_panel=OUTPUT)
    ],
    pattern: Annotated[
        list[str] | None,
        Option(
            help="A recipe or a pattern JSON, repeatable. full and window are always there.",
            rich_help_panel=PATTERN,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        Option(
            help=f"A method of `swa-jax select`, repeatable, or all of them: all. There are {', '.join(METHODS)}.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        Option(
            help="Share of the KV heads that a method windows, repeatable. Default: 0.5 and 0.75.",
            show_default=False,
            rich_help_panel=CHOICE,
        ),
    ] = None,
    seeds: Annotated[
        int,
        Option(
            help="How often each method chooses, each time by other prompts.", min=1, rich_help_panel=CHOICE
        ),
    ] = 3,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    eval_window: Annotated[
        int | None,
        Option(
            "--eval-window",
            help="Window while scoring. Default: that of the choice.",
            min=1,
            show_default=False,
            rich_help_panel=PATTERN,
        ),
    ] = None,
    examples: Annotated[
        int, Option("--examples", help="Needle prompts to choose by.", min=1, rich_help_panel=PROMPTS)
    ] = 64,
    held_out: Annotated[
        int, Option("--held-out", help="Needle prompts to score on.", min=1, rich_help_panel=PROMPTS)
    ] = 200,
    length: Length = 1024,
    keys: NumKeys = 1,
    haystack: Haystack = None,
    iterations: Annotated[
        int,
        Option(help="BOSCH: masks tried for each layer of a subproblem.", min=1, rich_help_panel=CHOICE),
    ] = 100,
    against: Annotated[
        str | None,
        Option(
            help="The method that differences are to. Default: the first.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Annotated[
        bool,
        Option(
            "--force",
            help="Go on where no pattern finds a single needle, which tells nothing.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    seed: Seed = 0,
) -> None:
    """Compare patterns and methods: needles found against memory, on prompts that nobody chose by.

    Run the same command again to go on after an interruption, or with more methods, ratios or seeds to add them.
    """
    ratios = ratio or [0.5, 0.75]
    methods = _check_methods(method or [], against, ratios)
    from swa_jax.checkpoint.folder import weights_sum
    from swa_jax.report.progress import Progress
    from swa_jax.select.compare import compare as run

    decoder, tokenizer = load_checkpoint(model, dtype)
    own = decoder.pattern
    known_window = own.sliding_window if window is None else window
    if known_window is None and methods:
        raise ConfigError(NO_WINDOW)
    sources = _with_baselines(pattern or [], known_window)
    overrides = Overrides(window if eval_window is None else eval_window, sink_tokens)
    patterns = list(
        zip(sources, resolve_patterns(sources, decoder.config, overrides, known_window), strict=True)
    )

    def draw(number: int, count: int = examples) -> list:
        return draw_needles(tokenizer, count, length, keys, haystack, None, number)

    scored_on = draw(HELD_OUT_SEED + seed, held_out)
    note_context(decoder.config, length)
    note_whole_prompts(patterns, max(len(example.prompt) for example in scored_on))
    with Progress("patterns") as progress:
        rows = run(
            decoder, patterns, scored_on, out,
            methods=methods, ratios=ratios, seeds=range(seed, seed + seeds), draw=draw,
            sliding_window=known_window,
            num_sink_tokens=own.num_sink_tokens if sink_tokens is None else sink_tokens,
            eval_window=eval_window, iterations=iterations, batch_size=batch_size, weights=weights_sum(model),
            settings={
                "model": str(model), "examples": examples, "held_out": held_out, "length": length, "keys": keys,
                "haystack": str(haystack or "python library"), "seed": seed,
            },
            force=force,
            report=lambda line: progress.console.print(line, highlight=False, soft_wrap=True),
            progress=progress.update,
        )  # fmt: skip
    _show(rows, against, _title_window(patterns, known_window), out)


def _show(rows: Sequence[Any], against: str | None, window: int | None, out: Path) -> None:
    from swa_jax.report import compare_table, frontier_chart, table_console
    from swa_jax.select.compare import summary

    summed = summary(rows, against)
    table_console().print(compare_table(summed, window))
    title = "What the memory buys" + ("" if window is None else f" (window {window})")
    frontier_chart(summed, out / "frontier.png", title=title)
    typer.echo(f"written to {out}")


def _title_window(patterns: Sequence[tuple[str, AttentionPattern]], known: int | None) -> int | None:
    """The window that recipes have; None where only files name one."""
    recipes = [pattern for name, pattern in patterns if name == "window"]
    return recipes[0].sliding_window if known is None and recipes else known


def _check_methods(named: Sequence[str], against: str | None, ratios: Sequence[float]) -> list[str]:
    """The methods, each once. Raises `ConfigError` for an unknown one, and for a ratio outside [0, 1]."""
    methods = list(METHODS) if list(named) == ["all"] else list(dict.fromkeys(named))
    for name in methods:
        if name not in METHODS:
            raise ConfigError(f"--method '{name}' is not known{nearest(name, list(METHODS))}")
    if against is not None and against not in methods:
        raise ConfigError(f"--against '{against}' is not among the methods: {', '.join(methods) or 'none'}")
    for share in ratios:
        if not 0 <= share <= 1:
            raise ConfigError(f"--ratio is {share}: the share of windowed heads must lie between 0 and 1")
    return methods


def _with_baselines(named: Sequence[str], window: int | None) -> list[str]:
    """The patterns to compare: `full`, what is named, and `window` unless all that is named brings its own window."""
    own_windows = window is None and named and all(name == "full" or is_pattern_file(name) for name in named)
    return list(dict.fromkeys(["full", *([] if own_windows else ["window"]), *named]))
