"""Every verb that takes a pattern reads the same sources, and only options that the user gave change them."""

import json
from pathlib import Path

import pytest
from test_cli import GOLDEN, fails, run
from tiny_models import byte_checkpoint, make

import swa_jax.model.generate
import swa_jax.train.loop
from swa_jax.model.pattern import AttentionPattern

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


# Source, options, and what must come of them: window (None: the verb's own default), sink tokens.
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
    assert f"window {window or 2048} (own key included), {sinks} sink tokens" in output
    used = []
    monkeypatch.setattr(
        swa_jax.model.generate, "generate", lambda model, *_, **__: used.append(model.pattern) or [[]]
    )
    run("generate", checkpoint, "hello", "--pattern", named(source, files), *options)
    assert (used[0].sliding_window, used[0].num_sink_tokens) == (window or 2048, sinks)
    assert used[0].full_attention_decode == (source == "swaa.json")


def test_evaluate(checkpoint, files, tmp_path):
    (tmp_path / "text.txt").write_text("All that is gold does not glitter. " * 12)
    sources = [(s, w, k) for s, options, w, k in SOURCES if not options]
    patterns = [x for source, *_ in sources for x in ("--pattern", named(source, files))]
    run("evaluate", checkpoint, *patterns, "--needles", 0, "--text", tmp_path / "text.txt", "--windows", "8",
        "--contexts", 64, "--out", tmp_path / "out")  # fmt: skip
    used = json.loads((tmp_path / "out" / "results.json").read_text())["patterns"]
    for source, window, sinks in sources:
        one = used[str(named(source, files))]
        assert (one["sliding_window"], one["num_sink_tokens"]) == (window or 2048, sinks)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ((), None),
        (("--window", 8), 8),
        (("--eval-window", 12), 12),
        (("--window", 8, "--eval-window", 12), 12),
    ],
)
def test_compare(checkpoint, files, tmp_path, options, given):
    """Recipes take the model's own window, where none is given; what a source says stays."""
    sources = [(s, w, k) for s, o, w, k in SOURCES if not o]
    patterns = [x for source, *_ in sources for x in ("--pattern", named(source, files))]
    run(
        "compare",
        checkpoint,
        *patterns,
        *options,
        "--out",
        tmp_path,
        "--held-out",
        2,
        "--length",
        320,
        "--force",
    )
    rows = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    for source, window, sinks in sources:
        used = rows[str(named(source, files))]["pattern"]
        assert (used["sliding_window"], used["num_sink_tokens"]) == (given or window or OWN_WINDOW, sinks)
    costs = [rows[name]["kv_cache_bytes"] for name in ("window", "streaming", "window+sink-tokens=40")]
    assert costs == sorted(set(costs))  # they are not one row three times


def test_sink_tokens_that_are_given_win_in_compare(checkpoint, files, tmp_path):
    patterns = ("--pattern", "streaming", "--pattern", files / "mine.json", "--sink-tokens", 0)
    run("compare", checkpoint, *patterns, "--out", tmp_path, "--held-out", 2, "--length", 320, "--force")
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["pattern"]["num_sink_tokens"] for row in rows} == {0}


@pytest.mark.parametrize(
    ("source", "window", "sinks"), [(s, w, k) for s, o, w, k in SOURCES if not o and s != "swaa.json"]
)
def test_train(files, tmp_path, monkeypatch, source, window, sinks):
    used = []

    class Stop(Exception):
        pass

    def drawn(config, pattern, *_):
        used.append(pattern)
        raise Stop

    monkeypatch.setattr(swa_jax.train.loop, "random_model", drawn)
    settings = ("model.num_hidden_layers=2", f"output={tmp_path / 'run'}", f"pattern={named(source, files)}")
    for given, expected in (("sliding_window=null", window or 2048), ("sliding_window=7", 7)):
        with pytest.raises(Stop):
            run("train", TINY, *settings, given)
        assert (used[-1].sliding_window, used[-1].num_sink_tokens) == (expected, sinks)


def test_import(files, tmp_path):
    run("import", GOLDEN / "llama-plain", tmp_path / "model", "--pattern", files / "swaa.json")
    stored = AttentionPattern.from_json(tmp_path / "model" / "pattern.json")
    assert (stored.sliding_window, stored.num_sink_tokens, stored.full_layers) == (24, 5, (1,))


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
