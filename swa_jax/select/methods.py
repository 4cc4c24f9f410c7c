"""Every way of choosing what keeps full attention, each declared once; and the one runner of them all.

To add a method: a runner here, and a row of `METHODS`. A runner takes a `Task` and shares of windowed layers or heads,
and returns a `Ranking`, or yields a mask for each share; its keyword arguments are the options of the method's own.
Nothing heavy is imported before a method runs, so that the command line reads the table for `--help`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import bootstrap
from swa_jax.base.files import tell_found
from swa_jax.base.settings import nearest
from swa_jax.model.window import Window
from swa_jax.select.separation import By, doubt, weakness
from swa_jax.select.task import Chosen, Ranking, Task, num_full

if TYPE_CHECKING:
    from swa_jax.model.config import ModelConfig
    from swa_jax.model.pattern import AttentionPattern
    from swa_jax.select.evaluator import MaskEvaluator
    from swa_jax.select.nll import LayerScorer

# ---- the runners ----


class Own(NamedTuple):
    """An option that only some methods have."""

    help: str
    least: int | None = None


Decode = Annotated[bool | None, Own("Full-attention decode in scoring. Default: as --fa-decode.")]
AtOnce = Annotated[int, Own("Layers made full side by side, which takes memory.", 1)]
Rounds = Annotated[int | None, Own("Rounds at most; each may take several.", 1)]


def _scorer(task: Task, score_fa_decode: bool | None, toggles_at_once: int) -> LayerScorer:
    from swa_jax.select.nll import LayerScorer

    scorer = LayerScorer(
        task.model,
        task.examples,
        Window(full_decode=score_fa_decode).of(task.window),
        batch_size=task.batch_size,
        toggles_at_once=toggles_at_once,
        partition=task.partition,
        file=task.file,
        weights=task.weights,
    )
    tell_found(task.file, scorer.num_known, len(task.examples), "examples", task.report)
    _check_told(task, "loss", scorer.window)
    return scorer


def _check_told(task: Task, by: By, window: Window) -> None:
    """Stop where the examples do not tell full attention from windows: two passes before a search of hundreds."""
    if window.holds(max(e.queries(window.full_decode) for e in task.examples)):
        task.refuse(f"the window of {window.size} keys holds whole prompts")
        return
    full, windowed = task.ends(window)
    all_full, none_full = (one.right if by == "answers" else one.nll for one in (full, windowed))
    found = doubt(all_full, none_full, by)
    if found is not None:
        task.refuse(found.reason, found.advice)
    elif any(e.value is not None for e in task.examples) and (found := weakness(full.right)) is not None:
        task.report(f"{found.reason}: {found.advice}")


def _nll(
    task: Task, ratios: Sequence[float], *, score_fa_decode: Decode = None, toggles_at_once: AtOnce = 1
) -> Ranking:
    scorer = _scorer(task, score_fa_decode, toggles_at_once)
    scores = scorer(progress=task.progress)
    intervals = {"intervals": [one.interval for one in scores.intervals()]}
    linear = task.model.config.linear_layers
    mean = [None if layer in linear else score for layer, score in enumerate(scores.mean.tolist())]
    said = {"scores": mean, "scored_with_full_attention_decode": scorer.window.full_decode}
    finite = np.where(np.isin(range(scorer.layers), linear), 0, scores.mean)
    order = [layer for layer in _ranked(finite) if layer not in linear]
    return Ranking(order, (scorer.layers, 1), said | intervals, linear)


def _nll_greedy(
    task: Task,
    ratios: Sequence[float],
    *,
    tried: Annotated[
        int | None, Own("Layers scored in a round; 0: all. Default: 4, or all if there are below 13.", 0)
    ] = None,
    rounds: Rounds = None,
    score_fa_decode: Decode = None,
    toggles_at_once: AtOnce = 1,
) -> Ranking:
    from swa_jax.select.nll import TRIED, provenance_of, tried_by_depth

    scorer, choosable = _scorer(task, score_fa_decode, toggles_at_once), len(task.model.config.attention_layers)
    named = tried_by_depth(choosable, TRIED) if tried is None else tried or None
    most = max(1, *(num_full(ratio, choosable) for ratio in ratios))
    found = provenance_of(scorer.greedy(most, tried=named, rounds=rounds, progress=task.progress))
    found["scored_with_full_attention_decode"] = scorer.window.full_decode
    return Ranking(found["picked"], (scorer.layers, 1), found, task.model.config.linear_layers)


def _masks(task: Task, by: By) -> MaskEvaluator:
    from swa_jax.select.evaluator import MaskEvaluator

    options: dict[str, Any] = {"batch_size": task.batch_size, "file": task.file, "weights": task.weights}
    evaluate = MaskEvaluator(task.model, task.examples, task.window, by=by, heads_in=task.heads_in, **options)
    if evaluate.num_evaluations:
        task.report(f"{task.file}: found {evaluate.num_evaluations} masks here, going on")
    _check_told(task, by, evaluate.window)
    return evaluate


def _nll_heads(
    task: Task,
    ratios: Sequence[float],
    *,
    tried: Annotated[int | None, Own("Heads scored in a round; 0: all. Default: 4.", 0)] = None,
    rounds: Annotated[int | None, Own("Rounds at most; each may take several. Default: 16.", 1)] = None,
) -> Ranking:
    from swa_jax.select.greedy_heads import ROUNDS, TRIED, greedy_heads

    evaluate = _masks(task, "loss")
    total = math.prod(evaluate.shape)
    most = max(1, *(num_full(ratio, total) for ratio in ratios))
    named = total if tried == 0 else tried or TRIED
    return greedy_heads(evaluate, most, tried=named, rounds=rounds or ROUNDS, progress=task.progress)


def _light_transfer(
    task: Task,
    ratios: Sequence[float],
    *,
    last: Annotated[int, Own("Last queries of a prompt that are looked at. SWAA takes 64.", 1)] = 32,
    recent: Annotated[
        int | None, Own("Keys that count as near, the query's own included. Default: 1020, or what --window holds.", 1)
    ] = None,
    lazy_sinks: Annotated[int, Own("First keys that count as near.", 0)] = 4,
) -> Ranking:
    from swa_jax.select.light_transfer import RECENT_KEYS, lazy_ratios

    recent = min(RECENT_KEYS, max(1, task.window.keys - lazy_sinks)) if recent is None else recent
    if max(len(example.prompt) for example in task.examples) <= recent + lazy_sinks:
        task.refuse(f"the {recent} keys of --recent reach over whole prompts, so that every layer is lazy")
    lazy = lazy_ratios(
        task.model,
        task.examples,
        last_queries=last,
        num_sink_tokens=lazy_sinks,
        recent_keys=recent,
        batch_size=task.batch_size,
        progress=task.progress,
    )
    mean, intervals = lazy.mean(0), [bootstrap(column).interval for column in lazy.T]
    said = {"last_queries": last, "sink_tokens": lazy_sinks, "recent_keys": recent}
    return Ranking(_ranked(-mean), (len(mean), 1), said | {"scores": mean.tolist(), "intervals": intervals})


def _bosch(
    task: Task,
    ratios: Sequence[float],
    *,
    variant: str,
    iterations: Annotated[int, Own("Masks tried a layer of a subproblem, or fewer where there are fewer.", 1)] = 100,
    optimizer: Annotated[
        Literal["one-plus-one", "nomad"], Own("nomad, as in the paper, needs PyNomadBBO.")
    ] = "one-plus-one",
    by: Annotated[By, Own("Score masks by right answers, or by the answers' loss.")] = "answers",
) -> Iterator[Chosen]:
    from swa_jax.select.bosch_search import bosch

    evaluate = _masks(task, by)
    settings: dict[str, Any] = {"variant": variant, "iterations": iterations, "optimizer": optimizer, "seed": task.seed}
    for ratio in ratios:
        before = evaluate.num_asked
        chosen = bosch(evaluate, ratio, progress=task.progress, **settings)
        tried = evaluate.num_asked - before
        said = chosen.provenance | {
            "scored_by": by,
            "iterations_a_layer": iterations,
            "optimizer": optimizer,
            "evaluations": tried,
        }
        what = "answers right" if by == "answers" else "likelihood of the answers"
        task.report(
            f"{what}: {chosen.score.value:.1%}, with full attention {chosen.original.value:.1%}, all windowed "
            f"{chosen.windowed.value:.1%}; {tried} masks tried"
        )
        if chosen.num_windowed != chosen.target:
            task.report(
                f"windowed {chosen.num_windowed} heads and not {chosen.target}: the nearest this method can reach"
            )
        yield chosen.full, said


def _static(task: Task, ratios: Sequence[float], *, method: Any) -> Ranking:
    from swa_jax.select.static import IN_WINDOW, LARGER_IS_LOCAL, static_scores

    longest = max((len(e.prompt) + len(e.answer) for e in task.examples), default=0)
    if method in IN_WINDOW and longest <= task.window.keys:
        task.refuse(f"the window of {task.window.size} keys holds whole prompts, so that every head is local")
    options: dict[str, Any] = {"batch_size": task.batch_size, "seed": task.seed, "progress": task.progress}
    scores = static_scores(task.model, task.examples, method, task.window, **options)
    if (scores == scores[0, 0]).all():
        task.refuse("every head has the same score")
    return rank_heads(scores, larger_is_local=method in LARGER_IS_LOCAL, heads_in=task.heads_in)


def _patching(task: Task, ratios: Sequence[float], *, by_gradient: bool) -> Ranking:
    from swa_jax.select.patching import patching_scores

    _check_told(task, "loss", task.window)
    options: dict[str, Any] = {"batch_size": task.batch_size, "progress": task.progress}
    scores = patching_scores(task.model, task.examples, task.window, by_gradient=by_gradient, **options)
    return rank_heads(scores, larger_is_local=False, heads_in=task.heads_in)


def _gates(
    task: Task,
    ratios: Sequence[float],
    *,
    whole_layers: bool,
    steps: Annotated[int, Own("Steps of training.", 1)] = 200,
) -> Iterator[Chosen]:
    from swa_jax.select.gates import gate_logits

    _check_told(task, "loss", task.window)
    for ratio in ratios:
        scores = gate_logits(
            task.model,
            task.examples,
            task.window,
            full_share=1 - ratio,
            whole_layers=whole_layers,
            batch_size=task.batch_size,
            steps=steps,
            seed=task.seed,
            progress=task.progress,
        )
        heads_in = 1 if whole_layers else task.heads_in
        mask, said = rank_heads(scores, larger_is_local=False, heads_in=heads_in).first(ratio)
        yield mask, said | {"steps": steps}


def _by_place(task: Task, ratios: Sequence[float], *, kind: Any) -> Iterator[Chosen]:
    from swa_jax.select.heads import heuristic_mask, of_all_layers

    config = task.model.config
    for ratio in ratios:
        rows = heuristic_mask(kind, len(config.attention_layers), task.shape[1], ratio, task.seed)
        yield of_all_layers(rows, config), {}


def rank_heads(scores: np.ndarray, *, larger_is_local: bool, heads_in: int = 1) -> Ranking:
    """KV heads by scores [L, K], the most local last (BOSCH, Section B.3); of equals the lower are windowed first.

    Of `heads_in` neighbours that stay together the mean counts.
    """
    means = scores.reshape(len(scores), -1, heads_in).mean(-1)
    order = _ranked((means if larger_is_local else -means).ravel())[::-1]
    pairs = [tuple(map(int, np.unravel_index(place, means.shape))) for place in order]
    return Ranking(pairs, means.shape, {"scores": scores.tolist(), "larger_is_local": larger_is_local})


def _ranked(scores: np.ndarray) -> list[int]:
    """Places in `scores` [N], the largest first; between equals the lower place."""
    if not np.isfinite(scores).all():
        raise ConfigError(f"scores must be finite numbers, got {scores.tolist()}")
    return np.argsort(-scores, kind="stable").tolist()


# ---- the table ----


class Method(NamedTuple):
    """One way of choosing which layers or KV heads keep full attention.

    Attributes:
      name: everywhere: of the command, of `compare --method`, in results and in `provenance`.
      by: what the choice goes by; costs: passes over the examples. Both stand in the docs.
      run: its runner; fixed: the runner's arguments that make this method of its family.
      keeps: whether it keeps scores in a file, from which a search goes on.
      meshes: whether it runs on several devices.
      hybrids: whether it takes models some of whose layers are linear.
    """

    name: str
    chooses: Literal["layers", "KV heads"]
    by: str
    costs: str
    run: Callable[..., Ranking | Iterator[Chosen]]
    fixed: Mapping[str, Any] = {}
    keeps: bool = False
    meshes: bool = False
    hybrids: bool = False

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Those of its own, by name."""
        parameters = inspect.signature(self.run, eval_str=True).parameters
        return {
            name: one for name, one in parameters.items() if one.kind == one.KEYWORD_ONLY and name not in self.fixed
        }


