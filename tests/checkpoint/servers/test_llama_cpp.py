"""llama.cpp's own server on our GGUF files: what it computes, and which cells its caches have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_answers import limit_of
from engine_process import engine_process
from gguf_files import FIXED
from letter_patterns import made_pattern
from live import check_named
from sized_models import LENGTH, SIZES, write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from swa_jax import load_model
from swa_jax.checkpoint import check_server
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern

WINDOW_SIZE, BATCHED, NEW = 24, 64, 8
WORDS = SIZES["vocab_size"]
_RNG = np.random.default_rng(0)
PROMPTS = [_RNG.integers(3, WORDS, length).tolist() for length in (400, 150)]
# A golden, a pattern ("own": the layers that it was trained with), and the architecture that runs it.
CASES = [
    ("llama-plain", "wF", "granite_swa"),
    ("llama-plain", "w", "granite_swa"),
    ("llama-plain", "F", "llama"),
    ("llama3-rope", "wwwF", "granite_swa"),
    ("llama-yarn", "wF", "granite_swa"),
    ("llama-bias", "Fw", "granite_swa"),
    ("mistral-window", "own", "granite_swa"),
    ("ministral-hybrid", "own", "granite_swa"),
    ("cwm-hybrid", "own", "granite_swa"),
    ("smollm3-hybrid", "wF", "granite_swa"),
    ("smollm3-hybrid", "F", "smollm3"),
    ("granite-full", "wF", "granite_swa"),
    ("granite-full", "F", "granite"),
    ("granite-swa-hybrid", "own", "granite_swa"),
    ("qwen2-full", "wF", "granite_swa"),
    ("qwen2-full", "F", "qwen2"),
    ("seed-oss-full", "wF", "granite_swa"),
    ("qwen3-hybrid", "wF", "step35"),
    ("qwen3-hybrid", "wwwF", "step35"),
    ("qwen3-hybrid", "F", "qwen3"),
    ("qwen3-moe-full", "wF", "mellum"),
    ("qwen3-moe-full", "F", "qwen3moe"),
    ("gemma2-hybrid", "Fw", "gemma2"),
    ("gemma3-hybrid", "own", "gemma3"),
    ("cohere-full", "F", "command-r"),
    ("cohere2-hybrid", "own", "cohere2"),
    ("olmo2-full", "wF", "olmo2"),
    ("olmo2-full", "F", "olmo2"),
    ("olmo3-hybrid", "own", "olmo2"),
    ("exaone4-full", "F", "exaone4"),
]
GIVEN = FIXED | {"gemma2-hybrid": {"query_pre_attn_scalar": 32}, "gemma3-hybrid": {"query_pre_attn_scalar": 32}}
# ggml has GELU in f16 on a CPU, and makes YaRN's angles by repeated products.
ROUNDED = {"gemma2-hybrid": 2e-2, "gemma3-hybrid": 5e-2, "llama-yarn": 3e-4}


@pytest.fixture(scope="session")
def llama_engine(tmp_path_factory):
    with engine_process(tmp_path_factory.mktemp("llama") / "log", script="llama_engine.py") as ask:
        yield ask


def write_tokenizer(folder) -> None:
    """Tokens of one sign and of two; the server keeps back what is no whole letter, and its log-probabilities."""
    signs = [chr(code) for code in range(33, 127)]
    pairs = [(signs[0], sign) for sign in signs[: WORDS - len(signs)]]
    vocab = {text: i for i, text in enumerate([*signs, *map("".join, pairs)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def exported(golden, letters, tmp_path, canary=False):
    folder = write_model(golden, tmp_path / "hf", **GIVEN.get(golden, {}))
    write_tokenizer(folder)
    source = open_checkpoint(import_model(folder, tmp_path / "ours"))
    pattern, layers = source.pattern, source.config.num_hidden_layers
    if letters != "own":
        pattern = made_pattern(letters, {}, layers, WINDOW_SIZE)
    notes = []
    options = {"pattern": pattern, "server": "llama.cpp", "canary": canary, "describe": notes.append}
    out = export_model(source.folder, tmp_path / "out", serve_length=LENGTH, batched_tokens=BATCHED, **options)
    return source, pattern, out, "\n".join(notes)


def difference_of(model, said) -> tuple[float, float]:
    """The greatest difference between log-probabilities, and the greatest of ours."""
    differences, largest = [], []
    for prompt, tokens, theirs in zip(PROMPTS, said["tokens"], said["logprobs"], strict=True):
        logits = model(jnp.array([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
        ours = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))  # [new tokens, V]
        differences.append(np.abs(ours - np.array(theirs)).max())
        largest.append(np.abs(ours).max())
    return max(differences), max(largest)


@pytest.mark.parametrize(("golden", "letters", "architecture"), CASES)
def test_llama_cpp_computes_what_we_do_in_the_cells_that_we_count(
    golden, letters, architecture, llama_engine, tmp_path
):
    source, pattern, out, notes = exported(golden, letters, tmp_path)
    assert f"runs it as {architecture}," in notes
    said = llama_engine(out, PROMPTS, LENGTH, BATCHED, NEW, words=WORDS)
    assert "refused" not in said, said
    model = load_model(source.folder, pattern=pattern)
    difference, largest = difference_of(model, said)
    limit = ROUNDED.get(golden, limit_of(largest))
    assert difference <= limit
    full = load_model(source.folder, pattern=AttentionPattern((FULL,) * pattern.num_layers))
    if WINDOW in pattern.layer_types:
        assert difference_of(full, said)[0] > 10 * limit
        memory = Memory(source.config, source.hf_config, LENGTH, "llama.cpp", BATCHED)
        entries = sum(cells * layers for cells, layers in said["cells"])
        assert entries / (LENGTH * pattern.num_layers) == memory.share(pattern)


@pytest.mark.parametrize(("letters", "expected"), [("wF", "right"), ("Fw", "kinds swapped")])
def test_a_live_server_is_named(letters, expected, llama_engine, tmp_path):
    """By the receipt of an export with windows in every second layer, the first one too."""
    folder = exported("llama-plain", "wF", tmp_path, canary=True)[2]
    served = folder if letters == "wF" else exported("llama-plain", letters, tmp_path / "other")[2]
    url = llama_engine(served, [], LENGTH, BATCHED)["url"]
    found = check_named(folder, url, expected)
    assert found["asked_by"] == "top"
    assert expected != "right" or found["generated"]["verdict"] == check_server.RIGHT


@pytest.mark.parametrize("change", [{"sliding_window": 25}, {"sliding_window": 23}, {"letters": "Fw"}], ids=str)
def test_another_window_or_layer_is_noticed(change, llama_engine, tmp_path):
    source, pattern, out, _ = exported("llama-plain", change.get("letters", "wF"), tmp_path)
    said = llama_engine(out, PROMPTS, LENGTH, BATCHED, NEW, words=WORDS)
    types = tuple(reversed(pattern.layer_types)) if "letters" in change else pattern.layer_types
    other = dataclasses.replace(pattern, layer_types=types, sliding_window=change.get("sliding_window", WINDOW_SIZE))
    difference, largest = difference_of(load_model(source.folder, pattern=other), said)
    assert difference > 10 * limit_of(largest)
