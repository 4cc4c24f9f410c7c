"""The demo's decisions, and (slow) the whole of it on a tiny random model."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx
from tiny_models import WIDER

import swa_jax.adapt.demo as demo
from swa_jax.checkpoint.folder import save_model
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.data.haystack import library_files, read_text
from swa_jax.errors import ConfigError
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.select import NLLScores

CONFIG = dataclasses.replace(
    WIDER, vocab_size=512, num_hidden_layers=8, model_type="qwen3", qk_norm=True, tie_word_embeddings=True
)
SCORES = NLLScores(np.array([[0.0, 0.1, 0.9, 0.2, 0.0, 0.8, 0.3, 0.1]] * 2), np.ones(2), demo.WINDOW, 0)
NAMES = ["full", "window", "streaming", "interleave-1-in-2", "interleave-1-in-4", "nll-1-in-2", "nll-1-in-4"]
ROW_KEYS = {
    "name",
    "full_layers",
    "needle_accuracy",
    "answer_nll",
    "kv_cache_bytes",
    "prefill_seconds",
    "decode_tokens_per_second",
}


def test_patterns_compared_have_the_budgets_their_names_say():
    patterns = demo.demo_patterns(CONFIG, SCORES)
    assert list(patterns) == NAMES + [f"{name}+fa-decode" for name in NAMES[1:]]
    assert patterns["nll-1-in-4"].full_layers == (2, 5)
    assert patterns["nll-1-in-2"].full_layers == (2, 3, 5, 6)
    assert patterns["interleave-1-in-4"].full_layers == (3, 7)
    for name, pattern in patterns.items():
        assert pattern.full_attention_decode == name.endswith("+fa-decode")
        assert pattern.sliding_window == demo.WINDOW
        assert pattern.num_sink_tokens == (demo.SINK_TOKENS if name.startswith("streaming") else 0)


def test_needles_lie_beyond_what_windows_pass_on():
    depth = demo.deepest_needle(CONFIG)
    assert 8 * demo.WINDOW < demo.LENGTH / 2
    # Even the last token generated must not reach the needle's end through eight windows.
    assert depth * demo.LENGTH + 26 + 8 * demo.WINDOW < demo.LENGTH
    with pytest.raises(ConfigError, match="at least 4 and at most"):
        demo.deepest_needle(dataclasses.replace(CONFIG, num_hidden_layers=20))


@pytest.mark.parametrize(
    ("nll", "interleave", "beats", "says"),
    [
        ([1] * 45 + [0] * 3, [0] * 44 + [1] * 4, True, "beats interleaving beyond"),
        ([0] * 48, [0] * 48, False, "carries the needle"),
        ([1] * 48, [1] * 48, False, "good ones already"),
        ([0] * 40 + [1] * 8, [1] * 40 + [0] * 8, False, "work only together"),
        ([1, 0] * 24, [0, 1] * 24, False, "too small for this many"),
        ([1, 0] * 23 + [1, 1], [0, 1] * 24, False, "too small for this many"),  # better, but by chance
    ],
)
def test_the_verdict_is_plain(nll, interleave, beats, says):
    sentence, got = demo.compare(np.array(nll, float), np.array(interleave, float))
    assert got is beats
    assert says in sentence
    assert "95 % interval" in sentence


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path):
    mine = tmp_path / "model" / "weights"
    mine.mkdir(parents=True)
    (mine / "kept").touch()
    with pytest.raises(ConfigError, match="no demo made"):
        demo.run_demo(tmp_path)
    assert (mine / "kept").exists()


@pytest.mark.long
def test_whole_demo_on_a_tiny_random_model(tmp_path, monkeypatch):
    hf = tiny_hf_model(tmp_path)
    for name, value in {"EXAMPLES": 6, "NLL_EXAMPLES": 2, "CALIBRATION_EXAMPLES": 2, "BATCH": 3}.items():
        monkeypatch.setattr(demo, name, value)
    out = tmp_path / "out"
    report = demo.run_demo(out, hf)
    assert json.loads((out / "report.json").read_text()) == report
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == NAMES + [f"{name}+fa-decode" for name in NAMES]
    for row in rows.values():
        assert row.keys() >= ROW_KEYS
        assert row["prefill_seconds"] > 0
        assert row["decode_tokens_per_second"] > 0
        assert 0 <= row["needle_interval"][0] <= row["needle_accuracy"] <= row["needle_interval"][1] <= 1
    cache = {name: row["kv_cache_bytes"] for name, row in rows.items()}
    assert (
        cache["window"]
        < cache["streaming"]
        < cache["interleave-1-in-4"]
        < cache["interleave-1-in-2"]
        < cache["full"]
    )
    assert cache["nll-1-in-4"] == cache["interleave-1-in-4"]
    assert {cache[name] for name in cache if name.endswith("+fa-decode")} == {cache["full"]}
    assert {step["step"] for step in report["routed_cpt"]} == set(range(1, len(report["routed_cpt"]) + 1))
    assert all(0 <= step["full_attention_ratio"] <= 1 for step in report["routed_cpt"])
    pictures = {"needles.png", "layer-scores.png", "accuracy-memory.png", "routed-cpt.png"}
    assert pictures <= {file.name for file in out.iterdir()}


def tiny_hf_model(folder):
    """A random model in Hugging Face format with a byte tokenizer's `tokenizer.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([read_text(library_files()[:3])], trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    model = Decoder(CONFIG, AttentionPattern.from_recipe("full", CONFIG), rngs=nnx.Rngs(0))
    checkpoint = save_model(model, folder / "checkpoint", tokenizer_from=folder / "tokenizer")
    export_model(checkpoint, folder / "hf", canary=False)
    return folder / "hf"
