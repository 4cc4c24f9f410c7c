"""`swa-jax adapt`: what it plans, what the receipt may cost, and what a killed run leaves to the next one."""

import dataclasses
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from command_line import fails, run
from small_job import SMALL, small_job

from swa_jax.adapt import estimate as estimate_module
from swa_jax.adapt import stages as stages_module
from swa_jax.adapt.estimate import (
    Clock,
    canary_budget,
    duration,
    estimate,
    estimate_report,
    estimate_text,
    operations,
    work,
)
from swa_jax.adapt.job import MARK, STAGES, AdaptOptions, prepare
from swa_jax.adapt.stages import StageResults, carry_out
from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.files import locked


def test_the_plan_says_what_would_be_done_and_does_nothing(tmp_path, monkeypatch):
    command = ("adapt", "recall", tmp_path / "out", "--kv-budget", 0.3, "--for", "vllm")
    said = run(*command, "--plan", *SMALL)
    assert not (tmp_path / "out").exists()
    for number, words in enumerate(("as it is", "search under 30%", "no fine-tuning"), start=1):
        assert any(line.strip().startswith(f"{number}. ") and words in line for line in said.splitlines())
    assert "export for vllm" in said
    assert "4 sink tokens: vllm 0.33.0 cannot run this pattern" in said
    assert "\nThis is an estimate: nothing was run, and nothing but the import was written.\n" in said
    monkeypatch.setattr(estimate_module, "time_layers", lambda job, length: Clock(2.0, 1.0, 1e-6))
    report = json.loads(run(*command, "--plan", "--json", *SMALL))
    assert [one["stage"] for one in report["stages"]] == list(STAGES)
    assert report["seconds"] == pytest.approx(sum(one["seconds"] for one in report["stages"]))
    assert report["seconds_in_a_layer"] == {"full": 2.0, "windowed": 1.0}
    assert fails(*command, "--json", *SMALL) == "--json prints what --plan finds: give both"


def test_the_estimate_grows_with_the_work(tmp_path):
    job = small_job(tmp_path)
    more = small_job(tmp_path, examples=40, tune=9, server="vllm")
    slow, fast = Clock(2e-2, 1e-2, 1e-6), Clock(2e-4, 1e-4, 1e-8)
    assert set(estimate(job, slow)) == set(STAGES)
    assert estimate(job, slow)["original"] > estimate(job, fast)["original"] > 0
    assert estimate(more, slow)["adapted"] > 5 * estimate(job, slow)["adapted"]
    assert estimate(job, slow)["tune"] == estimate(job, slow)["export"] == estimate(job, slow)["canary"] == 0
    assert min(estimate(more, slow)[name] for name in ("tune", "export", "canary")) > 0
    assert more.written_bytes > job.written_bytes + job.source.weight_bytes > 2**20
    assert [duration(seconds) for seconds in (0.2, 80, 600, 9000)] == ["1 s", "80 s", "10 min", "2.5 h"]


def test_the_work_of_a_deep_model(tmp_path):
    """Layer evaluations by hand: 30 layers, 3 of which stay full, ranked by 4 + 4 + 1 examples."""
    job = small_job(tmp_path, effort="normal", choose_by=8)
    config = dataclasses.replace(job.source.config, num_hidden_layers=30)
    job = dataclasses.replace(
        job, source=dataclasses.replace(job.source, config=config), space=dataclasses.replace(job.space, most=3)
    )
    ranking, found = 9 * 30, work(job, job.effort)
    candidates = 18 * 30 * job.space.num_candidates(job.effort.turns)
    assert job.space.num_candidates(1) < job.space.num_candidates(3)
    # A round: a gradient (both kinds twice, half as much again of windows), the base, and half a pass for each of 4.
    assert found["search"].full == pytest.approx(3 * 2 * ranking + candidates * 0.1)
    assert found["search"].windowed == pytest.approx(3 * (1.5 + 1 + 4 / 2) * ranking + candidates * 0.9)
    every = work(job, job.effort._replace(tried=None))["search"]
    assert every.windowed == pytest.approx(3 * (30 + 3) / 2 * ranking + candidates * 0.9)


def test_the_receipt_is_at_most_a_tenth_of_the_work(tmp_path):
    job = small_job(tmp_path, server="vllm", choose_by=8, examples=40)
    each = operations(job)
    total = sum(one.full * each.full + one.windowed * each.windowed for one in work(job, job.effort).values())
    assert 0 < canary_budget(job) < total / 10
    assert each.full > each.windowed > 0


