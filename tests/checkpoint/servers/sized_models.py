"""The golden models in sizes that vLLM's CPU kernels take: heads of 32 and longer texts, weights drawn alike."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from golden_models import GOLDEN, tensors_of
from safetensors.numpy import save_file

from swa_jax.base.files import read_json, write_json
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.servers import SERVERS
from swa_jax.checkpoint.tensor_names import hf_tensors

LENGTH = 512
SIZES = {
    "vocab_size": 160,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": LENGTH,
}
EXPERTS = {"moe_intermediate_size": 32}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # transformers' defaults, which vLLM's gpt-oss reads


def goldens() -> dict[str, str]:
    """A golden model of each family that vLLM runs."""
    found: dict[str, str] = {}
    for folder in sorted(GOLDEN.iterdir()):
        if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
            found.setdefault(read_json(folder / "config.json").get("model_type"), folder.name)
    return {family: found[family] for family in sorted(SERVERS["vllm"].classes)}


def _longer(factors: list[float], channels: int) -> list[float]:
    return np.interp(np.linspace(0, 1, channels), np.linspace(0, 1, len(factors)), factors).round(3).tolist()


def write_model(case: str, folder: Path, layers: int | None = None, **changes: Any) -> Path:
    """A golden model at `SIZES`, its tensors drawn so that products have the golden ones' size, as a folder.

    Args:
      layers: another number of them, like the golden ones in turn.
      changes: keys of `config.json`.
    """
    hf = read_json(GOLDEN / case / "config.json") | changes
    hf |= SIZES | {key: value for key, value in EXPERTS.items() if key in hf} | changes
    own = hf["num_hidden_layers"]
    hf["num_hidden_layers"] = layers or own
    rope = hf.get("rope_parameters", {})
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rope[key] = _longer(rope[key], int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2)
    if rope.get("rope_type") == "yarn":
        hf["rope_parameters"] = YARN | rope
    if "num_attention_heads_per_layer" in hf:
        hf["num_attention_heads_per_layer"] = [SIZES["num_attention_heads"]] * hf["num_hidden_layers"]
    for heads in hf.get("per_layer_config", {}).values():
        heads["head_dim"] = 2 * SIZES["head_dim"]
    golden = tensors_of(case)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in hf_tensors(model_config(hf)).items():
        like = golden[re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) % own), name)]
        # A matrix adds up more products than the golden one.
        wider = (like.shape[-1] / shape[-1]) ** 0.5 if len(shape) > 1 else 1
        tensors[name] = rng.normal(like.mean(), like.std() * wider, shape).astype(np.float32)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", hf)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
