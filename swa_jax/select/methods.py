"""Every way of choosing under one name, so that they can be compared at the same budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from swa_jax.config import ConfigError, nearest
from swa_jax.evaluate.examples import Example
from swa_jax.model import Decoder
from swa_jax.pattern import AttentionPattern
from swa_jax.select.bosch import Variant, bosch, bosch_pattern
from swa_jax.select.evaluator import MaskEvaluator
from swa_jax.select.heads import Heuristic, head_pattern, heuristic_mask, window_most_local, windowed_count
from swa_jax.select.light_transfer import SINK_TOKENS, lazy_ratios, light_transfer_pattern
from swa_jax.select.nll import LayerScorer, greedy_pattern, nll_pattern
from swa_jax.select.static import LARGER_IS_LOCAL, static_scores

VARIANTS: dict[str, Variant] = {
    "bosch" if name == "bosch" else f"bosch-{name}": name for name in get_args(Variant)
}
HEURISTICS: tuple[Heuristic, ...] = get_args(Heuristic)
LAYER_METHODS = ("nll", "nll-greedy", "light-transfer")
METHODS = (*LAYER_METHODS, *VARIANTS, *LARGER_IS_LOCAL, *HEURISTICS)


def choose(
    method: str,
    model: Decoder,
    examples: Sequence[Example],
    ratios: Sequence[float],
    *,
    sliding_window: int,
    num_sink_tokens: int = 0,
    batch_size: int = 8,
    iterations: int = 100,
    seed: int = 0,
    data: str = "",
    evaluations: Path | None = None,
    weights: str | None = None,
) -> list[AttentionPattern]:
    """A pattern for each ratio, the share of KV heads (of layers, for `LAYER_METHODS`) that is windowed, rounded up.

    Patterns are chosen and meant for decoding without full attention; each says in its provenance how it was chosen.

    Args:
      method: one of `METHODS`.
      examples: what to choose by; those that look at places alone ignore them.
      iterations: BOSCH's kappa.
      data: what the examples are, for the provenance.
      evaluations: where BOSCH keeps its scores; shared by its variants and ratios.
      weights: the sum of the weights for that file, as in `content_key`.

    Raises:
      ConfigError: an unknown method, a ratio outside [0, 1], or what the method itself refuses.
    """
    if method not in METHODS:
        raise ConfigError(f"method '{method}' is not known{nearest(method, METHODS)}")
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    if method in LAYER_METHODS:
        budgets = [layers - windowed_count(ratio, layers) for ratio in ratios]
        window: dict[str, Any] = {"sliding_window": sliding_window, "num_sink_tokens": num_sink_tokens}
        said: dict[str, Any] = {"data": data, "seed": seed}
        if method == "light-transfer":  # the paper's 4 + 1020 keys are its window of 1024
            recent = max(1, sliding_window - SINK_TOKENS)
            lazy = lazy_ratios(model, examples, recent_keys=recent, batch_size=batch_size)
            return [light_transfer_pattern(lazy, budget=n, **window, **said) for n in budgets]
        scorer = LayerScorer(model, examples, **window, full_attention_decode=False, batch_size=batch_size)
        if method == "nll":
            scores = scorer()
            return [nll_pattern(scores, budget=n, **said) for n in budgets]
        rounds = scorer.greedy(max(1, *budgets))
        return [
            greedy_pattern(rounds[:n], **said) if n else nll_pattern(rounds[0], budget=0, **said)
            for n in budgets
        ]
    if method in VARIANTS:
        evaluate = MaskEvaluator(
            model, examples, sliding_window=sliding_window, num_sink_tokens=num_sink_tokens,
            batch_size=batch_size, file=evaluations, weights=weights,
        )  # fmt: skip
        told = {"variant": VARIANTS[method], "iterations": iterations, "seed": seed}
        try:
            return [
                bosch_pattern(bosch(evaluate, ratio, **told), evaluate, ratio=ratio, data=data, **told)  # type: ignore[arg-type]
                for ratio in ratios
            ]
        finally:
            evaluate.save()

    if method in LARGER_IS_LOCAL:
        ranks = static_scores(
            model, examples, method, sliding_window=sliding_window, batch_size=batch_size, seed=seed
        )  # fmt: skip
        local = LARGER_IS_LOCAL[method]
        masks = [window_most_local(ranks, ratio, larger_is_local=local) for ratio in ratios]
        more = {"data": data, "scores": ranks.tolist(), "larger_is_local": local}
    else:
        masks = [heuristic_mask(method, layers, heads, ratio, seed) for ratio in ratios]  # type: ignore[arg-type]
        more = {}
    return [
        head_pattern(
            full,
            sliding_window,
            num_sink_tokens,
            {
                "method": method,
                "ratio": ratio,
                "windowed_heads": int((~full).sum()),
                "seed": seed,
                **more,
            },
        )
        for full, ratio in zip(masks, ratios, strict=True)
    ]
