"""What is to be chosen, and what a method finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from swa_jax.base.errors import ConfigError

if TYPE_CHECKING:
    from swa_jax.evaluate.examples import Example
    from swa_jax.evaluate.nll import AnswerScores
    from swa_jax.model.decoder import Decoder
    from swa_jax.model.pattern import AttentionPattern
    from swa_jax.model.sharding import Partition
    from swa_jax.model.window import Window

type Chosen = tuple[np.ndarray, dict[str, Any]]  # a mask [L, K] bool, True = full; or [L, 1]. And its provenance


@dataclasses.dataclass
class Task:
    """What is to be chosen, and by what: the same for every method.

    Attributes:
      model: methods that look at places alone read its `config` only.
      examples: what to choose by.
      window: of the windowed layers or heads, in the patterns and while those methods choose that run the model with
        windows; what it does not give is the model's own.
      heads_in: KV heads that stay full or windowed together, neighbours in a layer. The plug-in for vLLM then has fewer
        and larger modules of attention to run.
      data: what the examples are, for the provenance; seed: how they were drawn, and the seed of the method.
      file: where a search keeps its scores, so that an interrupted one goes on; weights: for that file, the sum of the
        weights, as in `content_key`.
      partition: the mesh on which weights and examples lie; only methods that say `meshes` take one.
      force: choose also where the examples do not tell full attention from windows.
      report: called with a line of text; progress: with (steps done, steps expected).
    """

    model: Decoder
    examples: Sequence[Example]
    window: Window
    batch_size: int = 8
    seed: int = 0
    heads_in: int = 1
    data: str = ""
    file: Path | None = None
    weights: str | None = None
    partition: Partition | None = None
    force: bool = False
    report: Callable[[str], None] = lambda _: None
    progress: Callable[[int, int], None] = lambda *_: None
    _ends: dict[Window, tuple[AnswerScores, AnswerScores]] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        refuse_nope(self.model.pattern)
        self.window = self.window.of(self.model.pattern.window)
        if self.heads_in > 1 and (heads := self.model.config.common_kv_heads) % self.heads_in:
            raise ConfigError(f"--heads-in {self.heads_in} does not divide the {heads} KV heads of a layer")

    @property
    def shape(self) -> tuple[int, int]:
        """(L, K): layers, and groups of `heads_in` KV heads in each."""
        return self.model.config.num_hidden_layers, self.model.config.common_kv_heads // self.heads_in

    def ends(self, window: Window) -> tuple[AnswerScores, AnswerScores]:
        """The scores of the examples under full attention, and under this window in every layer; computed once."""
        from swa_jax.evaluate.nll import score_answers
        from swa_jax.model.pattern import AttentionPattern

        config = self.model.config
        if window not in self._ends:
            options: dict[str, Any] = {"batch_size": self.batch_size, "partition": self.partition}
            full, windowed = (
                score_answers(
                    self.model,
                    self.examples,
                    pattern=AttentionPattern.from_full_layers(kept, config, **window.fields),
                    **options,
                )
                for kept in (config.attention_layers, ())
            )
            self._ends[window] = full, windowed
        return self._ends[window]

    def refuse(self, reason: str, advice: str = "take longer prompts or a smaller window") -> None:
        """Stop before anything is chosen by nothing; with `force` say so and go on."""
        if not self.force:
            raise ConfigError(
                f"{reason}: the choice would mean nothing, and no pattern is written. {advice[0].upper()}{advice[1:]}, "
                "or choose all the same with --force"
            )
        self.report(f"{reason}: the choice means nothing")


class Ranking(NamedTuple):
    """Layers, or KV heads, the most important first.

    Attributes:
      order: layers, or pairs (layer, KV head); a search has only as many as were asked for.
      shape: [L, 1] for layers, [L, K] for heads.
      linear: layers that have no attention, and are in no ranking.
      provenance: what they were ranked by, as plain JSON values.
    """

    order: list[Any]
    shape: tuple[int, int]
    provenance: dict[str, Any]
    linear: tuple[int, ...] = ()

    def first(self, ratio: float) -> Chosen:
        """The mask that leaves as many full as `ratio` does not window."""
        count = num_full(ratio, (self.shape[0] - len(self.linear)) * self.shape[1])
        mask = np.zeros(self.shape, bool)
        for unit in self.order[:count]:
            mask[unit] = True
        picked = {"picked": self.order[:count]} if "picked" in self.provenance else {}
        return mask, self.provenance | picked


def refuse_nope(pattern: AttentionPattern) -> None:
    """Raise `ConfigError` for a model whose own pattern says which layers are not rotated: no other can be scored."""
    if pattern.nope_full_layers:
        raise ConfigError(
            "this model's own pattern has nope_full_layers: it was trained without rotary embeddings in those full "
            "layers, so no other choice of layers or heads fits it. Choose with the model that it was trained from"
        )


def num_full(ratio: float, total: int) -> int:
    """How many of `total` layers or heads stay full where the share `ratio` is windowed, rounded up."""
    from swa_jax.select.heads import windowed_count

    return total - windowed_count(ratio, total)
