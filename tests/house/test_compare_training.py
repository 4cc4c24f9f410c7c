"""`python -m scripts.compare`, of training: some arms, resumed, reported; the verdicts on what is known."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from python_process import python

from scripts.compare import measures, runner, training
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config
from swa_jax.checkpoint.folder import weights_sum
from swa_jax.checkpoint.named import model_folder
from swa_jax.data.chains import ChainWords
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate.chains import ChainCell, chain_examples
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.loop import TrainConfig

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", ["swiattn", "swiattn-chains", "swiattn-ablations", "swat", "swat-longer"])
def test_every_arm_is_a_configuration_and_every_claim_is_about_an_arm(name):
    what = training.declared(name)
    configs = {
        arm: load_config(TrainConfig, ROOT / what["config"], training.words(of)) for arm, of in what["arms"].items()
    }
    assert len({training.fingerprint(config) for config in configs.values()}) == len(configs)
    if name.startswith("swat"):  # the arms are compared after the same tokens
        stages = [config.stages[0] for config in configs.values()]
        assert {s.steps * s.batch_size * s.sequence_length for s in stages} == {
            500 * 2048 * (4 if name == "swat-longer" else 1)
        }
    for _, _, (arm, value), (other, lower) in what["claims"]:
        assert {arm, other} <= set(configs)
        assert {value, lower} <= {*what["columns"], "right"}


@pytest.mark.parametrize(
    ("differences", "equal", "said"),  # equal: the paper has no difference
    [
        ([0.2, 0.3, 0.25], False, "reproduced in direction"),
        ([-0.2, -0.3, -0.25], False, "not reproduced: the opposite"),
        ([0.2, -0.1, 0.3], False, "no clear difference"),
        ([0.01, 0.9, 0.02], False, "no clear difference"),  # of one sign, within twice its standard error
        ([0.052, 0.069, 0.026], False, "no clear difference"),  # 3.9 times: chance does that too, with three seeds
        ([float("inf"), 0.3, 0.2], False, "reproduced in direction"),  # a diverged run has an infinite loss
        ([0.2, 0.3], False, "too few seeds"),
        ([0.2, -0.1, 0.3], True, "no clear difference, as in the paper"),
        ([0.2, 0.3, 0.25], True, "a difference, +0.250 on average"),
    ],
)
def test_verdict(differences, equal, said):
    assert training.verdict(differences, equal=equal) == said


def test_table_counts_seeds_and_says_what_diverged():
    def run(seed, values, diverged=None):
        return {"arm": "a", "seed": seed, "values": values, "diverged": diverged}

    runs = {"a": [run(0, {"x": 1.0}), run(1, {"x": 2.0})], "b": [run(0, {}, "step 3"), run(1, {"x": 4.0})]}
    text = training.table(runs, {"x": "loss", "y": "never measured"})
    assert text.splitlines()[0] == "| | seeds | loss |"
    assert "| a | 2 | 1.500 ± 0.707 |" in text
    assert "| b | 2, 1 diverged | 4.000 |" in text
    claims = (("b above a", "2, 1", ("b", "x"), ("a", "x")), ("not measured", "-", ("b", "y"), ("a", "y")))
    assert training.verdicts(runs, claims).splitlines()[2:] == ["| b above a | 2, 1 | +inf, +2.000 | too few seeds |"]


def test_report_goes_between_its_marks(tmp_path):
    document = tmp_path / "d.md"
    marks = "<!-- swat -->\n{}<!-- end of swat -->"
    document.write_text("before\n" + marks.format("old") + "\nafter\n")
    (tmp_path / "a.png").write_bytes(PNG)
    runner.put_into(document, "swat", "swat", "new", [(tmp_path / "a.png", "A picture")])
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "new" in text
    assert "![A picture](images/compare-swat-a.png)" in text
    assert (tmp_path / "images" / "compare-swat-a.png").read_bytes() == PNG
    with pytest.raises(ConfigError, match="has no '<!-- swiattn"):
        runner.put_into(document, "swiattn", "swiattn", "new")
    assert document.read_text() == text


def test_a_cell_is_measured_once_and_one_that_was_cut_off_is_none(tmp_path):
    measured = []

    def cell(name, settings=None):
        return runner.Cell((name, 0), lambda: measured.append(name) or {"value": len(measured)}, lambda: settings)

    def values_of(done):
        return json.dumps([line["value"] for line in done.values()]), []

    def run(*cells, limit=None, report_only=False, only=()):
        options = argparse.Namespace(out=tmp_path, limit=limit, report_only=report_only, only=only, docs=None)
        return runner.run(runner.Comparison("x", cells, values_of), options)

    assert run(cell("a"), cell("b"), limit=1) == "[1]"
    assert run(cell("a"), cell("b")) == (tmp_path / "table.md").read_text().strip() == "[1, 2]"
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"key": "[\\"c\\", 0]", "val')
    assert run(cell("a"), cell("c"), report_only=True) == "[1, 2]"
    assert run(cell("a"), cell("c"), cell("d"), only=["c"]) == "[1, 2, 3]"
    assert measured == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="there is no 'e'; there are: a; d"):
        run(cell("a"), cell("d"), only=["d", "e"])
    with pytest.raises(ConfigError, match="with other settings: name a new folder by --out"):
        run(cell("a", settings="other"))


def test_each_seed_continues_its_own_model(tmp_path):
    what = training.declared("swiattn-chains")
    bundled = model_folder("chains")
    assert training.base_of(what, 1, ["nowhere", "chains"]) == training.base_of(what, 1, []) == bundled
    with pytest.raises(ConfigError, match="seed 2 has no model to continue: --bases names 2"):
        training.base_of(what, 2, ["chains", "chains"])
    assert training.base_of(training.declared("swat"), 0, []) is None
    AttentionPattern.from_recipe("layers:2,5", 8, sliding_window=32).to_json(tmp_path / "chosen-1.json")
    overrides = training.overrides_of(what, "static-hybrid, chosen layers", 1, tmp_path, bundled)
    assert overrides == ["method=null", "pattern=layers:2,5", f"init_from={bundled}"]
    assert training.overrides_of(what, "full", 0, tmp_path, bundled) == ["method=full", f"init_from={bundled}"]
    options = argparse.Namespace(out=tmp_path, bases=[], tiny=True)
    assert training.cell(what, "full", 0, options).settings()["base"] == weights_sum(bundled)


def test_where_chains_are_carried_on():
    """The ends of statements: of the one with the number, and of those with a name."""
    tokenizer = load_tokenizer(ROOT / "swa_jax" / "chains")
    cell = ChainCell(3, 1, 64)
    examples = chain_examples(tokenizer, cell, num_examples=2, seed=3)
    tokens, answers = measures.answer_queries(examples)
    numbers, names = measures.statement_ends(examples, tokens.shape)
    words = ChainWords.of(tokenizer)
    assert numbers.sum() == 2
    assert np.isin(tokens[numbers == 1], words.numbers).all()
    assert names.sum() == 4
    assert np.isin(tokens[names == 1], words.names).all()
    assert answers.sum() == 2 * 3
    assert tokens.shape == (2, 64)


def compared(folder, name, *arms):
    """What is known of these arms, of seed 0."""
    python("-m", "scripts.compare", name, "--tiny", "--seeds", 0, "--only", *arms, "--out", folder)
    lines = {line["cell"][0]: line for line in runner.read_done(folder).values()}
    return [lines[arm] for arm in arms]


@pytest.mark.long
def test_swat_from_the_command_line(tmp_path):
    (line,) = compared(tmp_path, "swat", "sigmoid AliRope (-+)")
    assert 6 < line["values"]["32"] < 8  # log 1024 = 6.9
    for picture in ("table-3.png", "loss.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)


@pytest.mark.long
def test_swiattn_from_the_command_line(tmp_path):
    routed, windowed = compared(tmp_path, "swiattn", "swiattn", "swa-zero-shot")
    assert 0 < routed["values"]["full ratio"] < 1
    assert windowed["values"]["full ratio"] == 0
    assert len(routed["ratio_by_layer"][0]) == 8
    assert windowed["loss"] == []  # no step
    assert 2 < routed["values"]["text loss"] < 4
    for picture in ("loss.png", "ratio-swiattn.png", "needles.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)


@pytest.mark.long
def test_swiattn_on_chains_from_the_command_line(tmp_path):
    arms = ("swiattn", "static-hybrid, chosen layers", "swa-zero-shot")
    routed, hybrid, windowed = compared(tmp_path, "swiattn-chains", *arms)
    assert 0 < routed["values"]["full ratio, far hops"] < 1
    assert hybrid["values"]["full ratio, far hops"] == 0.5
    assert hybrid["pattern"].startswith("layers:")
    assert windowed["values"]["full ratio, far answers"] == 0
    assert hybrid["values"]["right"] > windowed["values"]["right"]
    for picture in ("loss.png", "right.png", "tokens-swiattn.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
