"""What the reports in docs/plans say, beside what a hand counts."""

import json
from pathlib import Path

import pytest
from small_runs import work_of

from swa_jax.base.chips import chip_name
from swa_jax.base.settings import load_config
from swa_jax.plan.candidates import RunChanges, candidates, present
from swa_jax.plan.cost import StepEstimate, estimate
from swa_jax.plan.search import Tried, outcome
from swa_jax.plan.text import describe
from swa_jax.train.config import TrainConfig

ROOT = Path(__file__).parents[2]


def published(name: str) -> dict:
    return json.loads((ROOT / "docs" / "plans" / f"{name}.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        "swat-340m-v5e-4x4",
        "swiattn-32k-v5p-4x4x4",
        "swiattn-32k-v6e-16x16",
        "qwen3-8b-bosch-v5p-4x4x8",
        "qwen3-8b-bosch-128k-v5p-4x4x8",
        "qwen3-8b-bosch-v6e-16x16",
        "llama-70b-v5p-4x4x4",
    ],
)
def test_a_plan_sends_what_a_hand_counts(name):
    """Weights gathered forward and back, gradients scattered once, by each piece of the batch; what `data` repeats
    summed; in bf16, by rings."""
    plan = published(name)
    repeats, weights = plan["mesh"]["data"], 2 * plan["parameters"]
    pieces = plan["mesh"]["fsdp"] * plan["mesh"]["context"]
    by_hand = plan["batch"]["accumulate"] * 3 * weights * (pieces - 1) / pieces
    by_hand += 2 * weights / pieces * (repeats - 1) / repeats
    sent = [one for one in plan["collectives"] if one["axes"] != "context"]  # over which keys and values go
    assert sum(one["bytes"] for one in sent) <= 1.1 * by_hand
    large = {one["kind"] for one in sent if one["axes"] != "data" and one["bytes"] > 1e-3 * by_hand}
    assert large == {"all-gather", "reduce-scatter"}


def test_heads_of_64_have_less_around_their_kernels_than_in_them():
    time = published("swat-340m-v5e-4x4")["time"]
    assert 0 < time["xla_seconds_by_part"]["around_attention"] < 0.6 * time["kernel_seconds"]


def test_a_program_that_is_compiled_and_has_no_room_for_itself_does_not_fit():
    plan = published("swat-340m-v5e-4x4")
    plan["memory"] |= {"total": plan["memory"]["capacity"] + 2**29, "fits": False, "free": -(2**29)}
    assert "DOES NOT FIT: 0.50 GiB over the 15.75 GiB of a chip. It was compiled" in describe(plan)
    tried = Tried(RunChanges(2, 8, 1, 1, "none", 1), StepEstimate({}, {}), plan)
    assert tried.seconds is None
    assert tried.bytes == plan["memory"]["total"]


def test_a_time_above_the_peak_is_none():
    plan = published("swat-340m-v5e-4x4")
    plan["time"]["mfu_scheduled"] = 3.0
    tried = Tried(RunChanges(2, 8, 1, 1, "none", 1), StepEstimate({}, {}), plan)
    assert tried.fits
    assert tried.seconds is None
    assert outcome(tried).endswith("but its time is not known: MFU 300%")


@pytest.mark.parametrize(
    "name",
    [
        "swat-340m-v5e-4x4",
        "swat-760m-v5e-16x16",
        "swiattn-32k-v5p-4x4x4",
        "swiattn-32k-v6e-16x16",
        "qwen3-8b-bosch-v5p-4x4x8",
        "qwen3-8b-bosch-128k-v5p-4x4x8",
    ],
)
def test_the_first_that_is_compiled_is_the_one_that_was_found_to_be_fast(name, monkeypatch):
    """SWAT 760M: of `fsdp` 64 and 32 with `context` 2, a device's part of the gradients is no whole tile."""
    monkeypatch.chdir(ROOT)
    plan = published(name)
    chosen = "mesh.", "remat=", "scan_layers=", "stages.0.accumulate="
    asked = [one for one in plan["overrides"] if not one.startswith(chosen)]
    work = work_of(load_config(TrainConfig, plan["config"], asked), plan["devices"], chip_name(plan["chip"]))
    settings = candidates(work.config, work.model, 0, work.devices, pinned=True)
    first = min(settings, key=lambda one: estimate(work, one).seconds)
    pinned = present(load_config(TrainConfig, plan["config"], plan["overrides"]), 0, plan["devices"])
    assert first == pinned
