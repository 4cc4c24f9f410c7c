"""The verbs `swa-jax select METHOD`: choose the layers or heads that keep full attention."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from typer import Argument, Option

from swa_jax.cli.groups import expand
from swa_jax.cli.options import (
    PATTERN,
    BatchSize,
    ComputeDtype,
    Model,
    Seed,
    SinkTokens,
    Window,
    find_model,
    load_checkpoint,
    parse_mesh,
)
from swa_jax.cli.select_options import (
    SEARCH,
    Evaluations,
    Examples,
    FaDecode,
    Force,
    Greedy,
    HeadBudget,
    Iterations,
    LastQueries,
    LayerBudget,
    LazySinks,
    LongExamples,
    Mesh,
    MinAnswer,
    Out,
    RecentKeys,
    ResumeFile,
    ScoreBy,
    ScoreFaDecode,
    TogglesAtOnce,
    Tried,
    check_out,
    check_separation,
    means_nothing,
    progress_bar,
    write_heads,
    write_layers,
)
from swa_jax.errors import ConfigError
from swa_jax.select.method_table import METHODS, By, Family, Heuristic, StaticMethod, Variant

if TYPE_CHECKING:
    import numpy as np

    from swa_jax.evaluate.examples import Example
    from swa_jax.model.decoder import Decoder

app = typer.Typer(no_args_is_help=True, help="Choose the layers or KV heads that keep full attention.")


def select_bosch(
    model: Model,
    out: Out,
    budget: HeadBudget,
    examples: Examples,
    variant: Annotated[Variant, Option(help="BOSCH, or one of its ablations.", rich_help_panel=SEARCH)] = "bosch",
    iterations: Iterations = 100,
    optimizer: Annotated[
        Literal["one-plus-one", "nomad"],
        Option(help="nomad, as in the paper, needs PyNomadBBO.", rich_help_panel=SEARCH),
    ] = "one-plus-one",
    by: ScoreBy = "answers",
    window: Window = None,
    sink_tokens: SinkTokens = None,
    evaluations: Evaluations = None,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Force = False,
) -> None:
    """BOSCH: search for the KV heads that can be windowed, by how many answers the model then gets right.

    Run the same command again to go on after an interruption.
    """
    from swa_jax.checkpoint.folder import weights_sum
    from swa_jax.select import MaskEvaluator, bosch, bosch_pattern

    budget.check()
    check_out(out)
    model = find_model(model)
    decoder, tokenizer = load_checkpoint(model, dtype)
    own = decoder.pattern
    window = own.sliding_window if window is None else window
    sink_tokens = own.num_sink_tokens if sink_tokens is None else sink_tokens
    ratio = budget.share(decoder.config, examples.length, window, sink_tokens)
    drawn, data = examples.draw(model, tokenizer, decoder.config)
    file = evaluations or out.with_suffix(".evaluations.jsonl")
    evaluate = MaskEvaluator(
        decoder,
        drawn,
        sliding_window=window,
        num_sink_tokens=sink_tokens,
        by=by,
        batch_size=batch_size,
        file=file,
        weights=weights_sum(model),
    )
    if known := evaluate.num_evaluations:
        typer.echo(f"{file}: found {known} masks here, going on", err=True)
    check_separation(decoder, drawn, evaluate.sliding_window, sink_tokens, by, force, batch_size=batch_size)
    search: dict[str, Any] = {
        "variant": variant,
        "iterations": iterations,
        "optimizer": optimizer,
        "seed": examples.seed,
    }
    with progress_bar("masks tried") as progress:
        chosen = bosch(evaluate, ratio, progress=progress, **search)
    pattern = bosch_pattern(chosen, evaluate, ratio=ratio, data=data, **search)
    write_heads(pattern, chosen.full, out)
    what = "answers right" if by == "answers" else "likelihood of the answers"
    typer.echo(
        f"{what}: {chosen.score.value:.1%}, with full attention {chosen.original.value:.1%}, all windowed "
        f"{chosen.windowed.value:.1%}; {evaluate.num_evaluations} masks tried in {evaluate.seconds:.0f} s"
    )
    if chosen.num_windowed != chosen.target:
        typer.echo(f"windowed {chosen.num_windowed} heads and not {chosen.target}: the nearest this method can reach")


class _Ranking(NamedTuple):
    """What heads are ranked by, and how the choice is written."""

    decoder: Decoder
    weights: str  # the sum of the decoder's
    examples: Sequence[Example]
    window: int
    sinks: int
    ratio: float
    said: dict[str, Any]  # for the provenance
    begun: float

    @property
    def windowed(self) -> dict[str, Any]:
        return {"sliding_window": self.window, "num_sink_tokens": self.sinks}

    @property
    def window_holds_all(self) -> bool:
        return max(len(e.prompt) + len(e.answer) for e in self.examples) <= self.window

    def check(self, by: By, force: bool, batch_size: int) -> None:
        """`check_separation` of what heads are ranked by."""
        check_separation(self.decoder, self.examples, self.window, self.sinks, by, force, batch_size=batch_size)

    def write(self, out: Path, scores: np.ndarray, method: str, larger_is_local: bool, **more: Any) -> None:
        from swa_jax.select.heads import head_pattern, window_most_local

        full = window_most_local(scores, self.ratio, larger_is_local=larger_is_local)
        provenance = {
            "method": method,
            "ratio": self.ratio,
            "windowed_heads": int((~full).sum()),
            **self.said,
            **more,
            "scores": scores.tolist(),
            "larger_is_local": larger_is_local,
            "seconds": round(time.monotonic() - self.begun, 1),
        }
        write_heads(head_pattern(full, self.window, self.sinks, provenance), full, out, scores)


def _ranking(
    model: Path,
    out: Path,
    budget: HeadBudget,
    examples: Examples,
    window: int | None,
    sink_tokens: int | None,
    dtype: ComputeDtype,
) -> _Ranking:
    from swa_jax.checkpoint.folder import weights_sum

    budget.check()
    check_out(out)
    model = find_model(model)
    decoder, tokenizer = load_checkpoint(model, dtype)
    window = decoder.pattern.sliding_window if window is None else window
    if window is None:
        raise ConfigError("--window is missing: give it, as the model's own pattern has none")
    sinks = decoder.pattern.num_sink_tokens if sink_tokens is None else sink_tokens
    ratio = budget.share(decoder.config, examples.length, window, sinks)
    drawn, data = examples.draw(model, tokenizer, decoder.config)
    said = {"data": data, "num_examples": examples.examples, "seed": examples.seed}
    return _Ranking(decoder, weights_sum(model), drawn, window, sinks, ratio, said, time.monotonic())


_HOLDS_ALL = "the window of {} keys holds whole prompts, so that every head is local"


def select_static(
    model: Model,
    method: Annotated[StaticMethod, Argument(help="Its name is a command, too.")],
    out: Out,
    budget: HeadBudget,
    examples: Examples,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    batch_size: BatchSize = 1,
    dtype: ComputeDtype = None,
    force: Force = False,
) -> None:
    """Rank the KV heads of the unchanged model from local to global, and window the most local ones."""
    from swa_jax.select.static import IN_WINDOW, LARGER_IS_LOCAL, static_scores

    ranking = _ranking(model, out, budget, examples, window, sink_tokens, dtype)
    if method in IN_WINDOW and ranking.window_holds_all:
        means_nothing(_HOLDS_ALL.format(ranking.window), force)
    with progress_bar("batches") as progress:
        scores = static_scores(
            ranking.decoder,
            ranking.examples,
            method,
            **ranking.windowed,
            batch_size=batch_size,
            seed=examples.seed,
            progress=progress,
        )
    if (scores == scores[0, 0]).all():
        means_nothing("every head has the same score", force)
    ranking.write(out, scores, method, LARGER_IS_LOCAL[method])


def select_gates(
    model: Model,
    out: Out,
    budget: HeadBudget,
    examples: Examples,
    steps: Annotated[int, Option(help="Steps of training.", min=1, rich_help_panel=SEARCH)] = 200,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Force = False,
) -> None:
    """Learned gates: train a number for each KV head that mixes full and window attention; the weights stay."""
    from swa_jax.select.gates import gate_logits

    ranking = _ranking(model, out, budget, examples, window, sink_tokens, dtype)
    ranking.check("loss", force, batch_size)
    with progress_bar("steps") as progress:
        scores = gate_logits(
            ranking.decoder,
            ranking.examples,
            full_share=1 - ranking.ratio,
            **ranking.windowed,
            steps=steps,
            batch_size=batch_size,
            seed=examples.seed,
            progress=progress,
        )
    ranking.write(out, scores, "gates", larger_is_local=False, steps=steps)


def select_nll_heads(
    model: Model,
    out: Out,
    budget: HeadBudget,
    examples: Examples,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    evaluations: Evaluations = None,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Force = False,
) -> None:
    """Greedy selection of KV heads: a gradient names some, the answers' loss decides, in at most 16 rounds."""
    from swa_jax.select.heads import head_mask
    from swa_jax.select.methods import choose

    ranking = _ranking(model, out, budget, examples, window, sink_tokens, dtype)
    ranking.check("loss", force, batch_size)
    with progress_bar("masks tried") as progress:
        (pattern,) = choose(
            "nll-heads", ranking.decoder, ranking.examples, [ranking.ratio], **ranking.windowed,
            batch_size=batch_size, seed=examples.seed, data=ranking.said["data"], weights=ranking.weights,
            evaluations=evaluations or out.with_suffix(".evaluations.jsonl"), progress=progress,
        )  # fmt: skip
    write_heads(pattern, head_mask(pattern, ranking.decoder.config.common_kv_heads), out)


