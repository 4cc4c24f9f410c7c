"""`init_optimizer`: a run that goes on with an earlier one's optimizer is the uninterrupted run, bit for bit."""

import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import BYTES
from training_runs import assert_same_weights, interrupted, read_metrics

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.checkpoint.folder import load_model, save_model
from swa_jax.model.lora import trained_and_frozen
from swa_jax.train.earlier_run import with_earlier_optimizer
from swa_jax.train.loop import TrainConfig, train
from swa_jax.train.optimizer import OptimizerConfig, learning_rate, make_optimizer
from swa_jax.train.run_checkpoints import load_state
from swa_jax.train.step import abstract_state, init_state

SCHEDULE = {"learning_rate": 0.02, "schedule": "warmup-stable-decay", "warmup_steps": 2, "decay_steps": 5}
FIRST, SECOND = 5, 6  # steps


def metrics(run):
    return [{k: v for k, v in line.items() if k not in ("step", "tokens_per_second")} for line in read_metrics(run)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory, byte_tokenizer):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("One of the special magic numbers for brave-otter is: 4821673.\n" * 40)
    (folder / "more.txt").write_text("A longer context, and other words in it. 12345\n" * 40)
    first, second = (
        {"sequence_length": 16, "batch_size": 4, "data": [{"files": [f"{folder}/{name}"]}]}
        for name in ("text.txt", "more.txt")
    )
    stages = [{"steps": FIRST, **first}, {"steps": SECOND, **second}]
    return {
        "tokenizer": str(byte_tokenizer),
        "pattern": "window",
        "sliding_window": 8,
        "checkpoint_every": 4,
        "stages": stages,
    }


def uninterrupted(settings, folder, name):
    """(its configuration, that of its first stage as a run of its own, that of the second)."""
    optimizer = {"name": name, **SCHEDULE}
    whole = settings | {"model": to_dict(BYTES), "optimizer": optimizer, "output": str(folder / "whole")}
    constant = optimizer | {"schedule": "constant", "decay_steps": 0}
    before = whole | {
        "optimizer": constant,
        "output": str(folder / "first"),
        "stages": settings["stages"][:1],
        "save_dtype": "bfloat16",
    }
    after = settings | {
        "init_from": str(folder / "first" / "model"),
        "init_optimizer": True,
        "seed": 1000,
        "optimizer": optimizer | {"first_step": FIRST},
        "output": str(folder / "second"),
        "stages": settings["stages"][1:],
    }
    return whole, before, after


@pytest.fixture(scope="module")
def runs_of(settings, tmp_path_factory):
    """By optimizer: the folder of an uninterrupted run and of its first stage alone, and the second's settings."""

    @functools.cache
    def trained(name):
        folder = tmp_path_factory.mktemp(name)
        whole, before, after = uninterrupted(settings, folder, name)
        for run in (whole, before):
            train(from_dict(TrainConfig, run), quiet=True)
        return folder, after

    return trained


@pytest.fixture(params=["adamw", pytest.param("muon", marks=pytest.mark.long)])
def runs(request, runs_of):
    return runs_of(request.param)


def test_the_uninterrupted_run_bit_for_bit(runs):
    folder, after = runs
    model = train(from_dict(TrainConfig, after), quiet=True)
    assert metrics(folder / "second") == metrics(folder / "whole")[FIRST:]
    assert len(metrics(folder / "second")) == SECOND
    assert_same_weights(load_model(model), load_model(folder / "whole" / "model"))


@pytest.mark.long
def test_without_the_moments_or_the_schedule_it_is_another_run(runs):
    folder, after = runs
    for name, change in (
        ("no-moments", {"init_optimizer": False}),
        ("no-schedule", {"optimizer": after["optimizer"] | {"first_step": 0}}),
    ):
        train(from_dict(TrainConfig, after | change | {"output": str(folder / name)}), quiet=True)
        assert metrics(folder / name)[1:] != metrics(folder / "whole")[FIRST + 1 :]


