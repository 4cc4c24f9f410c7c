"""Small training runs: what they logged, and how to interrupt them."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import swa_jax.train.loop

TEXT = "One of the special magic numbers for brave-otter is: 4821673.\n" * 40


def text_in(folder):
    """The data of a stage: a text, which is written into the folder."""
    (folder / "text.txt").write_text(TEXT)
    return [{"files": [f"{folder}/text.txt"]}]


def read_metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def assert_same_weights(one, other):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))


class Interruption(Exception):
    pass


def interrupted(step, train, *arguments, **options):
    """Train until the metrics of a step are known."""

    def look(line, config):
        if line["step"] == step:
            raise Interruption

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(swa_jax.train.loop, "_stop_on_nan", look)
        with pytest.raises(Interruption):
            train(*arguments, **options)
