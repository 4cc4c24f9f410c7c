"""BOSCH: search for the heads to window, by what each choice does to the answers.

Source: "BOSCH: Black-Box Binary Optimization for Short-Context Attention-Head Selection in LLMs", Section 2.2,
Algorithms 1 to 3, Section B.2. What we read differently, and why:

* Algorithm 2, line 2: delta = (original - best) / original. As printed its sign contradicts "lower w is easier".
* Algorithm 2's loop can spin for ever: it ends with a sweep that moves nothing. Where the count is not reached then,
  the nearest buckets that come nearest to it are taken. Counts are whole heads: ceil(bucket * K), buckets that come
  to the same count being one.
* The number of windowed heads is kept exactly in every subproblem; Eq. 5 only fines what is off.
* Algorithms 1 and 3 slip by one in an index each.
* Accuracies move in steps of one example and tie often: the answers' likelihood decides then. So it does between
  layers of equal weight w, as the mean over all that Stage 1 tried in the layer: the best choice alone says nothing
  of a layer that needs no more full heads than it was left with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.select.evaluator import MaskEvaluator, Score
from swa_jax.select.heads import windowed_count
from swa_jax.select.search import Optimizer, Optimum, ScoreBits, num_candidates, require_nomad, search, with_ones
from swa_jax.select.swaps import swap_search

Variant = Literal["bosch", "swaps", "single", "multi", "layer"]
BUCKETS = (0.0, 0.25, 0.5, 0.75, 1.0)  # ratios that Stage 2 gives a layer
PERCENTILES = (2.5, 97.5)
GROUP_LAYERS = 4  # that Stage 3 searches together, at most; the paper has groups of 50 heads at most
GAMMA = 0.2  # the headroom above the original score in Eq. 2


@dataclasses.dataclass(frozen=True)
class Selection:
    """The heads BOSCH chose, and how it came to them."""

    full: np.ndarray  # [L, K] bool
    score: Score
    original: Score  # with full attention
    windowed: Score  # with every head windowed
    target: int  # windowed heads asked for
    layer_scores: np.ndarray | None = None  # [L] Stage 1's best value once layer l and those above it are windowed
    layer_weights: np.ndarray | None = None  # [L] Stage 2's w, 0 easy to 1 hard
    layer_counts: np.ndarray | None = None  # [L] windowed heads that Stage 2 gave each layer

    @property
    def num_windowed(self) -> int:
        return int((~self.full).sum())

    @property
    def provenance(self) -> dict[str, Any]:
        """The scores and how many heads each layer was given, as plain JSON values."""
        lists = (self.layer_scores, self.layer_weights, self.layer_counts)
        scores, weights, counts = (None if one is None else one.tolist() for one in lists)
        return {
            "windowed_heads_asked_for": self.target,
            "scores": {
                "full attention": self.original._asdict(),
                "all windowed": self.windowed._asdict(),
                "chosen": self.score._asdict(),
            },
            "layer_scores": scores,
            "layer_weights": weights,
            "windowed_heads_by_layer": counts,
        }


def bosch(
    evaluate: MaskEvaluator,
    ratio: float,
    *,
    variant: Variant = "bosch",
    iterations: int = 100,
    optimizer: Optimizer = "one-plus-one",
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Selection:
    """Choose the ceil(ratio * L * K) KV heads whose windowing costs the answers least (BOSCH, Algorithms 1 to 3).

    Args:
      ratio: the share of windowed heads, the paper's rho.
      variant: "bosch" has all three stages. "swaps" goes on from there with swaps over the heads of all layers (see
        `swap_search`; not in the paper), which look at no more than `iterations` masks for each layer of the model. The
        others are ablations: "single" is the mask of Stage 1, "multi" that of Stage 1 over groups of `GROUP_LAYERS`
        layers, "layer" searches whole layers in one run. Their counts are rounded up in each layer, in each group, or
        in the number of layers.
      iterations: how many candidates are tried for each layer of a subproblem, the paper's kappa. Where there are no
        more than that, all are tried.
      progress: called with (candidates tried, candidates expected).

    Raises:
      ConfigError: a ratio outside [0, 1]; `b <= a` in Eq. 2, where the needles cannot tell full attention from
        windows; an optimizer that is not installed.
    """
    layers, heads = evaluate.shape
    if optimizer == "nomad":
        require_nomad()
    target = windowed_count(ratio, layers * heads)
    original, windowed = evaluate(np.ones(evaluate.shape, bool)), evaluate(np.zeros(evaluate.shape, bool))
    low, high = windowed.value, (1 + GAMMA) * original.value  # a and b of Eq. 2
    if high <= low:
        raise ConfigError(
            f"full attention scores {original.value:.1%} and windows everywhere {windowed.value:.1%}: there is nothing "
            "to search for; take prompts that the model answers"
        )
    run = _Subproblems(evaluate, iterations, seed, optimizer, low, high, progress)
    ends = (original, windowed, target)
    if variant == "layer":
        count = windowed_count(ratio, layers)
        run.expect(num_candidates(layers, layers - count, iterations * layers))
        full = run.whole_layers(np.ones(evaluate.shape, bool), count)
        return Selection(full, evaluate(full), *ends)
    groups = _split(range(layers - 1, -1, -1), GROUP_LAYERS if variant == "multi" else 1)
    staged = variant in ("bosch", "swaps")  # all stages of the paper
    probed, best, rise = _stage_1(run, groups, ratio, later=iterations * layers if staged else 0)
    if not staged:
        return Selection(probed, evaluate(probed), *ends, layer_scores=best)
    weights = layer_weights(best, original.value)
    layer_counts = adaptive_counts(weights, rise, heads, target)
    full = _stage_3(run, _easy_to_hard(weights, rise), layer_counts, probed)
    if variant == "swaps":
        order = np.random.default_rng([seed, 4]).permutation(full.size)
        full = run.swaps(with_ones(full.ravel(), full.size - target, order).reshape(full.shape))
    return Selection(full, evaluate(full), *ends, best, weights, layer_counts)


def _stage_1(
    run: _Subproblems, groups: Sequence[list[int]], ratio: float, later: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Algorithm 1: from the top layers down, each group of layers with those above it already windowed.

    Args:
      later: candidates that the stages after this one look at, for the progress.

    Returns:
      The heads that stay full [L, K]; of each layer [L] the best score, and how far all that was tried made the
      likelihood fall.
    """
    full = np.ones(run.evaluate.shape, bool)
    counts = [windowed_count(ratio, len(group) * full.shape[1]) for group in groups]
    run.expect(run.candidates(groups, counts), later)
    best, rise = np.zeros(len(full)), np.zeros(len(full))
    for group, count in zip(groups, counts, strict=True):
        before = run.evaluate(full).log_likelihood
        full, found = run.heads(full, group, count, stage=1)
        best[group] = found.score.value
        rise[group] = before - np.mean([score.log_likelihood for score in found.tried])
    return full, best, rise


