"""Selection, comparison and evaluation of a hybrid with linear layers: they speak of its attention layers alone."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import fails, run
from layer_letters import letters_of
from tiny_models import byte_checkpoint

import swa_jax
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.cli.compare import Choice
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.layer_types import FULL, LINEAR
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.compare import PatternComparison
from swa_jax.select.methods import METHODS, choose
from swa_jax.select.task import Task

GOLDEN = Path(__file__).parents[1] / "golden" / "linear" / "qwen3-5-eight"
ATTENDING = (1, 6, 7)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    model = swa_jax.load_model(import_model(GOLDEN, tmp_path_factory.mktemp("hybrid") / "model"))
    rng = np.random.default_rng(5)
    examples = [Example(rng.integers(0, 131, 40).tolist(), rng.integers(0, 131, 3).tolist(), []) for _ in range(4)]
    return Task(model, examples, Window(8, 0, False, 0), force=True)


@pytest.mark.parametrize(("method", "options"), [("nll", {}), ("nll-greedy", {}), ("nll-gradient", {"tried": 3})])
def test_layers_are_chosen_by_the_loss_of_real_passes(task, method, options):
    """The best single layer is the one under which the answers' loss, computed pattern by pattern, is least."""

    def loss(full: tuple[int, ...]) -> float:
        pattern = AttentionPattern.from_full_layers(full, task.model.config, 8)
        return float(score_answers(task.model, task.examples, pattern=pattern).nll.mean())

    windowed, losses = loss(()), [loss((layer,)) for layer in ATTENDING]
    (pattern,) = choose(method, task, [2 / 3], **options)
    assert pattern.full_layers == (ATTENDING[int(np.argmin(losses))],)
    assert letters_of(pattern).replace("F", "w") == "LwLLLLww"
    scores = pattern.provenance["scores"]
    assert [layer for layer, score in enumerate(scores) if score is not None] == [*ATTENDING]
    np.testing.assert_allclose([scores[layer] for layer in ATTENDING], windowed - np.array(losses), atol=1e-4)


def test_shares_are_of_attention_layers(task):
    for method in ("interleave", "begin-middle-end", "random"):
        found = [letters_of(pattern) for pattern in choose(method, task, [1, 2 / 3, 1 / 3, 0])]
        assert [row.count("F") for row in found] == [0, 1, 2, 3]
        assert {row.replace("F", "w") for row in found} == {"LwLLLLww"}


def test_layers_are_chosen_at_the_command_line(byte_tokenizer, tmp_path):
    types = (LINEAR, FULL, LINEAR, FULL)
    model = byte_checkpoint(
        tmp_path, byte_tokenizer, AttentionPattern(types), num_hidden_layers=4, linear_layers=(0, 2),
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    needles = ("--window", 16, "--examples", 2, "--length", 320, "--batch-size", 2, "--force")
    run("select", "nll-gradient", model, "--budget", 1, *needles, "--out", tmp_path / "layer.json")
    pattern = AttentionPattern.from_json(tmp_path / "layer.json")
    assert letters_of(pattern) in ("LFLw", "LwLF")
    said = fails("select", "kl", model, "--budget", 1, *needles, "--out", tmp_path / "other.json")
    assert "method 'kl' looks at the attention of every layer, and this model has linear layers" in said
    said = fails("adapt", model, tmp_path / "adapted", "--kv-budget", 0.5)
    assert said.startswith("adapt is not made yet for models with linear layers")
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({
        "output": "runs/none", "tokenizer": "none", "init_from": str(model), "pattern": "window", "sliding_window": 16,
        "stages": [{"steps": 1, "sequence_length": 64, "batch_size": 4}],
    }))  # fmt: skip
    said = fails("compile", config, "--topology", "v5e:2x2")
    assert said.startswith("a plan is not made yet for models with linear layers")


def test_a_comparison_takes_the_methods_that_take_the_model(task, tmp_path):
    """A name that is given is refused before anything is scored; of all, those that can are taken."""
    with pytest.raises(ConfigError, match="method 'kl' looks at the attention of every layer"):
        PatternComparison(task.model, task.examples, tmp_path, lambda _: [], {}, ["interleave", "kl"], [0.5], [0])
    assert not list(tmp_path.iterdir())
    found = Choice(method=["all"]).fitting([*METHODS], task.model.config)
    assert found == [name for name, method in METHODS.items() if method.hybrids]


@pytest.mark.parametrize("method", sorted(name for name, method in METHODS.items() if not method.hybrids))
def test_other_methods_are_refused(task, method):
    with pytest.raises(
        ConfigError, match=f"method '{method}' looks at the attention of every layer, .* nll, nll-greedy"
    ):
        choose(method, task, [0.5])
