"""Scores in a file belong to the content that they were made from, whatever its name and however alike it scores."""

import dataclasses
import inspect
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import run
from flax import nnx
from planted import planted_examples, planted_model
from plants import KV_HEADS, LAYERS, WINDOW_SIZE
from tiny_models import BYTES, SOFTMAX, byte_checkpoint, in_bfloat16, make

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import digest
from swa_jax.checkpoint.folder import load_model, save_model, weights_sum
from swa_jax.evaluate import Example
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import LayerScorer, MaskEvaluator
from swa_jax.select.content import content_key

FULL = np.ones((LAYERS, KV_HEADS), bool)


def saturated(**changes):
    """A planted model so sure of its answers that its likelihoods under full attention are all 0."""
    model = planted_model(**changes)
    model.lm_head.kernel[...] = 1000 * model.lm_head.kernel[...]
    return model


def mute(seed):
    """A model whose head says the same of every token: all of them score the logarithm of the vocabulary."""
    model = Decoder(BYTES, AttentionPattern.from_recipe("full", 2), rngs=nnx.Rngs(seed))
    model.lm_head.kernel[...] = jnp.zeros_like(model.lm_head.kernel[...])
    return model


def test_a_saturated_model_is_not_taken_for_another(tmp_path):
    file, examples = tmp_path / "scores.json", planted_examples()
    options = {"window": Window(WINDOW_SIZE), "batch_size": 8, "file": file}
    first, other = (
        MaskEvaluator(saturated(), examples, **options),
        MaskEvaluator(saturated(seed=3), examples, **options),
    )
    np.testing.assert_allclose(first(FULL), other(FULL), atol=1e-3)  # full attention does not tell them apart
    assert not np.allclose(first(~FULL), other(~FULL), rtol=1e-3)
    again = MaskEvaluator(saturated(), examples, **options)  # the same weights, made anew
    assert again.num_evaluations == 2


HOW = {"batch_size", "toggles_at_once", "partition", "heads_in", "file", "weights"}  # made, not which


@pytest.mark.parametrize("scorer", [MaskEvaluator, LayerScorer])
def test_other_content_begins_anew_beside_what_is_kept(scorer, tmp_path):
    file, examples, own = tmp_path / "scores.json", [Example(list(range(20)), [5, 6], [])], Window(4, 4, False)
    parameters = inspect.signature(scorer).parameters.values()
    deciding = {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY and p.name not in HOW}

    def make_scorer(model=None, examples=examples, window=None, **options):
        return scorer(mute(0) if model is None else model, examples, window or own, file=file, **options)

    def known(**options):
        made = make_scorer(**options)
        return made.num_known if scorer is LayerScorer else made.num_evaluations

    def score(**options):
        made = make_scorer(**options)
        made() if scorer is LayerScorer else made(np.ones((2, 1), bool))

    half = in_bfloat16(mute(0))
    score()
    score(weights="a folder's")
    before = file.read_bytes()
    others = [
        {"model": mute(1)},
        {"model": half},
        {"model": half, "weights": "a folder's"},
        {"weights": "another folder's"},
        {"examples": [Example(list(range(20)), [5, 7], [])]},
        *({"window": window} for window in (Window(5, 4, False), Window(4, 5, False), Window(4, 4, True))),
        *({name: f"not {value}"} for name, value in deciding.items()),
    ]
    assert [known(**options) for options in others] == [0] * len(others)
    score(**others[0])
    assert file.read_bytes().startswith(before)
    assert known() == known(**others[0]) == known(weights="a folder's") == 1
    file.write_text("{}")
    with pytest.raises(ConfigError, match="holds no scores of"):
        known()


def test_the_content_key_sees_what_decides_and_nothing_else():
    model = Decoder(SOFTMAX, make("wwww"), rngs=nnx.Rngs(0))
    examples = [Example([1, 2, 3], [4], ["four"]), Example([5, 6], [7, 8], [])]
    key = content_key(model, examples, sliding_window=6)
    same = [Example(np.array([1, 2, 3]), (4,), [], {"depth": 0.5}), examples[1]]
    assert content_key(model.with_pattern(make("FFFF", sliding_window=None)), same, sliding_window=6) == key
    assert digest(dict(reversed(key.items()))) == digest(key)
    stretched = Decoder(dataclasses.replace(SOFTMAX, rope_theta=5e5), make("wwww"), rngs=nnx.Rngs(0))
    nudged = Decoder(SOFTMAX, make("wwww"), rngs=nnx.Rngs(0))
    kernel = nudged.layers.mlp.down_proj.kernel
    kernel[...] = kernel[...].at[-1, -1, -1].multiply(1 + 1e-6)
    for name, changed in (
        ("config", content_key(stretched, examples, sliding_window=6)),
        ("weights", content_key(nudged, examples, sliding_window=6)),
        ("weights", content_key(model, examples, sliding_window=6, weights="other")),
        ("examples", content_key(model, examples[::-1], sliding_window=6)),
        ("examples", content_key(model, [Example([1, 2, 3, 4], [], []), examples[1]], sliding_window=6)),
        ("examples", content_key(model, [Example([1, 2, 9], [4], []), examples[1]], sliding_window=6)),
        ("examples", content_key(model, [dataclasses.replace(examples[0], value=(0,)), examples[1]], sliding_window=6)),
        ("sliding_window", content_key(model, examples, sliding_window=7)),
    ):
        assert [part for part in key if key[part] != changed[part]] == [name]


def test_a_folders_sum_is_that_of_its_weights(tmp_path):
    def save(seed, name, pattern):
        return save_model(Decoder(BYTES, make(pattern), rngs=nnx.Rngs(seed)), tmp_path / name)

    first, other = save(0, "first", "ww"), save(1, "other", "ww")
    shutil.copytree(first, tmp_path / "copy")
    make("Fw", sliding_window=3).to_json(tmp_path / "copy" / "pattern.json")
    assert weights_sum(first) == weights_sum(str(tmp_path / "copy")) != weights_sum(other)


def test_weights_changed_under_the_same_path_are_noticed(tmp_path, byte_tokenizer):
    """Where the model's answers are so alike that no likelihood tells."""
    checkpoint = byte_checkpoint(tmp_path, byte_tokenizer, make("ww"))
    options = ("--window", 16, "--examples", 2, "--length", 320, "--batch-size", 2, "--force", "--budget", 1)
    options = (*options, "--resume-file", tmp_path / "scores.json", "--out", tmp_path / "p.json")
    assert "examples here" not in run("select", "nll", checkpoint, *options)
    assert "found 2 of 2 examples here" in run("select", "nll", checkpoint, *options)
    model = load_model(checkpoint)
    shutil.rmtree(checkpoint)
    kernel = model.layers.mlp.down_proj.kernel
    kernel[...] = kernel[...] * (1 + 1e-5)
    save_model(model, checkpoint, tokenizer_from=byte_tokenizer.parent)
    assert "examples here" not in run("select", "nll", checkpoint, *options)