def _stage_3(run: _Subproblems, easy: np.ndarray, layer_counts: np.ndarray, probed: np.ndarray) -> np.ndarray:
    """Algorithm 3: layers of one ratio together, from the most windowed to the least; each search starts from `probed`.

    Args:
      easy: layers [L], the easy ones first; layer_counts: windowed heads of each [L].

    Returns:
      The heads that stay full [L, K].
    """
    groups = [
        group
        for count in sorted(set(layer_counts.tolist()), reverse=True)
        for group in _split([layer for layer in easy if layer_counts[layer] == count], GROUP_LAYERS)
    ]
    counts = [int(layer_counts[group].sum()) for group in groups]
    run.expect(run.candidates(groups, counts))
    full = np.ones_like(probed)
    for group, count in zip(groups, counts, strict=True):
        full, _ = run.heads(full, group, count, stage=3, hint=probed)
    return full


def layer_weights(best: np.ndarray, original: float) -> np.ndarray:
    """Algorithm 2, lines 2 to 7: each layer's relative drop, clipped and scaled to w [L] from 0 (easy) to 1 (hard).

    Args:
      best: [L] Stage 1's score after layer l and all above it were windowed; original: that of full attention.
    """
    delta = (original - np.asarray(best, np.float64)) / original
    drop = delta - np.append(delta[1:], 0.0)
    low, high = np.percentile(drop, PERCENTILES)
    return np.zeros(drop.size) if high == low else (drop.clip(low, high) - low) / (high - low)


def adaptive_counts(weights: np.ndarray, rise: np.ndarray, heads: int, target: int) -> np.ndarray:
    """Algorithm 2, lines 8 to 31: windowed heads of each layer [L], summing to the nearest to `target` they can.

    Args:
      weights: [L], 0 easy to 1 hard; rise: [L] decides between equals, larger is harder.
      heads: KV heads of a layer; target: windowed heads in all.
    """
    steps = sorted({math.ceil(bucket * heads - 1e-9) for bucket in BUCKETS})  # equal ones count once
    easy = _easy_to_hard(weights, rise)
    rank = np.zeros(len(weights), int)
    for bucket, group in enumerate(np.array_split(easy[::-1], len(steps))):  # the hardest get the lowest ratio
        rank[group] = bucket
    gap = target - sum(steps[r] for r in rank)
    step = 1 if gap > 0 else -1
    for near in (False, True):  # at last one move that overshoots, if that is nearer
        moved = True
        while gap and moved:
            moved = False
            for layer in easy if step > 0 else easy[::-1]:
                after = rank[layer] + step
                if not 0 <= after < len(steps):
                    continue
                change = steps[after] - steps[rank[layer]]
                if abs(change) <= abs(gap) or (near and abs(gap - change) < abs(gap)):
                    rank[layer], gap, moved = after, gap - change, True
                if gap * step <= 0:
                    break
            moved = moved and gap * step > 0
    return np.array(steps)[_settle(rank, steps, easy, target) if gap else rank]


