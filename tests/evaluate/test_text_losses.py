"""Real models: the loss of a text is that of transformers, and needles tell full attention from windows."""

import functools
import json
from pathlib import Path

import pytest
from command_line import run
from real_models import real_model

from swa_jax.checkpoint.folder import load_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.cli.options import PromptKind
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate import score_answers
from swa_jax.model.pattern import AttentionPattern

pytestmark = pytest.mark.models
ROOT = Path(__file__).parents[2]
# Written by `python -m scripts.goldens losses`: by transformers and lm-evaluation-harness, from the same files.
FOUND = json.loads((ROOT / "tests" / "golden" / "text_losses.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint folder of a real model by its name."""
    return functools.cache(lambda name: import_model(real_model(name), tmp_path_factory.mktemp("real") / name))


@pytest.mark.parametrize("name", FOUND)
def test_the_loss_of_a_text_is_that_of_transformers(folder, name, tmp_path):
    """Gemma's tokenizer puts a start token before a text: one stands before every sequence. SmolLM2's puts none."""
    lengths = ",".join(str(one["length"]) for one in FOUND[name]["text"])
    out = ("--lengths", lengths, "--batch-size", 2, "--dtype", "float32", "--out", tmp_path)
    run("evaluate", "text", folder(name), ROOT / "LICENSE", *out)
    rows = json.loads((tmp_path / "results.json").read_text())["perplexity_sweep"]
    for row, expected in zip(rows, FOUND[name]["text"], strict=True):
        assert row["num_tokens"] == expected["num_tokens"]
        assert row["nll"] == pytest.approx(expected["nll"], abs=1e-3)


def test_rolling_likelihoods_are_those_of_the_harness(folder):
    """SmolLM2 has a start token that its tokenizer does not put before a text; the harness does."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra [eval])")
    from lm_eval.api.instance import Instance

    from swa_jax.evaluate.harness import HarnessModel

    model, tokenizer = load_model(folder("smollm2"), dtype="float32"), load_tokenizer(folder("smollm2"))
    expected = FOUND["smollm2"]["rolling"]
    texts = [part.strip() for part in (ROOT / "LICENSE").read_text().split("\n\n") if part.strip()]
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts[: len(expected)])]
    assert tokenizer.start_ids == []
    got = HarnessModel(model, tokenizer, max_length=2048).loglikelihood_rolling(requests)
    assert got == pytest.approx(expected, abs=1e-2)


def test_needles_in_a_chat_tell_full_attention_from_windows(folder):
    kind = PromptKind(400).of(folder("smollm2"))
    assert kind.chat
    model, tokenizer = load_model(folder("smollm2"), dtype="float32"), load_tokenizer(folder("smollm2"))
    examples = kind.draw(tokenizer, 16, seed=0)
    windows = AttentionPattern.from_full_layers((), model.pattern.num_layers, 64)
    assert score_answers(model, examples).right.mean() >= 0.9
    # A window holds the needles of one prompt in six.
    assert score_answers(model, examples, pattern=windows).right.mean() <= 0.2
