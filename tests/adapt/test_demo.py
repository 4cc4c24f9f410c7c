"""The demo's decisions, and (slow) the whole of it on a tiny random model."""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx
from tiny_models import WIDER

import swa_jax.adapt.demo as demo
import swa_jax.adapt.demo_tasks as demo_tasks
from swa_jax.adapt.demo_tasks import Questions
from swa_jax.checkpoint.folder import save_model
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.data.chains import chain_tokenizer
from swa_jax.data.haystack import library_files, read_text
from swa_jax.errors import ConfigError
from swa_jax.model.decoder import Decoder
from swa_jax.model.pattern import AttentionPattern
from swa_jax.select import NLLScores
from swa_jax.select.heads import head_pattern, heuristic_mask

CONFIG = dataclasses.replace(
    WIDER, vocab_size=512, num_hidden_layers=8, model_type="qwen3", qk_norm=True, tie_word_embeddings=True
)
WINDOW = 32
SCORES = NLLScores(np.array([[0.0, 0.1, 0.9, 0.2, 0.0, 0.8, 0.3, 0.1]] * 2), np.ones(2), WINDOW, 0, picked=(2,))
NAMES = [
    "full", "window", "streaming", "interleave-1-in-2", "interleave-1-in-4",
    "nll-1-in-2", "nll-greedy-1-in-2", "nll-1-in-4", "nll-greedy-1-in-4",
]  # fmt: skip
DECODED = [f"{name}+fa-decode" for name in ("window", "interleave-1-in-2", "nll-1-in-2", "nll-greedy-1-in-2")]
HEADS = {"bosch-1-in-4": head_pattern(heuristic_mask("interleave", 8, 2, 0.75), WINDOW, 0, {})}
ASKED = Questions([], [], ["1 hop"], "Statements to look up", WINDOW, 3, [])
ROW_KEYS = {
    "name",
    "full_layers",
    "needle_accuracy",
    "answer_nll",
    "kv_cache_bytes",
    "prefill_seconds",
    "decode_tokens_per_second",
}


@pytest.fixture(scope="module")
def chain_words():
    return chain_tokenizer(texts=["the cat sat on the mat"] * 50)


def test_patterns_compared_have_the_budgets_their_names_say():
    later = [
        dataclasses.replace(SCORES, deltas=np.eye(8)[[best]], full_layers=chosen, picked=(best,))
        for best, chosen in ((7, (2,)), (0, (2, 7)), (1, (0, 2, 7)))
    ]
    patterns = demo.demo_patterns(CONFIG, [SCORES, *later], HEADS, ASKED)
    assert list(patterns) == [*NAMES, *HEADS, *DECODED]
    assert patterns["nll-1-in-4"].full_layers == (2, 5)
    assert patterns["nll-1-in-2"].full_layers == (2, 3, 5, 6)
    assert patterns["nll-greedy-1-in-4"].full_layers == (2, 7)
    assert patterns["nll-greedy-1-in-2"].full_layers == (0, 1, 2, 7)
    assert patterns["interleave-1-in-4"].full_layers == (3, 7)
    for name, pattern in patterns.items():
        assert pattern.full_attention_decode == name.endswith("+fa-decode")
        assert pattern.sliding_window == WINDOW
        assert pattern.num_sink_tokens == (demo.SINK_TOKENS if name.startswith("streaming") else 0)


def test_needles_lie_beyond_what_windows_pass_on():
    depth = demo_tasks.deepest_needle(CONFIG)
    assert 8 * demo_tasks.NEEDLE_WINDOW < demo_tasks.NEEDLE_LENGTH / 2
    # Even the last token generated must not reach the needle's end through eight windows.
    assert depth * demo_tasks.NEEDLE_LENGTH + 26 + 8 * demo_tasks.NEEDLE_WINDOW < demo_tasks.NEEDLE_LENGTH
    with pytest.raises(ConfigError, match="at least 4 and at most"):
        demo_tasks.deepest_needle(dataclasses.replace(CONFIG, num_hidden_layers=20))


