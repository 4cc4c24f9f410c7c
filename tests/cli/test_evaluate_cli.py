"""`swa-jax evaluate` on RULER's tasks and perplexity sweeps, and the functions behind it, on a tiny random model."""

import dataclasses
import importlib
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import run
from ruler_files import write_ruler_data
from tiny_models import byte_checkpoint, make, start_tokenizer
from typer.testing import CliRunner

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import accuracy_interval
from swa_jax.base.files import alone
from swa_jax.checkpoint.folder import load_model
from swa_jax.cli.main import app
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate import Example, perplexity, score_answers
from swa_jax.evaluate.measure import score_by_depth
from swa_jax.evaluate.ruler import RULER_TASKS, ruler_grid
from swa_jax.evaluate.ruler_data import RulerData
from swa_jax.evaluate.ruler_scores import RulerScore, ruler_scores
from swa_jax.evaluate.sweep import perplexity_sweep, with_window
from swa_jax.model.flops import matrix_parameters
from swa_jax.model.generate import generate
from swa_jax.model.layer_types import HYBRID, SWITCH, WINDOW
from swa_jax.model.pattern import AttentionPattern


def fails(*arguments: object) -> str:
    """The one sentence that a kind of measurement ends with; a note on the context may stand before it."""
    lines = run("evaluate", *arguments, status=2).splitlines()
    *notes, sentence = [line for line in lines if not line.startswith("sequences of ")]
    assert not notes, lines
    return sentence


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    return byte_checkpoint(
        tmp_path_factory.mktemp("evaluate"), byte_tokenizer, make("Fw", sliding_window=16), max_position_embeddings=96
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("All that is gold does not glitter, not all those who wander are lost. " * 8)
    return file


# ---- RULER ----


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return RulerData(write_ruler_data(tmp_path_factory.mktemp("ruler")))


@pytest.mark.slow
def test_scores_are_those_of_the_texts_that_generate_gives(checkpoint, data):
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    grid = ruler_grid(
        tokenizer,
        ["niah_single_1", "niah_multiquery"],
        lengths=[900],
        depths=[0.0, 1.0],
        num_examples=2,
        data=data,
        max_new_tokens=8,
    )
    cells = list(grid)
    # What the model says is what we look for in one cell, and half of it in one example of another.
    for cell, parts in ((cells[0], (1, 1)), (cells[3], (2, 0))):
        for i, said in enumerate(generate(model, [e.prompt for e in grid[cell]], max_new_tokens=8)):
            said = said[: said.index(tokenizer.eos_id)] if tokenizer.eos_id in said else said
            references = {0: ["never"], 1: [tokenizer.decode(said)], 2: [tokenizer.decode(said), "never"]}
            grid[cell][i] = dataclasses.replace(grid[cell][i], references=references[parts[i]])
    scores = ruler_scores(model, tokenizer, grid, max_new_tokens=8, batch_size=3)
    assert [(s.task, s.length, s.depth) for s in scores] == cells
    assert [s.score for s in scores] == [1, 0, 0, 0.25]
    assert scores[3].interval == list(accuracy_interval([0.5, 0])[1:])
    assert scores[3].scores == [0.5, 0]
    assert {s.num_examples for s in scores} == {2}
    assert all(p + 8 <= s.length for s in scores for p in s.prompt_tokens)


@pytest.mark.slow
def test_what_goes_beyond_the_context_goes_on_with_a_note(checkpoint, text, tmp_path):
    """Of every verb that reads prompts; --yarn makes room."""
    note = "sequences of {} tokens are longer than the model's context of 96: they are run all the same, "
    note += "at positions that the model was not trained for; --yarn {} stretches the context\n"
    needles = ("evaluate", "needles", checkpoint, "--examples", 1, "--length", 320)
    assert run(*needles).startswith(note.format(320, 4))
    assert "longer than the model's context" not in run(*needles, "--yarn", 4)
    assert note.format(97, 2) in run("evaluate", "text", checkpoint, text, "--lengths", "16,97")
    assert "longer than" not in run("evaluate", "text", checkpoint, text, "--lengths", "16,96").split("* longer")[0]
    assert run("generate", checkpoint, "x" * 90, "--max-new-tokens", 7).startswith(note.format(97, 2))
    assert "longer than" not in run("generate", checkpoint, "x" * 90, "--max-new-tokens", 6)
    compare = ("compare", checkpoint, "--held-out", 1, "--length", 320, "--force", "--out", tmp_path / "c")
    assert note.format(320, 4) in run(*compare)
    select = ("select", "nll", checkpoint, "--one-in", 2, "--examples", 1, "--length", 320)
    assert note.format(320, 4) in run(*select, "--out", tmp_path / "p.json")


def test_an_end_token_ends_the_answer(checkpoint, data, monkeypatch):
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    grid = ruler_grid(
        tokenizer, ["niah_single_1"], lengths=[900], depths=None, num_examples=1, data=data, max_new_tokens=8
    )
    ((cell, (example,)),) = grid.items()
    (said,) = generate(model, [example.prompt], max_new_tokens=8)
    last = next(i for i, token in enumerate(said) if token not in said[:i] and i >= 1)
    grid[cell] = [dataclasses.replace(example, references=[tokenizer.decode(said[: last + 1])])]
    assert ruler_scores(model, tokenizer, grid, max_new_tokens=8)[0].score == 1
    monkeypatch.setattr(tokenizer, "end_ids", (said[last],))
    assert ruler_scores(model, tokenizer, grid)[0].score == 0  # as many tokens as the grid was made for


def test_answers_longer_than_their_room_are_refused(checkpoint, data):
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    grid = ruler_grid(
        tokenizer, ["niah_single_1"], lengths=[900], depths=None, num_examples=1, data=data, max_new_tokens=8
    )
    with pytest.raises(ConfigError, match="prompts of length 900 leave less than max_new_tokens = 9"):
        ruler_scores(model, tokenizer, grid, max_new_tokens=9)


@pytest.mark.slow
def test_ruler_on_the_command_line(checkpoint, data, tmp_path):
    out = tmp_path / "results"
    patterns = ("--pattern", "full", "--pattern", "window", "--window", 16)
    options = ("--lengths", "1400,1500", "--examples", 2, "--max-new-tokens", 4, "--data", data.folder)
    tasks = ("niah_single_2", "niah_single_1")
    output = run("evaluate", "ruler", checkpoint, *tasks, *patterns, *options, "--depths", "0,1", "--out", out)
    assert "RULER's prompts 32/32\n" in output
    assert (
        "Data: your own essays.txt and adjectives.txt and nouns.txt; your own adjectives.txt and nouns.txt." in output
    )
    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["ruler"]["tasks"] == list(tasks)
    rows = results["ruler"]
    assert len(rows) == 2 * 2 * 2 * 2  # no average over depths
    assert [(r["name"], r["task"], r["length"], r["depth"]) for r in rows[:3]] == [
        ("full", "niah_single_2", 1400, 0),
        ("full", "niah_single_2", 1400, 1),
        ("full", "niah_single_2", 1500, 0),
    ]
    assert (out / "ruler.png").read_bytes().startswith(b"\x89PNG")
    late = ("niah_single_1", "--lengths", "900,300", "--data", data.folder, "--out", tmp_path / "late")
    assert "length is 300 tokens" in fails("ruler", checkpoint, *late)
    assert not (tmp_path / "late" / "results.json").exists()  # said before anything is measured
    template = tmp_path / "template.txt"
    template.write_text("no place")
    one = ("ruler", checkpoint, "niah_single_1", "--data", data.folder)
    assert "{prompt} exactly once" in fails(*one, "--template", template, "--lengths", 900)
    assert "'niah_singel_1'; did you mean 'niah_single_1'?" in fails("ruler", checkpoint, "niah_singel_1")
    assert "--lengths is '4k': give whole numbers from 1 on" in fails(*one, "--lengths", "4k")
    missing = fails("ruler", checkpoint, "qa_1", "--data", tmp_path / "none")
    assert "squad.json, which is not there: run `make ruler-data`" in missing
    for wrong in ((), ("vt", "--all")):
        assert "name the tasks to measure, or take all 13 with --all" in fails("ruler", checkpoint, *wrong)
    assert "--depths: the task vt has no depth" in fails("ruler", checkpoint, "vt", "--depths", 1)


@pytest.mark.slow
def test_all_of_ruler_has_an_average_and_differences(checkpoint, data, tmp_path):
    patterns = ("--pattern", "full", "--pattern", "window", "--window", 16)
    options = ("--lengths", 3000, "--examples", 1, "--max-new-tokens", 1, "--data", data.folder)
    output = run("evaluate", "ruler", checkpoint, "--all", *patterns, *options, "--out", tmp_path)
    assert "the difference from full on the same prompts" in output
    rows = json.loads((tmp_path / "results.json").read_text())["ruler"]
    assert [row["task"] for row in rows] == 2 * [*RULER_TASKS, "average"]
    for row in rows:
        assert (row["difference"] is None) == (row["name"] == "full")
    (average,) = (row for row in rows if (row["name"], row["task"]) == ("window", "average"))
    assert average["score"] == np.mean([row["score"] for row in rows if row["name"] == "window"][:-1])


def test_what_was_measured_before_an_interruption_is_kept(checkpoint, tmp_path, monkeypatch):
    lengths = []

    def measure(model, tokenizer, cells, **_):
        lengths.append(next(iter(cells))[1])
        if len(lengths) == 2:
            raise KeyboardInterrupt
        return [RulerScore(*cell, 1.0, [0.5, 1.0], 1, [890, 896], "", [1.0]) for cell in cells]

    monkeypatch.setattr(importlib.import_module("swa_jax.evaluate.ruler_scores"), "ruler_scores", measure)
    arguments = ("fwe", "--lengths", "900,1000", "--examples", 1, "--out", tmp_path)
    result = CliRunner().invoke(app, ["evaluate", "ruler", str(checkpoint), *map(str, arguments)])
    assert result.exit_code != 0
    assert lengths == [900, 1000]
    kept = json.loads((tmp_path / "results.json").read_text())["ruler"]
    assert [(row["length"], row["score"]) for row in kept] == [(900, 1.0)]


# ---- a longer context ----


def test_yarn_stretches_the_context_of_what_is_measured(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("All that is gold does not glitter. " * 8)
    rows = {}
    for name, options in {"plain": (), "yarn": ("--yarn", 2)}.items():
        output = run("evaluate", "text", checkpoint, text, "--lengths", 192, "--out", tmp_path / name, *options)
        rows[name] = json.loads((tmp_path / name / "results.json").read_text())
    assert (rows["plain"]["yarn"], rows["yarn"]["yarn"]) == (None, 2)
    plain, yarn = (rows[name]["perplexity_sweep"][0] for name in ("plain", "yarn"))
    config = load_model(checkpoint).config.with_yarn(2)
    assert (config.max_position_embeddings, config.rope_scaling.rope_type) == (192, "yarn")
    tokenizer = load_tokenizer(checkpoint)
    tokens = tokenizer.start_ids + tokenizer.encode(text.read_text())
    assert f"tokens of the text {len(tokens) - 1}/{len(tokens) - 1}\n" in output
    expected = perplexity(load_model(checkpoint, config=config), tokens, context=192)
    np.testing.assert_allclose(yarn["nll"], np.log(expected.perplexity), rtol=1e-6)
    assert abs(plain["nll"] - yarn["nll"]) > 1e-3
    assert fails("needles", checkpoint, "--yarn", 1) == (
        "--yarn 1: YaRN stretches the context: its factor must be above 1, got 1"
    )


def test_yarn_wants_rotary_embeddings_that_nothing_scales(checkpoint):
    config = load_model(checkpoint).config
    with pytest.raises(ConfigError, match=r"scales its rotary embeddings already \(yarn, factor 2\)"):
        config.with_yarn(2).with_yarn(2)
    with pytest.raises(ConfigError, match="position_embedding is 'none'"):
        dataclasses.replace(config, position_embedding="none").with_yarn(2)


# ---- perplexity by window and length ----


def test_a_start_token_stands_before_every_sequence_of_a_text(byte_tokenizer, tmp_path):
    """Every token is scored, from its sequence alone."""
    starting = start_tokenizer(byte_tokenizer, tmp_path / "starting")
    checkpoint = byte_checkpoint(tmp_path, starting, make("Fw", sliding_window=16), vocab_size=258)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("All that is gold does not glitter, not all those who wander.")
    tokens = load_tokenizer(checkpoint).encode(text.read_text())
    run("evaluate", "text", checkpoint, text, "--lengths", f"32,{len(tokens)}", "--out", out)
    rows = json.loads((out / "results.json").read_text())["perplexity_sweep"]
    model = load_model(checkpoint)
    for row, length in zip(rows, (32, len(tokens)), strict=True):
        segments = [Example([257], tokens[i : i + length], []) for i in range(0, len(tokens), length)]
        sums = [nll * len(one.answer) for nll, one in zip(score_answers(model, segments).nll, segments, strict=True)]
        assert row["num_tokens"] == len(tokens)
        assert row["nll"] == pytest.approx(sum(sums) / len(tokens), rel=1e-5)


@pytest.mark.slow
def test_a_sweep_scores_every_token_in_every_cell(checkpoint, text):
    model = load_model(checkpoint)
    tokens = list(text.read_bytes())
    scores = perplexity_sweep(model, tokens, windows=[4, 16, None], lengths=[32, 128], batch_size=2)
    assert [(s.window, s.length) for s in scores] == [(4, 32), (4, 128), (16, 32), (16, 128), (None, 32), (None, 128)]
    assert {s.num_tokens for s in scores} == {len(tokens) - 1}
    assert [s.past_training_length for s in scores] == [False, True] * 3
    for score in scores:
        pattern = (
            AttentionPattern.from_recipe("full", 2)
            if score.window is None
            else dataclasses.replace(model.pattern, sliding_window=score.window)
        )
        alone = perplexity(model.with_pattern(pattern), tokens, context=score.length)
        assert score.perplexity == pytest.approx(alone.perplexity, rel=1e-5)
        assert score.interval[0] < score.perplexity < score.interval[1]
    assert len({round(s.perplexity, 4) for s in scores}) == 6
    own = perplexity_sweep(model, tokens, windows=None, lengths=[32])
    assert (own[0].window, own[0].perplexity) == (16, pytest.approx(scores[2].perplexity, rel=1e-5))


def test_a_sweep_refuses_what_would_be_cut_or_would_change_nothing(checkpoint):
    model = load_model(checkpoint)
    with pytest.raises(ConfigError, match=r"the text has 20 tokens.*from 1 to 19"):
        perplexity_sweep(model, [1] * 20, windows=None, lengths=[8, 20])
    with pytest.raises(ConfigError, match="a window of 8 changes nothing"):
        with_window(AttentionPattern.from_recipe("full", 2), 8)


def test_a_window_that_no_layer_has_is_not_shown(checkpoint):
    """As of --pattern full --pattern window --window 16."""
    model = load_model(checkpoint).with_pattern(AttentionPattern.from_recipe("full", 2, sliding_window=16))
    assert model.pattern.sliding_window == 16
    (score,) = perplexity_sweep(model, [1] * 20, windows=None, lengths=[8])
    assert score.window is None


def test_a_sweep_on_the_command_line(checkpoint, text, tmp_path):
    out = tmp_path / "results"
    make("Fw", sliding_window=16).to_json(tmp_path / "Fw.json")
    patterns = ("--pattern", "window", "--pattern", tmp_path / "Fw.json")
    options = (text, "--eval-windows", "8,full", "--lengths", "32,128", "--out", out)
    output = run("evaluate", "text", checkpoint, *patterns, "--window", 16, *options)
    assert "Length 128" in output
    assert "* longer than the context" in output
    results = json.loads((out / "results.json").read_text())
    rows = results["perplexity_sweep"]
    assert [(r["window"], r["length"]) for r in rows[:4]] == [(8, 32), (8, 128), (None, 32), (None, 128)]
    assert rows[2]["perplexity"] == pytest.approx(rows[6]["perplexity"], rel=1e-5)  # full is full
    assert (out / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert "give whole numbers from 1 on or 'full' with commas between" in fails(
        "text", checkpoint, text, "--eval-windows", "wide"
    )
    picture = Path(__file__).parents[2] / "docs" / "images" / "adapt-report.png"
    assert fails("text", checkpoint, picture) == f"{picture} is no text in UTF-8: save it as one, or name another file"
    assert "too few for sequences of 4096" in fails("text", checkpoint, text, "--lengths", "4096")
    assert "changes nothing" in fails(
        "text", checkpoint, text, "--pattern", "full", "--eval-windows", "8", "--lengths", "32"
    )


def test_a_pattern_without_windows_is_refused_before_the_others_are_measured(checkpoint, text, tmp_path):
    patterns = ("--pattern", "window", "--pattern", "full", "--window", 16)
    said = fails("text", checkpoint, text, *patterns, "--eval-windows", 8, "--lengths", 32, "--out", tmp_path)
    assert "a window of 8 changes nothing" in said
    assert not (tmp_path / "results.json").exists()


def test_routing_on_the_command_line(checkpoint, text, tmp_path):
    out = tmp_path / "results"
    options = ("--pattern", "switch", "--window", 16, "--text", text, "--text-length", 64, "--out", out)
    tasks = ("--ruler", "niah_multikey_3", "--depths", "0,1", "--examples", 1, "--max-new-tokens", 2)
    output = run("evaluate", "routing", checkpoint, *options, *tasks, "--lengths", 900)
    assert "Routing: share of the queries" in output
    rows = json.loads((out / "results.json").read_text())["routing"]
    assert [(r["data"], r["length"], r["depth"]) for r in rows] == [
        ("text", 64, None),
        ("niah_multikey_3", 900, 0),
        ("niah_multikey_3", 900, 1),
    ]
    assert all(len(r["by_layer"]) == 2 and 0 <= r["full_ratio"] <= 1 for r in rows)
    assert rows[0]["n"] == 560 // 64
    assert rows[1]["keys_of_full"] > 700
    config = load_model(checkpoint).config
    wide = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    for row in rows:
        saved = row["gflops_of_full"] - row["gflops"]
        assert saved * 1e9 == pytest.approx(4 * wide * (row["keys_of_full"] - row["keys_read"]))
        attention = 4 * wide * row["keys_of_full"]
        assert row["gflops_of_full"] * 1e9 == pytest.approx(2 * matrix_parameters(config) + attention)
    assert (out / "routing.png").read_bytes().startswith(b"\x89PNG")
    assert "no layer of this pattern is routed" in fails("routing", checkpoint, "--text", text)
    alone = ("--pattern", "switch", "--window", 16, "--examples", 0)
    assert fails("routing", checkpoint, *alone) == ("--examples 0 leaves nothing to look at: name a text with --text")


def test_routing_on_needles(checkpoint, tmp_path):
    options = ("--pattern", "switch", "--window", 16, "--lengths", "320,330", "--examples", 4, "--depths", "0,1")
    run("evaluate", "routing", checkpoint, *options, "--out", tmp_path)
    rows = json.loads((tmp_path / "results.json").read_text())["routing"]
    assert [(r["data"], r["length"], r["depth"], r["n"]) for r in rows] == [
        ("needle", 320, 0, 2),
        ("needle", 320, 1, 2),
        ("needle", 330, 0, 2),
        ("needle", 330, 1, 2),
    ]


def test_needles_are_mapped_by_the_depths_that_they_take_in_turn():
    assert score_by_depth(np.array([1.0, 0, 0, 0, 1]), 2) == [pytest.approx(2 / 3), 0]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_a_missing_harness_is_one_sentence(checkpoint):
    assert fails("harness", checkpoint, "any") == (
        "evaluate harness needs lm-evaluation-harness, which is not installed: run pip install -e '.[eval]' in the "
        "folder of the swa-jax repository"
    )


# ---- speed ----


def test_efficiency_times_every_pattern(checkpoint, tmp_path):
    words = ["--pattern", "full", "--pattern", "window", "--window", 8, "--lengths", "64,96", "--repeats", 2]
    said = run("evaluate", "efficiency", checkpoint, *words, "--new-tokens", 4, "--out", tmp_path)
    assert "In brackets: times faster than full." in said
    rows = json.loads((tmp_path / "results.json").read_text())["efficiency"]
    assert [(row["name"], row["length"]) for row in rows] == [
        ("full", 64),
        ("window", 64),
        ("full", 96),
        ("window", 96),
    ]
    for full, window in (rows[:2], rows[2:]):
        assert full["kv_cache_bytes"] > window["kv_cache_bytes"] > 0
    assert all(len(row["token_seconds_all"]) == 2 for row in rows)
    assert "--lengths is '0': give whole numbers from 1 on" in fails("efficiency", checkpoint, "--lengths", "0")


def test_json_is_all_that_is_printed(checkpoint, text):
    """Of a text that is shorter than the default length: one sequence."""
    printed = json.loads(CliRunner().invoke(app, ["evaluate", "text", str(checkpoint), str(text), "--json"]).stdout)
    assert [row["length"] for row in printed["perplexity_sweep"]] == [len(text.read_bytes()) - 1]
    assert printed["settings"]["text"]["lengths"] is None


# ---- one folder for several kinds ----


def test_a_folder_tells_heads_apart(checkpoint, text, tmp_path):
    """No layer is full as a whole in either pattern."""
    file, out = tmp_path / "heads.json", tmp_path / "out"
    shared = ("--pattern", file, "--out", out)
    AttentionPattern((HYBRID, WINDOW), 16, full_kv_heads=((0,), ())).to_json(file)
    run("evaluate", "text", checkpoint, text, "--lengths", 32, *shared)
    AttentionPattern((WINDOW, HYBRID), 16, full_kv_heads=((), (0,))).to_json(file)
    assert fails("routing", checkpoint, *shared).startswith(f"{out} holds results of other content (other patterns)")
    AttentionPattern((HYBRID, SWITCH), 16, full_kv_heads=((0,), ())).to_json(file)
    said = run("evaluate", "text", checkpoint, text, "--lengths", 32, *shared, status=2)
    assert f"{out} holds results of other content (other patterns)" in said


def test_results_belong_to_the_content_of_files(checkpoint, tmp_path, monkeypatch):
    """A text, or a model's chat template, may be another under the same name."""
    sweep = importlib.import_module("swa_jax.evaluate.sweep")
    score = sweep.SweepScore(None, 8, 2.0, None, 0.7, 9, 1, False)
    monkeypatch.setattr(sweep, "perplexity_sweep", lambda *_, **__: [score])
    model, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    shutil.copytree(checkpoint, model)
    text.write_text("All that is gold")
    call = ("text", model, text, "--lengths", 8, "--out", out)
    run("evaluate", *call)
    assert f"{out} has these results already" in run("evaluate", *call)
    text.write_text("does not glitter")
    assert fails(*call).startswith(f"{out} holds results of `evaluate text` of other content (other file)")
    text.write_text("All that is gold")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert fails(*call).startswith(f"{out} holds results of other content (other checkpoint)")


def test_a_folder_is_written_by_one_process_at_a_time(checkpoint, text, tmp_path):
    with alone(tmp_path, "writing results to"):
        said = fails("text", checkpoint, text, "--out", tmp_path)
    assert said == f"another process is writing results to {tmp_path}: wait for it, or name another folder"


def test_several_kinds_share_a_folder(checkpoint, text, tmp_path, monkeypatch):
    measure, sweep = (importlib.import_module(f"swa_jax.evaluate.{name}") for name in ("measure", "sweep"))
    row = {"full_layers": [], "needle_accuracy": 1.0, "needle_interval": None, "answer_nll": 1.0, "kv_cache_bytes": 1}
    row |= {"prefill_seconds": 1.0, "decode_tokens_per_second": 1.0}
    answers = SimpleNamespace(scores=np.ones(1))
    monkeypatch.setattr(measure, "measure_pattern", lambda name, *_, **__: ({"name": name} | row, answers))
    score = sweep.SweepScore(None, 32, 2.0, None, 0.7, 9, 1, False)
    monkeypatch.setattr(sweep, "perplexity_sweep", lambda *_, **__: [score])
    out = ("--pattern", "window", "--window", 16, "--out", tmp_path)
    run("evaluate", "text", checkpoint, text, "--lengths", 32, *out)
    needles = ("needles", checkpoint, "--examples", 1, "--length", 320)
    run("evaluate", *needles, *out)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == {"model", "checkpoint", "yarn", "dtype", "patterns", "settings", "perplexity_sweep", "rows"}
    assert results["settings"]["text"].pop("file").startswith(f"{text} (")
    assert results["settings"]["text"] == {"lengths": "32", "eval_windows": None, "batch_size": 16, "seed": 0}
    before = (tmp_path / "results.json").read_bytes()
    for call in (needles, ("text", checkpoint, text, "--lengths", 32)):
        assert run("evaluate", *call, *out).endswith(f"{tmp_path} has these results already\n")
    other = ("--pattern", "window", "--window", 8, "--out", tmp_path)
    assert fails("harness", checkpoint, "x", *other).startswith(
        (f"{tmp_path} holds results of other content (other patterns): ", "evaluate harness needs")
    )
    routing = fails("routing", checkpoint, *other)
    assert routing.startswith(f"{tmp_path} holds results of other content (other patterns): name another folder")
    assert (tmp_path / "results.json").read_bytes() == before
    (tmp_path / "results.json").write_text("[]")
    assert "must hold a JSON object: name another folder with --out" in fails("routing", checkpoint, *out)
