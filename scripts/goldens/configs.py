"""What transformers makes of the configs in tests/checkpoint/families/configs, and of configurations without any key.

Of every file whose model transformers can build: the number of tensors of a checkpoint, a SHA-256 of their names and
shapes, and which layers are windowed. Models are built on torch's meta device, so that their size costs nothing.
"""

import hashlib
import json
import re

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from scripts.goldens.cases import ROOT, some, write_json

FAMILIES = ROOT / "tests" / "checkpoint" / "families"


def tensors_of(config) -> dict[str, list[int]]:
    """Name and shape of every tensor that `save_pretrained` would write."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = revert_weight_conversion(model, model.state_dict())
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    return {name: list(tensor.shape) for name, tensor in tensors.items() if name not in tied}


def digest(tensors: dict[str, list[int]]) -> str:
    lines = [f"{name} {'x'.join(map(str, shape))}" for name, shape in sorted(tensors.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def windows_of(config) -> tuple[str, int | None]:
    """The layers as letters (F full, w window), and the window. One over the whole context is none."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return "F" * layers, None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    letters = "".join("w" if kind == "sliding_attention" else "F" for kind in types)
    return letters, window if "w" in letters else None


def default_configs() -> dict[str, dict]:
    """By family, the keys that its own class of configurations adds to those of all models, and their defaults."""
    sources = (file.read_text() for file in sorted((ROOT / "swa_jax" / "checkpoint" / "families").glob("*.py")))
    names = sorted(name for source in sources for name in re.findall(r'Family\(\s*"(\w+)"', source))
    of_all = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    found = {}
    for name in names:
        if name in CONFIG_MAPPING:
            keys = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
            found[name] = {key: value for key, value in keys.items() if key not in of_all or key == "model_type"}
    return found


def write_configs(given) -> None:
    lines = (f" {json.dumps(name)}: {json.dumps(keys)}" for name, keys in default_configs().items())
    (FAMILIES / "default_configs.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    file = FAMILIES / "config_goldens.json"
    goldens = json.loads(file.read_text()) if given.only else {}
    for name in some(given.only, sorted(source.stem for source in (FAMILIES / "configs").glob("*.json"))):
        keys = json.loads((FAMILIES / "configs" / f"{name}.json").read_text())
        family = keys.pop("model_type")
        known = family in CONFIG_MAPPING  # which loads lazily: `get` finds nothing
        if not known or CONFIG_MAPPING[family] not in MODEL_FOR_CAUSAL_LM_MAPPING or "text_config" in keys:
            print(f"{name}: transformers has no text model of model_type {family}")
            continue
        keys.pop("quantization_config", None)  # which changes no name of a plain checkpoint
        config = AutoConfig.for_model(family, **keys)
        tensors, (letters, window) = tensors_of(config), windows_of(config)
        row = {"tensors": len(tensors), "sha256": digest(tensors), "layers": letters, "sliding_window": window}
        goldens[name] = row
        print(f"{name}: {len(tensors)} tensors, {letters} {window}")
    write_json(file, dict(sorted(goldens.items(), key=lambda item: f"{item[0]}.json")))
