"""What loading and importing take, measured in processes of their own."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf_files import write_gguf
from golden_models import GOLDEN, write_folder
from python_process import python

from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.tensor_names import expected_tensors

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100_000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Prints the growth of resident memory at its peak.
MEASURED = """
import sys
from pathlib import Path
import jax
from swa_jax.checkpoint.folder import load_model
from swa_jax.checkpoint.hf_import import import_model

def memory(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024

{work}(*sys.argv[1].split())  # what is compiled and imported on the way
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = memory("VmRSS:")
result = {work}(*sys.argv[2].split())
jax.block_until_ready(jax.tree.leaves(result))
print(memory("VmHWM:") - before)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to measure memory"),
]


def write_source(folder, kind, **changes) -> dict:
    """A Hugging Face folder of CONFIG with `changes`; returns the shapes of its tensors."""
    shapes = expected_tensors(model_config(CONFIG | changes))
    write_folder(folder, CONFIG | changes, {name: np.full(shape, 0.01, kind) for name, shape in shapes.items()})
    return shapes


def peak_of(work: str, small: str, large: str) -> int:
    """Bytes that `work`, a function of the program, takes for the arguments `large`, after a call with `small`."""
    return int(python("-c", MEASURED.replace("{work}", work), small, large))


@pytest.mark.parametrize("tied", [True, False])
def test_loading_takes_little_more_than_the_weights(tmp_path, tied):
    """Also where the embedding is most of the model."""
    shapes = write_source(tmp_path / "source", ml_dtypes.bfloat16, tie_word_embeddings=tied, dtype="bfloat16")
    weights = 2 * sum(map(math.prod, shapes.values()))
    assert weights > 250_000_000
    small = import_model(GOLDEN / "qwen2-full", tmp_path / "small")
    peak = peak_of("load_model", str(small), str(import_model(tmp_path / "source", tmp_path / "large")))
    assert peak < 1.25 * weights, f"{peak / weights:.2f}"


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_importing_takes_a_part_of_the_largest_tensor(tmp_path, kind):
    """Whose values, as f32, are 400 MB of 700."""
    small, large = GOLDEN / "qwen3-full", tmp_path / "large"
    write_source(large, np.float32, tie_word_embeddings=True)
    if kind == "gguf":
        large = write_gguf(tmp_path / "large.gguf", large, GGMLQuantizationType.Q8_0)
        small = write_gguf(tmp_path / "small.gguf", small)
    assert peak_of("import_model", f"{small} {tmp_path}/a", f"{large} {tmp_path}/b") < 120_000_000
