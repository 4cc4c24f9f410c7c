"""`select METHOD` and `pattern diff` as a user calls them."""

import json

import numpy as np
import pytest
import typer
from command_line import fails, run
from planted import in_place_of_a_checkpoint, planted_mask, planted_model
from plants import KV_HEADS, LAYERS, WINDOW_SIZE
from tiny_models import byte_checkpoint

from swa_jax.checkpoint.folder import load_model
from swa_jax.cli.select import app
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate import prompt_examples
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.select import methods, nll_scores
from swa_jax.select.heads import head_mask, head_pattern, rank_correlation
from swa_jax.select.methods import DEFAULT, METHODS

NEEDLES = ("--examples", 2, "--length", 320, "--batch-size", 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    return byte_checkpoint(
        tmp_path_factory.mktemp("select"),
        byte_tokenizer,
        AttentionPattern.from_recipe("full", 2),
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def planted_decoder():
    return planted_model()


@pytest.fixture
def planted(monkeypatch, planted_decoder):
    in_place_of_a_checkpoint(monkeypatch, planted_decoder, "select")


def test_bosch_writes_a_pattern_a_picture_and_its_evaluations(planted, tmp_path):
    out = tmp_path / "new" / "heads.json"
    options = ("x", "--ratio", 0.75, "--window", WINDOW_SIZE, "--batch-size", 8, "--out", out)
    output = run("select", "bosch", *options)
    assert "answers right: 100.0%, with full attention 100.0%, all windowed 0.0%" in output
    assert f"written to {out} and {out.with_suffix('.png')}" in output
    pattern = AttentionPattern.from_json(out)
    np.testing.assert_array_equal(head_mask(pattern, KV_HEADS), planted_mask())
    kept = out.with_suffix(".scores.jsonl").read_text().splitlines()
    assert len(kept) == pattern.provenance["evaluations"]
    assert out.with_suffix(".png").stat().st_size > 1000
    again = run("select", "bosch", *options)
    assert f"found {len(kept)} masks here, going on" in again
    assert AttentionPattern.from_json(out) == pattern
    other = (*options[:-1], out.with_name("layers.json"))
    run("select", "bosch-layer", *other, "--iterations", 2, "--seed", 1)
    assert AttentionPattern.from_json(other[-1]).provenance["method"] == "bosch-layer"


def test_a_file_without_scores_is_refused_before_the_work_and_stays_as_it_is(planted, tmp_path):
    diary = tmp_path / "diary.txt"
    diary.write_text("Monday\nTuesday")
    options = ("--budget", 1, "--window", WINDOW_SIZE, "--resume-file", diary, "--out", tmp_path / "p.json")
    sentence = f"{diary} holds no scores of a search: name another file, or remove this one to start over"
    assert fails("select", "nll", "no-such-model", *options) == sentence
    assert diary.read_text() == "Monday\nTuesday"


def test_only_what_the_method_itself_has_chosen_is_replaced(checkpoint, tmp_path):
    out, picture = tmp_path / "p.json", tmp_path / "p.png"
    options = (checkpoint, "--window", 8, "--length", 64, "--out", out)
    picture.write_text("a photo")
    sentence = "{} is there already, and is not from `select {}`: name another --out, or remove it"
    assert fails("select", "random", *options, "--ratio", 0.5) == sentence.format(picture, "random")
    picture.unlink()
    for text in ('{"my": "data"}', "no JSON", '{"layer_types": ["full_attention"]}'):
        out.write_text(text)
        assert fails("select", "random", *options, "--ratio", 0.5) == sentence.format(out, "random")
        assert out.read_text() == text
    out.unlink()
    for _ in range(2):
        run("select", "random", *options, "--ratio", 0.5)
    assert fails("select", "razor", *options, "--ratio", 0.5) == sentence.format(out, "razor")
    assert AttentionPattern.from_json(out).provenance["method"] == "random"


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (("--ratio", 0), "layer stays full: take the recipe 'full'"),
        (("--budget", 2), "layer stays full: take the recipe 'full'"),
        (("--ratio", 1), "layer is windowed: take the recipe 'window'"),
        (("--budget", 0), "layer is windowed: take the recipe 'window'"),
    ],
)
def test_nothing_is_measured_where_nothing_is_to_choose(checkpoint, tmp_path, budget, said):
    options = ("--window", 8, "--length", 64, "--out", tmp_path / "p.json")
    assert fails("select", "nll", checkpoint, *budget, *options) == f"there is nothing to choose where every {said}"


