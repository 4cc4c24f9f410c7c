"""What loading and importing take, measured in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf_files import write_gguf
from safetensors.numpy import save_file

from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.tensor_names import expected_tensors
from swa_jax.families import model_config

GOLDEN = Path(__file__).parents[1] / "golden"

# Prints the growth of resident memory at its peak and the bytes of the weights.
MEASURED = """
import sys
from pathlib import Path
import jax, swa_jax
from flax import nnx

def memory(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024

swa_jax.load_model(sys.argv[1])  # what is compiled and imported on the way
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = memory("VmRSS:")
model = swa_jax.load_model(sys.argv[2])
jax.block_until_ready(jax.tree.leaves(model))
weights = sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))
print(memory("VmHWM:") - before, weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure memory")
@pytest.mark.parametrize("tied", [True, False])
def test_loading_takes_little_more_than_the_weights(tmp_path, tied):
    """Also where the embedding is most of the model."""
    config = {
        "model_type": "llama",
        "vocab_size": 100_000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    shapes = expected_tensors(model_config(config))
    save_file({n: np.full(s, 0.01, ml_dtypes.bfloat16) for n, s in shapes.items()}, source / "model.safetensors")
    small, large = (import_model(GOLDEN / "qwen2-full", tmp_path / "small"), import_model(source, tmp_path / "large"))
    command = [sys.executable, "-c", MEASURED, str(small), str(large)]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    peak, weights = map(int, done.stdout.split())
    assert weights > 250_000_000
    assert peak < 1.25 * weights, f"{peak / weights:.2f}"
    print(f"peak / weights {peak / weights:.3f}")


# Prints the growth of resident memory at its peak while a file is imported.
IMPORTED = """
import sys
from pathlib import Path
from swa_jax.checkpoint.hf_import import import_model

def memory(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024

import_model(sys.argv[1], sys.argv[2] + "/small")  # what is imported on the way
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = memory("VmRSS:")
import_model(sys.argv[3], sys.argv[2] + "/large")
print(memory("VmHWM:") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure memory")
def test_importing_gguf_takes_a_part_of_the_largest_tensor(tmp_path):
    """Whose values, as f32, are 400 MB of 700."""
    config = {
        "model_type": "llama", "vocab_size": 100_000, "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = expected_tensors(model_config(config))
    save_file({n: np.full(s, 0.01, np.float32) for n, s in shapes.items()}, tmp_path / "model.safetensors")
    large = write_gguf(tmp_path / "large.gguf", tmp_path, GGMLQuantizationType.Q8_0)
    small = write_gguf(tmp_path / "small.gguf", GOLDEN / "qwen3-full")
    command = [sys.executable, "-c", IMPORTED, str(small), str(tmp_path), str(large)]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    peak = int(done.stdout)
    print(f"{peak / 1e6:.0f} MB")
    assert peak < 120_000_000
