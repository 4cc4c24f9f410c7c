"""Every verb that takes a pattern reads the same sources, and only options that the user gave change them."""

import itertools
import json
from pathlib import Path

import pytest
from command_line import fails, run
from tiny_models import byte_checkpoint, make

import swa_jax.evaluate.replies
import swa_jax.train.loop
from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.pattern_files import read_pattern
from swa_jax.checkpoint.folder import load_model, save_model
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.recipes import PUBLISHED

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = Path(__file__).parents[2] / "configs" / "swat-tiny.yaml"
OWN_WINDOW, FILE_WINDOW, FILE_SINKS = 16, 96, 10
SWAA = {"sliding_window_size": 24, "keep_first": 5, "force_fa_decode": True, "non_sliding_layers": [1]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    pattern = make("ww", sliding_window=OWN_WINDOW)
    return byte_checkpoint(tmp_path_factory.mktemp("sources"), byte_tokenizer, pattern)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    make("Fw", sliding_window=FILE_WINDOW, num_sink_tokens=FILE_SINKS).to_json(folder / "mine.json")
    (folder / "swaa.json").write_text(json.dumps(SWAA))
    model = {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 32, "vocab_size": 257}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


# Source, options, and what must come of them: window (None: the model's own), sink tokens.
SOURCES = [
    ("window", (), None, 0),
    ("streaming", (), None, 10),
    ("window+sink-tokens=40", (), None, 40),
    ("mine.json", (), FILE_WINDOW, FILE_SINKS),
    ("swaa.json", (), 24, 5),
    ("config.json", (), 32, 0),
    ("streaming", ("--window", 8), 8, 10),
    ("mine.json", ("--window", 8), 8, FILE_SINKS),
    ("mine.json", ("--sink-tokens", 0), FILE_WINDOW, 0),
    ("swaa.json", ("--sink-tokens", 3), 24, 3),
]


def named(source, files):
    return files / source if source.endswith(".json") else source


@pytest.mark.parametrize(("source", "options", "window", "sinks"), SOURCES)
def test_pattern_and_generate(checkpoint, files, monkeypatch, source, options, window, sinks):
    output = run("pattern", named(source, files), "--model", checkpoint, *options)
    window = window or OWN_WINDOW
    assert f"window {window} (own key included), {sinks} sink tokens" in output
    used = []
    monkeypatch.setattr(
        swa_jax.evaluate.replies, "write_replies", lambda model, *_, **__: used.append(model.pattern) or []
    )
    run("generate", checkpoint, "hello", "--pattern", named(source, files), *options)
    assert (used[0].sliding_window, used[0].num_sink_tokens) == (window, sinks)
    assert used[0].full_attention_decode == (source == "swaa.json")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_patterns_have_names(name, checkpoint):
    """A name stands for the file, of which the options of its command say the same; it fits one model alone."""
    pattern = AttentionPattern.from_json(PUBLISHED[name])
    assert read_pattern(name, pattern.num_layers) == read_pattern(PUBLISHED[name], pattern.num_layers) == pattern
    assert run("pattern", name) == run("pattern", PUBLISHED[name])
    method, options = pattern.provenance["method"], pattern.provenance["command"].split()
    assert options[:3] == ["swa-jax", "select", method]
    said = dict(itertools.pairwise(options))
    assert said["--window"] == str(pattern.sliding_window)
    assert said["--sink-tokens"] == str(pattern.num_sink_tokens)
    assert f"{name} is a published pattern, no recipe" in fails("pattern", f"{name}+fa-decode", "--layers", 30)
    assert f"did you mean '{name}'?" in fails("pattern", name + "x", "--layers", 30)
    sentence = f"{name}: the pattern has {pattern.num_layers} layers, the model 2"
    assert sentence in fails("generate", checkpoint, "hello", "--pattern", name)
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        swa_jax.load_model(checkpoint, pattern=name)


def test_windows_that_transformers_does_not_read_are_no_pattern(tmp_path):
    file = tmp_path / "config.json"
    types = ["sliding_attention", "full_attention"]
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, "layer_types": types}))
    assert fails("pattern", file) == (
        f"{file}: transformers' class for model_type 'llama' does not read the windows of layer_types: name a pattern "
        "file, such as the pattern.json of an export"
    )