BY_HEADS, BY_LAYERS = ("--ratio", 0.5), ("--budget", 1)
TOO_SHORT = {
    "dcam": BY_HEADS,
    "qada": BY_HEADS,
    "fisher": BY_HEADS,
    "kl": BY_HEADS,
    "gates": (*BY_HEADS, "--steps", 2),
    "bosch": BY_HEADS,
    "bosch-single": BY_HEADS,
    "nll": BY_LAYERS,
    "nll-greedy": BY_LAYERS,
    "nll-gradient": BY_LAYERS,
    "light-transfer": (*BY_LAYERS, "--recent", 60),
}


MARKS = dict.fromkeys(TOO_SHORT, pytest.mark.slow) | {"dcam": [], "gates": pytest.mark.long}


@pytest.mark.parametrize("method", [pytest.param(name, marks=MARKS[name]) for name in TOO_SHORT])
def test_prompts_that_the_window_holds_are_refused_unless_forced(planted, tmp_path, monkeypatch, method):
    """By prompts of 49 tokens that a window of 64 holds."""
    if method == "dcam":  # what it finds is no matter here
        scores = np.arange(LAYERS * KV_HEADS, dtype=float).reshape(LAYERS, KV_HEADS)
        monkeypatch.setattr("swa_jax.select.static.static_scores", lambda *_, **__: scores)
    out = tmp_path / "p.json"
    arguments = ("select", method, "x", *TOO_SHORT[method], "--out", out, "--window", 64)
    said = run(*arguments, status=2).strip()  # a progress bar leaves a line
    assert ": the choice would mean nothing, and no pattern is written. Take longer prompts" in said
    assert not out.exists()
    output = run(*arguments, "--force")
    assert f"{said.split(': the choice')[0]}: the choice means nothing" in output
    assert AttentionPattern.from_json(out).num_layers == LAYERS


@pytest.mark.parametrize("verb", [("select", "kl", "--ratio", 0.5), ("compare", "--method", "kl")])
def test_a_window_that_holds_whole_prompts_is_refused_before_the_model_is_looked_for(verb, tmp_path):
    said = fails(*verb, "no-such-model", "--window", 100_000, "--out", tmp_path / "p.json")
    assert said.startswith("--window 100000 holds whole prompts of 1024 tokens")


@pytest.mark.slow
def test_rankings_without_a_window_go_on(planted, tmp_path):
    run("select", "apl", "x", "--ratio", 0.5, "--window", 64, "--out", tmp_path / "p.json")
    assert (tmp_path / "p.json").exists()


def test_every_method_has_the_same_options_and_its_own():
    commands = typer.main.get_command(app).commands
    assert list(commands) == list(METHODS)
    common = (
        "ratio budget kv-budget for prompts min-answer chains chat fa-decode window sink-tokens resume-file out force"
    )
    options = {name: {flag for one in command.params for flag in one.opts} for name, command in commands.items()}
    shared = set.intersection(*options.values())
    assert {f"--{name}" for name in common.split()} <= shared
    own = {name: {f"--{one.replace('_', '-')}" for one in METHODS[name].options} for name in METHODS}
    for name, flags in options.items():
        some = {"--mesh": METHODS[name].meshes, "--heads-in": METHODS[name].chooses == "KV heads"}
        assert flags - shared == own[name] | {option for option, has in some.items() if has}
    assert own["bosch"] == {"--iterations", "--optimizer", "--by"}
    assert own["kl"] == own["interleave"] == set()


def test_without_a_method_it_is_the_default(planted, tmp_path, monkeypatch):
    named = []

    def choose(name, *arguments, **_):
        named.append(name)
        return methods.choose("interleave", *arguments)

    monkeypatch.setattr("swa_jax.cli.select.choose", choose)
    options = ("x", "--one-in", 2, "--window", WINDOW_SIZE, "--out", tmp_path / "p.json")
    run("select", *options)
    assert named == [DEFAULT["layers"]]
    assert fails("select", "fischer", *options) == "method 'fischer' is not known; did you mean 'fisher'?"


