"""NLL-guided selection: starting with every layer windowed, which single layer made full helps the answers most?

Source: "NLL-Guided Full-Attention Layer Selection for Training-Free Sliding-Window Adaptation" (arXiv 2606.27791),
Eq. 1 and Section 3.3. `L_ans` is the mean NLL of an example's answer tokens, teacher-forced. The paper scores as it
deploys, with full-attention decode: answer queries see everything, whatever the layer. Beyond the paper: scoring
again after each layer chosen (`LayerScorer.greedy`), so that of two layers that do the same only one is kept. Of a deep
model only those layers need scoring again that one gradient by gates (`select.gates`) names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import Estimate, bootstrap
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import AnswerBatch, answer_batches, check_examples
from swa_jax.model.attention import LayerData, layer_data
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_stacks import are_alike
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sharding import Partition, check_model, state_shardings
from swa_jax.model.window import OWN, Window
from swa_jax.select import toggles
from swa_jax.select.content import score_store
from swa_jax.select.gates import gate_gradient
from swa_jax.select.work import count_pass

Progress = Callable[[int, int], None]
TRIED = 4  # layers, or heads, that are scored in a round of a search that a gradient leads
EXACT_BELOW = 13  # layers: with fewer, all are scored
GRADIENT_PASSES = 4  # that a gradient takes, about


@dataclasses.dataclass(frozen=True)
class NLLScores:
    """What each layer is worth, example by example."""

    # [N, L] f64, nats a token: answer NLL of the base - answer NLL with layer l full besides; NaN of layers not tried,
    # and of linear ones
    deltas: np.ndarray
    window_nll: np.ndarray  # [N] f64: answer NLL of the base: every layer windowed, but for `full_layers`
    window: Window
    full_layers: tuple[int, ...] = ()  # full in the base already; their deltas are 0
    gradient: np.ndarray | None = None  # [L] f64, nats a token: what named the layers tried
    picked: tuple[int, ...] = ()  # the layers that a greedy search took by these scores

    @property
    def mean(self) -> np.ndarray:
        """delta_l, the mean over examples: [L]."""
        return self.deltas.mean(0)

    def intervals(self) -> list[Estimate]:
        """Each layer's mean delta with its 95 % bootstrap interval over examples; NaN without one if not tried."""
        return [
            Estimate(math.nan, None, None) if np.isnan(column).any() else bootstrap(column) for column in self.deltas.T
        ]

    def best(self, count: int = 1) -> list[int]:
        """The `count` layers of largest score among those tried that are not full yet; of equals the lower ones."""
        rest = [
            layer
            for layer in np.argsort(-self.mean, kind="stable").tolist()
            if layer not in self.full_layers and not np.isnan(self.deltas[0, layer])
        ]
        return rest[:count]