def test_evaluate(checkpoint, files, tmp_path):
    (tmp_path / "text.txt").write_text("All that is gold does not glitter. " * 12)
    sources = [(s, w, k) for s, options, w, k in SOURCES if not options]
    patterns = [x for source, *_ in sources for x in ("--pattern", named(source, files))]
    run("evaluate", "text", checkpoint, tmp_path / "text.txt", *patterns, "--eval-windows", "8", "--lengths", 64,
        "--out", tmp_path / "out")  # fmt: skip
    used = json.loads((tmp_path / "out" / "results.json").read_text())["patterns"]
    for source, window, sinks in sources:
        one = used[str(named(source, files))]
        assert (one["sliding_window"], one["num_sink_tokens"]) == (window or OWN_WINDOW, sinks)


@pytest.mark.slow
def test_the_window_of_a_recipe_is_said(checkpoint, files, tmp_path):
    """Where --window is not given: the model's own, or 2048; by every verb, and only of what takes it."""
    own = f"window: the window is {OWN_WINDOW}, the model's own; --window sets another\n"
    default = "window: the window is 2048, the default of recipes; --window sets another\n"
    assert run("pattern", "window", "--layers", 2).startswith(default)
    assert run("pattern", "window", "--model", checkpoint).startswith(own)
    assert run("generate", checkpoint, "hello", "--max-new-tokens", 1, "--pattern", "window").startswith(own)
    needles = ("evaluate", "needles", checkpoint, "--examples", 1, "--length", 320)
    output = run(*needles, "--pattern", "streaming", "--pattern", "full", "--pattern", files / "mine.json")
    assert output.startswith(own.replace("window:", "streaming:", 1))
    compare = ("compare", checkpoint, "--held-out", 1, "--length", 320, "--force", "--out", tmp_path / "c")
    assert own in run(*compare)
    full = ("full", files / "mine.json", "window+sink-tokens=2")
    for pattern, options in zip(full, ((), (), ("--window", 8)), strict=True):
        assert "sets another" not in run("pattern", pattern, "--layers", 2, *options)
    model = load_model(checkpoint, pattern="full")
    save_model(model, tmp_path / "full", tokenizer_from=checkpoint)
    whole = "a window of 2048 holds the model's whole context of 2048, "
    assert run("pattern", "window", "--model", tmp_path / "full").startswith(whole)


@pytest.mark.parametrize(
    ("options", "given", "given_sinks"),
    [
        ((), None, None),
        (("--window", 8), 8, None),
        (("--eval-window", 12), 12, None),
        (("--window", 8, "--eval-window", 12), 12, None),
        (("--sink-tokens", 3), None, 3),
    ],
)
def test_compare(checkpoint, files, tmp_path, monkeypatch, options, given, given_sinks):
    """Recipes take the model's own window, where none is given; what a source says stays."""
    used = {}

    def comparison(*_, **__):
        def stop(patterns):
            used.update(patterns)
            raise KeyboardInterrupt

        return stop

    monkeypatch.setattr("swa_jax.select.compare.PatternComparison", comparison)
    sources = [(s, w, k) for s, o, w, k in SOURCES if not o]
    patterns = [x for source, *_ in sources for x in ("--pattern", named(source, files))]
    words = (*patterns, *options, "--out", tmp_path, "--held-out", 1, "--length", 320)
    run("compare", checkpoint, *words, status=130)
    for source, window, sinks in sources:
        one = used[str(named(source, files))]
        wanted = given or window or OWN_WINDOW, sinks if given_sinks is None else given_sinks
        assert (one.sliding_window, one.num_sink_tokens) == wanted


@pytest.mark.parametrize(
    ("source", "window", "sinks"), [(s, w, k) for s, o, w, k in SOURCES if not o and s != "swaa.json"]
)
@pytest.mark.parametrize("start", ["model", "init_from"])
def test_train(checkpoint, files, tmp_path, monkeypatch, start, source, window, sinks):
    used = []

    class Stop(Exception):
        pass

    def stop(_, pattern, *__, **___):
        used.append(pattern)
        raise Stop

    monkeypatch.setattr(swa_jax.train.loop, "random_model", stop)
    monkeypatch.setattr(swa_jax.train.loop, "load_model", stop)
    text = tmp_path / "text.txt"
    text.write_text("a window slides over the text " * 200)
    settings = (f"output={tmp_path / 'run'}", f"pattern={named(source, files)}")
    settings += (f"stages.0.data=[{{files: ['{text}']}}]",)
    if start == "model":
        settings += ("model.num_hidden_layers=2",)
    else:
        settings += ("model=null", f"init_from={checkpoint}", f"tokenizer={checkpoint}")
    default = window or {"model": 2048, "init_from": OWN_WINDOW}[start]
    for given, expected in (("sliding_window=null", default), ("sliding_window=7", 7)):
        with pytest.raises(Stop):
            run("train", TINY, *settings, given)
        assert (used[-1].sliding_window, used[-1].num_sink_tokens) == (expected, sinks)


