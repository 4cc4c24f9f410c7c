"""`python -m scripts.train_chains`, `scripts.compare windows` and `card`: stopped and resumed, passed early, a hybrid
from a random start, a table of known runs, and a card of known scores."""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from compiled_chains import CLASSES, LAYERS, SERVES, WINDOW_SIZE, compiled_chains, small_tokenizer

from scripts import train_chains as train
from scripts.compare import card, runner, windows
from swa_jax import load_model
from swa_jax.base.settings import load_config
from swa_jax.data.lessons import write_tokenizer
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.train.config import TrainConfig

ROOT = Path(__file__).parents[2]


def test_the_curriculum_grows():
    config = load_config(TrainConfig, ROOT / "configs" / "chains.yaml")
    assert config.pattern == "full"
    lengths = [stage.sequence_length for stage in config.stages]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (32, 2048)
    for number, stage in enumerate(config.stages):
        assert 1950 <= stage.batch_size * stage.sequence_length <= 2200
        shares = {kind: sum(s.weight for s in stage.data if s.kind == kind) for kind in ("passages", "chains")}
        assert shares["passages"] >= 0.5 if number < 2 else shares["chains"] > shares["passages"] > 0
        hardest = max((s for s in stage.data if s.kind == "chains"), key=lambda source: source.weight)
        earlier = sum(s.weight for s in stage.data if s.kind == "chains" and s is not hardest)
        assert number < 2 or earlier >= 0.15
    rates = [factor for _, factor in config.rate_factors]
    assert rates == sorted(rates, reverse=True)
    assert config.optimizer.decay_steps == config.stages[-1].steps


@pytest.fixture
def tiny(tmp_path) -> Path:
    """Two stages of a tiny model."""
    settings = yaml.safe_load((ROOT / "configs" / "chains.yaml").read_text())
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings["model"] |= small | {"num_key_value_heads": 2, "head_dim": 8}
    settings["stages"] = [stage | {"steps": 4, "batch_size": 2} for stage in settings["stages"][1:3]]
    settings["optimizer"] |= {"warmup_steps": 1, "decay_steps": 4}
    settings["checkpoint_every"] = 2
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    write_tokenizer(small_tokenizer(), tmp_path / "tokenizer")
    return tmp_path


@pytest.mark.slow
def test_a_run_goes_on_and_ends_stages_early(tiny, monkeypatch):
    monkeypatch.setattr(train, "CHECK_TOKENS", 64 * 16)

    tokenizer = f"tokenizer={tiny / 'tokenizer'}"

    def run(output, *more):
        options = ("--config", tiny / "tiny.yaml", "--output", tiny / output, tokenizer)
        train.main([str(word) for word in (*options, *more)])
        return [json.loads(line) for line in (tiny / output / "log.jsonl").read_text().splitlines()]

    def saved(output):
        config = load_config(TrainConfig, tiny / "tiny.yaml", [f"output={tiny / output}", tokenizer])
        return jax.tree.leaves(train.CurriculumRun(config).state)

    lines = run("whole")
    for _ in range(3):
        parts = run("parts", "--steps", 3)
    assert parts[-1]["steps"] == 8
    for one, other in zip(saved("whole"), saved("parts"), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [(line["stage"], line["inside"], list(line["accuracy"])) for line in lines] == [
        (0, 2, ["1"]),
        (0, 4, ["1"]),
        (1, 2, ["1", "2"]),
        (1, 4, ["1", "2"]),
    ]
    for name in ("stage-1", "stage-2", "model"):
        assert load_model(tiny / "parts" / name).embedding.dtype == "bfloat16"
    monkeypatch.setattr(train, "PASSED", 0.0)
    assert [(line["stage"], line["steps"]) for line in run("early")] == [(0, 2), (1, 4)]


def test_a_hybrid_is_checked_beyond_its_window(tiny, monkeypatch):
    changes = [f"output={tiny / 'hybrid'}", f"tokenizer={tiny / 'tokenizer'}", "pattern=interleave-1-in-2+nope"]
    run = train.CurriculumRun(load_config(TrainConfig, tiny / "tiny.yaml", [*changes, "sliding_window=4"]), gap=48)
    assert run.model.pattern.layer_types == (WINDOW, FULL)
    assert run.model.pattern.sliding_window == 4
    assert run.model.config.rope_layers == ("global", "none")
    asked = []

    def drawn(*_, gap, **__):
        asked.append(gap)
        raise StopIteration

    monkeypatch.setattr(train, "chain_examples", drawn)
    for stage, gap in zip(run.config.stages, (32, 32), strict=True):  # half of rows of 64
        with pytest.raises(StopIteration):
            run._check(stage)
        assert asked.pop() == gap


def test_the_table_of_windows_tells_what_was_not_learned(tmp_path):
    ends = {  # by seed: of each stage the tokens and the accuracy at its end
        0: [(200_000, 0.5), (400_000, 0.93)],
        1: [(300_000, 0.91), (900_000, 0.7)],
    }
    done = {}
    for seed, stages in ends.items():
        lines = [
            {"stage": stage, "tokens": tokens + more, "accuracy": {"1": accuracy}}
            for stage, (tokens, accuracy) in enumerate(stages)
            for more in (-50_000, 0)
        ]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        done[json.dumps(["window 4", seed])] = {"ends": windows.ends_of(tmp_path)}
    assert windows.table(done, [0, 1, 2]).splitlines()[2:] == [
        "| window 4 | 0, 1 | 0.20 (not learned), 0.30 | 0.40, 0.90 (not learned) | 0.65 |"
    ]


@pytest.mark.long
def test_the_card_of_the_compiled_model(tmp_path):
    tokenizer, cell = small_tokenizer(), ChainCell(3, 3, 128)
    examples = chain_examples(tokenizer, cell, num_examples=32, gap=WINDOW_SIZE)
    comparison = card.of_model(compiled_chains(tokenizer), examples, cell, WINDOW_SIZE, "sum")
    options = argparse.Namespace(out=tmp_path, only=[], limit=None, report_only=False, docs=None)
    text = runner.run(comparison, options)
    score = {row["cell"][0]: row["score"] for row in runner.read_done(tmp_path).values()}
    assert score["full"] == 1
    for layer in range(LAYERS):
        assert (score[f"layer {layer}"] <= 0.9) == (layer in SERVES)
        for head in range(CLASSES):
            windowed, removed = (score[f"{part} {layer}.{head}"] for part in ("head", "no head"))
            assert (windowed < 1) == (head in SERVES.get(layer, ()))
            # Layer 0 looks one and two tokens back, which a window does not hide.
            assert (removed < 1) == (head in SERVES.get(layer, ()) or (layer == 0 and head < 2))
    removed = [score[f"no layer {layer}"] <= 0.9 for layer in range(LAYERS)]
    assert removed == [layer in (0, *SERVES) for layer in range(LAYERS)]
    # Nothing of what was removed is missing afterwards.
    assert comparison.cells[0].measure()["score"] == 1
    assert "- layers: 4 of 8: layer 2 (" in text
