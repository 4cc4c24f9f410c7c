"""The search of `swa-jax adapt`: layers (or heads), window, sink tokens and decode mode together, under a budget.

Layers, or heads, are ranked by the default method of `select` until there are as many as the budget leaves full. They
are ranked with sink tokens wherever the target allows these: without them other layers look important. Then the search
goes through its coordinates in turn: it tries every value of one while the others stay, keeps the best, and ends when a
round changes nothing. A candidate has as many full layers as the budget allows, and is scored once on the examples to
choose by.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from swa_jax.adapt.tasks import ROWS_OF_TEXT, EvalTask, Scores, lost, measure, share_right
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import Store, digest
from swa_jax.checkpoint.served_cache import BudgetError, Memory, most_within
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.heads import head_pattern, heuristic_mask
from swa_jax.select.methods import DEFAULT, Ranking, rank
from swa_jax.select.nll import TRIED, tried_by_depth
from swa_jax.select.task import Task

Unit = Literal["layers", "heads"]
SINK_TOKENS = 4  # SWAA's and StreamingLLM's number, where sink tokens are tried
# How what stays full is chosen: layers or heads by the default method, layers by their place alone, or none of them.
BY_LOSS, BY_HEADS, NONE = DEFAULT["layers"], DEFAULT["heads"], "none"
BY_PLACE = ("interleave", "begin-middle-end")
HOW = {
    BY_LOSS: "chosen by the answers' loss",
    BY_HEADS: "chosen by the answers' loss",
    BY_PLACE[0]: "at equal distances",
    BY_PLACE[1]: "at the start, middle and end",
}


class Effort(NamedTuple):
    """How much work goes into a choice and its measurement.

    Attributes:
      examples: prompts of each task to measure on; choose_by: others, to choose by.
      rank_by: of these, how many layers are ranked by; one in `ROWS_OF_TEXT` is a row of text.
      tried: layers that a round of the ranking scores, those that a gradient names; None: all, as in a shallow model.
      rounds: of the ranking, at most: a budget of more layers takes several at a time.
      turns: through layouts, windows and the rest, at most; the search ends when one changes nothing.
    """

    examples: int
    choose_by: int
    rank_by: int
    tried: int | None
    rounds: int
    turns: int


EFFORTS = {
    "quick": Effort(12, 4, 2, 2, 4, 1),
    "normal": Effort(48, 8, 4, TRIED, 8, 3),
    "full": Effort(96, 16, 16, None, 30, 3),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A candidate before it is known how many layers the budget leaves full."""

    layout: str
    window: Window

    def at(self, name: str, value: Any) -> Point:
        """The same but for one coordinate: the layout, or a field of the window."""
        if name == "layout":
            return Point(value, self.window)
        return Point(self.layout, dataclasses.replace(self.window, **{name: value}))


@dataclasses.dataclass(frozen=True)
class Space:
    """What may be chosen: the values of each coordinate that the server can run within the budget.

    Attributes:
      start: where the search begins.
      left_out: a sentence for each value that was left out, and why.
      most: full layers (or heads) of the candidate that has most of them, where they are chosen by their scores.
    """

    start: Point
    values: Mapping[str, tuple[Any, ...]]  # by coordinate of `Point`
    left_out: tuple[str, ...]
    most: int = 0

    def num_candidates(self, turns: int) -> int:
        """How many candidates a search looks at, about: one that changes its mind sees half of the values again."""
        return 1 + round((1.5 if turns > 1 else 1) * sum(len(values) - 1 for values in self.values.values()))