def test_chains_are_asked_in_turn_and_each_statement_is_out_of_the_window_of_the_next(chain_words):
    asked = demo_tasks.chain_questions(chain_words)
    assert len(asked.examples) == 3 * demo_tasks.EXAMPLES
    assert len(asked.calibration) == 3 * demo_tasks.CALIBRATION_EXAMPLES
    assert {tuple(one.prompt) for one in asked.examples}.isdisjoint(tuple(one.prompt) for one in asked.calibration)
    for number, example in enumerate(asked.examples):
        starts = example.meta["statements"]
        assert asked.kinds[number % 3][0] == str(len(starts))
        assert np.diff([*starts, len(example.prompt)]).min() >= asked.sliding_window
        assert len(example.prompt) + len(example.answer) == demo_tasks.CHAIN_LENGTH
        assert len(example.answer) <= asked.max_new_tokens


def test_a_model_that_answers_nothing_has_no_heads_to_search_for(chain_words):
    asked = demo_tasks.chain_questions(chain_words)._replace(calibration=[])
    config = dataclasses.replace(CONFIG, vocab_size=chain_words.backend.get_vocab_size())
    model = Decoder(config, AttentionPattern.from_recipe("full", config), rngs=nnx.Rngs(0))
    patterns, notes = demo.bosch_patterns(model, asked)
    assert not patterns
    assert notes[0].startswith("BOSCH was left out: ")


@pytest.mark.parametrize("name", ["nll-1-in-4", "nll-greedy-1-in-2", "bosch-1-in-2"])
@pytest.mark.parametrize(
    ("chosen", "interleave", "beats", "says"),
    [
        ([1] * 45 + [0] * 3, [0] * 44 + [1] * 4, True, "beats interleaving beyond"),
        ([0] * 48, [0] * 48, False, "carries what is asked for"),
        ([1] * 48, [1] * 48, False, "good ones already"),
        ([0] * 40 + [1] * 8, [1] * 40 + [0] * 8, False, "happen to be the better ones"),
        ([1, 0] * 24, [0, 1] * 24, False, "too small for this many"),
        ([1, 0] * 23 + [1, 1], [0, 1] * 24, False, "too small for this many"),  # better, but by chance
    ],
)
def test_the_verdict_is_plain(name, chosen, interleave, beats, says):
    other = f"interleave-{name[-6:]}"
    wrong = {"interleave-1-in-3": np.zeros(48)}
    scores = {name: np.array(chosen, float), other: np.array(interleave, float)} | wrong
    sentence, got = demo.compare(name, scores)
    assert got is beats
    assert says in sentence
    assert "95 % interval" in sentence
    assert ("work only together" in sentence) == (name == "nll-1-in-4" and "better ones" in says)


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
    for name, value in {"NEEDLE_EXAMPLES": 6, "NEEDLE_CALIBRATION": 2}.items():
        monkeypatch.setattr(demo_tasks, name, value)
    for name, value in {"NLL_EXAMPLES": 2, "BATCH": 3}.items():
        monkeypatch.setattr(demo, name, value)
    out = tmp_path / "out"
    report = demo.run_demo(out, hf)
    assert json.loads((out / "report.json").read_text()) == report
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == NAMES + DECODED
    for row in rows.values():
        assert row.keys() >= ROW_KEYS
        assert row["prefill_seconds"] > 0
        assert row["decode_tokens_per_second"] > 0
        assert 0 <= row["needle_interval"][0] <= row["needle_accuracy"] <= row["needle_interval"][1] <= 1
    cache = {name: row["kv_cache_bytes"] for name, row in rows.items()}
    assert (
        cache["window"] < cache["streaming"] < cache["interleave-1-in-4"] < cache["interleave-1-in-2"] < cache["full"]
    )
    assert cache["nll-1-in-4"] == cache["interleave-1-in-4"]
    assert {cache[name] for name in cache if name.endswith("+fa-decode")} == {cache["full"]}
    assert {step["step"] for step in report["routed_cpt"]} == set(range(1, len(report["routed_cpt"]) + 1))
    assert all(0 <= step["full_attention_ratio"] <= 1 for step in report["routed_cpt"])
    pictures = {"answers.png", "layer-scores.png", "accuracy-memory.png", "routed-cpt.png"}
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
