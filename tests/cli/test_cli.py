"""The command line: every verb reaches its implementation, and an expected error is one sentence."""

import json
import os
import re
from pathlib import Path

import pytest
from command_line import fails, run
from tiny_models import byte_checkpoint, make

import swa_jax.train.loop
from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict
from swa_jax.checkpoint.folder import load_model, save_model
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.config import TrainConfig

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    """A tiny byte-level model with its tokenizer."""
    return byte_checkpoint(tmp_path_factory.mktemp("cli"), byte_tokenizer, make("Fw", sliding_window=16))


# ---- patterns ----


def test_pattern_prints_the_map(tmp_path):
    out = tmp_path / "new" / "pattern.json"
    output = run("pattern", "interleave-1-in-4", "--layers", 8, "--window", 64, "--sink-tokens", 3, "--out", out)
    assert "8 layers: wwwFwwwF" in output
    assert "window 64 (own key included), 3 sink tokens, full-attention decode off" in output
    assert AttentionPattern.from_json(out).full_layers == (3, 7)
    again = run("pattern", out, "--fa-decode")
    assert "8 layers: wwwFwwwF" in again
    assert "window 64 (own key included), 3 sink tokens, full-attention decode on" in again


def test_pattern_of_a_model_as_json(checkpoint):
    words = ("pattern", "interleave-1-in-2", "--model", checkpoint, "--window", 8, "--length", 64)
    printed = json.loads(run(*words, "--json"))
    assert AttentionPattern.from_json(json.dumps(printed["pattern"])).full_layers == (1,)
    here, *servers = printed["caches"]
    assert (here["server"], here["share"]) == (None, pytest.approx((8 + 64) / (64 + 64)))
    assert {"vllm", "sglang"} <= {one["server"] for one in servers}
    said = run(*words)
    assert "2 layers: wF" in said
    assert f"{here['bytes'] / 2**20:.1f} MiB   56.2%" in said


# ---- wiring ----