def find_space(memory: Memory, budget: float, windows: Sequence[int], unit: Unit = "layers") -> Space:
    """Ask the server, and the budget, what may be chosen.

    Raises:
      ConfigError: nothing may: the server runs no such windows, or no pattern is within the budget.
    """
    left_out: list[str] = []
    errors: list[ConfigError] = []

    def full_heads(point: Point) -> int | None:
        """How many KV heads stay full; None, with the reason put down, where the candidate is not possible."""
        try:
            return _full_heads(fitting(point, memory, budget), memory)
        except ConfigError as error:
            errors.append(error)
            left_out.append(f"{_title(point)}: {_reason(error)}")
            return None

    def possible(name: str, *values: Any) -> tuple[Any, ...]:
        points = {value: start.at(name, value) for value in values}
        return tuple(value for value, point in points.items() if full_heads(point) is not None)

    chosen = BY_HEADS if unit == "heads" else BY_LOSS
    counts = {size: full_heads(Point(chosen, Window(size, 0, False))) for size in sorted(set(windows))}
    fits = {size: count for size, count in counts.items() if count is not None}
    if not fits:
        raise min(errors, key=lambda error: error.smallest if isinstance(error, BudgetError) else 0.0)
    # The window that leaves most of the model full; of equal ones the largest.
    start = Point(chosen, Window(max(fits, key=lambda size: (fits[size], size)), 0, False))
    sinks = possible("sink_tokens", SINK_TOKENS)
    start = start.at("sink_tokens", max(sinks, default=0))
    values = {
        "layout": (chosen, *possible("layout", *BY_PLACE, NONE)),
        "size": tuple(fits),
        "sink_tokens": (0, *sinks),
        "full_decode": (False, *possible("full_decode", True)),
    }
    heads = 1 if chosen == BY_HEADS else memory.config.most_kv_heads
    return Space(start, values, tuple(left_out), max(fits.values()) // heads)


def fitting(point: Point, memory: Memory, budget: float, order: Sequence[Any] | None = None) -> AttentionPattern:
    """The pattern of a candidate, with as many full layers (or heads) as the budget allows.

    Args:
      order: the layers, or heads (layer, head), the most important first; None takes layers as they come, and heads at
        equal distances, which costs the same memory.

    Raises:
      ConfigError: the server cannot run it, or it is never within the budget.
    """
    layers = memory.config.num_hidden_layers
    heads = memory.config.common_kv_heads if point.layout == BY_HEADS else 1
    total = layers * heads

    def make(full: int) -> AttentionPattern:
        if point.layout == BY_HEADS:
            mask = heuristic_mask("interleave", layers, heads, 1 - full / total)
            if order is not None:
                mask = np.zeros((layers, heads), bool)
                mask[tuple(np.array(order[:full], int).reshape(-1, 2).T)] = True
            return head_pattern(mask, point.window)
        if point.layout in BY_PLACE:
            mask = heuristic_mask(point.layout, layers, 1, 1 - full / total)  # type: ignore[arg-type]
            chosen = np.flatnonzero(mask[:, 0]).tolist()
        else:
            chosen = list(range(layers) if order is None else order)[:full]
        return AttentionPattern.from_full_layers(chosen, layers, **point.window.fields)

    most = 0 if point.layout == NONE else total - 1  # with all of them full nothing is windowed
    return most_within(memory, budget, most, make)


def _full_heads(pattern: AttentionPattern, memory: Memory) -> int:
    """KV heads with full attention; full-attention decode does not count."""
    plain = pattern.with_window(Window(full_decode=False))
    return int(plain.full_cache_heads(memory.config.most_kv_heads).sum())


@dataclasses.dataclass
class Search:
    """The search with everything it needs; a killed one goes on from its files in `folder`.

    Attributes:
      original: the scores of the model as it was, on `tasks`.
      key: what the scores depend on but for the pattern, so that another budget finds in the files what it needs.
      progress: called with a line of text, and with how many steps of how many are done.
    """

    model: Decoder
    tasks: Sequence[EvalTask]
    original: Scores
    memory: Memory
    budget: float
    space: Space
    folder: Path
    key: str
    batch_size: int
    effort: Effort
    seed: int
    report: Callable[[str], None]
    progress: Callable[[int, int], None]

    def __post_init__(self) -> None:
        self._order: list[Any] | None = None
        self._layer_scores: list[list[float | None]] = []
        self._ranked: dict[str, Any] = {}  # for the patterns' provenance
        self._left_out: list[str] = []
        self._scores = Store(self.folder / "candidates.jsonl", "candidates of a search", part=self.key)

    def __call__(self) -> dict[str, Any]:
        """The candidates that were tried, the best one's place, and what each layer is worth: plain JSON values."""
        start = self.space.start
        if self.space.most:
            self._rank()
        rows: dict[Point, dict[str, Any] | None] = {}

        def value(point: Point) -> tuple[float, int]:
            if point not in rows:
                rows[point] = self._row(point)
            row = rows[point]
            return (math.inf, 0) if row is None else (row["lost"], row["bytes"])

        best = start
        for _ in range(self.effort.turns):
            before = best
            for name, values in self.space.values.items():
                others = [best.at(name, one) for one in values]
                best = min([best, *others], key=value)  # of equals the one there is
            if best == before:
                break
        possible = {point: row for point, row in rows.items() if row is not None}
        if best not in possible:
            raise ConfigError(f"no candidate is possible: {self._left_out[0]}")
        return {
            "candidates": list(possible.values()),
            "best": list(possible).index(best),
            "layer_scores": self._layer_scores,
            "left_out": [*self.space.left_out, *self._left_out],
        }

    def _rank(self) -> None:
        """Put layers, or heads, in order, the most important first: each by what it saves beside those before it."""
        start, effort = self.space.start, self.effort
        examples = [
            example
            for task in self.tasks
            for example in task.examples[: effort.rank_by if task.answers else max(1, effort.rank_by // ROWS_OF_TEXT)]
        ]
        task = Task(
            self.model,
            examples,
            start.window,
            batch_size=self.batch_size,
            seed=self.seed,
            file=self.folder / "ranked.jsonl",
            weights=self.key,
            progress=self.progress,
            force=True,  # whether the tasks tell anything was asked before the search
        )
        total = layers = self.memory.config.num_hidden_layers
        own: dict[str, Any] = {"tried": effort.tried or 0, "rounds": effort.rounds}
        if start.layout == BY_HEADS:
            total *= self.memory.config.common_kv_heads
        else:
            at_once = 1 if jax.default_backend() == "cpu" else TRIED
            own |= {"tried": tried_by_depth(layers, effort.tried) or 0, "toggles_at_once": at_once}
        ranking = rank(start.layout, task, [1 - self.space.most / total], **own)
        assert isinstance(ranking, Ranking)
        self._order, self._ranked = ranking.order, ranking.provenance
        if start.layout == BY_LOSS:
            worth = zip(self._ranked["scores"], self._ranked["intervals"], strict=True)
            self._layer_scores = [[score, *(interval or (None, None))] for score, interval in worth]

    def _row(self, point: Point) -> dict[str, Any] | None:
        """A candidate with its scores; None where it is not possible, which it was at the start of the search."""
        try:
            pattern = self._pattern(point)
            taken = self.memory.bytes(pattern)
        except ConfigError as error:
            self._left_out.append(f"{_title(point)}: {_reason(error)}")
            return None
        content = dataclasses.asdict(pattern)
        del content["provenance"]
        name = digest(content)
        if name not in self._scores.records:
            self._scores.add(name, **self._score(pattern))
        row = (
            {"layout": point.layout, **point.window.fields}
            | self._scores.records[name]
            | {
                "full_layers": list(pattern.full_layers),
                "full_head_counts": list(pattern.full_head_counts),
                "bytes": taken,
                "share": taken / self.memory.full,
                "pattern": json.loads(pattern.to_json()),
            }
        )
        right = "" if row["right"] is None else f", {row['right']:.0%} right"
        title = _title(point, any(pattern.full_head_counts) or bool(pattern.full_layers))
        lost = f"loss {row['lost']:+.3f} nats a token against the original"
        self.report(f"{title}: {lost}{right}, {row['share']:.1%} of the cache")
        return row

    def _score(self, pattern: AttentionPattern) -> dict[str, Any]:
        scores = measure(self.model, self.tasks, pattern, self.batch_size, self.progress)
        return {"lost": lost(scores, self.original), "right": share_right(scores)}

    def _pattern(self, point: Point) -> AttentionPattern:
        pattern = fitting(point, self.memory, self.budget, self._order)
        provenance = {"method": f"adapt: {point.layout}", "seed": self.seed, "kv_budget": self.budget}
        if point.layout in (BY_LOSS, BY_HEADS):
            provenance |= self._ranked
        return dataclasses.replace(pattern, provenance=provenance)


def _title(point: Point, some_full: bool = True) -> str:
    window = point.window
    more = f", {window.sink_tokens} sink tokens" if window.sink_tokens else ""
    more += ", full-attention decode" if window.full_decode else ""
    unit = "heads" if point.layout == BY_HEADS else "layers"
    chosen = f"full {unit} {HOW[point.layout]}" if some_full and point.layout in HOW else f"no full {unit}"
    return f"window {window.size}, {chosen}{more}"


def _reason(error: ConfigError) -> str:
    """Why a candidate is not possible, without the advice."""
    if isinstance(error, BudgetError):
        return f"takes at least {error.smallest:.1%} of full attention's cache"
    return str(error).split("; ")[0]
