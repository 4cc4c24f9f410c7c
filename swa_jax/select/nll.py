"""NLL-guided selection: starting with every layer windowed, which single layer made full helps the answers most?

Source: "NLL-Guided Full-Attention Layer Selection for Training-Free Sliding-Window Adaptation" (arXiv 2606.27791),
Eq. 1 and Section 3.3. `L_ans` is the mean NLL of an example's answer tokens, teacher-forced. The paper scores as it
deploys, with full-attention decode: answer queries see everything, whatever the layer. Beyond the paper: scoring
again after each layer chosen (`nll_greedy`), so that of two layers that do the same only one is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import jax
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike

from swa_jax.errors import ConfigError
from swa_jax.estimates import Estimate, bootstrap
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import AnswerBatch, answer_batches, check_examples
from swa_jax.model.attention import LayerPlan, layer_plan
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition, check_model, state_shardings
from swa_jax.select import toggles
from swa_jax.select.score_file import ScoreFile, content_key

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class NLLScores:
    """What each layer is worth, example by example."""

    deltas: (
        np.ndarray
    )  # [N, L] f64, nats a token: answer NLL of the base - answer NLL with layer l full besides
    window_nll: np.ndarray  # [N] f64: answer NLL of the base: every layer windowed, but for `full_layers`
    sliding_window: int
    num_sink_tokens: int
    full_attention_decode: bool = True  # whether answer queries saw everything
    full_layers: tuple[int, ...] = ()  # full in the base already; their deltas are 0

    @property
    def mean(self) -> np.ndarray:
        """delta_l, the mean over examples: [L]."""
        return self.deltas.mean(0)

    def intervals(self, seed: int = 0) -> list[Estimate]:
        """Each layer's mean delta with its 95 % bootstrap interval over examples."""
        return [bootstrap(column, seed=seed) for column in self.deltas.T]


class Options(TypedDict, total=False):
    """How `LayerScorer` scores; all are optional."""

    sliding_window: int | None
    num_sink_tokens: int | None
    full_attention_decode: bool
    batch_size: int
    reuse: bool
    toggles_at_once: int
    partition: Partition | None
    file: Path | None
    weights: str | None