def test_a_search_by_prompts_that_tell_nothing_does_not_begin(checkpoint, tmp_path):
    out = tmp_path / "p.json"
    heads = ("--ratio", 0.5, "--window", 16, "--out", out, *NEEDLES)
    said = fails("select", "bosch", checkpoint, *heads)
    assert said.startswith("with full attention the model itself gets 0% of the 2 answers right: the choice")
    assert "Take a task that the model can do: shorter prompts (--length)" in said
    assert "or choose by the answers' loss (--by loss, or a method by NLL)" in said
    for method, options in (
        ("bosch", (*heads, "--by", "loss")),
        ("nll", ("--budget", 1, "--window", 16, "--out", out, *NEEDLES)),
    ):
        said = fails("select", method, checkpoint, *options)
        assert "nats a token against full attention, no difference beyond chance on 2 examples" in said
    assert not list(tmp_path.glob("*.json"))
    assert fails("select", "bosch", checkpoint, "--ratio", 0.5, "--out", "x.txt").startswith("--out is x.txt")


@pytest.mark.slow
def test_bosch_by_loss(planted, tmp_path):
    out = tmp_path / "heads.json"
    options = ("x", "--ratio", 0.75, "--window", WINDOW_SIZE, "--batch-size", 8, "--out", out)
    output = run("select", "bosch-single", *options, "--by", "loss")
    assert "likelihood of the answers: " in output
    pattern = AttentionPattern.from_json(out)
    assert (pattern.provenance["scored_by"], pattern.provenance["windowed_heads"]) == ("loss", 24)
    again = run("select", "bosch-single", *options, "--by", "loss")
    assert f"found {pattern.provenance['evaluations']} masks here, going on" in again
    assert AttentionPattern.from_json(out) == pattern


@pytest.mark.parametrize("method", ["dcam", pytest.param("razor", marks=pytest.mark.slow)])
def test_a_ranking_writes_a_pattern_with_its_scores(checkpoint, tmp_path, method):
    out = tmp_path / "p.json"
    run("select", method, checkpoint, "--ratio", 0.5, "--window", 16, "--out", out, *NEEDLES)
    pattern = AttentionPattern.from_json(out)
    said = pattern.provenance
    assert (said["method"], said["windowed_heads"], np.shape(said["scores"])) == (method, 2, (2, 2))
    assert (~head_mask(pattern, 2)).sum() == 2
    assert out.with_suffix(".png").exists()


def test_pattern_diff_counts_and_swaps(tmp_path):
    small, large = np.ones((2, 4), bool), np.ones((2, 4), bool)
    small[0] = False
    large[0, 2:] = large[1] = False
    for name, mask in (("small", small), ("large", large)):
        pattern = head_pattern(mask, Window(16, 2, name == "large"))
        pattern.to_json(tmp_path / f"{name}.json")
    files = (tmp_path / "small.json", tmp_path / "large.json")
    output = run("pattern", "diff", *files, "--kv-heads", 4, "--swap", tmp_path / "swap.json")
    assert "turnover 50.0% of the first's windowed heads are not the second's (100.0%" in output
    assert "Jaccard distance 0.750; of the full heads 1.000" in output
    assert "rank correlation" not in output  # these have no scores
    assert "layer 0: only the first windows KV heads [0, 1]" in output
    assert "layer 1: only the second windows KV heads [0, 1, 2, 3]" in output
    swapped = AttentionPattern.from_json(tmp_path / "swap.json")
    assert (swapped.num_sink_tokens, swapped.full_attention_decode) == (2, True)
    mask = head_mask(swapped, 4)
    assert (~mask).sum() == 6
    assert not mask[0, :2].any()
    assert fails("pattern", "diff", *files).startswith("--kv-heads is missing")
    assert fails("pattern", "diff", *files, "--kv-heads", 1) == "--kv-heads is 1, but a pattern names KV head 1"