def _settle(rank: np.ndarray, steps: Sequence[int], easy: np.ndarray, target: int) -> np.ndarray:
    """The buckets nearest to `rank` of all that come nearest to the count.

    Where steps are unlike (of 6 heads 2, 1, 2, 1), some layers must go up and others down. Of moves of one length, the
    one with the easier layers windowed further.
    """
    hardness = np.argsort(easy)  # [L] place among the layers, 0 the easiest
    plans: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}  # by heads windowed so far
    for now, hard in zip(rank.tolist(), hardness.tolist(), strict=True):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for count, (moved, order, chosen) in plans.items():
            for bucket, step in enumerate(steps):
                plan = (moved + abs(bucket - now), order + bucket * hard, (*chosen, bucket))
                longer[count + step] = min(plan, longer.get(count + step, plan))
        plans = longer
    return np.array(plans[min(plans, key=lambda count: (abs(target - count), plans[count]))][2])


@dataclasses.dataclass
class _Subproblems:
    """What the subproblems of one run share."""

    evaluate: MaskEvaluator
    iterations: int
    seed: int
    optimizer: Optimizer
    low: float  # a of Eq. 2
    high: float  # b
    progress: Callable[[int, int], None]
    done: int = 0
    total: int = 0

    def expect(self, now: int, later: int = 0) -> None:
        self.total = self.done + now + later

    def candidates(self, groups: Sequence[Sequence[int]], counts: Sequence[int]) -> int:
        """Masks to look at where `counts` heads are windowed in each group of layers."""
        heads = self.evaluate.shape[1]
        return sum(
            num_candidates(len(group) * heads, len(group) * heads - count, self.iterations * len(group))
            for group, count in zip(groups, counts, strict=True)
        )

    def heads(
        self, full: np.ndarray, group: list[int], count: int, *, stage: int, hint: np.ndarray | None = None
    ) -> tuple[np.ndarray, Optimum]:
        """Window `count` of the heads of the layers `group`, the rest of `full` [L, K] staying; start from `hint`."""

        def with_bits(bits: np.ndarray) -> np.ndarray:
            mask = full.copy()
            mask[group] = bits.reshape(len(group), -1)
            return mask

        rng = np.random.default_rng([self.seed, stage, *group])
        begin = (full if hint is None else hint)[group].ravel()
        begin = with_ones(begin, begin.size - count, rng.permutation(begin.size))
        found = self._search(with_bits, begin, self.iterations * len(group), rng)
        return with_bits(found.bits), found

    def swaps(self, full: np.ndarray) -> np.ndarray:
        """As many full heads as in `full` [L, K], wherever swaps find better ones."""
        budget = self.iterations * len(full)
        self.expect(budget)
        rng = np.random.default_rng([self.seed, 5])
        found = swap_search(self._scored(lambda bits: bits.reshape(full.shape)), full.ravel(), budget, rng)
        return found.bits.reshape(full.shape)

    def whole_layers(self, full: np.ndarray, count: int) -> np.ndarray:
        def with_bits(bits: np.ndarray) -> np.ndarray:
            return np.repeat(bits[:, None], full.shape[1], axis=1)

        rng = np.random.default_rng([self.seed, 0])
        begin = with_ones(np.ones(len(full), bool), len(full) - count, rng.permutation(len(full)))
        return with_bits(self._search(with_bits, begin, self.iterations * len(full), rng).bits)

    def _search(
        self, with_bits: Callable[[np.ndarray], np.ndarray], begin: np.ndarray, budget: int, rng: np.random.Generator
    ) -> Optimum:
        return search(self._scored(with_bits), begin, budget, rng, optimizer=self.optimizer, normalise=self._normalised)

    def _normalised(self, score: Score) -> float:
        return (score.value - self.low) / (self.high - self.low)

    def _scored(self, with_bits: Callable[[np.ndarray], np.ndarray]) -> ScoreBits:
        def score(bits: np.ndarray) -> Score:
            value = self.evaluate(with_bits(bits))
            self.done += 1
            self.progress(self.done, max(self.total, self.done))
            return value

        return score


def _easy_to_hard(weights: np.ndarray, rise: np.ndarray) -> np.ndarray:
    """Layers [L] by weight, then by rise, then from the top down (Stage 1's order)."""
    return np.lexsort((-np.arange(len(weights)), rise, weights))


def _split(layers: Sequence[int], most: int) -> list[list[int]]:
    """Consecutive groups of nearly equal size, none above `most`."""
    count = -(-len(layers) // most)
    return [group.tolist() for group in np.array_split(np.asarray(layers, int), count)] if count else []