_ROWS, _SEARCH = "one pass with whole attention rows", "hundreds to thousands of passes"
_LAYERS: dict[str, Any] = {"keeps": True, "meshes": True, "hybrids": True}
_PLACE: dict[str, Any] = {"hybrids": True}
_BOSCH: dict[str, Any] = {"keeps": True}
_TABLE = (
    Method("nll", "layers", "what making one layer full, all others windowed, does for the answers",
           "(layers + 3) / 2 passes", _nll, **_LAYERS),
    Method("nll-greedy", "layers", "what making one more layer full does, asked again after each layer chosen",
           "at most (layers + 3) / 2 passes for each layer chosen", _nll_greedy, {"tried": 0}, **_LAYERS),
    Method("nll-gradient", "layers", "what making one more layer full does, of four that one gradient names",
           "6 to 8 passes for each layer chosen", _nll_greedy, **_LAYERS),
    Method("nll-heads", "KV heads", "what making one more head full does, of four that one gradient names",
           "8 passes or more a round", _nll_heads, keeps=True),
    Method("light-transfer", "layers", "how much the last queries look at near keys anyway", "one pass",
           _light_transfer),
    Method("bosch", "KV heads", "a search over which heads are windowed, scored by answers that are right", _SEARCH,
           _bosch, {"variant": "bosch"}, **_BOSCH),
    Method("bosch-swaps", "KV heads", "BOSCH, then swaps over the heads of all layers", _SEARCH,
           _bosch, {"variant": "swaps"}, **_BOSCH),
    Method("bosch-single", "KV heads", "BOSCH's first stage alone: one layer at a time, each at the same ratio",
           _SEARCH, _bosch, {"variant": "single"}, **_BOSCH),
    Method("bosch-multi", "KV heads", "BOSCH's first stage over groups of four layers", _SEARCH,
           _bosch, {"variant": "multi"}, **_BOSCH),
    Method("bosch-layer", "layers", "BOSCH's search over whole layers", _SEARCH,
           _bosch, {"variant": "layer"}, **_BOSCH),
    Method("dcam", "KV heads", "attention inside the window", _ROWS, _static, {"method": "dcam"}),
    Method("apl", "KV heads", "how far back the last token looks most", _ROWS, _static, {"method": "apl"}),
    Method("proxy", "KV heads", "how few blocks of keys a head needs", _ROWS, _static, {"method": "proxy"}),
    Method("qada", "KV heads", "attention inside the window, that outside estimated", _ROWS,
           _static, {"method": "qada"}),
    Method("razor", "KV heads", "how much a head looks back to earlier occurrences of a token, in random text",
           "one pass", _static, {"method": "razor"}),
    Method("fisher", "KV heads", "whether the answers depend on attention outside the window",
           "one pass and its gradient", _static, {"method": "fisher"}),
    Method("fisher-text", "KV heads", "as `fisher`, of all tokens in place of the answers'",
           "one pass and its gradient", _static, {"method": "fisher-text"}),
    Method("kl", "KV heads", "how far windowing one head alone moves the full model's predictions",
           "a pass for each head", _static, {"method": "kl"}),
    Method("kl-layers", "layers", "how far windowing one layer alone moves the full model's predictions",
           "a pass for each layer", _static, {"method": "kl-layers"}),
    Method("patching", "KV heads", "what a head says under full attention, put into a run with windows",
           "a pass for each head", _patching, {"by_gradient": False}),
    Method("patching-gradient", "KV heads", "as `patching`, to first order", "two passes and a gradient",
           _patching, {"by_gradient": True}),
    Method("gates", "KV heads", "gates between full and window attention, learned by the answers' loss",
           "200 steps of training", _gates, {"whole_layers": False}),
    Method("gates-layers", "layers", "as `gates`, one gate a layer", "200 steps of training",
           _gates, {"whole_layers": True}),
    Method("random", "layers", "chance", "nothing", _by_place, {"kind": "random"}, **_PLACE),
    Method("random-heads", "KV heads", "chance", "nothing", _by_place, {"kind": "random-heads"}, **_PLACE),
    Method("begin-middle-end", "layers", "place: at the start, in the middle and at the end", "nothing",
           _by_place, {"kind": "begin-middle-end"}, **_PLACE),
    Method("interleave", "layers", "place: at equal distances", "nothing", _by_place, {"kind": "interleave"}, **_PLACE),
)  # fmt: skip
METHODS: dict[str, Method] = {method.name: method for method in _TABLE}
BY_PLACE = tuple(name for name, method in METHODS.items() if method.run is _by_place)  # these need no examples
DEFAULT = {"layers": "nll-gradient", "heads": "nll-heads"}  # docs/selection.md says why