def test_pattern_diff_compares_scores_by_rank(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, scores in zip(files, ([3.0, 1.0, 1.0, 0.0], [9.0, 4.0, 2.0, 3.0]), strict=True):
        pattern = AttentionPattern.from_full_layers([0], 4, 16, provenance={"scores": scores})
        pattern.to_json(file)
    ranks = np.array([[4, 2.5, 2.5, 1], [4, 3, 1, 2]])
    assert "2 of 4" not in (output := run("pattern", "diff", *files))
    assert "3 of 4 layers windowed" in output
    expected = f"rank correlation of the scores {np.corrcoef(ranks)[0, 1]:.2f} (Spearman)"
    assert expected in run("pattern", "diff", *files)
    assert rank_correlation([1, 1], [1, 2]) == 0


# ---- layers ----

LAYER_NEEDLES = ("--window", 16, *NEEDLES, "--force")  # a model of random weights


@pytest.mark.slow
def test_nll_goes_on_from_its_file_and_writes_what_it_found(checkpoint, tmp_path):
    out, kept = tmp_path / "new" / "p.json", tmp_path / "scores.json"
    options = ("--budget", 1, "--resume-file", kept, "--out", out, *LAYER_NEEDLES)
    output = run("select", "nll", checkpoint, *options, "--toggles-at-once", 2)
    assert f"written to {out} and {out.with_suffix('.png')}" in output
    first = AttentionPattern.from_json(out)
    assert first.provenance["method"] == "nll"
    assert len(first.full_layers) == 1
    before = kept.read_text()
    output = run("select", "nll", checkpoint, *options)
    assert f"{kept}: found 2 of 2 examples here, doing 0" in output
    assert AttentionPattern.from_json(out) == first
    greedy = out.with_name("greedy.json")
    run("select", "nll-greedy", checkpoint, *options, "--out", greedy)
    pattern = AttentionPattern.from_json(greedy)
    assert pattern.provenance["method"] == "nll-greedy"
    assert pattern.provenance["picked"] == list(pattern.full_layers)
    assert pattern.full_layers == first.full_layers  # a budget of one is one round
    assert kept.read_text() == before
    for other in ("--fa-decode", "--score-fa-decode"):
        found = "examples here" in run("select", "nll", checkpoint, *options, other)
        assert found == (other == "--score-fa-decode")  # the first has scored both
    output = run("select", "nll", checkpoint, *options, "--fa-decode", "--no-score-fa-decode")
    assert "found 2 of 2 examples here" in output
    assert AttentionPattern.from_json(out).full_attention_decode
    assert "examples here" not in run("select", "nll", checkpoint, *options, "--window", 17)


def test_wrong_arguments_of_layer_selection_get_a_sentence(checkpoint, tmp_path):
    nll = ("select", "nll", checkpoint, "--out", tmp_path / "p.json", *LAYER_NEEDLES)
    assert fails(*nll) == "give exactly one of --ratio, --budget, --one-in and --kv-budget: how many layers stay full"
    assert fails(*nll, "--budget", 3) == "--budget is 3 full layers, the model has 2"
    heads = ("select", "kl", checkpoint, "--out", tmp_path / "p.json", *LAYER_NEEDLES)
    assert fails(*heads, "--budget", 5) == "--budget is 5 full KV heads, the model has 4"
    assert fails(*heads, "--ratio", 2) == "--ratio is 2: the share of windowed KV heads must lie between 0 and 1"
    assert fails(*nll, "--budget", 1, "--mesh", "rows=2").startswith("--mesh must be sizes of the axes data, fsdp,")
    said = fails(*nll, "--budget", 1, "--mesh", "data=64")
    assert said.startswith("--mesh data=64: 'mesh' (")
    assert "asks for 64 devices" in said
    lazy = ("select", "light-transfer", checkpoint, "--out", tmp_path / "p.json", *LAYER_NEEDLES)
    assert fails(*lazy, "--budget", 3) == "--budget is 3 full layers, the model has 2"
    assert not (tmp_path / "p.json").exists()


def test_light_transfer_writes_a_pattern_with_its_scores(checkpoint, tmp_path):
    out = tmp_path / "p.json"
    options = ("--one-in", 2, "--lazy-sinks", 2, "--out", out, *NEEDLES)
    run("select", "light-transfer", checkpoint, *options, "--window", 24)
    pattern = AttentionPattern.from_json(out)
    said = pattern.provenance
    assert (pattern.sliding_window, pattern.num_sink_tokens, len(pattern.full_layers)) == (24, 0, 1)
    assert (said["method"], said["recent_keys"], np.shape(said["scores"])) == ("light-transfer", 22, (2,))
    assert out.with_suffix(".png").stat().st_size > 1000
    said = fails(
        "select", "light-transfer", checkpoint, "--one-in", 2, "--out", out, *NEEDLES, "--window", 24, "--recent", 1020
    )
    assert said.startswith("the 1020 keys of --recent reach over whole prompts, so that every layer is lazy: ")
    assert AttentionPattern.from_json(out) == pattern  # what was there is not lost


# ---- prompts of one's own ----


@pytest.fixture
def prompts(tmp_path):
    """Five records of 30 + 24 bytes and one each that is too long or whose answer is too short."""
    records = [{"prompt": f"{i}" * 30, "answer": f"{i + 1}" * 24} for i in range(5)]
    records += [{"prompt": "x" * 300, "answer": "y" * 24}, {"prompt": "x" * 30, "answer": "short"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_layers_are_chosen_by_prompts_of_ones_own(checkpoint, prompts, tmp_path):
    out = tmp_path / "layers.json"
    options = ("--prompts", prompts, "--window", 8, "--length", 64, "--batch-size", 2, "--out", out, "--force")
    long = ("--min-answer", 20, "--resume-file", tmp_path / "scores.json")
    run("select", "nll", checkpoint, "--budget", 1, "--examples", 5, *options, *long)
    provenance = AttentionPattern.from_json(out).provenance
    assert provenance["data"] == f"5 prompts of {prompts} with at most 64 tokens"

    tokenizer = load_tokenizer(checkpoint)
    drawn = prompt_examples(tokenizer, prompts, num_examples=5, length=64, min_answer=20)
    assert sorted(tokenizer.decode(e.prompt) + e.references[0] for e in drawn) == [
        f"{i}" * 30 + f"{i + 1}" * 24 for i in range(5)
    ]
    model = load_model(checkpoint)
    expected = nll_scores(model, drawn, sliding_window=8, full_attention_decode=False, batch_size=2)
    np.testing.assert_allclose(provenance["scores"], expected, atol=1e-6)

    assert fails("select", "nll", checkpoint, "--budget", 1, "--examples", 6, *options, *long) == (
        f"6 examples are asked for, but 5 of the 7 records of {prompts} are at most 64 tokens long with an answer of "
        "at least 20: ask for fewer, or allow longer prompts or shorter answers"
    )
    assert "which --prompts replaces" in fails("select", "nll", checkpoint, "--budget", 1, "--keys", 4, *options)
    prompts.write_text('{"prompt": "x"}\n')
    assert f"{prompts}, line 1" in fails("select", "nll", checkpoint, "--budget", 1, *options)


# ---- a budget of memory ----


def test_as_many_layers_stay_full_as_fit_the_cache(checkpoint, tmp_path):
    nll = ["select", "nll", checkpoint, "--window", 16, *NEEDLES, "--out", tmp_path / "p.json", "--force"]
    said = run(*nll, "--kv-budget", 0.6)
    assert (
        "1 of 2 layers stay full: with them the cache of 320 tokens takes 52.5% of full attention's, counted here"
        in said
    )
    assert len(AttentionPattern.from_json(tmp_path / "p.json").full_layers) == 1
    said = run(*nll, "--kv-budget", 0.6, "--serve-length", 64, status=2)
    assert "0 of 2 layers stay full: with them the cache of 64 tokens takes 25.0%" in said
    assert "there is nothing to choose where every layer is windowed: take the recipe 'window'" in said
    assert "takes at least 0.05 of full attention's" in fails(*nll, "--kv-budget", 0.01)
    assert fails(*nll, "--kv-budget", 2) == "--kv-budget is 2: give a share above 0 and at most 1"
    assert fails(*nll, "--kv-budget", 0.5, "--one-in", 2).startswith("give exactly one of --ratio, --budget, --one-in")
    assert "--for says where or how" in fails(*nll, "--one-in", 2, "--for", "vllm")
    assert fails(*nll, "--kv-budget", 0.04, "--fa-decode").startswith("--kv-budget 0.04 cannot be met")
    assert fails(*nll, "--kv-budget", 0.5, "--for", "vlm").startswith("--for is 'vlm'; did you mean 'vllm'")


def test_as_many_heads_stay_full_as_fit_the_cache(checkpoint, tmp_path):
    words = ["select", "random-heads", checkpoint, "--window", 16, "--out", tmp_path / "p.json"]
    said = run(*words, "--kv-budget", 0.8, "--serve-length", 320)
    assert "3 of 4 KV heads stay full: with them the cache of 320 tokens takes 76.2%" in said
    assert head_mask(AttentionPattern.from_json(tmp_path / "p.json"), 2).sum() == 3
    assert fails(*words).endswith("--one-in and --kv-budget: how many KV heads stay full")
    assert "runs no single full heads" in fails(*words, "--kv-budget", 0.8, "--for", "vllm")
    assert "give that too" in fails(*words, "--ratio", 0.5, "--serve-length", 64)
