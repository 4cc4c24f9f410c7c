"""The verb `evaluate`: patterns of one model measured on needles, RULER's tasks and text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from swa_jax.cli.options import (
    BatchSize,
    ComputeDtype,
    FullDecode,
    Haystack,
    Length,
    Model,
    NumKeys,
    Seed,
    SinkTokens,
    Window,
    Yarn,
    check_output,
    draw_needles,
    fractions,
    load_checkpoint,
    numbers,
    text_files,
    with_options,
)
from swa_jax.errors import ConfigError

if TYPE_CHECKING:
    from swa_jax.cli.evaluate_parts import Measured
    from swa_jax.evaluate import Example
    from swa_jax.evaluate.questions import Question
    from swa_jax.evaluate.ruler import Cell
    from swa_jax.model.decoder import Decoder

DEFAULT_NEEDLES = 48
DEFAULT_DEPTHS = "0,0.2,0.4,0.6,0.8,1"


def evaluate(
    model: Model,
    pattern: Annotated[
        list[str] | None,
        Option(help="A recipe or a pattern JSON, repeatable; default: the checkpoint's own."),
    ] = None,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    fa_decode: FullDecode = None,
    needles: Annotated[
        int | None,
        Option(
            help=f"Needle prompts a pattern; 0 leaves them out. Default: {DEFAULT_NEEDLES}, or 0 with --ruler, "
            "--harness, --windows, --contexts or questions.",
            min=0,
            show_default=False,
        ),
    ] = None,
    length: Length = 1024,
    keys: NumKeys = 1,
    haystack: Haystack = None,
    text: Annotated[Path | None, Option(help="Also give the perplexity of this text.")] = None,
    context: Annotated[int, Option(help="Tokens of that text a pass.", min=1)] = 1024,
    depths: Annotated[
        str | None,
        Option(
            help=f"Where the needles lie, as fractions of the prompt, taken in turn; default {DEFAULT_DEPTHS}. "
            "With --ruler: a grid of these depths; default: drawn as RULER does.",
            show_default=False,
        ),
    ] = None,
    ruler: Annotated[
        list[str] | None,
        Option(help="A task of RULER such as niah_single_2, repeatable, or all of them: all."),
    ] = None,
    lengths: Annotated[
        str | None,
        Option(help="Tokens of the RULER prompts with their answers: 4096,8192; default: --length."),
    ] = None,
    examples: Annotated[int, Option(help="RULER prompts for each task, length and depth.", min=1)] = 20,
    max_new_tokens: Annotated[int, Option(help="Tokens of a RULER answer.", min=1)] = 128,
    template: Annotated[
        Path | None,
        Option(help="What a chat model wants around a question: a file that holds {prompt}."),
    ] = None,
    windows: Annotated[
        str | None, Option(help="Perplexity of --text at these windows: 128,1024,full.")
    ] = None,
    contexts: Annotated[
        str | None, Option(help="Perplexity of --text in sequences of these lengths: 512,4096.")
    ] = None,
    routing: Annotated[
        bool,
        Option(
            "--routing",
            help="Of routed (switch) patterns: full-attention ratio by layer on --text, and by depth on the RULER "
            "prompts, or on the needles.",
        ),
    ] = False,
    harness: Annotated[
        list[str] | None,
        Option(help="A task of lm-evaluation-harness, repeatable; needs lm-eval."),
    ] = None,
    harness_folder: Annotated[
        Path | None, Option(help="A folder with YAML files of harness tasks of one's own.")
    ] = None,
    limit: Annotated[int | None, Option(help="Only the first N documents of a harness task.", min=1)] = None,
    longbench: Annotated[
        Path | None, Option(help="LongBench: a .jsonl, or a folder of them; needs --longbench-prompts.")
    ] = None,
    longbench_prompts: Annotated[Path | None, Option(help="LongBench's dataset2prompt.json.")] = None,
    longbench_v2: Annotated[Path | None, Option("--longbench-v2", help="LongBench v2's JSON.")] = None,
    longmemeval: Annotated[Path | None, Option(help="LongMemEval's JSON; needs --judge.")] = None,
    judge: Annotated[
        str | None,
        Option(
            help="A program that reads answers as JSON lines and prints yes, no or 0 to 1 for each; or URL#MODEL, an "
            "OpenAI-compatible endpoint."
        ),
    ] = None,
    cut_middle: Annotated[
        bool,
        Option("--cut-middle", help="Cut the middle out of long questions' texts; default: leave them out."),
    ] = False,
    max_length: Annotated[
        int | None,
        Option(
            help="Tokens of a harness request or a LongBench prompt with its answer; default: what the model's "
            "config names.",
            min=1,
        ),
    ] = None,
    batch_size: BatchSize = 16,
    yarn: Yarn = None,
    dtype: ComputeDtype = None,
    seed: Seed = 0,
    out: Annotated[Path | None, Option(help="Write results.json and pictures to this folder.")] = None,
) -> None:
    """Measure patterns: needles found, answer loss, memory, speed; RULER's tasks; perplexity by window and length."""
    from swa_jax.cli import evaluate_parts as parts
    from swa_jax.data.haystack import read_text
    from swa_jax.files import write_json
    from swa_jax.report import table_console

    sweep = windows is not None or contexts is not None
    asks = longbench or longbench_v2 or longmemeval
    if needles is None:
        needles = 0 if ruler or sweep or harness or asks else DEFAULT_NEEDLES
    if sweep and text is None:
        raise ConfigError("--windows and --contexts ask for the perplexity of a text: name it with --text")
    if not (needles or ruler or harness or asks or text):
        raise ConfigError(
            "nothing to measure: --needles is 0, and no --ruler, --text, --harness or set of questions is given"
        )
    tasks = _ruler_tasks(ruler or [])
    decoder, tokenizer = load_checkpoint(model, dtype, yarn=yarn)
    names = pattern or ["own"]
    sources: list[str] | list[None] = pattern or [None]
    models = [
        (name, with_options(decoder, source, window, sink_tokens, fa_decode))
        for name, source in zip(names, sources, strict=True)
    ]
    places = fractions(depths or DEFAULT_DEPTHS)
    tokens = tokenizer.start_ids + tokenizer.encode(read_text([text])) if text is not None else []
    files = None if haystack is None else text_files(haystack)
    wrap = "{prompt}" if template is None else read_text([template])
    console = table_console()
    if routing:
        from swa_jax.evaluate.routing import check_routed

        for _, one in models:
            check_routed(one.pattern)
    results: dict[str, Any] = {
        "model": str(model),
        "patterns": {
            name: {
                "sliding_window": one.pattern.sliding_window,
                "num_sink_tokens": one.pattern.num_sink_tokens,
                "full_attention_decode": one.pattern.full_attention_decode,
                "full_layers": list(one.pattern.full_layers),
            }
            for name, one in models
        },
        "haystack": str(haystack or "python library"),
        "length": length,
        "keys": keys,
        "yarn": yarn,
        "seed": seed,
    }
    if out is not None:
        if (out / "results.json").exists():
            raise ConfigError(f"{out} has results already: name another folder with --out, or move it away")
        check_output("--out", out / "results.json")

    def save(key: str, rows: list[dict[str, Any]]) -> None:
        """What is measured so far, so that an interruption does not cost it."""
        results[key] = rows
        if out is not None:
            write_json(out / "results.json", results)

    def finish(part: Measured) -> None:
        save(part.key, part.rows)
        if out is not None:
            part.draw(out)

    cells: dict[Cell, list[Example]] = {}  # what --routing looks at
    if needles or (tokens and not sweep):
        drawn = draw_needles(tokenizer, needles, length, keys, haystack, places, seed) if needles else []
        if needles:
            _remark(models, max(len(example.prompt) for example in drawn), length)
        once = [] if sweep else tokens
        finish(parts.measure_needles(console, models, tokenizer, drawn, places, once, context, batch_size))
        cells = {
            ("needle", length, depth): drawn[i :: len(places)] for i, depth in enumerate(places[:needles])
        }
    if tasks:
        from swa_jax.evaluate.ruler import ruler_grid

        sizes = numbers("--lengths", lengths) if lengths else [length]
        if routing:
            cells.clear()

        def grid(task: str, size: int, number: int) -> dict[Cell, list[Example]]:
            return ruler_grid(
                tokenizer,
                [task],
                lengths=[size],
                depths=None if depths is None else places,
                num_examples=number,
                haystack=files,
                max_new_tokens=max_new_tokens,
                wrap=wrap,
                seed=seed,
            )

        def grids() -> Iterator[dict[Cell, list[Example]]]:
            # One task and length at a time: all prompts of a long run together would fill the memory.
            for task, size in itertools.product(tasks, sizes):
                made = grid(task, size, examples)
                if routing:
                    cells.update(made)
                yield made

        for task in tasks:
            grid(
                task, min(sizes), 1
            )  # too short a length is said now, not after the hours that the others take
        prompts = len(tasks) * len(sizes) * examples * (1 if depths is None else len(places))
        finish(
            parts.measure_ruler(
                console, models, tokenizer, grids(), prompts, max_new_tokens, batch_size, save
            )
        )
    if routing:
        finish(parts.measure_routing(console, models, tokens, context, cells, batch_size))
    if sweep:
        sizes = numbers("--contexts", contexts) if contexts else [context]
        spans = numbers("--windows", windows, word="full") if windows else None
        finish(parts.measure_sweep(console, models, tokens, spans, sizes, batch_size))
    if asks:
        questions = _read_questions(longbench, longbench_prompts, longbench_v2, longmemeval)
        finish(
            parts.measure_questions(
                console, models, tokenizer, questions, max_length, cut_middle, wrap, judge, batch_size, out
            )
        )
    if harness:
        finish(
            parts.measure_harness(
                console, models, tokenizer, harness, harness_folder, limit, max_length, batch_size
            )
        )
    if out is not None:
        typer.echo(f"written to {out}")


