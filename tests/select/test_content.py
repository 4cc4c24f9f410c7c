"""Scores in a file belong to the content that they were made from, whatever its name and however alike it scores."""

import dataclasses
import inspect
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import fails, run
from flax import nnx
from planted import KV_HEADS, LAYERS, WINDOW_SIZE, planted_examples, planted_model
from tiny_models import BYTES, SOFTMAX, byte_checkpoint, make

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import digest
from swa_jax.checkpoint.folder import load_model, save_model
from swa_jax.evaluate import Example
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import LayerScorer, MaskEvaluator

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
    options = {"window": Window(WINDOW_SIZE), "batch_size": 16}
    first, other = saturated(), saturated(seed=3)
    scored = MaskEvaluator(first, examples, file=file, **options)
    alone = MaskEvaluator(other, examples, **options)
    np.testing.assert_allclose(scored(FULL), alone(FULL), atol=1e-3)  # full attention does not tell them apart
    assert not np.allclose(scored(~FULL), alone(~FULL), rtol=1e-3)
    with pytest.raises(ConfigError, match=r"masks of other content \(other weights, so that it is of another model"):
        MaskEvaluator(other, examples, file=file, **options)
    again = MaskEvaluator(saturated(), examples, file=file, **options)  # the same weights, made anew
    assert again.num_evaluations == 2


@pytest.mark.parametrize("scorer", [MaskEvaluator, LayerScorer])
def test_models_that_score_alike_have_files_of_their_own(scorer, tmp_path):
    file, examples = tmp_path / "scores.json", [Example(list(range(20)), [5, 6], [])]

    def make_scorer(model=None, examples=examples, **options):
        model = mute(0) if model is None else model
        return scorer(model, examples, **({"window": Window(4), "file": file} | options))

    made = make_scorer()
    if scorer is LayerScorer:
        made()
    else:
        made(np.ones((2, 1), bool))
    before = file.read_bytes()
    graph, state = nnx.split(mute(0))
    half = nnx.merge(graph, nnx.map_state(lambda _, x: x.replace(x[...].astype(jnp.bfloat16)), state))
    for said, options in (
        ("other weights, so that it is of another model", {"model": mute(1)}),
        ("other weights, so that it is of another model", {"model": half}),
        ("other examples", {"examples": [Example(list(range(20)), [5, 7], [])]}),
    ):
        with pytest.raises(ConfigError, match=said):
            make_scorer(**options)
    assert file.read_bytes() == before
    file.unlink()
    made = make_scorer(weights="a folder's")
    made(np.ones((2, 1), bool)) if scorer is MaskEvaluator else made()
    with pytest.raises(ConfigError, match="dtype was float32 there and is bfloat16 here"):
        make_scorer(half, weights="a folder's")


HOW = {"batch_size", "reuse", "toggles_at_once", "partition", "file", "weights"}  # scores are made: not which they are


@pytest.mark.parametrize("scorer", [MaskEvaluator, LayerScorer])
def test_every_option_that_decides_is_in_the_key(scorer, tmp_path):
    model, examples = mute(0), [Example(list(range(20)), [5, 6], [])]
    parameters = inspect.signature(scorer).parameters.values()
    deciding = {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY and p.name not in HOW}
    given = deciding | dataclasses.asdict(Window(4, 4, False))

    def make_scorer(given):
        window = Window(*(given[field.name] for field in dataclasses.fields(Window)))
        options = {name: given[name] for name in deciding}
        return scorer(model, examples, window, file=tmp_path / "scores.json", weights="a", **options)

    made = make_scorer(given)
    made() if scorer is LayerScorer else made(np.ones((2, 1), bool))
    for name, value in given.items():
        other = {bool: lambda x: not x, str: lambda x: f"not {x}"}.get(type(value), lambda x: x + 1)
        changed = given | {name: other(value)}
        with pytest.raises(ConfigError, match=f"was {value} there and is {changed[name]} here"):
            make_scorer(changed)


def test_the_content_key_sees_what_decides_and_nothing_else():
    from swa_jax.select.content import content_key

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
    from swa_jax.checkpoint.folder import weights_sum

    def save(seed, name, pattern):
        return save_model(Decoder(BYTES, make(pattern), rngs=nnx.Rngs(seed)), tmp_path / name)

    first, other = save(0, "first", "ww"), save(1, "other", "ww")
    shutil.copytree(first, tmp_path / "copy")
    make("Fw", sliding_window=3).to_json(tmp_path / "copy" / "pattern.json")
    assert weights_sum(first) == weights_sum(str(tmp_path / "copy")) != weights_sum(other)


def test_weights_changed_under_the_same_path_are_noticed(tmp_path, byte_tokenizer):
    """Where the model's answers are so alike that no likelihood tells."""
    checkpoint = byte_checkpoint(tmp_path, byte_tokenizer, make("ww"))
    options = ("--window", 16, "--examples", 2, "--length", 320, "--batch-size", 2)
    options = (
        *options,
        "--force",
        "--budget",
        1,
        "--resume-file",
        tmp_path / "scores.json",
        "--out",
        tmp_path / "p.json",
    )
    run("select", "nll", checkpoint, *options)
    before = (tmp_path / "p.json").read_bytes()
    model = load_model(checkpoint)
    shutil.rmtree(checkpoint)
    kernel = model.layers.mlp.down_proj.kernel
    kernel[...] = kernel[...] * (1 + 1e-5)
    save_model(model, checkpoint, tokenizer_from=byte_tokenizer.parent)
    assert fails("select", "nll", checkpoint, *options) == (
        f"{tmp_path / 'scores.json'} holds scores of layers of other content (other weights, so that it is of another "
        "model): name another file, or remove this one to start over"
    )
    assert (tmp_path / "p.json").read_bytes() == before
    stale = (*options[:-4], "--resume-file", tmp_path / "new.json", "--out", tmp_path / "p.json")
    run("select", "nll", checkpoint, *stale)