def test_import(files, tmp_path):
    run("import", GOLDEN / "llama-plain", tmp_path / "model", "--pattern", files / "swaa.json")
    stored = AttentionPattern.from_json(tmp_path / "model" / "pattern.json")
    assert (stored.sliding_window, stored.num_sink_tokens, stored.full_layers) == (24, 5, (1,))


def test_a_recipe_takes_the_window_of_the_model_that_is_imported_or_loaded(checkpoint, tmp_path):
    golden = GOLDEN / "mistral-window"
    own = json.loads((golden / "config.json").read_text())["sliding_window"]
    run("import", golden, tmp_path / "model", "--pattern", "interleave-1-in-2")
    assert AttentionPattern.from_json(tmp_path / "model" / "pattern.json").sliding_window == own != 2048
    assert load_model(checkpoint, pattern="streaming").pattern.sliding_window == OWN_WINDOW


def test_a_swaa_configuration_that_is_wrong_is_named(checkpoint, tmp_path):
    file = tmp_path / "swaa.json"
    for change, said in (
        ({"keep_frst": 1}, "SWAA config: unknown key 'keep_frst'; did you mean 'keep_first'?"),
        ({"non_sliding_layers": [2]}, "full layer 2 does not exist: the model has layers 0 to 1"),
        ({"non_sliding_layers": ["1"]}, "non_sliding_layers[0] must be a whole number, got '1'"),
        ({"non_sliding_layers": 1}, "non_sliding_layers must be a list of layers, got 1"),
        ({"force_fa_decode": "false"}, "force_fa_decode must be true or false, got 'false'"),
        ({"sliding_window_size": 2.5}, "sliding_window_size must be a whole number, got 2.5"),
    ):
        file.write_text(json.dumps(SWAA | change))
        assert fails("generate", checkpoint, "hello", "--pattern", file) == f"{file}: {said}"
    file.write_text(json.dumps(SWAA))
    said = "give one of --layers N and --model DIR: "
    assert fails("pattern", file).startswith(said)
    assert "2 layers: wF" in run("pattern", file, "--layers", 2)
    file.write_text("{}")
    assert "has no 'layer_types': it is not" in fails("pattern", file, "--layers", 2)


def test_pattern_diff_reads_all_that_a_pattern_may_be(checkpoint, files, tmp_path):
    mine, swaa = files / "mine.json", files / "swaa.json"
    output = run("pattern", "diff", mine, swaa)  # the first says how many layers there are
    assert f"{mine}: 1 of 2 layers windowed (50.0%)" in output
    assert "layer 0: only the second windows it\nlayer 1: only the first windows it" in output
    printed = json.loads(run("pattern", "diff", mine, swaa, "--json"))
    assert (printed["windowed"], printed["of"], printed["turnover"]) == ([1, 1], 2, 1)
    assert printed["layers"] == [
        {"layer": 0, "only": "second", "kv_heads": [0]},
        {"layer": 1, "only": "first", "kv_heads": [0]},
    ]
    assert "only the" not in run("pattern", "diff", "full", "layers:0,1", "--layers", 2)
    nope = "layers:0+nope"
    assert f"{nope}: full layers without rotary" in run("pattern", "diff", nope, "layers:0", "--layers", 2)
    assert "layer 0: only the second windows it" in run("pattern", "diff", "full", "window", "--model", checkpoint)
    assert "windowed" in run(
        "pattern", "diff", files / "config.json", '{"layer_types": ["full_attention", "full_attention"]}'
    )
    assert fails("pattern", "diff", "full", "window").startswith("give one of --layers N and --model DIR: ")
    make("Fww").to_json(tmp_path / "three.json")
    assert fails("pattern", "diff", mine, tmp_path / "three.json") == (
        f"{tmp_path / 'three.json'} has 3 layers, not 2: they must agree"
    )
    run("pattern", "diff", "full", "window", "--layers", 2, "--window", 8, status=2)  # it has no such option
    swapped = tmp_path / "swap.json"
    run("pattern", "diff", mine, swaa, "--swap", swapped)
    assert AttentionPattern.from_json(swapped).provenance["first"] == str(mine)