def test_the_plan_names_what_is_faster(tmp_path, monkeypatch):
    job = small_job(tmp_path, window=(16, 24, 32, 48), length=512, server="vllm", examples=4, choose_by=8)
    monkeypatch.setattr(estimate_module, "time_layers", lambda job, length: Clock(length / 512, length / 1024, 1e-6))
    said = estimate_text(estimate_report(job))
    line = next(line for line in said.splitlines() if line.startswith("Faster, each alone: "))
    assert [name in line for name in ("--effort quick (", "--length 256 (", "--window ")] == [True] * 3
    monkeypatch.setattr(estimate_module, "time_layers", lambda job, length: Clock(0, 0, 0))
    assert "Faster" not in estimate_text(estimate_report(small_job(tmp_path, effort="quick")))


def test_the_time_of_killed_runs_counts(tmp_path):
    """Until the last file that they wrote, of the same stage with the same key."""
    folder, said = tmp_path / "adapt", []
    folder.mkdir()
    (folder / "search-begun.json").write_text(json.dumps({"key": "k", "before": 30.0, "at": time.time() - 100}))
    (folder / "candidates.json").write_text("{}")
    for file in folder.iterdir():
        os.utime(file, times=(time.time() - 60,) * 2)
    StageResults(folder, said.append).stage("search", "searching", "k", dict)
    stored = json.loads((folder / "search.json").read_text())
    assert stored["seconds"] == pytest.approx(30 + 40, abs=5)
    assert said[0] == "searching ... 70 s were spent on it before"
    assert not (folder / "search-begun.json").exists()
    (folder / "search-begun.json").write_text(json.dumps({"key": "k", "before": 30.0, "at": time.time() - 100}))
    StageResults(folder, said.append).stage("search", "searching", "other", dict)
    assert json.loads((folder / "search.json").read_text())["seconds"] < 5


def test_a_damaged_result_costs_its_own_stage(tmp_path):
    folder, said = tmp_path / "adapt", []
    folder.mkdir()
    results = StageResults(folder, said.append)
    for name in ("original", "search"):
        results.stage(name, name, "k", lambda: {"is": name})  # noqa: B023
    (folder / "search.json").write_text('{"key": "k", "seco')
    said.clear()
    for name in ("original", "search"):
        assert results.stage(name, name, "k", lambda: {"is": "new"})["is"] == {"original": "original"}.get(name, "new")
    assert [line.split(" (")[0] for line in said] == [
        "original: found here",
        f"{folder / 'search.json'} is not valid JSON: Unterminated string starting at",
        "search ...",
        "search: 0 s",
    ]
    assert json.loads((folder / "search.json").read_text())["result"] == {"is": "new"}


def test_half_made_folders_are_named_and_removed(tmp_path, monkeypatch):
    job = small_job(tmp_path, server="vllm")
    for name in ("vllm.partial", "notes"):
        (tmp_path / "out" / name).mkdir(parents=True)
    monkeypatch.setattr(estimate_module, "time_layers", lambda job, length: Clock(1.0, 1.0, 1e-6))
    said = estimate_text(estimate_report(job))
    assert f"half made by an interrupted run, to be removed: {tmp_path}/out/vllm.partial" in said
    monkeypatch.setattr(stages_module._Stages, "__call__", lambda self, reported: None)
    said = []
    carry_out(job, said.append, lambda _: None)
    assert said == [f"removing {tmp_path}/out/vllm.partial, which an interrupted run left half made"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapt", "notes"]


def test_two_runs_in_one_folder_are_refused(tmp_path):
    job = small_job(tmp_path)
    job.folder.mkdir(parents=True)
    with locked(job.folder / MARK), pytest.raises(CheckpointError, match="another process is writing"):
        carry_out(job, print, lambda _: None)


def test_what_cannot_be_tuned_is_refused_at_once(tmp_path):
    short, ids = tmp_path / "short.txt", tmp_path / "ids"
    short.write_text("a few words")
    with pytest.raises(ConfigError):
        small_job(tmp_path, tune=2, tune_data=(str(short),))
    ids.mkdir()
    for file in (Path(__file__).parents[2] / "swa_jax" / "recall").iterdir():
        (ids / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((ids / "tokenizer.json").read_text())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": 1024, "content": "<image>", "special": True} | plain)
    (ids / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = AdaptOptions(str(ids), tmp_path / "out", length=256, window=(16,), examples=4, choose_by=2)
    assert prepare(settings).settings.kv_budget == 0.3
    long = tmp_path / "long.txt"
    long.write_text("many words and more " * 5000)
    prepare(dataclasses.replace(settings, tune=2, tune_data=(str(long),)))  # no text has that id
    long.write_text("many <image> words " * 5000)
    with pytest.raises(ConfigError):
        prepare(dataclasses.replace(settings, tune=2, tune_data=(str(long),)))


def test_a_full_disk_is_found_at_once(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="make room"):
        small_job(tmp_path)