def nll_scores(
    model: Decoder,
    examples: Sequence[Example],
    *,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> np.ndarray:
    """delta_l = L_ans(all windowed) - L_ans(all windowed but layer l): [L] float64; larger = needs full attention more.

    L_ans is the mean NLL of the answers' tokens (NLL-guided selection, Eq. 1). Options, costs and errors are those of
    `LayerScorer`.
    """
    return nll_deltas(model, examples, progress=progress, **options).mean


def nll_deltas(
    model: Decoder,
    examples: Sequence[Example],
    *,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> NLLScores:
    """The same as `nll_scores`, but with the deltas of every example and their intervals."""
    return LayerScorer(model, examples, **options)(progress=progress)


def nll_greedy(
    model: Decoder,
    examples: Sequence[Example],
    budget: int,
    *,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> list[NLLScores]:
    """`budget` rounds of scores. The best layer of each round is full in the next ones.

    `best_layer(round)` is the layer that a round chose. `greedy_pattern` makes a pattern of all rounds. Options and
    errors are those of `LayerScorer`. It costs about `budget` times as much as scoring once.

    Raises `ConfigError` also if the budget is not between 1 and the number of layers.
    """
    return LayerScorer(model, examples, **options).greedy(budget, progress=progress)


class LayerScorer:
    """`scorer(full_layers) -> NLLScores`: with `full_layers` full, what does making one further layer full save?

    An example has deltas of exactly 0 if the window holds its whole prompt (`len(prompt) <= sliding_window +
    num_sink_tokens`; without full-attention decode, prompt and answer together).

    Args:
      sliding_window, num_sink_tokens: None takes those of the model's pattern.
      full_attention_decode: True is the paper's setting. A layer that only *answer* queries need for looking far back
        then scores nothing, because they see everything anyway. Take False for a pattern that will run without it.
      reuse: start from the activations below the layer that is made full. This takes (L + 3) / (2 (L + 1)) of the
        layer evaluations of L + 1 whole passes, which False makes, and which a model
        of dense and sparse layers takes. The results are the same up to rounding.
      toggles_at_once: with `reuse`, how many layers are made full side by side, in one batch of that many times
        `batch_size` rows. That many layer inputs and one more are in memory, and twice that while they are put
        together.
      partition: the mesh on which weights and examples lie. Rows and tokens are rounded up to sizes that divide.
      file: a JSON file that keeps the scores of finished batches. An interrupted selection continues from it.
      weights: with `file`, the sum of the weights, as in `content_key`. None computes it from the model's arrays.

    Raises:
      ConfigError: no window, neither given nor in the model's pattern; `toggles_at_once` below 1; no examples, or one
        with an empty prompt or answer; or `file` holds scores of other weights, another configuration or dtype, other
        examples or other settings.
    """

    def __init__(
        self,
        model: Decoder,
        examples: Sequence[Example],
        *,
        sliding_window: int | None = None,
        num_sink_tokens: int | None = None,
        full_attention_decode: bool = True,
        batch_size: int = 8,
        reuse: bool = True,
        toggles_at_once: int = 1,
        partition: Partition | None = None,
        file: Path | None = None,
        weights: str | None = None,
    ):
        window = model.pattern.sliding_window if sliding_window is None else sliding_window
        sinks = model.pattern.num_sink_tokens if num_sink_tokens is None else num_sink_tokens
        if window is None:
            raise ConfigError(
                "sliding_window is missing (--window): give it, as the model's own pattern has none"
            )
        if toggles_at_once < 1:
            raise ConfigError(f"toggles_at_once must be at least 1, got {toggles_at_once}")
        check_examples(examples)
        self.sliding_window, self.num_sink_tokens = window, sinks
        self.full_attention_decode = full_attention_decode
        self.num_examples = len(examples)
        self.layers = model.config.num_hidden_layers
        self._config = model.config
        self._graph, self._weights = nnx.split(model.with_pattern(self._pattern(())))
        if partition is not None:
            check_model(model.config, partition)
            shardings = state_shardings(self._weights, partition, model.config)
            self._weights = jax.device_put(self._weights, shardings)
        # What is reused goes through the layers one by one, which takes layers that are all alike.
        reuse = reuse and not model.config.mlp_layer_types
        self._partition, self._reuse, self._at_once = partition, reuse, toggles_at_once
        # Where the window holds the whole prompt, window and full attention are the same function. Different kernels
        # would still round differently, and ranking that noise is what this avoids: all layers take the full kernel,
        # so that all L + 1 passes are the same program on the same data, and one of them stands for all.
        queries = [len(e.prompt) + (0 if full_attention_decode else len(e.answer) - 1) for e in examples]
        held = [count <= window + sinks for count in queries]
        self._batches: list[tuple[np.ndarray, AnswerBatch, bool]] = [
            (np.array(members)[index], batch, short)
            for short in (True, False)
            if (members := [i for i, one in enumerate(held) if one == short])
            for index, batch in answer_batches(
                [examples[i] for i in members], batch_size, full_attention_decode, partition
            )
        ]
        content = {} if file is None else content_key(
            model, examples, weights=weights, sliding_window=window, num_sink_tokens=sinks,
            full_attention_decode=full_attention_decode,
        )  # fmt: skip
        self._file = ScoreFile(file, content, "scores of layers")

    @property
    def num_known(self) -> int:
        """Examples whose scores with every layer windowed are known, those found in the file included."""
        return sum(_key((), i) in self._file.scores for i in range(self.num_examples))

    @property
    def seconds(self) -> float:
        """Since this scorer was made, and what the runs before it took by their file."""
        return self._file.seconds

    def __call__(self, full_layers: Sequence[int] = (), *, progress: Progress | None = None) -> NLLScores:
        """Score the layers that are not in `full_layers`; progress is called with (passes done, passes in all), a
        pass being one over all examples whichever way they are scored."""
        chosen = tuple(sorted(full_layers))
        total = self.layers + 1
        done = [0.0, 0.0]  # examples' passes made, and the passes reported

        def report(examples: int, passes: float) -> None:
            done[0] += passes * examples
            while progress and done[0] >= (done[1] + 1) * self.num_examples - 0.5:
                done[1] += 1
                progress(int(done[1]), total)

        for index, batch, short in self._batches:
            if not all(_key(chosen, i) in self._file.scores for i in index):
                for i, row in zip(index, self._rows(batch, short, chosen, len(index), report), strict=False):
                    self._file.scores[_key(chosen, i)] = row.tolist()
                self._file.save()
            else:
                report(len(index), total)
        rows = np.array([self._file.scores[_key(chosen, i)] for i in range(self.num_examples)])  # [N, 1 + L]
        return NLLScores(
            rows[:, :1] - rows[:, 1:],
            rows[:, 0],
            self.sliding_window,
            self.num_sink_tokens,
            self.full_attention_decode,
            chosen,
        )

    def greedy(self, budget: int, *, progress: Progress | None = None) -> list[NLLScores]:
        """The rounds of `nll_greedy`; progress counts the passes of all of them."""
        if not 1 <= budget <= self.layers:
            raise ConfigError(
                f"budget is {budget} full layers; greedy selection takes 1 to {self.layers} of this model"
            )
        rounds: list[NLLScores] = []
        for number in range(budget):

            def report(done: int, total: int, before: int = number * (self.layers + 1)) -> None:
                if progress:
                    progress(before + done, budget * total)

            rounds.append(self([best_layer(scores) for scores in rounds], progress=report))
        return rounds

    def _rows(
        self,
        batch: AnswerBatch,
        short: bool,
        full_layers: tuple[int, ...],
        examples: int,
        report: Callable[[int, float], None],
    ) -> np.ndarray:
        """NLL of the base and with each layer full, which for one that is full is the base's: [B, 1 + L] f64."""
        rest = [] if short else [layer for layer in range(self.layers) if layer not in full_layers]
        base = range(self.layers) if short else full_layers
        share = (self.layers + 1) / (len(rest) + 1)

        def progress(results: int) -> None:
            report(examples, results * share)

        arguments = (self._graph, self._weights, batch, self._plan(base), rest)
        if self._reuse and rest:
            nll = toggles.reuse(
                *arguments, toggles_at_once=self._at_once, partition=self._partition, progress=progress
            )
        else:
            nll = toggles.passes(*arguments, partition=self._partition, progress=progress)
        rows = np.repeat(nll[:1], 1 + self.layers, axis=0)
        rows[[1 + layer for layer in rest]] = nll[1:]
        return rows.T

    def _pattern(self, full_layers: Sequence[int]) -> AttentionPattern:
        return AttentionPattern.from_full_layers(
            full_layers, self.layers, self.sliding_window, num_sink_tokens=self.num_sink_tokens
        )

    def _plan(self, full_layers: Sequence[int]) -> LayerPlan:
        return layer_plan(self._pattern(full_layers), self._config, toggles.KINDS)


def _key(full_layers: Sequence[int], example: int) -> str:
    return f"{','.join(map(str, full_layers))}:{example}"


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


def best_layer(scores: NLLScores) -> int:
    """The layer of largest score among those that are not full yet; between equals the lower one."""
    rest = [layer for layer in range(scores.deltas.shape[1]) if layer not in scores.full_layers]
    return rest[int(np.argmax(scores.mean[rest]))]


def full_layer_budget(num_layers: int, budget: int | None, one_in_n: int | None) -> int:
    """How many layers stay full: `budget`, or one in n and at least 1.

    Raises `ConfigError` unless just one of them is given, and the model has as many layers.
    """
    if (budget is None) == (one_in_n is None):
        raise ConfigError("give exactly one of budget and one_in_n")
    if budget is not None:
        if not 0 <= budget <= num_layers:
            raise ConfigError(f"budget is {budget} full layers, the model has {num_layers}")
        return budget
    assert one_in_n is not None
    if one_in_n < 1:
        raise ConfigError(f"one_in_n must be at least 1, got {one_in_n}")
    return max(1, num_layers // one_in_n)


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
      budget: how many layers stay full. Give this or `one_in_n`.
      one_in_n: one layer in n stays full, at least one.
      full_attention_decode: whether the pattern has it; None is as it was scored.
      data: what the examples were, for the pattern's provenance.
      seed: how they were drawn, for the pattern's provenance.

    Raises:
      ConfigError: not exactly one of `budget` and `one_in_n`, or a budget the model cannot meet.
    """
    chosen = select_layers(scores.mean, full_layer_budget(scores.deltas.shape[1], budget, one_in_n))
    provenance = {"method": "nll", "scores": scores.mean.tolist()}
    return _as_scored(scores, chosen, full_attention_decode, data, seed, provenance)


def greedy_pattern(
    rounds: Sequence[NLLScores],
    *,
    full_attention_decode: bool | None = None,
    data: str = "",
    seed: int | None = None,
) -> AttentionPattern:
    """The pattern of `nll_greedy`'s rounds: one full layer for each. The other arguments are those of `nll_pattern`.

    `provenance["scores"]` is each layer's score in the first round, `["rounds"]` the layer and the scores of all.
    """
    picked = [best_layer(scores) for scores in rounds]
    provenance: dict[str, Any] = {
        "method": "nll-greedy",
        "scores": rounds[0].mean.tolist(),
        "picked": picked,
        "rounds": [scores.mean.tolist() for scores in rounds],
    }
    return _as_scored(rounds[0], picked, full_attention_decode, data, seed, provenance)


def _as_scored(
    scores: NLLScores,
    full_layers: Sequence[int],
    full_attention_decode: bool | None,
    data: str,
    seed: int | None,
    provenance: dict[str, Any],
) -> AttentionPattern:
    decode = scores.full_attention_decode if full_attention_decode is None else full_attention_decode
    provenance = provenance | {
        "data": data,
        "num_examples": len(scores.deltas),
        "intervals": [estimate.interval for estimate in scores.intervals()],
        "seed": seed,
        "scored_with_full_attention_decode": scores.full_attention_decode,
    }
    return AttentionPattern.from_full_layers(
        full_layers,
        scores.deltas.shape[1],
        scores.sliding_window,
        num_sink_tokens=scores.num_sink_tokens,
        full_attention_decode=decode,
        provenance=provenance,
    )
