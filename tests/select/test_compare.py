"""`swa-jax compare`: methods at equal budgets, on prompts they did not choose by."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from command_line import fails, run
from flax import nnx
from planted import PLANTED, in_place_of_a_checkpoint, planted_examples, planted_mask, planted_model
from plants import KV_HEADS, LAYERS, WINDOW_SIZE
from tiny_models import BYTES, byte_checkpoint, in_bfloat16, make
from typer.testing import CliRunner

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import accuracy_interval, bootstrap, paired_bootstrap
from swa_jax.checkpoint.folder import save_model
from swa_jax.cli.main import app
from swa_jax.evaluate import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select.compare import PatternComparison, summary
from swa_jax.select.heads import head_mask, head_pattern
from swa_jax.select.methods import METHODS, choose
from swa_jax.select.task import Task

RATIO = 1 - len(PLANTED) / (LAYERS * KV_HEADS)


@pytest.fixture(scope="module")
def model():
    return planted_model()


def test_patterns_with_heads_are_data_to_one_program(model):
    """And score as the model does that was made for the pattern."""
    import swa_jax.evaluate.nll as nll

    examples = planted_examples(4)
    rng = np.random.default_rng(0)
    masks = [planted_mask(), *(rng.random((LAYERS, KV_HEADS)) < p for p in (0.2, 0.8))]
    masks[1][0] = [True, False, True, False]
    sizes = []
    for mask in masks:
        pattern = head_pattern(mask, Window(WINDOW_SIZE, 1))
        scored = score_answers(model, examples, pattern=pattern)
        sizes.append(nll.score_batch._cache_size())
        own = score_answers(model.with_pattern(pattern), examples)
        np.testing.assert_allclose(scored.nll, own.nll, rtol=1e-5)
        assert scored.nll.max() < 2 or mask is not masks[0]
    assert sizes[0] == sizes[1] == sizes[2]
    two = [Example(e.prompt[:-1], [e.prompt[-1], *e.answer], []) for e in examples]
    pattern = head_pattern(masks[1], Window(WINDOW_SIZE, 1, True))
    free = score_answers(model, two, pattern=pattern)
    np.testing.assert_allclose(free.nll, score_answers(model.with_pattern(pattern), two).nll, rtol=1e-5)
    bound = score_answers(model, two, pattern=pattern.with_window(Window(full_decode=False)))
    assert not np.allclose(free.nll, bound.nll)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_windows_the_share_it_is_told(model, method):
    window = Window(WINDOW_SIZE, full_decode=method == "kl")
    task = Task(model, planted_examples(4), window, batch_size=4, force=True)
    less = {"iterations": 2, "steps": 2, "tried": 2, "rounds": 2}
    own = {option: value for option, value in less.items() if option in METHODS[method].options}
    for pattern, ratio in zip(choose(method, task, [0.5, 0.75], **own), (0.5, 0.75), strict=True):
        assert (~head_mask(pattern, KV_HEADS)).mean() == ratio
        assert pattern.sliding_window == WINDOW_SIZE
        assert pattern.full_attention_decode == (method == "kl")
        assert pattern.provenance["method"] == method


def test_results_are_kept_and_summed_up(model, tmp_path):
    def go(methods, seeds=(0, 1)):
        comparison = PatternComparison(
            model,
            planted_examples(seed=9),
            tmp_path,
            lambda seed: planted_examples(seed=seed),
            {"model": "planted"},
            methods,
            [RATIO],
            seeds,
            Window(WINDOW_SIZE),
            iterations=20,
            batch_size=8,
            report=lines.append,
            progress=lambda *count: counts.append(count),
        )
        return comparison([("full", AttentionPattern.from_recipe("full", LAYERS))])

    lines, counts = [], []
    rows = go(["random-heads"])
    assert counts == [(1, 3), (2, 3), (3, 3)]  # chance takes no time to choose
    assert [line.split(":")[0] for line in lines] == [
        "full",
        "random-heads at 0.75, seed 0",
        "random-heads at 0.75, seed 1",
    ]
    lines.clear()
    rows = go(["random-heads", "bosch"])
    assert lines[0] == f"{tmp_path / 'results.json'}: found 3 of 5 patterns here, doing 2"
    assert len(lines) == 3  # what was there is not done again
    assert [count for count in counts[3:] if len(count) == 2] == [(1, 2), (2, 2)]
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    kept = AttentionPattern.from_json(tmp_path / "patterns" / "bosch-0.75-seed-0.json")
    np.testing.assert_array_equal(head_mask(kept, KV_HEADS), planted_mask())
    full, drawn, found = summary(rows, "bosch")
    assert full["needle_accuracy"] == found["by_seed"][0] == 1
    assert full["needle_interval"] == accuracy_interval(np.ones(8)).interval  # over prompts, not over seeds
    assert drawn["needle_accuracy"] < 0.6
    assert drawn["gap"][0] == pytest.approx(drawn["needle_accuracy"] - found["needle_accuracy"])
    assert drawn["gap"][2] < 0
    losses = [
        np.mean([row["losses"] for row in rows if row["name"] == name], axis=0) for name in ("random-heads", "bosch")
    ]
    assert drawn["loss_gap"] == list(paired_bootstrap(*losses))
    assert drawn["answer_nll_interval"] == bootstrap(losses[0]).interval
    assert drawn["by_seed"] == [row["needle_accuracy"] for row in rows if row["name"] == "random-heads"]
    assert not {"gap", "loss_gap"} & found.keys()
    quarter = 1 / 4 + 3 / 4 * WINDOW_SIZE / 49  # prompts of 48 tokens and one of answer
    assert found["kv_cache_bytes"] / full["kv_cache_bytes"] == pytest.approx(quarter)
    lines.clear()
    assert go(["random-heads"], seeds=(1,)) == rows  # what was chosen before comes with it
    assert go(["random-heads", "bosch"]) == rows == json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [line.split(": ")[1] for line in lines] == [
        "found 2 of 2 patterns here, doing 0",
        "found 5 of 5 patterns here, doing 0",
    ]
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object: name another --out"):
        go(["bosch"])


def scored(model, patterns, out, **options):
    """The rows of these patterns, and the lines of those that were scored and not found."""
    lines = []
    options = {"draw": lambda _: [], "settings": {}, "batch_size": 8} | options
    rows = PatternComparison(model, planted_examples(), out, report=lines.append, **options)(patterns)
    return rows, [line for line in lines if line.endswith("% found")]


def test_a_pattern_that_changes_under_its_name_is_scored_again(model, tmp_path):
    full = AttentionPattern.from_recipe("full", LAYERS)
    planted = head_pattern(planted_mask(), Window(WINDOW_SIZE))
    windows = AttentionPattern.from_recipe("window", LAYERS, sliding_window=WINDOW_SIZE)
    first, _ = scored(model, [("full", full), ("mine.json", planted)], tmp_path)
    second, lines = scored(model, [("full", full), ("mine.json", windows)], tmp_path)
    assert [row["needle_accuracy"] for row in first + second] == [1, 1, 1, 0]
    assert lines == ["mine.json: 0.0 % found"]
    wider = dataclasses.replace(planted, num_sink_tokens=1)
    _, lines = scored(model, [("full", full), ("mine.json", wider)], tmp_path)
    assert len(lines) == 1
    # Going back, another provenance, another name, and full attention with a window that no layer has are known.
    again = dataclasses.replace(planted, provenance={"method": "by hand"})
    idle = dataclasses.replace(full, sliding_window=5, full_attention_decode=True)
    for _ in range(2):
        rows, lines = scored(model, [("all", idle), ("mine.json", again), ("yours.json", windows)], tmp_path)
        assert lines == []
        assert [row["name"] for row in rows] == ["all", "mine.json", "yours.json"]
        assert [row["needle_accuracy"] for row in rows] == [1, 1, 0]
        size = (tmp_path / "results.json").stat().st_size
    scored(model, [("all", idle), ("mine.json", again), ("yours.json", windows)], tmp_path)
    assert (tmp_path / "results.json").stat().st_size == size  # finding rows adds none


def test_rows_of_other_weights_data_and_options_are_not_taken(model, tmp_path):
    full = [("full", AttentionPattern.from_recipe("full", LAYERS))]
    scored(model, full, tmp_path)
    nudged = planted_model(noise=0.0021)  # the same answers
    for other, options in ((nudged, {}), (in_bfloat16(model), {}), (model, {"weights": "another folder's"})):
        rows, lines = scored(other, full, tmp_path, **options)
        assert (len(rows), len(lines)) == (1, 1)
        assert scored(other, full, tmp_path, **options)[1] == []
    assert scored(model, full, tmp_path)[1] == []
    # What a method chose depends on all that it chose by.
    choose_by = {"methods": ["dcam"], "ratios": [0.5], "seeds": [0], "draw": lambda seed: planted_examples(4)}
    window = {"window": Window(WINDOW_SIZE)}
    assert len(scored(model, full, tmp_path, **choose_by, **window)[1]) == 1
    assert scored(model, full, tmp_path, **choose_by, **window)[1] == []
    for change in (
        {"window": Window(9)},
        {"window": Window(WINDOW_SIZE, 1)},
        {"eval_window": 7},
        {"draw": lambda seed: planted_examples(4, seed=5)},
    ):
        rows, lines = scored(model, full, tmp_path, **(choose_by | window | change))
        assert (len(rows), len(lines)) == (2, 1)
    chosen = AttentionPattern.from_json(tmp_path / "patterns" / "dcam-0.5-seed-0.json")
    assert chosen == AttentionPattern.from_json(json.dumps(rows[1]["pattern"]))
    scored(model, full, tmp_path, **choose_by | {"window": Window(9)})  # its own again, though nothing is scored
    assert AttentionPattern.from_json(tmp_path / "patterns" / "dcam-0.5-seed-0.json").sliding_window == 9


def test_methods_do_not_choose_by_prompts_that_tell_nothing(model, tmp_path):
    windows = AttentionPattern.from_recipe("window", LAYERS, sliding_window=WINDOW_SIZE)
    full = AttentionPattern.from_recipe("full", LAYERS)
    choose_by = {"methods": ["interleave"], "ratios": [0.5], "seeds": [0], "window": Window(WINDOW_SIZE)}
    weak = [("full", windows), ("window", dataclasses.replace(windows, num_sink_tokens=4))]
    same = [("full", full), ("window", full)]
    sentences = {
        "weak": "with full attention the model itself gets 0% of the 8 answers right",
        "same": "windows in every layer get 100% of the answers right and full attention 100%, no difference beyond",
    }
    for name, patterns in {"weak": weak, "same": same}.items():
        out = tmp_path / name
        with pytest.raises(ConfigError, match=f"{sentences[name]}.*--by loss.*or go on with --force"):
            scored(model, patterns, out, **choose_by)
        kept = json.loads((out / "results.json").read_text())["rows"]
        assert {"interleave"}.isdisjoint(row["name"] for row in kept)
        rows, _ = scored(model, patterns, out, force=True, **choose_by)
        assert len(rows) == 3
        lines = []  # where nothing is chosen it is said, and shown
        shown = {"draw": lambda _: [], "settings": {}, "report": lines.append}
        assert len(PatternComparison(model, planted_examples(), tmp_path / f"{name} alone", **shown)(patterns)) == 2
        assert lines[-1].startswith(sentences[name])
    told, lines = scored(model, [("full", full), ("window", windows)], tmp_path / "told", **choose_by)
    assert len(told) == len(lines) == 3


def test_weights_that_change_under_their_path_are_scored_again(tmp_path, byte_tokenizer):
    checkpoint = byte_checkpoint(tmp_path, byte_tokenizer, make("ww", sliding_window=16))
    options = ("--out", tmp_path / "out", "--held-out", 2, "--length", 320, "--pattern", "window")
    assert "full: 0.0 % found" in run("compare", checkpoint, *options)
    assert "% found" not in run("compare", checkpoint, *options)
    assert "full: 0.0 % found" in run("compare", checkpoint, *options, "--dtype", "bfloat16")
    shutil.rmtree(checkpoint)
    save_model(
        Decoder(BYTES, make("ww", sliding_window=16), rngs=nnx.Rngs(1)),
        checkpoint,
        tokenizer_from=byte_tokenizer.parent,
    )
    output = run("compare", checkpoint, *options)
    assert "full: 0.0 % found" in output
    assert "also holds 4 rows of other weights, prompts or options: not shown" in output
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert len({row["answer_nll"] for row in rows if row["name"] == "full"}) == 3
    # A model that finds nothing lets no method choose.
    options = ("--out", tmp_path / "refused", *options[2:], "--method", "interleave", "--seeds", 1)
    output = run("compare", checkpoint, *options, status=2)
    assert "with full attention the model itself gets 0% of the 2 answers right" in output
    assert "What each choice keeps and costs" not in output
    assert not (tmp_path / "refused" / "frontier.png").exists()
    assert "What each choice keeps and costs" in run("compare", checkpoint, *options, "--force")


def test_the_window_where_the_model_has_none(tmp_path, byte_tokenizer):
    """Recipes take 2048; methods, which choose what to window, want to be told."""
    checkpoint = byte_checkpoint(tmp_path, byte_tokenizer, make("FF", sliding_window=None))
    options = ("--held-out", 2, "--length", 320, "--force")
    missing = "no window is given (--window), and the model's own pattern has none"
    file = tmp_path / "mine.json"
    make("Fw", sliding_window=96, num_sink_tokens=10).to_json(file)
    out = ("--out", tmp_path / "out")
    assert fails("compare", checkpoint, *options, *out, "--method", "nll", "--pattern", file) == missing
    run("compare", checkpoint, *options, *out, "--pattern", file)
    full, mine = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert (full["name"], mine["name"]) == ("full", str(file))
    assert (mine["pattern"]["sliding_window"], mine["pattern"]["num_sink_tokens"]) == (96, 10)
    out = ("--out", tmp_path / "recipes")
    output = run("compare", checkpoint, *options, *out, "--pattern", "streaming", "--pattern", file)
    # 2048, the default of recipes, is also this model's context.
    assert "a window of 2048 holds the model's whole context of 2048, which is full attention: take a smaller" in output
    rows = json.loads((tmp_path / "recipes" / "results.json").read_text())["rows"]
    windows = [(row["name"], row["pattern"]["sliding_window"]) for row in rows]
    assert windows == [("full", None), ("window", 2048), ("streaming", 2048), (str(file), 96)]


def test_a_method_that_chooses_says_how_far_it_is(model, tmp_path):
    counts = []
    drawn, progress = planted_examples(4), lambda *count: counts.append(count)
    settings = {"window": Window(WINDOW_SIZE), "batch_size": 2, "progress": progress}
    comparison = PatternComparison(model, drawn, tmp_path, lambda _: drawn, {}, ["dcam"], [0.5], [3], **settings)
    comparison([("full", AttentionPattern.from_recipe("full", LAYERS))])
    assert [count for count in counts if len(count) == 2] == [(1, 2), (2, 2)]
    assert [text for *_, text in counts[1:-1]] == [f"dcam, seed 3 chooses: {batch}/2" for batch in (1, 2)]


def test_another_window_for_scoring(model, tmp_path):
    chosen = (["interleave"], [1.0], [0], Window(WINDOW_SIZE), 48)
    rows = PatternComparison(model, planted_examples(8), tmp_path, lambda _: [], {}, *chosen)([])
    assert rows[0]["needle_accuracy"] == 1
    chosen = AttentionPattern.from_json(tmp_path / "patterns" / "interleave-1-seed-0.json")
    assert chosen.sliding_window == WINDOW_SIZE


def test_full_attention_decode(model, tmp_path):
    """Methods choose under it and are scored under it; what was scored without it stays another result."""
    asked = [Example(e.prompt[:-1], [e.prompt[-1], *e.answer], []) for e in planted_examples(4)]

    def go(decode):
        chosen = (["nll", "kl"], [0.75], [0], Window(WINDOW_SIZE, full_decode=decode))
        options = {"force": True, "report": lines.append}
        rows = PatternComparison(model, asked, tmp_path, lambda _: asked, {}, *chosen, **options)([])
        for row in rows:
            pattern = AttentionPattern.from_json(json.dumps(row["pattern"]))
            assert pattern.full_attention_decode == decode
            scored = score_answers(model, asked, pattern=pattern)
            assert row["answer_nll"] == pytest.approx(float(scored.nll.mean()), rel=1e-6)
        assert rows[0]["pattern"]["provenance"]["scored_with_full_attention_decode"] == decode
        return rows[1]["pattern"]["provenance"]["scores"]

    lines = []
    without, beside = go(False), go(True)
    assert without != beside
    assert (go(False), go(True)) == (without, beside)
    assert sum(line.endswith("% found") for line in lines) == 4  # nothing twice


@pytest.fixture
def planted_checkpoint(model, monkeypatch):
    in_place_of_a_checkpoint(monkeypatch, model, "compare")


def test_what_a_method_refuses_ends_no_other(planted_checkpoint, monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "dcam", METHODS["dcam"]._replace(run=lambda task, _, **__: task.refuse("no reason")))
    options = ("--window", WINDOW_SIZE, "--seeds", 1, "--method", "dcam", "--method", "interleave", "--out", tmp_path)
    output = run("compare", "x", *options, "--ratio", 0.5, status=2)
    assert "dcam, seed 0, chooses nothing: no reason: the choice would mean nothing" in output
    assert "What each choice keeps and costs" in output
    assert "patterns 3/3\n" in output
    assert f"dcam refused to choose, as is said above; the rest is in {tmp_path}" in " ".join(output.split())
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["full", "window", "interleave"]


def test_on_the_command_line(planted_checkpoint, tmp_path):
    options = ("x", "--window", WINDOW_SIZE, "--seeds", 1, "--method", "fisher", "--method", "interleave")
    output = run("compare", *options, "--out", tmp_path / "c", "--pattern", "layers:2,3,5,6", "--ratio", 0.5)
    assert "layers:2,3,5,6: 100.0 % found" in output
    assert "Found against fisher" in output
    assert "patterns 1/5\n" in output
    assert "patterns 5/5\n" in output
    assert (tmp_path / "c" / "frontier.png").stat().st_size > 10_000
    again = (*options, "--out", tmp_path / "c", "--pattern", "layers:2,3,5,6", "--ratio", 0.5)
    said = json.loads(CliRunner().invoke(app, ["compare", *map(str, again), "--json"]).stdout)
    assert [row["name"] for row in said["rows"]] == ["full", "window", "layers:2,3,5,6", "fisher", "interleave"]
    assert (said["window"], said["rows"][0]["needle_accuracy"]) == (WINDOW_SIZE, 1)
    assert "method 'fischer' is not known; did you mean 'fisher'?" in fails(
        "compare", "x", "--method", "fischer", "--out", tmp_path
    )
    assert "--against 'bosch' is not among the methods: fisher, interleave" in fails(
        "compare", *options, "--against", "bosch", "--out", tmp_path
    )
    assert "--ratio is 2.0" in fails("compare", *options, "--ratio", 2, "--out", tmp_path)
    run("compare", *options, "--fa-decode", "--out", tmp_path / "c", "--ratio", 0.5)
    rows = json.loads((tmp_path / "c" / "results.json").read_text())["rows"]
    assert [row["pattern"]["full_attention_decode"] for row in rows[-3:]] == [True] * 3
