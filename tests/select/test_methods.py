"""Each method is declared once, and `select`, `compare` and `adapt` choose by one runner; what some find of planted
heads."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import run
from planted import in_place_of_a_checkpoint, planted_examples, planted_model
from plants import KV_HEADS, LAYERS, WINDOW_SIZE, Unit

from scripts.compare.plants import work
from swa_jax.adapt.search import EFFORTS, Point, Search, fitting
from swa_jax.adapt.tasks import EvalTask
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.served_cache import Memory, modules
from swa_jax.evaluate.nll import answer_batches
from swa_jax.model.flops import forward_flops, output_flops
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import gates
from swa_jax.select.heads import head_mask
from swa_jax.select.methods import DEFAULT, METHODS, choose
from swa_jax.select.task import Ranking, Task

ROOT = Path(__file__).parents[2]
QUICK = ("nll-gradient", "razor", "interleave")


@pytest.fixture(scope="module")
def model():
    return planted_model()


@pytest.fixture
def planted(monkeypatch, model):
    in_place_of_a_checkpoint(monkeypatch, model, "select", "compare")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in METHODS]
)
def test_select_and_compare_choose_what_choose_does(planted, model, tmp_path, name, monkeypatch):
    """From the same inputs, sink tokens and full-attention decode among them."""
    monkeypatch.setattr(gates, "gate_logits", lambda *a, steps, logits=gates.gate_logits, **o: logits(*a, steps=2, **o))
    fewer = {"iterations": 2} if "iterations" in METHODS[name].options else {}
    task = Task(
        model, planted_examples(), Window(WINDOW_SIZE, 1, True), batch_size=8, seed=3, force=True
    )  # for proxy's blocks
    (wanted,) = choose(name, task, [0.75], **fewer)
    assert (wanted.provenance["method"], wanted.full_attention_decode) == (name, True)
    options = ["x", "--ratio", 0.75, "--window", WINDOW_SIZE, "--sink-tokens", 1, "--fa-decode", "--seed", 3]
    options += ["--batch-size", 8, "--force"]
    run("select", name, *options, *(["--iterations", 2] if fewer else []), "--out", tmp_path / "p.json")
    assert AttentionPattern.from_json(tmp_path / "p.json") == wanted
    run("compare", *options, "--iterations", 2, "--method", name, "--seeds", 1, "--out", tmp_path / "compared")
    row = json.loads((tmp_path / "compared" / "results.json").read_text())["rows"][-1]
    assert (row["name"], AttentionPattern.from_json(json.dumps(row["pattern"]))) == (name, wanted)


PASSES = {  # of whole models over the examples, gradients, and logits of all labels, gradients counted twice
    "nll": ((LAYERS + 3) / 2, 0, 1 + LAYERS),
    "kl": (1 + LAYERS * KV_HEADS, 0, 2 * LAYERS * KV_HEADS),
    "kl-layers": (1 + LAYERS, 0, 2 * LAYERS),
    "fisher": (1, 1, 3),
    "dcam": (1, 0, 0),
    "light-transfer": (1, 0, 0),
    "patching": (2 + LAYERS * KV_HEADS, 0, 1 + LAYERS * KV_HEADS),
    "patching-gradient": (2, 1, 3),
    "gates": (200, 200, 600),
    "interleave": (0, 0, 0),
}


@pytest.mark.parametrize(
    "name", [n if n in ("nll", "fisher") else pytest.param(n, marks=pytest.mark.slow) for n in PASSES]
)
def test_a_choice_says_what_it_costs(model, tmp_path, name):
    """The same, whether scores are found in a file or made."""
    file = tmp_path / "scores.jsonl" if METHODS[name].keeps else None
    task = Task(model, planted_examples(), Window(WINDOW_SIZE), batch_size=len(planted_examples()), file=file)
    padded = 64 * len(planted_examples())  # tokens of a pass
    passes, gradients, logits = PASSES[name]
    ((_, batch),) = answer_batches(task.examples, task.batch_size)
    for _ in range(2 if file else 1):
        (pattern,) = choose(name, task, [0.75])
        said = pattern.provenance
        assert said["tokens"] == passes * padded
        assert said["tokens_back"] == gradients * padded
    output = output_flops(model.config)
    each = forward_flops(model.config, 65 / 2) - output
    expected = each * padded * (passes + 2 * gradients) + output * logits * batch.labels.size
    assert said["flops"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["nll-heads", pytest.param("bosch", marks=pytest.mark.slow)])
def test_masks_that_a_file_knows_are_counted_too(model, tmp_path, name):
    fewer = {"rounds": 1} if name == "nll-heads" else {"iterations": 2, "by": "loss"}
    costs = []
    for _ in range(2):
        task = Task(model, planted_examples(), Window(WINDOW_SIZE), file=tmp_path / "scores.jsonl")
        costs.append([one.provenance["tokens"] for one in choose(name, task, [0.75, 0.5], **fewer)])
    assert costs[0] == costs[1]
    assert min(costs[0]) > 0


@pytest.mark.parametrize("unit", ["layers", pytest.param("heads", marks=pytest.mark.slow)])
def test_adapt_chooses_what_select_does(model, tmp_path, unit):
    memory = Memory(model.config, {}, 49)
    point = Point(DEFAULT[unit], Window(WINDOW_SIZE, 0, False))
    pattern = fitting(point, memory, 0.5)
    heads = 1 if unit == "layers" else KV_HEADS
    full = int(head_mask(pattern, KV_HEADS).sum()) * heads // KV_HEADS
    effort = EFFORTS["normal"]._replace(rank_by=8)
    space = SimpleNamespace(start=point, most=full)
    said = (lambda _: None), (lambda *_: None)
    tasks = [EvalTask("a", "", "", planted_examples())]
    search = Search(model, tasks, {}, memory, 0.5, space, tmp_path, "k" * 32, 8, effort, 0, *said)
    search._rank()
    task = Task(model, planted_examples(), Window(WINDOW_SIZE), batch_size=8)
    (wanted,) = choose(DEFAULT[unit], task, [1 - full / (LAYERS * heads)], rounds=effort.rounds)
    assert search._pattern(point) == wanted


def test_the_default_is_one():
    assert {METHODS[name].chooses for name in DEFAULT.values()} == {"layers", "KV heads"}
    help_of = {verb: " ".join(run(*verb.split(), "--help").replace("│", " ").split()) for verb in ("select", "compare")}
    assert all(DEFAULT["layers"] in text for text in help_of.values())


def test_the_first_of_a_ranking_stay_full():
    ranking = Ranking([2, 0, 1], (3, 1), {"picked": [2, 0, 1]})
    mask, said = ranking.first(1 / 3)
    assert mask[:, 0].tolist() == [True, False, True]
    assert said["picked"] == [2, 0]
    heads, _ = Ranking([(1, 0), (0, 1)], (2, 2), {}).first(0.7)
    np.testing.assert_array_equal(heads, [[False, False], [True, False]])
    with pytest.raises(ConfigError, match=r"ratio is 1\.5"):
        ranking.first(1.5)


def test_of_equal_layers_the_lower_one_stays_full(model, monkeypatch):
    class Scorer:
        layers, window, mean = 4, Window(WINDOW_SIZE, 0, False), np.array([0.0, 2.0, 1.0, 2.0])

        def __call__(self, progress):
            return SimpleNamespace(mean=self.mean, intervals=list)

    monkeypatch.setattr("swa_jax.select.methods._scorer", lambda *_: Scorer())
    task = Task(model, [], Window(WINDOW_SIZE))
    assert [pattern.full_layers for pattern in choose("nll", task, [0.5, 0.75, 1])] == [(1, 3), (1,), ()]
    Scorer.mean[0] = np.nan
    with pytest.raises(ConfigError, match="finite"):
        choose("nll", task, [0.5])


# By a method at a placement at least and at most so many. Of two heads that do the same, one at a time is not missed.
HITS = [("kl", "whole layers", 1, 1), ("kl", "redundant pairs", 0, 0.99)]
HITS += [("patching", "one a layer", 1, 1), ("patching-gradient", "one a layer", 1, 1)]
LONG_HITS = [("kl", "conjunctions", 1, 1)]
LONG_HITS += [("gates", name, 0.95, 1) for name in ("one a layer", "conjunctions", "redundant pairs")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "placement", "least", "most"), HITS + [pytest.param(*row, marks=pytest.mark.long) for row in LONG_HITS]
)
def test_planted_heads_are_found(method, placement, least, most):
    assert least <= work(method, placement, seed=0, examples=16)["hits"] <= most


TWOS = ((2, 0), (2, 1), (5, 2), (5, 3), (3, 0), (3, 1), (6, 2), (6, 3))


@pytest.mark.parametrize("name", ["nll-heads", "kl", pytest.param("bosch-swaps", marks=pytest.mark.slow)])
def test_heads_in_twos_are_found(name):
    """Neighbours stay full together, so that the plug-in's modules have two heads."""
    model = planted_model(units=[Unit("one", (head,)) for head in TWOS])
    task = Task(model, planted_examples(), Window(WINDOW_SIZE), batch_size=8, heads_in=2)
    (found,) = choose(name, task, [0.75])
    assert {(layer, head) for layer, heads in enumerate(found.full_kv_heads) for head in heads} == set(TWOS)
    assert modules(found, KV_HEADS) == (4, 12)
    with pytest.raises(ConfigError, match="--heads-in 3 does not divide the 4 KV heads of a layer"):
        Task(model, [], Window(WINDOW_SIZE), heads_in=3)


