"""The cache of a sequence as vLLM's engine grants it and as we count it: drawn models, and real ones."""

import numpy as np
import pytest
from engine_answers import check_answers, counted_entries, granted_entries, held_as_granted
from real_models import real_model
from sized_models import LENGTH, write_model

from swa_jax import load_model
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.named import model_folder
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.model.layer_types import FULL, WINDOW
from swa_jax.model.pattern import AttentionPattern


def check_count(said, source, pattern, length, batched) -> None:
    assert "refused" not in said, said
    memory = Memory(source.config, source.hf_config, length, "vllm", batched, "cpu")
    windowed = pattern.layer_types.count(WINDOW)
    granted = granted_entries(said)
    assert granted == counted_entries(memory, pattern.num_layers - windowed, windowed, pattern.sliding_window)
    heads, channels = source.config.common_kv_heads, source.config.head_dim
    assert memory.bytes(pattern) == granted[0] * 2 * heads * channels * 2
    assert held_as_granted(said)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_models(seed, engine, tmp_path):
    rng = np.random.default_rng(seed)
    layers, window, batched = int(rng.integers(2, 13)), int(rng.integers(2, 300)), int(rng.choice([32, 100, 256]))
    windowed = rng.random(layers) < rng.random()
    pattern = AttentionPattern(tuple(WINDOW if one else FULL for one in windowed), window if windowed.any() else None)
    folder = import_model(write_model("llama-plain", tmp_path / "hf", layers), tmp_path / "ours")
    export = export_model(folder, tmp_path / "export", pattern=pattern, server="vllm", canary=False)
    prompts = [rng.integers(3, 130, int(rng.integers(300, 480))).tolist()]
    check_count(engine(export, prompts, LENGTH, batched), open_checkpoint(folder), pattern, LENGTH, batched)


@pytest.mark.parametrize(
    ("name", "full", "window", "length"),
    [("recall", 4, 64, 512), ("smollm2", 4, 100, 512), ("gemma3-270m", None, None, 1024)],
)
def test_real_models(name, full, window, length, engine, tmp_path):
    folder = model_folder(name if name == "recall" else real_model(name))
    source = open_checkpoint(folder)
    layers = source.config.num_hidden_layers
    every = range(full - 1, layers, full) if full else ()
    pattern = AttentionPattern.from_full_layers(every, layers, window) if full else source.pattern
    export = export_model(folder, tmp_path / "export", pattern=pattern, server="vllm", canary=False)
    prompts = [np.random.default_rng(0).integers(10, 100, length - 100).tolist()]
    said = engine(export, prompts, length, 64)
    check_answers(load_model(folder, pattern=pattern, dtype="float32"), prompts, said)
    check_count(said, source, pattern, length, 64)
