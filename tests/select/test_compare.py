"""`swa-jax compare`: methods at equal budgets, on prompts they did not choose by."""

import dataclasses
import json

import numpy as np
import pytest
from command_line import fails, run
from planted import KV_HEADS, LAYERS, PLANTED, WINDOW_SIZE, planted_examples, planted_mask, planted_model

from swa_jax.evaluate import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.pattern import AttentionPattern
from swa_jax.select.compare import compare, summary
from swa_jax.select.heads import head_mask, head_pattern
from swa_jax.select.methods import METHODS, choose
from swa_jax.settings import ConfigError

RATIO = 1 - len(PLANTED) / (LAYERS * KV_HEADS)


@pytest.fixture(scope="module")
def model():
    return planted_model()


def test_patterns_with_heads_are_data_to_one_program(model, monkeypatch):
    """And score as the model does that was made for the pattern."""
    import swa_jax.evaluate.nll as nll

    examples = planted_examples(4)
    rng = np.random.default_rng(0)
    masks = [planted_mask(), *(rng.random((LAYERS, KV_HEADS)) < p for p in (0.2, 0.8))]
    masks[1][0] = [True, False, True, False]
    sizes = []
    for mask in masks:
        pattern = head_pattern(mask, WINDOW_SIZE, 1, {})
        scored = score_answers(model, examples, pattern=pattern)
        sizes.append(nll.score_batch._cache_size())
        own = score_answers(model.with_pattern(pattern), examples)
        np.testing.assert_allclose(scored.nll, own.nll, rtol=1e-5)
        assert scored.nll.max() < 2 or mask is not masks[0]
    assert sizes[0] == sizes[1] == sizes[2]
    two = [Example(e.prompt[:-1], [e.prompt[-1], *e.answer], []) for e in examples]
    pattern = dataclasses.replace(head_pattern(masks[1], WINDOW_SIZE, 1, {}), full_attention_decode=True)
    free = score_answers(model, two, pattern=pattern)
    np.testing.assert_allclose(free.nll, score_answers(model.with_pattern(pattern), two).nll, rtol=1e-5)
    bound = score_answers(model, two, pattern=pattern, full_attention_decode=False)
    assert not np.allclose(free.nll, bound.nll)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_windows_the_share_it_is_told(model, method):
    patterns = choose(
        method, model, planted_examples(4), [0.5, 0.75], sliding_window=WINDOW_SIZE, iterations=2, batch_size=4
    )  # fmt: skip
    for pattern, ratio in zip(patterns, (0.5, 0.75), strict=True):
        assert (~head_mask(pattern, KV_HEADS)).mean() == ratio
        assert pattern.sliding_window == WINDOW_SIZE
        assert pattern.provenance["method"].startswith(method.removesuffix("-heads"))


def test_results_are_kept_and_summed_up(model, tmp_path):
    def go(methods, seeds=(0, 1), **settings):
        return compare(
            model, [("full", AttentionPattern.from_recipe("full", LAYERS))], planted_examples(16, seed=9), tmp_path,
            methods=methods, ratios=[RATIO], seeds=seeds, draw=lambda seed: planted_examples(seed=seed),
            sliding_window=WINDOW_SIZE, iterations=100, batch_size=16, settings={"model": "planted"} | settings,
            report=lines.append,
        )  # fmt: skip

    lines = []
    rows = go(["random-heads"])
    assert [line.split(":")[0] for line in lines] == [
        "full", "random-heads at 0.75, seed 0", "random-heads at 0.75, seed 1",
    ]  # fmt: skip
    lines.clear()
    rows = go(["random-heads", "bosch"])
    assert len(lines) == 2  # what was there is not done again
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    kept = AttentionPattern.from_json(tmp_path / "patterns" / "bosch-0.75-seed-0.json")
    np.testing.assert_array_equal(head_mask(kept, KV_HEADS), planted_mask())
    full, drawn, found = summary(rows, "bosch")
    assert full["needle_accuracy"] == found["by_seed"][0] == 1
    assert drawn["needle_accuracy"] < 0.6
    assert drawn["gap"][0] == pytest.approx(drawn["needle_accuracy"] - found["needle_accuracy"])
    assert drawn["gap"][2] < 0
    assert drawn["by_seed"] == [row["needle_accuracy"] for row in rows if row["name"] == "random-heads"]
    assert "gap" not in found
    quarter = 1 / 4 + 3 / 4 * WINDOW_SIZE / 49  # prompts of 48 tokens and one of answer
    assert found["kv_cache_bytes"] / full["kv_cache_bytes"] == pytest.approx(quarter)
    with pytest.raises(ConfigError, match="was made with model = planted, this is another"):
        go(["bosch"], model="another")
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no results of `compare`"):
        go(["bosch"])


def test_another_window_for_scoring(model, tmp_path):
    rows = compare(
        model, [], planted_examples(8), tmp_path, methods=["interleave"], ratios=[1.0], seeds=[0],
        draw=lambda _: [], sliding_window=WINDOW_SIZE, eval_window=48, settings={},
    )  # fmt: skip
    assert rows[0]["needle_accuracy"] == 1
    chosen = AttentionPattern.from_json(tmp_path / "patterns" / "interleave-1-seed-0.json")
    assert chosen.sliding_window == WINDOW_SIZE


def test_on_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr("swa_jax.cli.compare.load_checkpoint", lambda *_: (planted_model(), None))
    monkeypatch.setattr("swa_jax.cli.compare.draw_needles", lambda *_: planted_examples())
    options = ("x", "--window", WINDOW_SIZE, "--seeds", 1, "--method", "fisher", "--method", "interleave")
    output = run("compare", *options, "--out", tmp_path / "c", "--pattern", "layers:2,3,5,6", "--ratio", 0.5)
    assert "layers:2,3,5,6: 100.0 % found" in output
    assert "Against fisher" in output
    assert (tmp_path / "c" / "frontier.png").stat().st_size > 10_000
    assert "--method 'fischer' is not known; did you mean 'fisher'?" in fails(
        "compare", "x", "--method", "fischer", "--out", tmp_path
    )
    assert "--against 'bosch' is not among the methods: fisher, interleave" in fails(
        "compare", *options, "--against", "bosch", "--out", tmp_path
    )
    assert "--ratio is 2.0" in fails("compare", *options, "--ratio", 2, "--out", tmp_path)
