"""What the demo asks of a model: chains of the bundled one, needles of any other.

Chains need several look-ups inside the prompt, and words that only the bundled model's tokenizer writes as one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from swa_jax.adapt.tasks import HOPS, RIVALS
from swa_jax.data.haystack import Haystack, library_files
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.errors import ConfigError
from swa_jax.evaluate import Example, needle_examples
from swa_jax.evaluate.chains import ChainCell, chains_in_turn
from swa_jax.model.config import ModelConfig

EXAMPLES = 24  # of each kind of chain
CALIBRATION_EXAMPLES = 8  # the same, for selection, drawn with another seed
EVALUATION_SEED, CALIBRATION_SEED = 1, 2

CHAIN_LENGTH, CHAIN_WINDOW = 384, 32

NEEDLE_LENGTH = 1024  # tokens of prompt and answer together
NEEDLE_WINDOW = 48  # with 8 layers, what windows can pass on reaches back 384 tokens; the needles lie further back
NEEDLE_EXAMPLES, NEEDLE_CALIBRATION = 48, 16
NEEDLE_DEPTHS = 6
NEEDLE_TOKENS = 20  # the answer has about 18


class Questions(NamedTuple):
    """What patterns are chosen by and measured on.

    Attributes:
      examples: to measure on; number i is of kind `kinds[i % len(kinds)]`.
      calibration: others, to choose layers and heads by.
      kinds: of questions, as the columns of a table.
      about: what `kinds` are.
      sliding_window: of every pattern that has windows.
      max_new_tokens: as many as the longest answer has.
      notes: sentences for the report.
    """

    examples: list[Example]
    calibration: list[Example]
    kinds: list[str]
    about: str
    sliding_window: int
    max_new_tokens: int
    notes: list[str]


def chain_questions(tokenizer: Tokenizer) -> Questions:
    """Chains of one, two and three hops whose statements lie further apart than a window reaches."""

    def draw(count: int, seed: int) -> list[Example]:
        cells = [ChainCell(hops, RIVALS, CHAIN_LENGTH) for hops in HOPS]
        return chains_in_turn(tokenizer, cells, count * len(HOPS), gap=CHAIN_WINDOW, seed=seed)

    note = (
        f"A question is answered by chains of 1 to {max(HOPS)} statements (hops) in {CHAIN_LENGTH} tokens, among "
        f"{RIVALS} rivals. The statements of a chain are at least {CHAIN_WINDOW} tokens apart, as many as the window "
        "has: each must be looked up through a full layer or head. Names, numbers and places are drawn anew."
    )
    examples, calibration = draw(EXAMPLES, EVALUATION_SEED), draw(CALIBRATION_EXAMPLES, CALIBRATION_SEED)
    kinds = [f"{hops} hop{'s' if hops > 1 else ''}" for hops in HOPS]
    longest = max(len(example.answer) for example in examples)
    return Questions(examples, calibration, kinds, "Statements to look up", CHAIN_WINDOW, longest, [note])


def needle_questions(tokenizer: Tokenizer, config: ModelConfig) -> Questions:
    """Numbers hidden so deep that windows alone cannot pass them on."""
    highest = deepest_needle(config)
    depths = np.linspace(0.02, highest, NEEDLE_DEPTHS).round(3).tolist()
    haystack = Haystack(tokenizer, library_files(held_out=True))

    def draw(num_examples: int, seed: int) -> list[Example]:
        return needle_examples(
            tokenizer, length=NEEDLE_LENGTH, num_examples=num_examples, depths=depths, haystack=haystack, seed=seed
        )

    note = (
        f"Needles lie at depths of 2 % to {highest:.0%}, further from the question than the "
        f"{config.num_hidden_layers} x {NEEDLE_WINDOW} tokens that windows alone can pass on. The haystack is Python "
        "library source; keys, numbers and places are drawn anew."
    )
    examples, calibration = draw(NEEDLE_EXAMPLES, EVALUATION_SEED), draw(NEEDLE_CALIBRATION, CALIBRATION_SEED)
    kinds = _places(examples[:NEEDLE_DEPTHS])
    about = "Depth of the needle in the prompt"
    return Questions(examples, calibration, kinds, about, NEEDLE_WINDOW, NEEDLE_TOKENS, [note])


def _places(examples: Sequence[Example]) -> list[str]:
    return [f"{100 * one.meta['needle_start'] / len(one.prompt):.0f} %" for one in examples]


def deepest_needle(config: ModelConfig) -> float:
    """The greatest depth at which a whole needle lies beyond what the windows of all layers can pass on."""
    reach, needle = config.num_hidden_layers * NEEDLE_WINDOW, 32
    depth = 1 - (reach + needle) / (NEEDLE_LENGTH - NEEDLE_TOKENS)
    if depth < 0.2 or config.num_hidden_layers < 4:
        most = int(0.76 * NEEDLE_LENGTH / NEEDLE_WINDOW)
        raise ConfigError(
            f"the demo needs a model of at least 4 and at most {most} layers: with {config.num_hidden_layers} and a "
            f"window of {NEEDLE_WINDOW}, {NEEDLE_LENGTH} tokens would not tell patterns apart"
        )
    return depth