def test_weights_and_moments_are_the_last_checkpoints_and_the_counts_are_new(runs):
    folder, after = runs
    config = from_dict(TrainConfig, after)
    model = load_model(config.init_from, dtype="float32")
    fresh = init_state(trained_and_frozen(model)[0], make_optimizer(config.optimizer, config.total_steps, model.config))
    earlier, _ = load_state(folder / "first" / "checkpoints" / str(FIRST), abstract_state(fresh))
    assert int(earlier.step) == FIRST
    state = with_earlier_optimizer(fresh, config)
    assert int(state.step) == int(state.skipped) == float(state.norm_mean) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, earlier.params)
    moments = 0
    for (path, ours), theirs in zip(
        jax.tree_util.tree_leaves_with_path(state.optimizer), jax.tree.leaves(earlier.optimizer), strict=True
    ):
        if ours.ndim:
            np.testing.assert_array_equal(ours, theirs)
            moments += bool(np.any(ours != 0))
        elif ours.dtype == jnp.int32:
            assert int(theirs) == FIRST
            assert int(ours) in (0, FIRST), path
    assert moments >= 4
    counts = [int(x) for x in jax.tree.leaves(state.optimizer) if x.ndim == 0 and x.dtype == jnp.int32]
    assert 0 in counts  # the schedule's, to which first_step is added
    assert FIRST in counts  # by which the moments are debiased


def test_an_interruption_changes_nothing_even_when_the_earlier_run_is_gone(runs):
    folder, after = runs
    shutil.copytree(folder / "first", folder / "copy")
    after = after | {"init_from": str(folder / "copy" / "model"), "output": str(folder / "resumed")}
    interrupted(5, train, from_dict(TrainConfig, after), quiet=True)
    shutil.rmtree(folder / "copy" / "checkpoints")
    train(from_dict(TrainConfig, after), quiet=True)
    assert metrics(folder / "resumed") == metrics(folder / "whole")[FIRST:]


# ---- refusals ----


@pytest.fixture
def first(runs_of):
    return runs_of("adamw")


def refused(after, folder, sentence, error=ConfigError):
    after = after | {"output": str(folder / "new")}
    with pytest.raises(error, match=sentence):
        train(from_dict(TrainConfig, after), quiet=True)
    assert not (folder / "new").exists()


def test_a_model_without_a_run_has_no_optimizer_state(first, tmp_path):
    folder, after = first
    imported = save_model(load_model(folder / "first" / "model"), tmp_path / "imported")
    sentence = "has no optimizer state, because .* holds no checkpoint; an imported model never has one"
    refused(after | {"init_from": str(imported)}, folder, sentence)


def test_another_optimizer_or_place_in_the_schedule_is_refused(first):
    folder, after = first
    optimizer = after["optimizer"]
    refused(after | {"optimizer": optimizer | {"name": "muon"}}, folder, "'optimizer.name' is muon, but .* adamw")
    wrong = after | {"optimizer": optimizer | {"first_step": 4}}
    refused(wrong, folder, r"'optimizer.first_step' = 4, but .* ended at step 5: set it to 5")
    with pytest.raises(ConfigError, match=r"'init_optimizer' goes on .* set 'init_from' to that run's model"):
        from_dict(TrainConfig, after | {"init_from": None, "model": to_dict(BYTES)})
    with pytest.raises(ConfigError, match="new LoRA adapters have none"):
        from_dict(TrainConfig, after | {"lora": {}})


def test_new_routers_have_no_moments(first):
    folder, after = first
    sentence = r"array '.*router.*' is in this run and not in .*5: they are of different models"
    refused(after | {"pattern": "switch"}, folder, sentence, CheckpointError)


def test_a_damaged_or_foreign_checkpoint_is_refused(first, tmp_path):
    folder, after = first
    copy = tmp_path / "copy"
    shutil.copytree(folder / "first", copy)
    after = after | {"init_from": str(copy / "model")}
    other = load_model(copy / "model")
    other.norm.scale[...] = other.norm.scale[...] * 2
    shutil.rmtree(copy / "model")
    save_model(other, copy / "model")
    refused(after, folder, "the weights of .*model are not those of .*/5", CheckpointError)
    largest = max((copy / "checkpoints" / "5").rglob("*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    refused(after, folder, f"'init_optimizer': .*{Path(largest).name} is damaged", CheckpointError)
    assert (copy / "checkpoints" / "5").is_dir()  # a run that is only read is left as it is
    shutil.rmtree(copy / "checkpoints" / "5")
    refused(after, folder, "the last checkpoint of .* is of step 4 of 5: finish that run", CheckpointError)


def test_a_schedule_that_begins_in_its_middle_is_the_rest_of_the_whole():
    whole = learning_rate(OptimizerConfig(**SCHEDULE), 2.0, 20)
    rest = learning_rate(OptimizerConfig(**SCHEDULE, first_step=12), 2.0, 8)
    np.testing.assert_array_equal([rest(i) for i in range(9)], [whole(12 + i) for i in range(9)])
    assert whole(12) != whole(19)