def select_heuristic(
    model: Model,
    kind: Annotated[Heuristic, Argument(help="Its name is a command, too.")],
    out: Out,
    budget: HeadBudget,
    window: Annotated[
        int,
        Option("--window", help="Visible keys of a windowed query, its own included.", min=1, rich_help_panel=PATTERN),
    ],
    sink_tokens: SinkTokens = None,
    seed: Seed = 0,
) -> None:
    """Heads chosen by their place alone, at the same count as the other methods: something to compare with."""
    from swa_jax.checkpoint.folder import open_checkpoint
    from swa_jax.select.heads import head_pattern, heuristic_mask

    budget.check()
    check_out(out)
    checkpoint = open_checkpoint(find_model(model))
    config = checkpoint.config
    sinks = checkpoint.pattern.num_sink_tokens if sink_tokens is None else sink_tokens
    ratio = budget.share(config, config.max_position_embeddings, window, sinks)
    full = heuristic_mask(kind, config.num_hidden_layers, config.common_kv_heads, ratio, seed)
    provenance = {
        "method": kind,
        "ratio": ratio,
        "windowed_heads": int((~full).sum()),
        "seed": seed if kind.startswith("random") else None,
    }
    write_heads(head_pattern(full, window, sinks, provenance), full, out)


def select_nll(
    model: Model,
    out: Out,
    budget: LayerBudget,
    examples: Examples,
    greedy: Greedy = False,
    tried: Tried = None,
    window: Window = None,
    sink_tokens: SinkTokens = None,
    fa_decode: FaDecode = False,
    score_fa_decode: ScoreFaDecode = None,
    toggles_at_once: TogglesAtOnce = 1,
    resume_file: ResumeFile = None,
    mesh: Mesh = None,
    min_answer: MinAnswer = 20,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Force = False,
) -> None:
    """NLL-guided selection: keep full the layers whose full attention helps the answers most."""
    from swa_jax.checkpoint.folder import weights_sum
    from swa_jax.files import tell_found
    from swa_jax.select import LayerScorer, greedy_pattern, nll_pattern
    from swa_jax.select.nll import tried_by_depth

    if tried is not None and not greedy:
        raise ConfigError("--tried is the number of layers that a round of --greedy scores: give both")
    budget.check()
    check_out(out)
    partition = None if mesh is None else parse_mesh(mesh)
    model = find_model(model)
    decoder, tokenizer = load_checkpoint(model, dtype, partition)
    own = decoder.pattern
    window = own.sliding_window if window is None else window
    sink_tokens = own.num_sink_tokens if sink_tokens is None else sink_tokens
    full = budget.layers(model, decoder.config, examples.length, window, sink_tokens, fa_decode)
    if greedy and not full:
        why = "--budget is 0" if budget.kv_budget is None else "none fits --kv-budget"
        raise ConfigError(f"--greedy chooses one layer at least, but {why}")
    drawn, data = examples.draw(model, tokenizer, decoder.config, min_answer)
    scorer = LayerScorer(
        decoder,
        drawn,
        sliding_window=window,
        num_sink_tokens=sink_tokens,
        full_attention_decode=fa_decode if score_fa_decode is None else score_fa_decode,
        batch_size=batch_size,
        toggles_at_once=toggles_at_once,
        partition=partition,
        file=resume_file,
        weights=weights_sum(model),
    )
    tell_found(resume_file, scorer.num_known, scorer.num_examples, "examples")
    check_separation(
        decoder, drawn, scorer.sliding_window, sink_tokens, "loss", force, batch_size=batch_size,
        full_attention_decode=scorer.full_attention_decode, partition=partition,
    )  # fmt: skip
    with progress_bar("passes") as progress:
        named = tried_by_depth(decoder.config.num_hidden_layers) if tried is None else tried or None
        rounds = scorer.greedy(full, tried=named, progress=progress) if greedy else [scorer(progress=progress)]
    scores = rounds[0]
    about: dict[str, Any] = {"full_attention_decode": fa_decode, "data": data, "seed": examples.seed}
    pattern = greedy_pattern(rounds, **about) if greedy else nll_pattern(scores, budget=full, **about)
    title = f"What each layer is worth alone (window {scores.sliding_window})"
    write_layers(pattern, scores.intervals(), out, title=title)
    typer.echo(f"{examples.examples} examples scored in {scorer.seconds:.0f} s")
    if greedy:
        typer.echo(f"chosen in this order: {pattern.provenance['picked']}; the picture shows the first round")


