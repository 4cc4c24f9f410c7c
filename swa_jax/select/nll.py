"""NLL-guided selection: starting with every layer windowed, which single layer made full helps the answers most?

Source: "NLL-Guided Full-Attention Layer Selection for Training-Free Sliding-Window Adaptation" (arXiv 2606.27791),
Eq. 1 and Section 3.3. `L_ans` is the mean NLL of an example's answer tokens, teacher-forced. The paper scores as it
deploys, with full-attention decode: answer queries see everything, whatever the layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from swa_jax.config import ConfigError
from swa_jax.evaluate.bootstrap import Estimate, bootstrap
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model import Decoder
from swa_jax.pattern import AttentionPattern


@dataclasses.dataclass(frozen=True)
class NLLScores:
    """What each layer is worth, example by example."""

    deltas: np.ndarray  # [N, L] f64, nats a token: answer NLL all windowed - answer NLL with layer l full
    window_nll: np.ndarray  # [N] f64: answer NLL with every layer windowed
    sliding_window: int
    num_sink_tokens: int
    full_attention_decode: bool = True  # whether answer queries saw everything

    @property
    def mean(self) -> np.ndarray:
        """delta_l, the mean over examples: [L]."""
        return self.deltas.mean(0)

    def intervals(self, seed: int = 0) -> list[Estimate]:
        """Each layer's mean delta with its 95 % bootstrap interval over examples."""
        return [bootstrap(column, seed=seed) for column in self.deltas.T]


def nll_scores(
    model: Decoder,
    examples: Sequence[Example],
    *,
    sliding_window: int | None = None,
    num_sink_tokens: int | None = None,
    full_attention_decode: bool = True,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """delta_l = L_ans(all windowed) - L_ans(all windowed but layer l): [L] float64; larger = needs full attention more.

    Costs num_layers + 1 forward passes over the examples and one compilation for each padded length. An example whose
    prompt the window holds entirely (`len(prompt) <= sliding_window + num_sink_tokens`; without full-attention decode,
    prompt and answer) has deltas of exactly 0.

    Args:
      sliding_window, num_sink_tokens: None takes the model's pattern's.
      full_attention_decode: the paper's setting. Under it a layer that only *answer* queries need for looking far
        back scores nothing, as they see everything anyway; score with False for a pattern that will run without.
      progress: called with (passes done, passes in all).

    Raises:
      ConfigError: no window, neither given nor in the model's pattern.
      ValueError: no examples, or one with an empty prompt or answer.
    """
    return nll_deltas(
        model,
        examples,
        sliding_window=sliding_window,
        num_sink_tokens=num_sink_tokens,
        full_attention_decode=full_attention_decode,
        batch_size=batch_size,
        progress=progress,
    ).mean


def nll_deltas(
    model: Decoder,
    examples: Sequence[Example],
    *,
    sliding_window: int | None = None,
    num_sink_tokens: int | None = None,
    full_attention_decode: bool = True,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> NLLScores:
    """As `nll_scores`, with the deltas of every example."""
    window = model.pattern.sliding_window if sliding_window is None else sliding_window
    sinks = model.pattern.num_sink_tokens if num_sink_tokens is None else num_sink_tokens
    if window is None:
        raise ConfigError("sliding_window is missing: give it, as the model's own pattern has none")
    layers = model.config.num_hidden_layers
    model = model.with_pattern(AttentionPattern.from_full_layers([], layers, window, num_sink_tokens=sinks))

    def answer_nll(subset: list[int], full_layers: Sequence[int]) -> np.ndarray:
        pattern = AttentionPattern.from_full_layers(
            full_layers, layers, window, num_sink_tokens=sinks, full_attention_decode=full_attention_decode
        )
        return score_answers(model, [examples[i] for i in subset], batch_size=batch_size, pattern=pattern).nll

    # Where the window holds the whole prompt, window and full attention are the same function. Different kernels would
    # still round differently, and ranking that noise is what this avoids: all layers take the full kernel, so that all
    # L + 1 passes are the same program on the same data, and one of them stands for all.
    windowed = [
        len(e.prompt) + (0 if full_attention_decode else len(e.answer) - 1) for e in examples
    ]  # queries
    short = [i for i, queries in enumerate(windowed) if queries <= window + sinks]
    long = [i for i in range(len(examples)) if i not in set(short)]
    base, deltas = np.zeros(len(examples)), np.zeros((len(examples), layers))
    if short or not examples:
        base[short] = answer_nll(short, range(layers))
    if long:
        base[long] = answer_nll(long, [])
    for layer in range(layers if long else 0):
        if progress:
            progress(layer + 1, layers + 1)
        deltas[long, layer] = base[long] - answer_nll(long, [layer])
    if progress:
        progress(layers + 1, layers + 1)
    return NLLScores(deltas, base, window, sinks, full_attention_decode)


def select_layers(scores: ArrayLike, budget: int) -> tuple[int, ...]:
    """The `budget` layers of largest score, in order of depth; between equals the lower layer wins.

    Raises `ConfigError` if the budget is not between 0 and the number of layers, or a score is not finite.
    """
    scores = np.asarray(scores, np.float64)
    if scores.ndim != 1 or not np.isfinite(scores).all():
        raise ConfigError(
            f"scores must be one finite number a layer, got shape {scores.shape}: {scores.tolist()}"
        )
    if not 0 <= budget <= scores.size:
        raise ConfigError(f"budget is {budget} full layers, the model has {scores.size}")
    return tuple(sorted(np.argsort(-scores, kind="stable")[:budget].tolist()))


def nll_pattern(
    scores: NLLScores,
    *,
    budget: int | None = None,
    one_in_n: int | None = None,
    full_attention_decode: bool | None = None,
    data: str = "",
    seed: int | None = None,
) -> AttentionPattern:
    """The pattern with the best layers full and the others windowed as they were when scored.

    Args:
      budget: full layers; or `one_in_n`: one layer in n, at least 1 (as many as the recipe `interleave-1-in-n`).
      full_attention_decode: of the pattern; None is as scored.
      data, seed: what the examples were and how they were drawn, for the pattern's provenance.

    Raises:
      ConfigError: not exactly one of `budget` and `one_in_n`, or a budget the model cannot meet.
    """
    layers = scores.deltas.shape[1]
    if (budget is None) == (one_in_n is None):
        raise ConfigError("give exactly one of budget and one_in_n")
    if budget is None:
        assert one_in_n is not None
        if one_in_n < 1:
            raise ConfigError(f"one_in_n must be at least 1, got {one_in_n}")
        budget = max(1, layers // one_in_n)
    decode = scores.full_attention_decode if full_attention_decode is None else full_attention_decode
    provenance = {
        "method": "nll",
        "data": data,
        "num_examples": len(scores.deltas),
        "seed": seed,
        "scores": scores.mean.tolist(),
        "scored_with_full_attention_decode": scores.full_attention_decode,
    }
    return AttentionPattern.from_full_layers(
        select_layers(scores.mean, budget),
        layers,
        scores.sliding_window,
        num_sink_tokens=scores.num_sink_tokens,
        full_attention_decode=decode,
        provenance=provenance,
    )