def test_demo(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("swa_jax.cli.adapt.carry_out_and_report", calls.append)
    for words in ((), ("--out", tmp_path)):
        assert "adapt a model of your own: swa-jax adapt MODEL OUT" in run("demo", *words)
    assert [(settings.model, settings.out) for settings in calls] == [
        ("chains", Path("runs/demo")),
        ("chains", tmp_path),
    ]


def test_train(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(swa_jax.train.loop, "train", lambda config: seen.append(config) or "runs/x/model")
    config = Path(__file__).parents[2] / "configs" / "swat-tiny.yaml"
    assert run("train", config, f"output={tmp_path}", "stages.0.steps=3").strip() == "runs/x/model"
    assert (seen[0].output, seen[0].stages[0].steps) == (str(tmp_path), 3)


def test_import_and_export(tmp_path):
    output = run("import", GOLDEN / "llama-plain", tmp_path / "model", "--pattern", "window")
    assert "full attention in 0 layers" in output
    run("export", tmp_path / "model", tmp_path / "back", "--no-canary")
    assert (tmp_path / "back" / "config.json").is_file()
    assert json.loads((tmp_path / "back" / "pattern.json").read_text())["sliding_window"] == 2048
    options = ("--no-canary", "--pattern", "layers:1", "--window", 8)
    run("export", tmp_path / "model", tmp_path / "other", *options)
    chosen = json.loads((tmp_path / "other" / "pattern.json").read_text())
    assert (chosen["sliding_window"], chosen["layer_types"].index("full_attention")) == (8, 1)
    assert "name one with --pattern" in fails("export", tmp_path / "model", tmp_path / "third", "--window", 8)
    assert not (tmp_path / "third").exists()
    assert str(tmp_path / "model") in fails("import", GOLDEN / "llama-plain", tmp_path / "model")
    assert "absent" in fails("export", tmp_path / "absent", tmp_path / "third")


def test_generate(checkpoint):
    options = ("--max-new-tokens", 12)  # the sizes of test_generate_cli's, whose programs serve here
    output = run("generate", checkpoint, "Hello", *options)
    assert output.endswith("\n")
    assert run("generate", checkpoint, "-", *options, input="Hello") == output
    assert run("generate", checkpoint, "Hello", *options, "--window", 2) != output
    sampled = (*options, "--temperature", 2.0, "--top-k", 50)
    drawn = [run("generate", checkpoint, "Hello", *sampled, "--seed", seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert fails("generate", checkpoint, "Hi", "--top-p", 2) == "--top-p must be above 0 and at most 1, got 2.0"
    assert fails("generate", checkpoint, "") == "the prompt is empty: a prompt needs at least one token"
    assert "absent" in fails("generate", "absent", "Hi")
    three = make("www").to_json(checkpoint.parent / "three.json") and checkpoint.parent / "three.json"
    sentence = f"{three}: the pattern has 3 layers, the model 2: they must agree"
    assert fails("generate", checkpoint, "Hi", "--pattern", three) == sentence


def test_generate_says_what_it_makes_of_its_options(checkpoint, tmp_path):
    assert fails("generate", checkpoint, os.fsdecode(b"hello \xff")) == (
        "the prompt is not UTF-8 text, from its byte 6 on"
    )
    output = run("generate", checkpoint, "hello", "--max-new-tokens", 1, "--pattern", "switch", "--window", 8)
    assert "the model has no routers for --pattern switch: they are drawn at random, untrained" in output
    full = load_model(checkpoint, pattern="full")
    save_model(full, tmp_path / "full", tokenizer_from=checkpoint)
    for options in (("--window", 8), ("--sink-tokens", 2), ("--fa-decode",)):
        assert "have no effect: the model's own pattern" in fails("generate", tmp_path / "full", "hello", *options)
    run("generate", tmp_path / "full", "hello", "--max-new-tokens", 1, "--sink-tokens", 0)


def test_select_writes_a_pattern_and_a_picture(checkpoint, tmp_path):
    out = tmp_path / "chosen.json"
    options = ("--examples", 2, "--length", 320, "--window", 16, "--force")
    output = run("select", "nll", checkpoint, "--out", out, "--one-in", 2, *options)
    assert "full attention in 1 layers" in output
    pattern = AttentionPattern.from_json(out)
    assert (len(pattern.full_layers), pattern.sliding_window) == (1, 16)
    assert pattern.provenance["method"] == "nll"
    assert len(pattern.provenance["scores"]) == 2
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert load_model(checkpoint, pattern=out).pattern == pattern
    assert fails("select", "nll", checkpoint, "--out", "x.txt", "--budget", 1).startswith("--out is x.txt")


def test_evaluate_needles(checkpoint, tmp_path):
    out = tmp_path / "results"
    patterns = ("--pattern", "full", "--pattern", "window", "--window", 16)
    options = ("--examples", 6, "--length", 320, "--batch-size", 6, "--out", out)
    output = run("evaluate", "needles", checkpoint, *patterns, *options)
    assert "Needles found" in output
    assert "needles, answered and scored 24/24\n" in output
    results = json.loads((out / "results.json").read_text())
    full, window = results["rows"]
    assert (full["name"], window["name"]) == ("full", "window")
    assert full["kv_cache_bytes"] == 2 * full["cache_tokens"] * 2 * 8 * 4
    assert window["kv_cache_bytes"] == 2 * 16 * 2 * 8 * 4
    assert (out / "needles.png").read_bytes().startswith(b"\x89PNG")
    assert results["patterns"]["window"]["sliding_window"] == 16
    assert "holds whole prompts" not in output
    assert "length" in fails("evaluate", "needles", checkpoint, "--length", 20)
    for absent in (tmp_path, tmp_path / "absent.txt"):
        assert fails("evaluate", "text", checkpoint, absent).startswith(f"{absent}")


def test_windows_that_hold_whole_prompts_are_remarked_on(checkpoint, tmp_path):
    patterns = ("--length", 320, "--pattern", "window", "--pattern", "full", "--window", 400)
    compare = ("compare", checkpoint, "--held-out", 1, "--force", "--out", tmp_path)
    for command in (("evaluate", "needles", checkpoint, "--examples", 1), compare):
        output = run(*command, *patterns)
        assert re.search(
            r"^window: the window of 400 tokens holds whole prompts \(\d+\), which is full attention", output, re.M
        )
        assert output.count("holds whole prompts") == 1


# ---- buckets ----


@pytest.mark.parametrize(
    "command",
    [
        "import gs://bucket/hf gs://bucket/model",
        "export gs://bucket/model out",
        "export model s3://bucket/out",
        "generate gs://bucket/model hello",
        "compare model --out=gs://bucket/table",
        "pattern print window --model gs://bucket/model",
        "train run.yaml output=gs://bucket/run",
    ],
)
def test_a_bucket_is_refused_before_anything_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(
        r"(the (argument|destination)|'[\w-]+' =) (gs|s3)://\S+ is the address of a bucket, .* of the mounted folder",
        fails(*command.split()),
    )
    assert not list(tmp_path.iterdir())


def test_a_prompt_may_speak_of_buckets(checkpoint):
    run("generate", checkpoint, "gs://bucket is where", "--max-new-tokens", 1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"output": "gs://b/run"}, "'output' = gs://b/run"),
        ({"init_from": "gs://b/model", "model": None}, "'init_from' = gs://b/model"),
        ({"tokenizer": "gs://b/t"}, "'tokenizer' = gs://b/t"),
        ({"pattern": "gs://b/p.json"}, "'pattern' = gs://b/p.json"),
        (
            {"stages": [{"steps": 1, "sequence_length": 8, "batch_size": 1, "data": [{"files": ["s3://b/d"]}]}]},
            "data files s3://b/d",
        ),
    ],
)
def test_a_configuration_names_no_bucket(change, what):
    stages = [{"steps": 1, "sequence_length": 8, "batch_size": 1}]
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 8)
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    settings = {"output": "run", "tokenizer": "t", "stages": stages, "model": sizes}
    from_dict(TrainConfig, settings)
    with pytest.raises(ConfigError, match=f"^{re.escape(what)} is the address of a bucket"):
        from_dict(TrainConfig, settings | change)


def test_the_library_refuses_buckets_too(checkpoint):
    for path in ("gs://bucket/model", Path("gs://bucket/model")):
        with pytest.raises(ConfigError, match=r"gs:/+bucket/model is the address of a bucket"):
            load_model(path)
        with pytest.raises(ConfigError, match=r"gs:/+bucket/model is the address of a bucket"):
            save_model(load_model(checkpoint), path)