def select_light_transfer(
    model: Model,
    out: Out,
    budget: LayerBudget,
    examples: LongExamples,
    last: LastQueries = 32,
    recent: RecentKeys = None,
    lazy_sinks: LazySinks = 4,
    window: Annotated[
        int | None,
        Option(
            "--window",
            help="Window of the pattern. Default: as --recent.",
            min=1,
            show_default=False,
            rich_help_panel=PATTERN,
        ),
    ] = None,
    sink_tokens: Annotated[
        int | None,
        Option(
            "--sink-tokens",
            help="Sink tokens of the pattern. Default: as --lazy-sinks.",
            min=0,
            show_default=False,
            rich_help_panel=PATTERN,
        ),
    ] = None,
    fa_decode: FaDecode = False,
    batch_size: BatchSize = 8,
    dtype: ComputeDtype = None,
    force: Force = False,
) -> None:
    """LightTransfer: window the layers whose last queries attend to sink tokens and recent keys anyway."""
    from swa_jax.select import lazy_ratios, light_transfer_pattern
    from swa_jax.select.light_transfer import RECENT_KEYS

    budget.check()
    check_out(out)
    model = find_model(model)
    decoder, tokenizer = load_checkpoint(model, dtype)
    if recent is None:
        recent = RECENT_KEYS if window is None else min(RECENT_KEYS, max(1, window - lazy_sinks))
    visible = recent if window is None else window, lazy_sinks if sink_tokens is None else sink_tokens
    full = budget.layers(model, decoder.config, examples.length, *visible, fa_decode)
    drawn, data = examples.draw(model, tokenizer, decoder.config)
    if max(len(example.prompt) for example in drawn) <= recent + lazy_sinks:
        means_nothing(f"--recent {recent} reaches over whole prompts, so that every layer is lazy", force)
    with progress_bar("batches") as progress:
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
        seed=examples.seed,
    )
    title = f"How lazy each layer is ({last} queries, {lazy_sinks} + {recent} keys)"
    axis = "Attention on sink tokens\nand recent keys"
    write_layers(pattern, scores.intervals(), out, title=title, axis=axis)


# ---- a command for each method; `static` and `heuristic` are older spellings ----

_COMMANDS: dict[Family, Callable[..., None]] = {
    "nll": expand(select_nll),
    "nll-heads": expand(select_nll_heads),
    "light-transfer": expand(select_light_transfer),
    "bosch": expand(select_bosch),
    "static": expand(select_static),
    "gates": expand(select_gates),
    "heuristic": expand(select_heuristic),
}


def _with_fixed(command: Callable[..., None], fixed: Mapping[str, Any]) -> Callable[..., None]:
    """The command without the parameters that are fixed."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**given, **fixed)

    signature = inspect.signature(command)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter for name, parameter in signature.parameters.items() if name not in fixed]
    )
    return run


for _method in METHODS.values():
    # `bosch` and `nll` keep the options that name their variants.
    _fixed = {} if _method.name in _COMMANDS else _method.options
    _text = None if _method.name in _COMMANDS else f"Choose {_method.chooses} by {_method.by}."
    app.command(_method.name, help=_text)(_with_fixed(_COMMANDS[_method.family], _fixed))
app.command("static", hidden=True)(_COMMANDS["static"])
app.command("heuristic", hidden=True)(_COMMANDS["heuristic"])
