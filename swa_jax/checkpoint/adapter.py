"""A folder of LoRA adapters in PEFT's format, merged onto the model that they adapt."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.base.files import check_destination, read_json
from swa_jax.checkpoint.companions import check_companions
from swa_jax.checkpoint.families import model_config
from swa_jax.checkpoint.families.pattern_files import load_pattern
from swa_jax.checkpoint.finite import check_finite
from swa_jax.checkpoint.folder import CONFIG_FILE, PATTERN_FILE, Checkpoint, read_companions, write_checkpoint
from swa_jax.checkpoint.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX
from swa_jax.checkpoint.safetensors_files import DTYPES, Parts, TensorReader, read_header
from swa_jax.checkpoint.tensor_names import joined_parts
from swa_jax.checkpoint.text_part import part_name, text_name
from swa_jax.model.parameters import EMBEDDING, HEAD
from swa_jax.model.pattern import AttentionPattern

# Settings that change nothing beside plain LoRA, or are checked below; PEFT's others change what W or its change is.
_KNOWN = """
alpha_pattern auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config exclude_modules inference_mode
init_lora_weights layers_pattern layers_to_transform lora_alpha lora_dropout megatron_core modules_to_save peft_type
peft_version qalora_group_size r rank_pattern revision target_modules task_type use_rslora velora_config
"""
_INITS = ("gaussian", "eva", "orthogonal", "mica")  # they leave W as it is
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")


def merge_adapter(
    adapter: Path,
    base: Checkpoint,
    destination: str | Path,
    *,
    pattern: AttentionPattern | str | Path | None = None,
    describe: Callable[[str], Any] = lambda text: None,
) -> Path:
    """Write a checkpoint folder of W + s B A for every adapted matrix W, in its dtype, and of all others as they are.

    s is alpha / r, or alpha / sqrt(r) with `use_rslora`. Modules that were trained whole (`modules_to_save`), and the
    embeddings that PEFT saves beside their adapters (`base_layer`), replace the base's.

    Args:
      adapter: a folder with `adapter_config.json` and `adapter_model.safetensors`. Its tokenizer's files, if it has
        any, come in place of the base's.
      describe: called with what a user should know, before anything is written.
      pattern: as for `import_model`; None: the adapter's own `pattern.json`, or else the base's.

    Returns:
      The destination.

    Raises:
      ConfigError: adapters of another kind than LoRA of matrices, a pattern that does not fit the model, or a tokenizer
        that cannot be read.
      CheckpointError: a file that is missing or damaged, tensors that do not fit the base, merged weights that are no
        numbers, a destination in use.
    """
    destination = check_destination(destination)
    settings = read_json(adapter / ADAPTER_CONFIG)
    _check(adapter, settings)
    found = _read(adapter / ADAPTER_WEIGHTS)
    names = _own_names(found)
    base = _untied(base, names, settings)
    changes = _changes(adapter, base, found, names, settings)
    if pattern is None and (own := adapter / PATTERN_FILE).is_file():
        pattern = own
    chosen = base.pattern if pattern is None else load_pattern(pattern, base.config)

    def read(names: list[str]) -> Parts:
        for name, whole in base.read(names):
            if name in changes:
                change = changes[name]
                whole = whole if change.whole is None else change.whole
                if change.a is not None and change.b is not None:
                    product = change.b.astype(np.float32) @ change.a.astype(np.float32)
                    whole = whole.astype(np.float32) + change.scale * product
            yield name, whole.astype(base.tensors[name][0])

    def check(name: str, part: np.ndarray) -> None:
        check_finite(part, name, f"{adapter}, merged onto {base.folder},")

    own_files = read_companions(adapter)
    companions = read_companions(base.folder) | own_files
    files = companions | {CONFIG_FILE: json.dumps(base.hf_config).encode()}
    notes = check_companions(adapter if own_files else base.folder, files, base.config.vocab_size)
    if left_out := sorted({part_name(module) for module in found if module not in names}):
        notes.append(f"only the adapters of the language model are merged; left out: {', '.join(left_out)}")
    for note in (f"merging {adapter} and {base.folder} into {destination}", *notes):
        describe(note)
    write_checkpoint(destination, base.hf_config, chosen, base.tensors, read, companions=companions, check=check)
    return destination


def _check(adapter: Path, settings: dict[str, Any]) -> None:
    """Raise `ConfigError` for adapters that are no plain LoRA."""
    file = adapter / ADAPTER_CONFIG
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type is {settings.get('peft_type')!r}; supported: LORA")
    for key, value in settings.items():
        if value and key not in _KNOWN.split():
            raise ConfigError(f"{file}: {key:.40} is set, which is not supported; supported: plain LoRA")
    if (init := settings.get("init_lora_weights")) not in (None, True, False, *_INITS):
        raise ConfigError(
            f"{file}: init_lora_weights is {init!r:.40}, which may change the base's own weights; supported: true, "
            f"false, null, {', '.join(_INITS)}: save the adapters as plain LoRA (save_pretrained of PEFT with "
            "path_initial_model_for_weight_conversion)"
        )
    if settings.get("bias", "none") != "none":
        raise ConfigError(f"{file}: bias is {settings['bias']!r}; supported: 'none'")
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{file}: alpha_pattern must map names of modules to numbers, got {patterns!r:.40}")
    for pattern in patterns:
        try:
            _ends_with(pattern, "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{file}: alpha_pattern {pattern!r:.40} is no regular expression: {error}") from None
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{adapter} holds no {ADAPTER_WEIGHTS}: save the adapters as safetensors")


type Adapters = dict[str, dict[str, np.ndarray]]  # by module: "A" and "B", "W" in place of the base's, or all


def _read(file: Path) -> Adapters:
    found: Adapters = {}
    with TensorReader() as reader:
        for name, stored in read_header(file).items():
            if stored.dtype not in DTYPES:
                raise CheckpointError(f"{file}: tensor {name} has dtype {stored.dtype}; supported: {', '.join(DTYPES)}")
            module, part, array = name.removesuffix(".weight").removesuffix(".base_layer"), "W", reader.whole(stored)
            if factor := _FACTOR.fullmatch(name):
                module, of_embedding, part = factor.groups()
                if of_embedding:  # they are for its transpose
                    part, array = {"A": "B", "B": "A"}[part], array.T
            found.setdefault(module.removeprefix(PREFIX), {})[part] = array
    return found


def _own_names(found: Adapters) -> dict[str, str]:
    """The base's matrix of each module; of a whole model's modules, those of its language model."""
    plain = {module: f"{module}.weight" for module in found}
    inside = {module: own for module, name in plain.items() if (own := text_name(name)) is not None}
    return plain if inside.items() <= plain.items() else inside


def _untied(base: Checkpoint, names: dict[str, str], settings: dict[str, Any]) -> Checkpoint:
    """The base with an output matrix of its own where adapters change one of two that are tied: PEFT copies what it
    wraps, so that the other one stays as it was."""
    embedding = EMBEDDING in names.values() and not settings.get("ensure_weight_tying")
    if not base.config.tie_word_embeddings or not (embedding or HEAD in names.values()):
        return base
    hf = {**base.hf_config, "tie_word_embeddings": False}
    stored = {**base.stored, HEAD: base.stored[EMBEDDING]}
    return dataclasses.replace(base, hf_config=hf, config=model_config(hf), stored=stored)


class Change(NamedTuple):
    """What becomes of a matrix."""

    whole: np.ndarray | None  # in place of the base's
    scale: float
    b: np.ndarray | None
    a: np.ndarray | None


def _changes(
    adapter: Path, base: Checkpoint, found: Adapters, names: dict[str, str], settings: dict[str, Any]
) -> dict[str, Change]:
    """What becomes of the base's tensors, by their names."""
    file = adapter / ADAPTER_WEIGHTS
    joined, changes = joined_parts(base.config), dict[str, Change]()
    for module, name in names.items():
        parts = found[module]
        rows = [(part.name, part.shape) for part in joined.get(name, ())]
        rows = rows or ([(name, base.tensors[name][1])] if name in base.tensors else [])
        whole, b, a = (parts.get(part) for part in "WBA")
        if not rows or (a is None) != (b is None):
            raise CheckpointError(
                f"{file} adapts {module} ({', '.join(sorted(parts))}), which is no matrix of the base {base.folder}"
            )
        shape = (sum(shape[0] for _, shape in rows), *rows[0][1][1:])
        fits = whole is None or whole.shape == shape
        if a is not None and b is not None:
            fits = fits and (b.shape, a.shape[1:]) == ((shape[0], *a.shape[:1]), shape[1:])
        if not fits:
            shapes = " and ".join(f"{key} {value.shape}" for key, value in sorted(parts.items()))
            raise CheckpointError(f"{file}: {module} has {shapes}, which do not fit the base's {shape}")
        first, scale = 0, 1.0 if a is None else _scale(settings, module, len(a))
        for name, shape in rows:
            own = slice(first, first + shape[0])
            changes[name] = Change(None if whole is None else whole[own], scale, None if b is None else b[own], a)
            first += shape[0]
    if not changes:
        raise CheckpointError(f"{file} holds no adapters")
    return changes


def _scale(settings: dict[str, Any], module: str, rank: int) -> float:
    """s of a module: `alpha_pattern` names those with an alpha of their own, by the end of their names."""
    patterns = settings.get("alpha_pattern") or {}
    own = (alpha for pattern, alpha in patterns.items() if _ends_with(pattern, module))
    alpha = next(own, settings.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ConfigError(f"{ADAPTER_CONFIG}: lora_alpha must be a number, got {alpha!r:.40}")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _ends_with(pattern: str, module: str) -> bool:
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
