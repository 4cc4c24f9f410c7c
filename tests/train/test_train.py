"""Training: the loss falls, an interrupted run goes on bit for bit, wrong configurations cost nothing."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from training_runs import TEXT, Interruption, assert_same_weights, interrupted, losses, read_metrics, text_in

import swa_jax.train.loop
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.checkpoint.folder import load_model, save_model
from swa_jax.data.sources import SourceConfig
from swa_jax.data.tokenize import tokenize
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.loop import TrainConfig, random_model, train
from swa_jax.train.patterns import find_start, run_pattern
from swa_jax.train.stage_data import stage_batches
from swa_jax.train.step import SPIKE_DECAY, SPIKE_WARMUP, init_state, make_step

ROOT = Path(__file__).parents[2]

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "qk_norm": True,
    "tie_word_embeddings": True,
}


@pytest.fixture
def settings(tmp_path, byte_tokenizer):
    (tmp_path / "more.txt").write_text(TEXT[::-1])
    data = [*text_in(tmp_path), {"files": [f"{tmp_path}/more.txt"], "weight": 0.5}]
    shape = {"sequence_length": 32, "batch_size": 4, "data": data}
    return {
        "output": str(tmp_path / "run"),
        "tokenizer": str(byte_tokenizer),
        "model": MODEL,
        "pattern": "window",
        "sliding_window": 8,
        "checkpoint_every": 4,
        # Constant, so that runs of any number of steps are one program.
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "warmup_steps": 4, "schedule": "constant"},
        "stages": [{"steps": 14, **shape}, {"steps": 6, "patterns": ["full", "interleave-1-in-2"], **shape}],
    }


def config_of(settings, **changes):
    return from_dict(TrainConfig, settings | changes)


def held_out_documents(folder):
    """A source of documents enough that some are held out and some are not."""
    file = folder / "documents.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"{i} " + TEXT[i : 400 + i]}) for i in range(12)))
    return [{"files": [str(file)], "held_out": 0.3}]


@pytest.mark.slow
def test_loss_falls_and_an_interrupted_run_is_bit_identical(settings, tmp_path):
    settings["optimizer"] = {"name": "muon", "learning_rate": 0.02, "warmup_steps": 4}
    model = train(config_of(settings), quiet=True)
    expected = losses(tmp_path / "run")
    assert len(expected) == 20
    assert np.mean(expected[-3:]) < expected[0] - 0.5

    again = settings | {"output": str(tmp_path / "again")}
    for step in (6, 17):  # inside the first stage and the second, off the checkpoints
        interrupted(step, train, config_of(again), quiet=True)
    resumed = train(config_of(again), quiet=True)
    assert losses(tmp_path / "again") == expected
    assert_same_weights(load_model(model), load_model(resumed))

    train(config_of(again), quiet=True)  # finished: nothing to do
    assert losses(tmp_path / "again") == expected
    with pytest.raises(ConfigError, match="'seed' differs"):
        train(config_of(again, seed=1), quiet=True)


@pytest.mark.slow
def test_routed_cpt_starts_from_the_model_and_reports_the_ratio(settings, tmp_path):
    stage = [settings["stages"][0] | {"steps": 2}]
    start = train(config_of(settings, stages=stage), quiet=True)
    routed = {"model": None, "init_from": str(start), "pattern": "switch", "output": str(tmp_path / "cpt")}
    finished = train(config_of(settings, **routed, stages=stage), quiet=True)
    line = read_metrics(tmp_path / "cpt")[0]
    assert 0 < line["full_attention_ratio"] < 1
    assert len(line["full_attention_ratio_by_layer"]) == 2
    assert line["regularization"] > 0
    assert load_model(finished).pattern.layer_types == ("switch_attention",) * 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"init_from": "somewhere"}, "exactly one of 'model'"),
        ({"stages": []}, "'stages' is empty"),
        ({"seed": -1}, "'seed' must be 0 or more, got -1"),
        ({"stages": [{"steps": 0, "sequence_length": 8, "batch_size": 1}]}, r"'stages\.0\.steps' must be at least 1"),
        (
            {"stages": [{"steps": 1, "sequence_length": 8, "batch_size": 1, "learning_rate_factor": 0}]},
            r"'stages\.0\.learning_rate_factor' must be above 0, got 0",
        ),
        ({"pattern": "window+fa-decode"}, "full-attention decode has no boundary"),
        (
            {"model": MODEL | {"vocab_size": 100}},
            "has 257 tokens, the model's vocab_size is 100: they do not belong together",
        ),
        (
            {"stages": [{"steps": 1, "sequence_length": 8, "batch_size": 10**12, "data": [{"files": [__file__]}]}]},
            r"'stages\.0': 1000000000000 rows of 8 tokens take .* GiB are free: lower 'batch_size'",
        ),
        (
            {"xla_options": {"xla_cpu_enable_fast_math": False, "xla_no_such": "1"}},
            r"'xla_options\.xla_no_such' = 1 cannot be used: .* says \"No such compile option: 'xla_no_such'\"",
        ),
        (
            {"xla_options": {"xla_cpu_enable_fast_math": "perhaps"}},
            r"'xla_options\.xla_cpu_enable_fast_math' = perhaps cannot be used",
        ),
    ],
)
def test_a_wrong_configuration_writes_nothing(settings, tmp_path, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        train(config_of(settings, **changes), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"kind": "prompts", "files": ["later.jsonl"]}, r"later\.jsonl, line 2 is not valid JSON"),
        ({"kind": "prompts", "files": ["good.jsonl"]}, "none of the 1 prompts fits sequence_length = 8"),
        ({"files": ["absent.txt"]}, r"data files 'absent\.txt': no such file"),
        ({"files": ["short.txt"]}, r"the text of short\.txt has 4 tokens, less than one row of sequence_length = 8"),
        ({"files": ["text.txt"], "held_out": 0.999}, "none to train on"),
        ({"files": ["text.txt"]}, "no source holds anything out"),
        ({"kind": "needles"}, "more than length = 8"),
    ],
)
def test_the_data_of_every_stage_is_opened_before_the_first_step(settings, tmp_path, monkeypatch, data, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text(json.dumps({"prompt": "how much", "answer": "3"}))
    (tmp_path / "later.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c",\n')
    (tmp_path / "short.txt").write_text("abc")
    later = {"steps": 1, "sequence_length": 8, "batch_size": 2, "data": [data]}
    first, held_out = settings["stages"][0], {}
    if sentence == "no source holds anything out":
        first, held_out = first | {"data": held_out_documents(tmp_path)}, {"validate_every": 1}
    monkeypatch.setattr(swa_jax.train.loop, "random_model", None)
    with pytest.raises(ValueError, match=sentence):
        train(config_of(settings, stages=[first, later], **held_out), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_run_without_its_config_goes_on_under_its_own_settings_only(settings, tmp_path):
    stage = [settings["stages"][0] | {"steps": 6}]
    config = config_of(settings, stages=stage)
    interrupted(5, train, config, quiet=True)
    run = tmp_path / "run"
    written = (run / "config.yaml").read_text()
    (run / "config.yaml").unlink()
    recorded = run / "checkpoints" / "4" / "config.yaml"
    assert recorded.read_text() == written
    other = config_of(settings, stages=stage, optimizer=settings["optimizer"] | {"learning_rate": 0.1})
    with pytest.raises(ConfigError, match=f"'optimizer' differs.*resume with {recorded} as it is"):
        train(other, quiet=True)
    (run / "config.yaml").write_text(yaml.safe_dump(to_dict(other)))  # edited to agree with what is asked for
    with pytest.raises(ConfigError, match=f"'optimizer' differs.*resume with {recorded} as it is"):
        train(other, quiet=True)
    (run / "config.yaml").unlink()
    train(config, quiet=True)
    assert (run / "config.yaml").read_text() == written
    assert len(losses(run)) == 6
    shutil.rmtree(run / "checkpoints")
    (run / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=f"settings are unknown, because {run / 'config.yaml'} is missing"):
        train(config, quiet=True)


def test_the_share_of_the_peak_is_shown_where_the_peak_is_known():
    line = {"step": 1, "loss": 2.7141, "tokens_per_second": 412345.6}
    assert swa_jax.train.loop._summary(line) == "loss 2.714  412k tokens/s"
    assert swa_jax.train.loop._summary(line | {"mfu": 0.4149}) == "loss 2.714  412k tokens/s  MFU 41 %"


@pytest.mark.slow
def test_a_stage_has_its_own_learning_rate(settings):
    """Under a factor next to 0 the second stage changes nothing, neither by Muon nor by Adam; without one it does."""
    first, second = ({**stage, "steps": 2} for stage in settings["stages"])
    rates = {"name": "muon", "learning_rate": 0.02, "schedule": "constant", "weight_decay": 0.0}

    def trained(*stages):
        model = load_model(train(config_of(settings, stages=list(stages), optimizer=rates), quiet=True))
        shutil.rmtree(settings["output"])
        return jax.tree.leaves(nnx.state(model))

    short = trained(first)
    for after, before in zip(trained(first, second | {"learning_rate_factor": 1e-9}), short, strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-7)
    for after, before in zip(trained(first, second), short, strict=True):
        assert not np.allclose(after, before, rtol=0, atol=1e-5)


def without_rope(settings, **changes):
    """A run of two steps whose full layers are not rotated; the model has a windowed layer and a full one."""
    stage = settings["stages"][0] | {"steps": 2}
    return config_of(settings, stages=[stage], **{"pattern": "interleave-1-in-2+nope"} | changes)


def test_full_layers_without_rope_are_as_if_they_were_written_out(settings):
    written = MODEL | {"rope_layers": ("global", "none")}
    start = find_start(without_rope(settings))
    as_written = without_rope(settings, model=written, pattern="interleave-1-in-2")
    assert start.config == find_start(as_written).config
    # The model says it, so its pattern need not: a server can have it.
    assert run_pattern(without_rope(settings), start) == run_pattern(as_written, start)
    assert not start.teacher.rope_layers  # which keeps its positions


def test_a_run_keeps_the_pattern_of_the_model_that_it_starts_from(settings, tmp_path):
    model = from_dict(TrainConfig, settings).model
    own = AttentionPattern.from_recipe("layers:1", 2, sliding_window=8)
    save_model(Decoder(model, own, rngs=nnx.Rngs(0)), tmp_path / "hybrid")
    del settings["pattern"], settings["sliding_window"]
    assert config_of(settings).attention == "full"
    started = settings | {"model": None, "init_from": str(tmp_path / "hybrid")}

    def chosen(**changes):
        config = config_of(started, **changes)
        return run_pattern(config, find_start(config))

    assert chosen() == own
    assert chosen(sliding_window=5) == dataclasses.replace(own, sliding_window=5)
    assert chosen(pattern="full").full_layers == chosen(method="full").full_layers == (0, 1)


def test_several_processes_do_not_import_a_model(settings, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr("swa_jax.train.patterns.model_folder", None)
    with pytest.raises(ConfigError, match=r"each of the 2 processes would import it .* swa-jax import org/model DST"):
        find_start(config_of(settings, model=None, init_from="org/model"))


@pytest.mark.slow
def test_full_layers_without_rope(settings, tmp_path):
    """The model is saved so, and one that had them can lose them too."""
    model = load_model(train(without_rope(settings), quiet=True))
    assert model.config.rope_layers == ("global", "none")
    tokens = np.arange(1, 25)[None]
    rotated = random_model(dataclasses.replace(model.config, rope_layers=()), model.pattern, 0, None)
    nnx.update(rotated, nnx.state(model))
    assert np.abs(rotated(tokens) - model(tokens)).max() > 1e-2

    save_model(rotated, tmp_path / "rotated", tokenizer_from=settings["tokenizer"])
    start = find_start(without_rope(settings, model=None, init_from=str(tmp_path / "rotated")))
    assert start.config.rope_layers == ("global", "none")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pattern": "full+nope"}, "this one has only full layers"),
        ({"pattern": "window+nope"}, "this one has no full layer"),
        ({"model": MODEL | {"position_embedding": "none"}}, "position_embedding = none has none"),
    ],
)
def test_full_layers_without_rope_need_others(settings, changes, sentence):
    config = without_rope(settings, **changes)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        train(config, quiet=True)
    assert not Path(config.output).exists()


def test_zero_shot_is_the_windowed_model_as_it_is(settings, tmp_path):
    stage = [settings["stages"][0] | {"steps": 2}]
    start = train(config_of(settings, stages=stage, pattern="full"), quiet=True)
    changes = {"model": None, "init_from": str(start), "pattern": None, "output": str(tmp_path / "zero")}
    model = load_model(train(config_of(settings, **changes, method="swa-zero-shot", stages=stage), quiet=True))
    assert set(model.pattern.layer_types) == {"sliding_attention"}
    narrower = config_of(settings | {"sliding_window": 5}, **changes, method="swa-zero-shot", stages=stage)
    with pytest.raises(ConfigError, match="'sliding_window' differs"):  # there is no checkpoint, but a model
        train(narrower, quiet=True)
    shutil.rmtree(start.parent / "checkpoints")
    with pytest.raises(ConfigError, match="training anew would not replace it"):
        train(config_of(settings, stages=stage, pattern="full"), quiet=True)
    assert_same_weights(model, load_model(start))


@pytest.mark.slow
def test_pieces_and_remat_change_nothing_and_held_out_loss_is_logged(settings, tmp_path):
    plain = {"steps": 4, "sequence_length": 32, "batch_size": 4, "data": held_out_documents(tmp_path)}
    optimizer = {"name": "adamw", "learning_rate": 1e-3, "eps": 1e-4}
    results = []
    for i, (stage, changes) in enumerate(
        [(plain, {}), (plain | {"accumulate": 2}, {}), (plain, {"remat": "projections"})]
    ):
        run = tmp_path / f"run{i}"
        changes |= {"output": str(run), "stages": [stage], "optimizer": optimizer, "validate_every": 2}
        train(config_of(settings, **changes), quiet=True)
        lines = read_metrics(run)
        assert [line["step"] for line in lines if "validation_loss" in line] == [0, 2, 4]
        results.append([line.get("loss", line.get("validation_loss")) for line in lines])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5)


def test_updates_that_are_no_numbers_are_skipped_or_stop_the_run(settings, tmp_path, monkeypatch):
    def broken_model(*arguments, draw=swa_jax.train.loop.random_model):
        model = draw(*arguments)
        model.embedding[...] = model.embedding[...] * np.nan
        return model

    monkeypatch.setattr(swa_jax.train.loop, "random_model", broken_model)
    broken = {"stages": [settings["stages"][0] | {"steps": 3}]}
    with pytest.raises(FloatingPointError, match="not a number at step"):
        train(config_of(settings, **broken), quiet=True)
    train(config_of(settings, **broken, on_nonfinite="skip", output=str(tmp_path / "skipping")), quiet=True)
    assert read_metrics(tmp_path / "skipping")[-1]["skipped_updates"] == 3


def test_an_update_far_above_the_running_norm_is_skipped_once_that_is_trusted(settings):
    config = config_of(settings, spike_factor=4.0, optimizer={"name": "adamw", "warmup_steps": 0})
    pattern = AttentionPattern.from_recipe("window", 2, sliding_window=8)
    model = Decoder(config.model, pattern, rngs=nnx.Rngs(0))
    optimizer = swa_jax.train.loop.make_optimizer(config.optimizer, 100, model.config)
    step_function = make_step(model, optimizer, config, None)
    tokens = np.arange(64, dtype=np.int32).reshape(2, 32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "weights": np.ones((2, 32), np.float32)}

    def skipped(updates, skipped_before, factor):
        """Whether a step is, whose gradient norm is `factor` times the mean of `updates` updates."""
        params = jax.tree.map(np.array, nnx.state(model, nnx.Param))
        state = init_state(params, optimizer)
        state.step, state.skipped = np.int32(updates + skipped_before), np.int32(skipped_before)
        mean = norm / factor * (1 - SPIKE_DECAY**updates)  # as the running mean has it, not debiased
        state.norm_mean = np.float32(mean)
        after, _ = step_function(state, batch, 1)
        changed = any(
            (a != b).any() for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(params), strict=True)
        )
        assert int(after.skipped) - skipped_before == int(not changed)
        assert int(after.step) == updates + skipped_before + 1
        assert not changed or float(after.norm_mean) != np.float32(mean)
        # A spike counts as the largest norm that is none, so that a lasting rise is followed.
        followed = (SPIKE_DECAY + (1 - SPIKE_DECAY) * 4.0) * mean
        assert changed or float(after.norm_mean) == pytest.approx(followed, rel=1e-6)
        return not changed

    state = init_state(jax.tree.map(np.array, nnx.state(model, nnx.Param)), optimizer)
    norm = float(step_function(state, batch, 1)[1]["gradient_norm"])
    assert not skipped(30, 0, 3.9)
    assert skipped(30, 0, 4.1)
    assert skipped(SPIKE_WARMUP, 7, 4.1)
    assert not skipped(SPIKE_WARMUP - 1, 7, 4.1)  # steps that were skipped do not count


def test_a_tokenizer_that_the_data_is_not_of_is_found_before_the_model_is_drawn(
    settings, tmp_path, byte_tokenizer, monkeypatch
):
    monkeypatch.setattr(swa_jax.train.loop, "random_model", None)
    tokenize(SourceConfig(files=(f"{tmp_path}/text.txt",)), byte_tokenizer, tmp_path / "tokens")
    stage = settings["stages"][0] | {"data": [{"kind": "tokens", "files": [str(tmp_path / "tokens")]}]}
    other = ROOT / "swa_jax" / "recall" / "tokenizer.json"
    with pytest.raises(ConfigError, match="was tokenised with another tokenizer"):
        train(config_of(settings, stages=[stage], tokenizer=str(other), model=MODEL | {"vocab_size": 1024}), quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_found_before_the_model_is_drawn(settings, monkeypatch):
    monkeypatch.setattr(swa_jax.train.loop, "random_model", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"'log.wandb_project' needs the package wandb"):
        train(config_of(settings, log={"wandb_project": "mine"}), quiet=True)


def test_the_held_out_loss_before_the_first_step_is_the_models_own_and_comes_once(
    settings, tmp_path, monkeypatch, capsys
):
    """A run that is killed before its first checkpoint begins anew; one that goes on does not validate again. And what
    is shown without a terminal."""
    stage = {"steps": 3, "sequence_length": 32, "batch_size": 4, "data": held_out_documents(tmp_path)}
    config = config_of(settings, stages=[stage], checkpoint_every=2, validate_every=3)
    for step, said in ((1, 1), (3, 1), (None, 0)):
        if step is None:
            train(config)
        else:
            interrupted(step, train, config)
        shown = capsys.readouterr().err
        assert shown.count("step 0/3  validation loss ") == said
        if step == 3:
            assert "stage 1 of 1: steps 1 to 3, each 4 rows of 32 tokens\n" in shown
            assert "window 8 (own key included)" in shown
            assert re.search(r"^step 1/3  loss \d\.\d{3}  [\d.]+k? tokens/s(  last checkpoint 1)?$", shown, re.M)
        losses = [line for line in read_metrics(tmp_path / "run") if "validation_loss" in line]
        assert [line["step"] for line in losses] == [0] + [3] * (step is None)
    run = swa_jax.train.loop._prepare(config)
    params, frozen = swa_jax.train.loop.trained_and_frozen(run.model)
    state = init_state(params, run.optimizer, frozen)
    loss = swa_jax.train.loop.make_validation_loss(run.model, config, None)
    opened, found = [], []
    monkeypatch.setattr(swa_jax.train.loop, "stage_batches", lambda *a, **b: opened.append(a) or stage_batches(*a, **b))
    log = SimpleNamespace(add=lambda step, values: found.append(values["validation_loss"]), say=lambda text: None)
    session = swa_jax.train.loop._Session(run, None, log, log, None)
    for _ in range(2):
        session.validate(0, loss, state)
    assert found == [pytest.approx(losses[0]["validation_loss"], rel=1e-6)] * 2
    assert len(opened) == 1  # which may mean to tokenise all of the data
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_held_out_loss_is_not_lost_by_a_kill_after_its_checkpoint(settings, tmp_path, monkeypatch):
    stage = {"steps": 8, "sequence_length": 32, "batch_size": 4, "data": held_out_documents(tmp_path)}
    changes = {"stages": [stage], "checkpoint_every": 4, "validate_every": 4}
    train(config_of(settings, **changes, output=str(tmp_path / "straight")), quiet=True)
    expected = read_metrics(tmp_path / "straight")
    assert [line["step"] for line in expected if "validation_loss" in line] == [0, 4, 8]
    real = swa_jax.train.loop.RunCheckpoints.save

    def killed_after(checkpoints, step, *arguments):
        real(checkpoints, step, *arguments)
        checkpoints.wait()
        raise Interruption

    monkeypatch.setattr(swa_jax.train.loop.RunCheckpoints, "save", killed_after)
    with pytest.raises(Interruption):
        train(config_of(settings, **changes), quiet=True)
    monkeypatch.undo()
    train(config_of(settings, **changes), quiet=True)
    timing = "tokens_per_second"
    assert [{k: v for k, v in line.items() if k != timing} for line in read_metrics(tmp_path / "run")] == [
        {k: v for k, v in line.items() if k != timing} for line in expected
    ]
