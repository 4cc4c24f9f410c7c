"""The verb `compare`: patterns, and methods that choose them, on the same needles in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from swa_jax.cli.options import (
    BatchSize,
    ComputeDtype,
    Haystack,
    Length,
    Model,
    NumKeys,
    Seed,
    SinkTokens,
    Window,
    draw_needles,
    load_checkpoint,
    resolve_pattern,
)
from swa_jax.errors import ConfigError
from swa_jax.families.pattern_files import is_pattern_file
from swa_jax.select.method_table import METHODS
from swa_jax.settings import nearest

NO_WINDOW = "--window is missing: give it, as the model's own pattern has none"
HELD_OUT_SEED = 10**6  # far from any seed that prompts to choose by are drawn with


def compare(
    model: Model,
    out: Annotated[Path, Option(help="A folder for results, patterns and the picture.")],
    pattern: Annotated[
        list[str] | None,
        Option(help="A recipe or a pattern JSON, repeatable; full and window are always there."),
    ] = None,
    method: Annotated[
        list[str] | None,
        Option(
            help=f"A method of `swa-jax select`, repeatable, or all of them: all. There are {', '.join(METHODS)}."
        ),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        Option(help="Share of the KV heads that a method windows, repeatable.", show_default="0.5 and 0.75"),
    ] = None,
    seeds: Annotated[
        int, Option(help="How often each method chooses, each time by other prompts.", min=1)
    ] = 3,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    eval_window: Annotated[
        int | None,
        Option("--eval-window", help="Window while scoring; default: that of the choice.", min=1),
    ] = None,
    examples: Annotated[int, Option("--examples", help="Needle prompts to choose by.", min=1)] = 64,
    held_out: Annotated[int, Option("--held-out", help="Needle prompts to score on.", min=1)] = 200,
    length: Length = 1024,
    keys: NumKeys = 1,
    haystack: Haystack = None,
    iterations: Annotated[
        int, Option(help="BOSCH: masks tried for each layer of a subproblem.", min=1)
    ] = 100,
    against: Annotated[
        str | None, Option(help="The method that differences are to; default: the first.")
    ] = None,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Annotated[
        bool, Option("--force", help="Go on where no pattern finds a single needle, which tells nothing.")
    ] = False,
    seed: Seed = 0,
) -> None:
    """Compare patterns and methods: needles found against memory, on prompts that nobody chose by.

    Run the same command again to go on after an interruption, or with more methods, ratios or seeds to add them.
    """
    from swa_jax.checkpoint.folder import weights_sum
    from swa_jax.report import compare_table, frontier_chart, table_console
    from swa_jax.report.progress import Progress
    from swa_jax.select.compare import compare as run
    from swa_jax.select.compare import summary

    methods = list(METHODS) if method == ["all"] else list(dict.fromkeys(method or []))
    for name in methods:
        if name not in METHODS:
            raise ConfigError(f"--method '{name}' is not known{nearest(name, list(METHODS))}")
    if against is not None and against not in methods:
        raise ConfigError(f"--against '{against}' is not among the methods: {', '.join(methods) or 'none'}")
    ratios = ratio or [0.5, 0.75]
    for share in ratios:
        if not 0 <= share <= 1:
            raise ConfigError(f"--ratio is {share}: the share of windowed heads must lie between 0 and 1")
    decoder, tokenizer = load_checkpoint(model, dtype)
    own = decoder.pattern
    choose_window = own.sliding_window if window is None else window
    if choose_window is None and methods:
        raise ConfigError(NO_WINDOW)
    sources = _sources(pattern or [], choose_window)
    override = window if eval_window is None else eval_window
    patterns = [
        (name, resolve_pattern(name, decoder.config, override, sink_tokens, None, choose_window))
        for name in sources
    ]

    def draw(number: int, count: int = examples) -> list:
        return draw_needles(tokenizer, count, length, keys, haystack, None, number)

    console = table_console()
    with Progress("patterns") as progress:
        rows = run(
            decoder,
            patterns,
            draw(HELD_OUT_SEED + seed, held_out),
            out,
            methods=methods,
            ratios=ratios,
            seeds=range(seed, seed + seeds),
            draw=draw,
            sliding_window=choose_window,
            num_sink_tokens=own.num_sink_tokens if sink_tokens is None else sink_tokens,
            eval_window=eval_window,
            iterations=iterations,
            batch_size=batch_size,
            weights=weights_sum(model),
            settings={
                "model": str(model), "examples": examples, "held_out": held_out, "length": length, "keys": keys,
                "haystack": str(haystack or "python library"), "seed": seed,
            },
            force=force,
            report=lambda line: progress.console.print(line, highlight=False, soft_wrap=True),
            progress=progress.update,
        )  # fmt: skip
    summed = summary(rows, against)
    console.print(compare_table(summed, choose_window))
    title = "What the memory buys" + ("" if choose_window is None else f" (window {choose_window})")
    frontier_chart(summed, out / "frontier.png", title=title)
    typer.echo(f"written to {out}")


def _sources(named: list[str], window: int | None) -> list[str]:
    """The patterns to compare; without a window for `window`, files that bring their own are enough."""
    if window is not None:
        return list(dict.fromkeys(["full", "window", *named]))
    if not named or any(name != "full" and not is_pattern_file(name) for name in named):
        raise ConfigError(NO_WINDOW)
    return list(dict.fromkeys(["full", *named]))
