"""What the reports in docs/plans say, beside what a hand counts."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_plan_sends_what_a_hand_counts():
    """Weights gathered forward and back, gradients scattered once, and what `data` repeats summed; in bf16, by rings.

    Of the published plans this one alone splits nothing over all of its slice, where the compiler sums
    (`Target.scatters_whole`), nor a sequence, whose keys are sent as well.
    """
    plan = json.loads((ROOT / "docs" / "plans" / "swat-340m-v5e-4x4.json").read_text())
    pieces, repeats, weights = plan["mesh"]["fsdp"], plan["mesh"]["data"], 2 * plan["parameters"]
    assert plan["mesh"]["context"] == 1 < repeats
    by_hand = 3 * weights * (pieces - 1) / pieces + 2 * weights / pieces * (repeats - 1) / repeats
    assert sum(one["bytes"] for one in plan["collectives"]) <= 1.1 * by_hand
    assert {one["kind"] for one in plan["collectives"] if one["axes"] == "fsdp" and one["bytes"] > 1e6} == {
        "all-gather",
        "reduce-scatter",
    }