def find_method(name: str) -> Method:
    """The row of a method. Raises `ConfigError` for an unknown one, and names the nearest."""
    if name not in METHODS:
        raise ConfigError(f"method '{name}' is not known{nearest(name, list(METHODS))}")
    return METHODS[name]


def check_model(method: str, config: ModelConfig) -> None:
    """Raise `ConfigError` for a method that is not known, or that takes no such model."""
    row = find_method(method)
    if config.linear_layers and not row.hybrids:
        known = ", ".join(name for name, one in METHODS.items() if one.hybrids)
        raise ConfigError(
            f"method '{method}' looks at the attention of every layer, and this model has linear layers; known for "
            f"such models: {known}"
        )
    if row.chooses == "KV heads":
        _ = config.common_kv_heads  # raises where layers differ


# ---- choosing ----


def rank(method: str, task: Task, ratios: Sequence[float], **options: Any) -> Ranking | Iterator[Chosen]:
    """What a method finds: layers or heads in order, or a mask for each ratio. Arguments and errors as in `choose`."""
    check_model(method, task.model.config)
    row = find_method(method)
    return row.run(task, ratios, **row.fixed, **options)


def choose(method: str, task: Task, ratios: Sequence[float], **options: Any) -> list[AttentionPattern]:
    """A pattern for each ratio: the share of KV heads, or of layers, that is windowed, rounded up.

    Each pattern says in its provenance how it was chosen, and what that cost: seconds, tokens forward and back, and
    operations. A ranking costs what its largest share of full layers or heads does; each mask what it adds to those of
    the ratios before it.

    Args:
      method: a name in `METHODS`; options: of its own (`Method.options`).

    Raises:
      ConfigError: an unknown method, a ratio outside [0, 1], examples that tell nothing (unless `task.force`), or what
        the method itself refuses.
    """
    from swa_jax.select.heads import head_pattern, single_heads
    from swa_jax.select.work import counted

    patterns, attending = [], task.model.config.attention_layers
    with counted() as ranked:
        found = rank(method, task, ratios, **options)
    for ratio in ratios:
        with counted() as work:
            groups, said = found.first(ratio) if isinstance(found, Ranking) else next(found)
        full = single_heads(groups, task.heads_in)
        cost = ranked if isinstance(found, Ranking) else work
        provenance = {
            "method": method,
            "ratio": ratio,
            "data": task.data,
            "num_examples": len(task.examples),
            "seed": task.seed,
            **({"heads_in": task.heads_in} if task.heads_in > 1 else {}),
            "seconds": round(cost.seconds, 1),
            "tokens": round(cost.tokens),
            "tokens_back": round(cost.back),
            "flops": cost.flops(task.model.config),
            **({"windowed_heads": int((~full[list(attending)]).sum())} if full.shape[1] > 1 else {}),
            **said,
        }
        patterns.append(head_pattern(full, task.window, provenance, linear=task.model.config.linear_layers))
    return patterns
