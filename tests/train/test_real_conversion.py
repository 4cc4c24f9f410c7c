"""SmolLM2 converted by configs/swiattn/cpt-smollm2.yaml: where training starts, and that it lowers the loss."""

import functools
from pathlib import Path

import numpy as np
import pytest
from real_models import real_model
from training_runs import read_metrics

from swa_jax.base.settings import load_config
from swa_jax.checkpoint.folder import load_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.train.config import TrainConfig
from swa_jax.train.loop import train
from swa_jax.train.patterns import find_start, run_pattern

pytestmark = pytest.mark.models
CONFIG = Path(__file__).parents[2] / "configs" / "swiattn" / "cpt-smollm2.yaml"
HYBRID = ("method=null", "pattern=interleave-1-in-4")
NOPE = ("method=null", "pattern=interleave-1-in-4+nope")
TOLERANCE = 1e-3  # as beside transformers: tests/checkpoint/test_real_gguf.py
TOKENS = np.random.default_rng(0).integers(0, 49152, (1, 48))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return import_model(real_model("smollm2"), tmp_path_factory.mktemp("real") / "smollm2")


@pytest.fixture(scope="module")
def logits(folder):
    """The logits [T, V] at the first step of a run with these settings, or of the original."""
    original = functools.cache(lambda: np.asarray(load_model(folder, dtype="float32")(TOKENS))[0])

    def of(*overrides):
        if not overrides:
            return original()
        config = load(folder, *overrides)
        start = find_start(config)
        model = load_model(folder, run_pattern(config, start), dtype="float32", config=start.config)
        return np.asarray(model(TOKENS))[0]

    return of


def load(folder, *overrides):
    return load_config(TrainConfig, CONFIG, [f"init_from={folder}", f"tokenizer={folder}", *overrides])


def test_open_routers_start_as_the_original_and_closed_ones_as_its_windows(logits):
    """A window of 16 cuts the 48 tokens; routers are open or closed whatever their weights draw."""
    opened, closed = (logits("sliding_window=16", f"model_changes.router_bias_init={bias}") for bias in (1e3, -1e3))
    windows = logits("sliding_window=16", "method=swa-cpt")
    np.testing.assert_allclose(opened, logits(), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(closed, windows, rtol=0, atol=TOLERANCE)
    assert np.abs(windows - logits())[16:].max() > 1


def test_a_hybrid_starts_as_the_original_but_for_windows_and_positions(logits):
    whole, cut, nope = (logits(*HYBRID), logits(*HYBRID, "sliding_window=16"), logits(*NOPE))
    np.testing.assert_allclose(whole, logits(), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(cut[:16], logits()[:16], rtol=0, atol=TOLERANCE)
    assert np.abs(cut - logits())[16:].max() > 1
    # One token alone has no positions to tell apart.
    np.testing.assert_allclose(nope[0], logits()[0], rtol=0, atol=TOLERANCE)
    assert np.abs(nope - logits())[1:].max() > 1


@pytest.mark.parametrize("overrides", [(), NOPE], ids=["swiattn", "hybrid+nope"])
def test_a_few_steps_lower_the_loss_of_held_out_text(folder, overrides, tmp_path):
    few = ("stages.0.steps=3", "stages.0.sequence_length=64", "stages.0.batch_size=1", "sliding_window=16")
    often = ("validate_every=3", "validation_batches=2", "optimizer.warmup_steps=1", "optimizer.schedule=constant")
    train(load(folder, *few, *often, *overrides, f"output={tmp_path / 'run'}"), quiet=True)
    before, after = (line["validation_loss"] for line in read_metrics(tmp_path / "run") if "validation_loss" in line)
    assert after < before