def nll_scores(
    model: Decoder,
    examples: Sequence[Example],
    *,
    sliding_window: int | None = None,
    num_sink_tokens: int | None = None,
    full_attention_decode: bool = True,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> np.ndarray:
    """delta_l = L_ans(all windowed) - L_ans(all windowed but layer l): [L] float64; larger = needs full attention more.

    L_ans is the mean NLL of the answers' tokens (NLL-guided selection, Eq. 1); full-attention decode is the paper's
    setting. Options, costs and errors are those of `LayerScorer`.
    """
    window = Window(sliding_window, num_sink_tokens, full_attention_decode)
    return nll_deltas(model, examples, window, progress=progress, **options).mean


def nll_deltas(
    model: Decoder,
    examples: Sequence[Example],
    window: Window = OWN,
    *,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> NLLScores:
    """The same as `nll_scores`, but with the deltas of every example and their intervals."""
    return LayerScorer(model, examples, window, **options)(progress=progress)


class LayerScorer:
    """`scorer(full_layers) -> NLLScores`: with `full_layers` full, what does making one further layer full save?

    An example has deltas of exactly 0 if the window holds its whole prompt (`Window.holds`; without full-attention
    decode, prompt and answer together).

    Args:
      window: what it does not give is the model's own. Full-attention decode is the paper's setting. A layer that only
        *answer* queries need for looking far back then scores nothing, because they see everything anyway: leave it
        out for a pattern that will run without it.
      toggles_at_once: how many layers are made full side by side, in one batch of that many times `batch_size` rows,
        each from the activations below it. This takes (L + 3) / (2 (L + 1)) of the layer evaluations of L + 1 whole
        passes, which 0 makes, and which a model of dense and sparse layers takes. The results are the same up to
        rounding. That many layer inputs and one more are in memory, and twice that while they are put together.
      partition: the mesh on which weights and examples lie. Rows and tokens are rounded up to sizes that divide.
      file: keeps the scores of finished batches, by their content (see `content_key`): the same selection goes on from
        there, any other begins anew beside them.
      weights: with `file`, the sum of the weights, as in `content_key`. None computes it from the model's arrays.

    Raises:
      ConfigError: no window, neither given nor in the model's pattern; `toggles_at_once` below 0; no examples, or one
        with an empty prompt or answer; or `file` holds something else.
    """

    def __init__(
        self,
        model: Decoder,
        examples: Sequence[Example],
        window: Window = OWN,
        *,
        batch_size: int = 8,
        toggles_at_once: int = 1,
        partition: Partition | None = None,
        file: Path | None = None,
        weights: str | None = None,
    ):
        self.window = window.of(model.pattern.window)
        if toggles_at_once < 0:
            raise ConfigError(f"toggles_at_once must be at least 0, got {toggles_at_once}")
        check_examples(examples)
        self.num_examples = len(examples)
        self.layers = model.config.num_hidden_layers
        self.choosable = model.config.attention_layers
        self._config = model.config
        self._graph, self._weights = nnx.split(model.with_pattern(self._pattern(())))
        if partition is not None:
            check_model(model.config, partition)
            shardings = state_shardings(self._weights, partition, model.config)
            self._weights = jax.device_put(self._weights, shardings)
        # What is reused goes through the layers one by one, which takes layers that are all alike.
        self._partition, self._at_once = partition, toggles_at_once if are_alike(model.config) else 0
        # Where the window holds the whole prompt, window and full attention are the same function. Different kernels
        # would still round differently, and ranking that noise is what this avoids: all layers take the full kernel,
        # so that all L + 1 passes are the same program on the same data, and one of them stands for all.
        held = [self.window.holds(e.queries(self.window.full_decode)) for e in examples]
        self._batches: list[tuple[np.ndarray, AnswerBatch, bool]] = [
            (np.array(members)[index], batch, short)
            for short in (True, False)
            if (members := [i for i, one in enumerate(held) if one == short])
            for index, batch in answer_batches([examples[i] for i in members], batch_size, self.window, partition)
        ]
        content: dict[str, Any] = self.window.fields | {"weights": weights}
        self._store = score_store(file, "scores of layers", model, examples, **content)

    @property
    def num_known(self) -> int:
        """Examples whose scores with every layer windowed are known, those found in the file included."""
        return sum(self._known((), i, ()) for i in range(self.num_examples))

    def __call__(
        self,
        full_layers: Sequence[int] = (),
        *,
        tried: Sequence[int] | None = None,
        progress: Progress = lambda *_: None,
    ) -> NLLScores:
        """Score the layers that are not in `full_layers`, or of these those in `tried`.

        `progress` is called with (passes done, passes in all), a pass being one over all examples whichever way they
        are scored.
        """
        chosen = tuple(sorted(full_layers))
        rest = sorted({*(self.choosable if tried is None else tried)} - {*chosen})
        total = 1 + len(rest)
        done = [0.0, 0.0]  # examples' passes made, and the passes reported

        def report(examples: int, passes: float) -> None:
            done[0] += passes * examples
            while done[0] >= (done[1] + 1) * self.num_examples - 0.5:
                done[1] += 1
                progress(int(done[1]), total)

        for index, batch, short in self._batches:
            toggled = [] if short else rest  # what the file knows is work too
            count_pass(batch.tokens, self._passes(toggled), logits=(1 + len(toggled)) * batch.labels.size)
            if not all(self._known(chosen, i, rest) for i in index):
                rows = self._rows(batch, short, chosen, rest, functools.partial(report, len(index)))
                for i, row in zip(index, rows, strict=False):
                    before = self._losses(chosen, i) or [None] * len(row)
                    losses = [old if math.isnan(x) else x for x, old in zip(row.tolist(), before, strict=True)]
                    self._store.add(_key(chosen, i), losses=losses)
            else:
                report(len(index), total)
        rows = np.array([self._losses(chosen, i) for i in range(self.num_examples)], float)  # [N, 1 + L]
        others = sorted({*range(self.layers)} - {*rest, *chosen})
        rows[:, [1 + layer for layer in others]] = np.nan  # the store may know more, and a choice must not go by that
        return NLLScores(rows[:, :1] - rows[:, 1:], rows[:, 0], self.window, chosen)

    def gradient(self, full_layers: Sequence[int] = ()) -> np.ndarray:
        """How fast the answers' loss falls as each layer, beside `full_layers`, is opened: [L] f64, nats a token."""
        chosen = tuple(sorted(full_layers))
        key = f"gradient:{','.join(map(str, chosen))}"
        long = [(index, batch) for index, batch, short in self._batches if not short]
        for _, batch in long:
            count_pass(batch.tokens, back=1, logits=3 * batch.labels.size)
        if key not in self._store.records:
            full = np.zeros((self.layers, self._config.most_kv_heads), bool)
            full[list(chosen)] = True
            gained = gate_gradient(self._graph, self._weights, long, full, self._partition)
            self._store.add(key, gains=(gained.sum(1) / self.num_examples).tolist())
        return np.array(self._store.records[key]["gains"])

    def greedy(
        self, budget: int, *, tried: int | None = None, rounds: int | None = None, progress: Progress = lambda *_: None
    ) -> list[NLLScores]:
        """Rounds of scores until `budget` layers are full: the best layer of each is full in the next ones.

        `round.picked` has the layers that a round chose; progress counts the passes of all rounds. Scoring every layer
        costs about `budget` times as much as scoring once.

        Args:
          tried: how many layers a round scores: those that one gradient for all of them (`gradient`) names. None scores
            all.
          rounds: the most there may be; where `budget` is larger, each takes several layers at a time, and scores as
            many more. `picked` says which.
        """
        if not 1 <= budget <= len(self.choosable):
            raise ConfigError(
                f"budget is {budget} full layers; greedy selection takes 1 to {len(self.choosable)} of this model"
            )
        found: list[NLLScores] = []
        counts = shares(budget, rounds)
        steps = [self._steps(tried, count, sum(counts[:number])) for number, count in enumerate(counts)]
        for number, count in enumerate(counts):

            def report(done: int, _: int, before: int = sum(steps[:number])) -> None:
                progress(before + done, sum(steps))

            full = [layer for scores in found for layer in scores.picked]
            scores = self._round(full, None if tried is None else tried + count - 1, report)
            found.append(dataclasses.replace(scores, picked=tuple(scores.best(count))))
        return found

    def _steps(self, tried: int | None, count: int, full: int) -> int:
        """Of a round that begins with `full` layers, for its progress."""
        left = len(self.choosable) - full
        return 1 + left if tried is None else GRADIENT_PASSES + 1 + min(tried + count - 1, left)

    def _round(self, full: Sequence[int], tried: int | None, progress: Progress) -> NLLScores:
        if tried is None:
            return self(full, progress=progress)
        gradient = self.gradient(full)
        progress(GRADIENT_PASSES, 0)
        order = np.argsort(-gradient, kind="stable").tolist()
        named = [i for i in order if i in self.choosable and i not in full][:tried]
        scores = self(full, tried=named, progress=lambda done, _: progress(GRADIENT_PASSES + done, 0))
        return dataclasses.replace(scores, gradient=gradient)

    def _known(self, full_layers: Sequence[int], example: int, rest: Sequence[int]) -> bool:
        """Whether the base's score of an example is known, and those of the layers in `rest`."""
        row = self._losses(full_layers, example)
        return row is not None and all(row[1 + layer] is not None for layer in rest)

    def _losses(self, full_layers: Sequence[int], example: int) -> list[float | None] | None:
        """What is known of an example: its loss under the base and with each layer full [1 + L]."""
        record = self._store.records.get(_key(full_layers, example))
        return None if record is None else record["losses"]

    def _passes(self, toggled: Sequence[int]) -> float:
        """Of whole models: a stream whose layer is made full starts at that layer where what is below is reused."""
        below = sum(toggled) / self.layers if self._at_once else 0
        return 1 + len(toggled) - below

    def _rows(
        self,
        batch: AnswerBatch,
        short: bool,
        full_layers: tuple[int, ...],
        rest: Sequence[int],
        report: Callable[[float], None],
    ) -> np.ndarray:
        """NLL of the base and with each layer of `rest` full, the base's for a full one, else NaN: [B, 1 + L] f64."""
        toggled = [] if short else rest
        base = self.choosable if short else full_layers
        share = (1 + len(rest)) / (1 + len(toggled))

        def progress(results: int) -> None:
            report(results * share)

        arguments = (self._graph, self._weights, batch, self._data(base), toggled)
        if self._at_once and toggled:
            nll = toggles.reuse(*arguments, toggles_at_once=self._at_once, partition=self._partition, progress=progress)
        else:
            nll = toggles.passes(*arguments, partition=self._partition, progress=progress)
        rows = np.full((1 + self.layers, nll.shape[1]), np.nan)
        rows[[0, *(1 + layer for layer in (*rest, *full_layers))]] = nll[0]
        rows[[1 + layer for layer in toggled]] = nll[1:]
        return rows.T

    def _pattern(self, full_layers: Sequence[int]) -> AttentionPattern:
        return AttentionPattern.from_full_layers(full_layers, self._config, **self.window.fields)

    def _data(self, full_layers: Sequence[int]) -> LayerData:
        return layer_data(self._pattern(full_layers), self._config, toggles.KINDS)


def _key(full_layers: Sequence[int], example: int) -> str:
    return f"{','.join(map(str, full_layers))}:{example}"


def provenance_of(rounds: Sequence[NLLScores]) -> dict[str, Any]:
    """What a greedy search found, as plain JSON values.

    The layers in the order in which they were picked; what each is worth beside those picked before it, with its
    interval; its scores in every round, and the gradients that named the layers tried. Layers not tried have null.
    """
    worth = [Estimate(math.nan, None, None)] * len(rounds[0].mean)
    for scores in rounds:
        for layer, estimate in enumerate(scores.intervals()):
            if layer not in scores.full_layers and not math.isnan(estimate.mean):
                worth[layer] = estimate
    gradients = [scores.gradient.tolist() for scores in rounds if scores.gradient is not None]
    return {
        "picked": [layer for scores in rounds for layer in scores.picked],
        "scores": _known(np.array([one.mean for one in worth])),
        "intervals": [one.interval for one in worth],
        "rounds": [_known(scores.mean) for scores in rounds],
        **({"gradients": gradients} if gradients else {}),
    }


def _known(values: np.ndarray) -> list[float | None]:
    """Plain JSON values: null for NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def tried_by_depth(layers: int, tried: int | None) -> int | None:
    """How many layers a round of a greedy search scores: all of a shallow model's (None), which costs little more."""
    return None if layers < EXACT_BELOW else tried


def shares(budget: int, rounds: int | None) -> list[int]:
    """How many each round of a greedy search takes, in at most so many rounds: nearly the same number."""
    count = budget if rounds is None else min(budget, rounds)
    return [budget // count + (number < budget % count) for number in range(count)]
