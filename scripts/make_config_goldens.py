"""What transformers makes of the config.json files in tests/families/configs: tests/families/config_goldens.json.

For every file whose model transformers itself can build: the number of tensors of a checkpoint, a SHA-256 of their
names and shapes, and which layers are windowed. Models are built on torch's meta device, so their size costs nothing.
And default_configs.json: of each family, the config.json of a model that was asked for without any key.

The test suite reads the results and needs neither torch nor transformers. To write them again, in the environment of
`scripts/make_goldens.py`:

    /tmp/oracle/bin/python scripts/make_config_goldens.py
"""

import copy
import hashlib
import json
import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

ROOT = Path(__file__).parents[1]
FAMILIES = ROOT / "tests" / "families"


def read_config(file: Path):
    """The configuration of a file, less its quantisation, which changes no name of a plain checkpoint."""
    keys = copy.deepcopy(json.loads(file.read_text()))
    keys.pop("quantization_config", None)
    return AutoConfig.for_model(keys.pop("model_type"), **keys)


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
    sources = (file.read_text() for file in sorted((ROOT / "swa_jax" / "families").glob("*.py")))
    names = sorted(name for source in sources for name in re.findall(r'Family\(\s*"(\w+)"', source))
    of_all = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    found = {}
    for name in names:
        if name in CONFIG_MAPPING:
            keys = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
            found[name] = {key: value for key, value in keys.items() if key not in of_all or key == "model_type"}
    return found


def main() -> None:
    lines = (f" {json.dumps(name)}: {json.dumps(keys)}" for name, keys in default_configs().items())
    (FAMILIES / "default_configs.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    goldens = {}
    for file in sorted((FAMILIES / "configs").glob("*.json")):
        keys = json.loads(file.read_text())
        known = keys["model_type"] in CONFIG_MAPPING
        kind = CONFIG_MAPPING[keys["model_type"]] if known else None  # it loads lazily: `get` finds nothing
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or "text_config" in keys:
            print(f"{file.stem}: transformers has no text model of model_type {keys['model_type']}")
            continue
        config = read_config(file)
        tensors = tensors_of(config)
        letters, window = windows_of(config)
        goldens[file.stem] = {
            "tensors": len(tensors),
            "sha256": digest(tensors),
            "layers": letters,
            "sliding_window": window,
        }
        print(f"{file.stem}: {len(tensors)} tensors, {letters} {window}")
    (FAMILIES / "config_goldens.json").write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