def test_heads_in_twos_within_a_budget(planted, tmp_path):
    """Planted singly, they cannot all be had in twos; what is chosen comes in twos, and takes what was asked for."""
    options = ["--window", WINDOW_SIZE, "--batch-size", 8, "--kv-budget", 0.35, "--serve-length", 128]
    run("select", "nll-heads", "x", *options, "--heads-in", 2, "--out", tmp_path / "p.json")
    found = AttentionPattern.from_json(tmp_path / "p.json")
    mask = head_mask(found, KV_HEADS)
    assert (mask[:, ::2] == mask[:, 1::2]).all()
    assert found.provenance["heads_in"] == 2
    assert 0.29 < Memory(planted_model().config, {}, 128).share(found) <= 0.35
    assert "--heads-in" not in run("select", "nll-gradient", "--help")


# ---- what docs/selection.md says of methods ----


def methods_table() -> str:
    rows = [f"| `{m.name}` | {m.chooses} | {m.by} | {m.costs} |" for m in METHODS.values()]
    return "\n".join(["| method | chooses | by | costs |", "|---|---|---|---|", *rows]) + "\n"


def advice() -> str:
    """Numbers found with 1/2, 1/4 and 1/8 full, from docs/data/choices-on-chains.json and the page on real models."""
    docs = {file: file.read_text() for file in ROOT.glob("docs/**/*.md")}
    header = "| method | 1/2 full | 1/4 full | 1/8 full |"
    (page,) = (text for text in docs.values() if header in text)
    found = [{}]
    for row in json.loads((ROOT / "docs" / "data" / "choices-on-chains.json").read_text())["rows"]:
        found[0].setdefault(row["method"], []).append(f"{row['found']:.0%}"[:-1])
    for table in page.split(header)[1:]:
        rows = (line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[2:])
        found.append({name.strip("`"): [cell.split(" %")[0] for cell in cells] for name, *cells in rows})
    lines = ["| method | chooses | chains | SmolLM2 | Gemma 3 |", "|---|---|---|---|---|"]
    for name in found[0]:
        cells = [", ".join(model[name]) if name in model else "" for model in found]
        lines.append(f"| `{name}` | {METHODS[name].chooses} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("table", [methods_table, advice])
def test_the_tables_of_the_page_are_made_anew(table):
    assert table() in (ROOT / "docs" / "selection.md").read_text(), f"docs/selection.md must have\n{table()}"