def _read_questions(
    longbench: Path | None, prompts: Path | None, longbench_v2: Path | None, longmemeval: Path | None
) -> list[Question]:
    from swa_jax.evaluate import questions

    found: list[Question] = []
    if longbench is not None:
        if prompts is None:
            raise ConfigError(
                "--longbench needs --longbench-prompts, the dataset2prompt.json that comes with it"
            )
        found += questions.longbench(longbench, prompts)
    if longbench_v2 is not None:
        found += questions.longbench_v2(longbench_v2)
    if longmemeval is not None:
        found += questions.longmemeval(longmemeval)
    return found


def _remark(models: Sequence[tuple[str, Decoder]], longest: int, length: int) -> None:
    """What a reader of the table might not think of: windows that reach over everything, and prompts too long."""
    for name, model in models:
        pattern = model.pattern
        visible = (pattern.sliding_window or longest) + pattern.num_sink_tokens
        if len(pattern.full_layers) < pattern.num_layers and longest <= visible:
            typer.echo(
                f"{name}: the window of {pattern.sliding_window} tokens holds whole prompts ({longest}), which is full "
                "attention: take longer prompts (--length) or a shorter --window"
            )
    context = models[0][1].config.max_position_embeddings
    if length > context:
        typer.echo(f"prompts of {length} tokens are longer than the model's context of {context}")


def _ruler_tasks(names: Sequence[str]) -> list[str]:
    from swa_jax.evaluate.ruler import RULER_TASKS, ruler_task

    for name in names:
        if name != "all":
            ruler_task(name)
    return list(RULER_TASKS) if "all" in names else list(dict.fromkeys(names))
