"""What a run that goes on holds in memory, and what it must have in common with what it was."""

import dataclasses

import jax
import pytest
from tiny_models import BYTES
from training_runs import interrupted, text_in

import swa_jax.train.loop
import swa_jax.train.run_checkpoints
import swa_jax.train.stage_data
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.model.parameters import parameters
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.loop import TrainConfig, train


@pytest.fixture
def settings(tmp_path, byte_tokenizer):
    return {
        "output": str(tmp_path / "run"),
        "tokenizer": str(byte_tokenizer),
        "model": to_dict(BYTES),
        "pattern": "window",
        "sliding_window": 8,
        "checkpoint_every": 1,
        "optimizer": {"schedule": "constant"},
        "stages": [{"steps": 3, "sequence_length": 16, "batch_size": 4, "data": text_in(tmp_path)}],
    }


def test_weights_and_moments_are_held_once(settings, monkeypatch):
    before, held = sum(x.nbytes for x in jax.live_arrays()), []

    def note(function):
        def noted(*arguments):
            held.append(sum(x.nbytes for x in jax.live_arrays()) - before)
            return function(*arguments)

        return noted

    interrupted(2, train, from_dict(TrainConfig, settings), quiet=True)
    monkeypatch.setattr(swa_jax.train.run_checkpoints, "load_state", note(swa_jax.train.run_checkpoints.load_state))
    monkeypatch.setattr(swa_jax.train.loop, "place_batch", note(swa_jax.train.loop.place_batch))
    # Without a checkpoint before the end: what Orbax is still writing may lie in arrays of JAX.
    train(from_dict(TrainConfig, settings | {"checkpoint_every": 9}), quiet=True)
    restoring, *steps = held
    once = 3 * 4 * sum(parameter.size for parameter in parameters(BYTES))  # f32, with Adam's two moments
    assert restoring < 0.1 * once
    assert len(steps) == 2
    assert max(steps) < 1.1 * once


def test_an_edited_pattern_file_is_noticed(settings, tmp_path):
    file = tmp_path / "chosen.json"
    settings |= {"pattern": str(file), "sliding_window": None}
    first = AttentionPattern.from_recipe("layers:0", 2, sliding_window=8)
    first.to_json(file)
    interrupted(2, train, from_dict(TrainConfig, settings), quiet=True)
    AttentionPattern.from_recipe("layers:1", 2, sliding_window=8).to_json(file)
    with pytest.raises(ConfigError, match=r"the attention patterns are not those that the run in .* began with"):
        train(from_dict(TrainConfig, settings), quiet=True)
    dataclasses.replace(first, provenance={"method": "another way to the same"}).to_json(file)
    train(from_dict(TrainConfig, settings), quiet=True)
    assert (tmp_path / "run" / "model").is_dir()


def test_the_data_of_a_stage_that_is_done_may_be_gone(settings, tmp_path):
    (tmp_path / "first.txt").write_text("abc" * 100)
    first = settings["stages"][0] | {"steps": 1, "data": [{"files": [f"{tmp_path}/first.txt"]}]}
    settings["stages"].insert(0, first)
    interrupted(2, train, from_dict(TrainConfig, settings), quiet=True)
    (tmp_path / "first.txt").unlink()
    train(from_dict(TrainConfig, settings), quiet=True)
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.parametrize("name", ["tokenizer", "stages.0.data.0.files"])
def test_processes_that_read_other_data_are_named(settings, tmp_path, monkeypatch, name):
    """Each reads a copy of its own, under the same name."""
    module = swa_jax.train.stage_data
    monkeypatch.setattr(module, "from_first_process", lambda ask: ask() | {name: "other"})
    with pytest.raises(ConfigError, match=f"'{name}' has other contents in process 0 than in process 0, under"):
        train(from_dict(TrainConfig, settings), quiet=True)
    assert not (tmp_path / "run").exists()
