"""What a run leaves open ("auto") is chosen when it begins, written down, and kept when it goes on."""

import pytest
import yaml
from command_line import run
from tiny_models import BYTES
from training_runs import losses, text_in

from swa_jax.base.settings import load_config, to_dict
from swa_jax.plan.choose import settled
from swa_jax.train.config import TrainConfig

SHAPE = {"sequence_length": 32, "batch_size": 4}


@pytest.fixture
def file(tmp_path, byte_tokenizer):
    data = text_in(tmp_path)
    settings = {"output": f"{tmp_path}/run", "tokenizer": str(byte_tokenizer), "model": to_dict(BYTES)}
    stages = [{"steps": 1, **SHAPE, "data": data}, {"steps": 2, **SHAPE, "data": data}]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings | {"stages": stages, "checkpoint_every": 1}))
    return file


@pytest.mark.parametrize(("free", "remat", "pieces"), [(0, "layer", 4), (1e12, "none", 1)])
def test_it_is_chosen_by_the_memory_at_hand_and_kept_where_that_changes(free, remat, pieces, file, monkeypatch):
    monkeypatch.setattr("swa_jax.plan.choose.free_memory", lambda: free)
    said = run("train", file, "stages.1.steps=1")
    assert ("chosen to fit into the memory" in said) == (free == 0)
    recorded = yaml.safe_load((file.parent / "run/config.yaml").read_text())
    assert (recorded["remat"], recorded["scan_layers"]) == (remat, True)
    assert [stage["accumulate"] for stage in recorded["stages"]] == [pieces, pieces]
    assert "auto" not in recorded["mesh"].values()
    monkeypatch.setattr("swa_jax.plan.choose.free_memory", lambda: 1e12 - free)
    assert "'stages' differs" in run("train", file, status=2)  # another number of steps, and nothing else
    run("train", file, "stages.1.steps=1")
    assert len(losses(file.parent / "run")) == 2


def test_all_processes_go_by_the_memory_of_the_first(file, monkeypatch):
    monkeypatch.setattr("swa_jax.plan.choose.free_memory", lambda: 1e12)
    monkeypatch.setattr("swa_jax.plan.choose.from_first_process", lambda ask: 0.0 * ask())
    assert settled(load_config(TrainConfig, file), print).remat == "layer"


def test_what_is_pinned_stays(file, monkeypatch):
    monkeypatch.setattr("swa_jax.plan.choose.free_memory", lambda: 0)
    run("train", file, "remat=attention", "stages.0.accumulate=2")
    recorded = yaml.safe_load((file.parent / "run/config.yaml").read_text())
    assert recorded["remat"] == "attention"
    assert [stage["accumulate"] for stage in recorded["stages"]] == [2, 4]
