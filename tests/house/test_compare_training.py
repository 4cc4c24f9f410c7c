"""scripts/compare_training.py: a few steps of some arms, resumed, reported; the verdicts on what is known."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from swa_jax.checkpoint.named import model_folder
from swa_jax.data.chains import ChainWords
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.errors import ConfigError
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.model.pattern import AttentionPattern
from swa_jax.settings import load_config
from swa_jax.train.loop import TrainConfig

ROOT = Path(__file__).parents[2]
SCRIPT = "compare_training"
PNG = b"\x89PNG\r\n\x1a\n"


def command(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compare_training.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", ["swiattn", "swiattn-chains", "swiattn-ablations", "swat", "swat-longer"])
def test_every_arm_is_a_configuration_and_every_claim_is_about_an_arm(script, name):
    comparison = script.COMPARISONS[name]
    configs = {
        arm: load_config(TrainConfig, ROOT / comparison.CONFIG, overrides) for arm, overrides in comparison.ARMS.items()
    }
    assert len({script.fingerprint(config) for config in configs.values()}) == len(configs)
    if name.startswith("swat"):  # the arms are compared after the same tokens
        stages = [config.stages[0] for config in configs.values()]
        assert {s.steps * s.batch_size * s.sequence_length for s in stages} == {
            500 * 2048 * (4 if name == "swat-longer" else 1)
        }
    for _, _, higher, lower in comparison.CLAIMS:
        assert {higher[0], lower[0]} <= set(configs)


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ([0.2, 0.3, 0.25], "reproduced in direction"),
        ([-0.2, -0.3, -0.25], "not reproduced: the opposite"),
        ([0.2, -0.1, 0.3], "no clear difference"),
        ([0.01, 0.9, 0.02], "no clear difference"),  # of one sign, within twice its standard error
        ([float("inf"), 0.3, 0.2], "reproduced in direction"),  # a diverged run has an infinite loss
        ([0.2, 0.3], "too few seeds"),
    ],
)
def test_verdict(script, differences, said):
    assert script.verdict(differences) == said


def test_verdict_where_the_paper_has_no_difference(script):
    assert script.verdict([0.2, -0.1, 0.3], equal=True) == "no clear difference, as in the paper"
    assert script.verdict([0.2, 0.3, 0.25], equal=True) == "a difference, +0.250 on average"


def test_table_counts_seeds_and_says_what_diverged(script):
    def run(seed, values, diverged=None):
        return {"arm": "a", "seed": seed, "values": values, "diverged": diverged}

    runs = {"a": [run(0, {"x": 1.0}), run(1, {"x": 2.0})], "b": [run(0, {}, "step 3"), run(1, {"x": 4.0})]}
    text = script.table(runs, {"x": "loss", "y": "never measured"})
    assert text.splitlines()[0] == "| | seeds | loss |"
    assert "| a | 2 | 1.500 ± 0.707 |" in text
    assert "| b | 2, 1 diverged | 4.000 |" in text
    claims = (("b above a", "2, 1", ("b", "x"), ("a", "x")), ("not measured", "-", ("b", "y"), ("a", "y")))
    assert script.verdicts(runs, claims).splitlines()[2:] == ["| b above a | 2, 1 | +inf, +2.000 | too few seeds |"]


def test_report_goes_between_its_marks(script, tmp_path):
    document = tmp_path / "d.md"
    marks = "<!-- swat: made by scripts/compare_training.py -->\n{}<!-- end of swat -->"
    document.write_text("before\n" + marks.format("old") + "\nafter\n")
    (tmp_path / "a.png").write_bytes(PNG)
    script.put_into(document, "swat", "new", [("a.png", "A picture")], tmp_path)
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "new" in text
    assert "![A picture](images/compare-swat-a.png)" in text
    assert (tmp_path / "images" / "compare-swat-a.png").read_bytes() == PNG
    with pytest.raises(ConfigError, match="has no '<!-- swiattn"):
        script.put_into(document, "swiattn", "new", [], tmp_path)


def test_each_seed_continues_its_own_model(script, tmp_path):
    comparison = script.COMPARISONS["swiattn-chains"]
    names = ["recall", "chains"]
    bases = [model_folder(name) for name in names]
    assert script.base_of(comparison, 1, names) == bases[1]
    with pytest.raises(ConfigError, match="seed 2 has no model to continue: --bases names 2"):
        script.base_of(comparison, 2, names)
    assert script.base_of(script.COMPARISONS["swat"], 0, []) is None
    pattern = AttentionPattern.from_recipe("layers:2,5", 8, sliding_window=32)
    pattern.to_json(tmp_path / "chosen-1.json")
    arm = "static-hybrid, chosen layers"
    overrides = script.overrides_of(comparison, arm, 1, tmp_path, bases[1])
    assert overrides == ["method=null", "pattern=layers:2,5", f"init_from={bases[1]}"]
    assert script.overrides_of(comparison, "full", 0, tmp_path, bases[0]) == ["method=full", f"init_from={bases[0]}"]


def test_where_chains_are_carried_on(script):
    """The ends of statements: of the one with the number, and of those with a name."""
    chains = sys.modules["compare_swiattn_chains"]
    tokenizer = load_tokenizer(ROOT / "swa_jax" / "chains")
    cell = ChainCell(3, 1, 64)
    examples = chain_examples(tokenizer, cell, num_examples=2, seed=3)
    tokens, answers = chains.answer_queries(examples)
    numbers, names = chains._statement_ends(examples, tokens.shape)
    words = ChainWords.of(tokenizer)
    assert numbers.sum() == 2
    assert np.isin(tokens[numbers == 1], words.numbers).all()
    assert names.sum() == 4
    assert np.isin(tokens[names == 1], words.names).all()
    assert answers.sum() == 2 * 3
    assert tokens.shape == (2, 64)


@pytest.mark.long
def test_swat_from_the_command_line_goes_on_where_it_was(tmp_path):
    arm = "sigmoid AliRope (-+)"
    wrong = command("swat", "--arms", "sigmoid", "--out", tmp_path)
    assert wrong.returncode == 2
    assert "no arm 'sigmoid'" in wrong.stderr
    first = command("swat", "--tiny", "--seeds", 0, "--arms", arm, "--out", tmp_path)
    assert first.returncode == 0, first.stderr
    before = json.loads((tmp_path / "results.json").read_text())
    assert list(before) == [f"{arm} | 0"]
    assert 6 < before[f"{arm} | 0"]["values"]["32"] < 8  # log 1024 = 6.9
    again = command("swat", "--tiny", "--seeds", 0, "--arms", arm, "--out", tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "results.json").read_text()) == before
    for picture in ("table-3.png", "loss.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
    other = command("swat", "--seeds", 0, "--arms", arm, "--out", tmp_path)
    assert other.returncode == 1
    assert "with other settings: name a new folder with --out" in other.stderr


@pytest.mark.long
def test_swiattn_from_the_command_line(tmp_path):
    done = command("swiattn", "--tiny", "--seeds", 0, "--arms", "swiattn", "swa-zero-shot", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    routed, windowed = (results[f"{arm} | 0"] for arm in ("swiattn", "swa-zero-shot"))
    assert 0 < routed["values"]["full ratio"] < 1
    assert windowed["values"]["full ratio"] == 0
    assert len(routed["ratio_by_layer"][0]) == 8
    assert windowed["loss"] == []  # no step
    assert 2 < routed["values"]["text loss"] < 4
    assert (tmp_path / "ratio-swiattn.png").read_bytes().startswith(PNG)


@pytest.mark.long
def test_swiattn_on_chains_from_the_command_line(tmp_path):
    arms = ("swiattn", "static-hybrid, chosen layers", "swa-zero-shot")
    done = command("swiattn-chains", "--tiny", "--seeds", 0, "--arms", *arms, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    routed, hybrid, windowed = (results[f"{arm} | 0"] for arm in arms)
    assert 0 < routed["values"]["full ratio, far hops"] < 1
    assert hybrid["values"]["full ratio, far hops"] == 0.5
    assert hybrid["pattern"].startswith("layers:")
    assert windowed["values"]["full ratio, far answers"] == 0
    assert hybrid["values"]["right"] > windowed["values"]["right"]
    for picture in ("loss.png", "right.png", "tokens-swiattn.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
    other = command(
        "swiattn-chains", "--tiny", "--seeds", 0, "--arms", "swiattn", "--out", tmp_path, "--bases", tmp_path / "runs"
        / "swiattn-seed-0" / "model",
    )  # fmt: skip
    assert other.returncode == 1
    assert "with other settings: name a new folder with --out" in other.stderr
