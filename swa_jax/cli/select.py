"""The verbs `swa-jax select METHOD`: choose the layers or heads that keep full attention."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

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
    check_output,
    draw_needles,
    load_checkpoint,
    parse_mesh,
)
from swa_jax.errors import ConfigError
from swa_jax.select.method_table import METHODS, Family, Heuristic, StaticMethod, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.estimates import Estimate
    from swa_jax.evaluate import Example
    from swa_jax.model.pattern import AttentionPattern

app = typer.Typer(no_args_is_help=True, help="Choose the layers or KV heads that keep full attention.")

Out = Annotated[Path, Option(help="The pattern's JSON file; the picture goes beside it.")]
NumExamples = Annotated[int, Option("--examples", help="Examples to choose by.", min=1)]
Prompts = Annotated[
    Path | None,
    Option(
        "--prompts",
        help="Choose by these in place of needles: JSONL, Parquet or ArrayRecord with the fields prompt and answer.",
    ),
]
Budget = Annotated[int | None, Option("--budget", help="Layers that stay full.", min=0)]
OneIn = Annotated[int | None, Option("--one-in", help="Or: one full layer in N.", min=1)]
FaDecode = Annotated[bool, Option("--fa-decode", help="Set full-attention decode in the pattern.")]
Ratio = Annotated[float, Option("--ratio", help="Share of the KV heads that are windowed.", min=0, max=1)]
Force = Annotated[
    bool, Option("--force", help="Write the pattern also where the prompts tell nothing about the choice.")
]


def select_bosch(
    model: Model,
    out: Out,
    ratio: Ratio,
    variant: Annotated[Variant, Option(help="BOSCH, or one of its ablations.")] = "bosch",
    iterations: Annotated[
        int, Option(help="Masks tried for each layer of a subproblem; fewer where there are fewer.", min=1)
    ] = 100,
    optimizer: Annotated[
        Literal["one-plus-one", "nomad"], Option(help="nomad, as in the paper, needs PyNomadBBO.")
    ] = "one-plus-one",
    window: Window = None,
    sink_tokens: SinkTokens = None,
    examples: NumExamples = 64,
    length: Length = 1024,
    keys: NumKeys = 1,
    haystack: Haystack = None,
    prompts: Prompts = None,
    evaluations: Annotated[
        Path | None,
        Option(
            help="JSON that keeps the scores, so that an interrupted search goes on; default: beside --out."
        ),
    ] = None,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """BOSCH: search for the KV heads that can be windowed, by how many answers the model then gets right.

    Run the same command again to go on after an interruption.
    """
    import numpy as np

    from swa_jax.checkpoint.folder import weights_sum
    from swa_jax.select import MaskEvaluator, bosch, bosch_pattern

    _check_out(out)
    decoder, tokenizer = load_checkpoint(model, dtype)
    drawn, data = _drawn(tokenizer, prompts, examples, length, keys, haystack, seed)
    file = evaluations or out.with_suffix(".evaluations.json")
    evaluate = MaskEvaluator(
        decoder,
        drawn,
        sliding_window=window,
        num_sink_tokens=sink_tokens,
        batch_size=batch_size,
        file=file,
        weights=weights_sum(model),
    )
    if evaluate.num_evaluations:
        typer.echo(f"{file} has the scores of {evaluate.num_evaluations} masks: going on from there")
    if evaluate(np.ones(evaluate.shape, bool)) == evaluate(np.zeros(evaluate.shape, bool)):
        _means_nothing("windows everywhere do just as well as full attention", force)
    try:
        with _progress("masks tried") as progress:
            chosen = bosch(
                evaluate,
                ratio,
                variant=variant,
                iterations=iterations,
                optimizer=optimizer,
                seed=seed,
                progress=progress,
            )
    finally:
        evaluate.save()
    pattern = bosch_pattern(
        chosen,
        evaluate,
        ratio=ratio,
        variant=variant,
        iterations=iterations,
        optimizer=optimizer,
        seed=seed,
        data=data,
    )
    _write_heads(pattern, chosen.full, out)
    typer.echo(
        f"answers right: {chosen.score.accuracy:.1%}, with full attention {chosen.original.accuracy:.1%}, "
        f"all windowed {chosen.windowed.accuracy:.1%}; {evaluate.num_evaluations} masks tried in "
        f"{evaluate.seconds:.0f} s"
    )
    if chosen.num_windowed != chosen.target:
        typer.echo(
            f"windowed {chosen.num_windowed} heads and not {chosen.target}: the nearest this method can reach"
        )


def select_static(
    model: Model,
    method: Annotated[StaticMethod, Argument(help="Its name is a command, too.")],
    out: Out,
    ratio: Ratio,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    examples: NumExamples = 64,
    length: Length = 1024,
    keys: NumKeys = 1,
    haystack: Haystack = None,
    prompts: Prompts = None,
    batch_size: BatchSize = 1,
    dtype: ComputeDtype = None,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """Rank the KV heads of the unchanged model from local to global, and window the most local ones."""
    from swa_jax.select.heads import head_pattern, window_most_local
    from swa_jax.select.static import IN_WINDOW, LARGER_IS_LOCAL, static_scores

    _check_out(out)
    decoder, tokenizer = load_checkpoint(model, dtype)
    window = decoder.pattern.sliding_window if window is None else window
    if window is None:
        raise ConfigError("--window is missing: give it, as the model's own pattern has none")
    drawn, data = _drawn(tokenizer, prompts, examples, length, keys, haystack, seed)
    if method in IN_WINDOW and max(len(e.prompt) + len(e.answer) for e in drawn) <= window:
        _means_nothing(f"the window of {window} keys holds whole prompts, so that every head is local", force)
    start = time.monotonic()
    with _progress("batches") as progress:
        scores = static_scores(
            decoder,
            drawn,
            method,
            sliding_window=window,
            batch_size=batch_size,
            seed=seed,
            progress=progress,
        )
    if (scores == scores[0, 0]).all():
        _means_nothing("every head has the same score", force)
    full = window_most_local(scores, ratio, larger_is_local=LARGER_IS_LOCAL[method])
    provenance = {
        "method": method,
        "ratio": ratio,
        "windowed_heads": int((~full).sum()),
        "data": data,
        "num_examples": examples,
        "seed": seed,
        "scores": scores.tolist(),
        "larger_is_local": LARGER_IS_LOCAL[method],
        "seconds": round(time.monotonic() - start, 1),
    }
    sinks = decoder.pattern.num_sink_tokens if sink_tokens is None else sink_tokens
    _write_heads(head_pattern(full, window, sinks, provenance), full, out, scores)


def select_heuristic(
    model: Model,
    kind: Annotated[Heuristic, Argument(help="Its name is a command, too.")],
    out: Out,
    ratio: Ratio,
    window: Annotated[int, Option("--window", help="Visible keys of a windowed query.", min=1)],
    sink_tokens: SinkTokens = None,
    seed: Seed = 0,
) -> None:
    """Heads chosen by their place alone, at the same count as the other methods: something to compare with."""
    from swa_jax.checkpoint.folder import open_checkpoint
    from swa_jax.select.heads import head_pattern, heuristic_mask

    _check_out(out)
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    full = heuristic_mask(kind, config.num_hidden_layers, config.num_key_value_heads, ratio, seed)
    provenance = {
        "method": kind,
        "ratio": ratio,
        "windowed_heads": int((~full).sum()),
        "seed": seed if kind.startswith("random") else None,
    }
    sinks = checkpoint.pattern.num_sink_tokens if sink_tokens is None else sink_tokens
    _write_heads(head_pattern(full, window, sinks, provenance), full, out)


def select_nll(
    model: Model,
    out: Out,
    budget: Budget = None,
    one_in: OneIn = None,
    greedy: Annotated[
        bool, Option("--greedy", help="Score again after each layer chosen: BUDGET times the work.")
    ] = False,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    fa_decode: FaDecode = False,
    score_fa_decode: Annotated[
        bool | None,
        Option(
            "--score-fa-decode/--no-score-fa-decode",
            help="Whether answers see everything while layers are scored; default: as the pattern will decode.",
            show_default=False,
        ),
    ] = None,
    reuse: Annotated[
        bool,
        Option(
            "--reuse/--no-reuse",
            help="Start from the activations below a layer, or run whole passes.",
            show_default=False,
        ),
    ] = True,
    toggles_at_once: Annotated[
        int, Option(help="Layers made full side by side: more memory, fewer and larger steps.", min=1)
    ] = 1,
    resume_file: Annotated[
        Path | None,
        Option(
            help="JSON that keeps the scores of finished batches, so that an interrupted selection goes on."
        ),
    ] = None,
    mesh: Annotated[
        str | None, Option(help="Spread weights and examples over the devices: data=2,fsdp=4.")
    ] = None,
    examples: NumExamples = 64,
    length: Length = 1024,
    keys: NumKeys = 1,
    haystack: Haystack = None,
    prompts: Prompts = None,
    min_answer: Annotated[
        int, Option(help="Tokens that an answer of --prompts has at least; the paper takes 20.", min=1)
    ] = 20,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """NLL-guided selection: keep full the layers whose full attention helps the answers most."""
    from swa_jax.checkpoint.folder import weights_sum
    from swa_jax.select import LayerScorer, greedy_pattern, nll_pattern
    from swa_jax.select.nll import full_layer_budget

    _check_budget(out, budget, one_in)
    if toggles_at_once > 1 and not reuse:
        raise ConfigError("--toggles-at-once goes with reused activations: leave out --no-reuse")
    partition = None if mesh is None else parse_mesh(mesh)
    decoder, tokenizer = load_checkpoint(model, dtype, partition)
    full = full_layer_budget(decoder.config.num_hidden_layers, budget, one_in)
    if greedy and not full:
        raise ConfigError("--greedy chooses one layer at least, but --budget is 0")
    drawn, data = _drawn(tokenizer, prompts, examples, length, keys, haystack, seed, min_answer)
    scorer = LayerScorer(
        decoder,
        drawn,
        sliding_window=window,
        num_sink_tokens=sink_tokens,
        full_attention_decode=fa_decode if score_fa_decode is None else score_fa_decode,
        batch_size=batch_size,
        reuse=reuse,
        toggles_at_once=toggles_at_once,
        partition=partition,
        file=resume_file,
        weights=weights_sum(model),
    )
    if scorer.num_kept:
        typer.echo(f"{resume_file} has the scores of {scorer.num_kept} examples: going on from there")
    with _progress("passes") as progress:
        rounds = scorer.greedy(full, progress=progress) if greedy else [scorer(progress=progress)]
    scores = rounds[0]
    if not scores.deltas.any():
        _means_nothing("windows everywhere do just as well as full attention", force)
    if greedy:
        pattern = greedy_pattern(rounds, full_attention_decode=fa_decode, data=data, seed=seed)
    else:
        pattern = nll_pattern(scores, budget=full, full_attention_decode=fa_decode, data=data, seed=seed)
    title = f"What each layer is worth alone (window {scores.sliding_window})"
    _write_layers(pattern, scores.intervals(), out, title=title)
    typer.echo(f"{examples} examples scored in {scorer.seconds:.0f} s")
    if greedy:
        typer.echo(f"chosen in this order: {pattern.provenance['picked']}; the picture shows the first round")


def select_light_transfer(
    model: Model,
    out: Out,
    budget: Budget = None,
    one_in: OneIn = None,
    last: Annotated[
        int, Option(help="Last queries of a prompt that are looked at; SWAA takes 64.", min=1)
    ] = 32,
    recent: Annotated[int, Option(help="Keys that count as near, the query's own included.", min=1)] = 1020,
    lazy_sinks: Annotated[int, Option(help="First keys that count as near.", min=0)] = 4,
    window: Annotated[
        int | None, Option("--window", help="Of the pattern; default: as --recent.", min=1)
    ] = None,
    sink_tokens: Annotated[
        int | None, Option("--sink-tokens", help="Of the pattern; default: as --lazy-sinks.", min=0)
    ] = None,
    fa_decode: FaDecode = False,
    examples: NumExamples = 64,
    length: Length = 2048,
    keys: NumKeys = 1,
    haystack: Haystack = None,
    prompts: Prompts = None,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Force = False,
    seed: Seed = 0,
) -> None:
    """LightTransfer: window the layers whose last queries attend to sink tokens and recent keys anyway."""
    from swa_jax.select import lazy_ratios, light_transfer_pattern
    from swa_jax.select.nll import full_layer_budget

    _check_budget(out, budget, one_in)
    decoder, tokenizer = load_checkpoint(model, dtype)
    full = full_layer_budget(decoder.config.num_hidden_layers, budget, one_in)
    drawn, data = _drawn(tokenizer, prompts, examples, length, keys, haystack, seed)
    if max(len(example.prompt) for example in drawn) <= recent + lazy_sinks:
        _means_nothing(f"--recent {recent} reaches over whole prompts, so that every layer is lazy", force)
    with _progress("batches") as progress:
        scores = lazy_ratios(
            decoder,
            drawn,
            last_queries=last,
            num_sink_tokens=lazy_sinks,
            recent_keys=recent,
            batch_size=batch_size,
            progress=progress,
        )
    pattern = light_transfer_pattern(
        scores,
        budget=full,
        sliding_window=window,
        num_sink_tokens=sink_tokens,
        full_attention_decode=fa_decode,
        data=data,
        seed=seed,
    )
    title = f"How lazy each layer is ({last} queries, {lazy_sinks} + {recent} keys)"
    axis = "Attention on sink tokens\nand recent keys"
    _write_layers(pattern, scores.intervals(), out, title=title, axis=axis)


def _means_nothing(reason: str, force: bool) -> None:
    """Stop before a pattern is written that was chosen by nothing; with `force` say so and go on."""
    if not force:
        raise ConfigError(
            f"{reason}: the choice would mean nothing, and no pattern is written. Take longer prompts or a smaller "
            "window, or write it all the same with --force"
        )
    typer.echo(f"{reason}: the choice means nothing")


def _check_budget(out: Path, budget: int | None, one_in: int | None) -> None:
    if (budget is None) == (one_in is None):
        raise ConfigError("give exactly one of --budget and --one-in: how many layers stay full")
    _check_out(out)


def _check_out(out: Path) -> None:
    if out.suffix != ".json":
        raise ConfigError(f"--out is {out}: a pattern file must end in .json")
    check_output("--out", out)


def _drawn(
    tokenizer: Tokenizer,
    prompts: Path | None,
    count: int,
    length: int,
    keys: int,
    haystack: Path | None,
    seed: int,
    min_answer: int = 1,
) -> tuple[list[Example], str]:
    """The examples to choose by, and what they are."""
    if prompts is None:
        what = f"needle prompts of {length} tokens, {keys} key(s), haystack {haystack or 'python library'}"
        return draw_needles(tokenizer, count, length, keys, haystack, None, seed), f"{count} {what}"
    from swa_jax.evaluate import prompt_examples

    if keys != 1 or haystack is not None:
        raise ConfigError("--keys and --haystack are of needles, which --prompts replaces: leave them out")
    drawn = prompt_examples(
        tokenizer, prompts, num_examples=count, length=length, min_answer=min_answer, seed=seed
    )
    return drawn, f"{count} prompts of {prompts} with at most {length} tokens"


def _write_heads(
    pattern: AttentionPattern, full: np.ndarray, out: Path, scores: np.ndarray | None = None
) -> None:
    from swa_jax.report import head_map

    title = f"{pattern.provenance['method']}: {int((~full).sum())} of {full.size} KV heads windowed"
    larger = pattern.provenance.get("larger_is_local")
    _write(
        pattern,
        out,
        lambda picture: head_map(full, picture, title=title, scores=scores, larger_is_local=larger),
    )


def _write_layers(pattern: AttentionPattern, scores: Sequence[Estimate], out: Path, **labels: str) -> None:
    from swa_jax.report import layer_scores_chart

    _write(pattern, out, lambda picture: layer_scores_chart(scores, pattern.full_layers, picture, **labels))


def _write(pattern: AttentionPattern, out: Path, draw: Callable[[Path], None]) -> None:
    pattern.to_json(out)
    picture = out.with_suffix(".png")
    draw(picture)
    typer.echo(f"{pattern}\nwritten to {out} and {picture}")


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    from swa_jax.report.progress import Progress

    with Progress(label) as progress:
        yield progress.update


# ---- a command for each method; `static`, `heuristic` and `periodic` are older spellings ----

_COMMANDS: dict[Family, Callable[..., None]] = {
    "nll": select_nll,
    "light-transfer": select_light_transfer,
    "bosch": select_bosch,
    "static": select_static,
    "heuristic": select_heuristic,
}


def _with_fixed(command: Callable[..., None], fixed: Mapping[str, Any]) -> Callable[..., None]:
    """The command without the parameters that are fixed."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**given, **fixed)

    signature = inspect.signature(command, eval_str=True)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter for name, parameter in signature.parameters.items() if name not in fixed]
    )
    return run


for _method in METHODS.values():
    # `bosch` and `nll` keep the options that name their variants.
    _fixed = {} if _method.name in _COMMANDS else _method.options
    _text = None if _method.name in _COMMANDS else f"Choose {_method.chooses} by {_method.by}."
    app.command(_method.name, help=_text)(_with_fixed(_COMMANDS[_method.family], _fixed))
app.command("static", hidden=True)(select_static)
app.command("heuristic", hidden=True)(select_heuristic)
app.command("periodic", hidden=True)(_with_fixed(select_heuristic, {"kind": "interleave"}))
