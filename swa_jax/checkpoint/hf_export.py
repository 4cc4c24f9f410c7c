"""Export: a checkpoint folder becomes a Hugging Face folder."""

from __future__ import annotations

import logging
from pathlib import Path

from swa_jax.checkpoint.folder import CONFIG_FILE, PATTERN_FILE, copy_companions, open_checkpoint
from swa_jax.checkpoint.safetensors_files import write_model
from swa_jax.checkpoint.tensor_names import hf_tensors, join_tensors, joined_parts
from swa_jax.families import apply_pattern, model_config
from swa_jax.files import check_destination, new_folder, write_json

log = logging.getLogger(__name__)


def export_model(checkpoint: str | Path, destination: str | Path) -> Path:
    """Write a checkpoint folder as a Hugging Face folder; importing that again gives the same bits.

    `config.json` says what the pattern says where a Hugging Face family can (`layer_types`, `sliding_window`), else
    full attention in every layer, with a logged notice. The pattern itself is always in `pattern.json`, which
    `import_model` reads. Weights pass through memory a tensor at a time.

    Returns:
      The destination, a folder that must not exist yet or be empty.

    Raises:
      CheckpointError: the checkpoint is damaged or is none, or the destination is in use.
    """
    destination = check_destination(destination)
    source = open_checkpoint(checkpoint)
    hf, notice = apply_pattern(source.hf_config, source.pattern)
    written = model_config(hf)  # the same model, of the family that can say the pattern
    joined = joined_parts(written)
    tensors = {
        name: (source.tensors[joined[name][0].name if name in joined else name][0], shape)
        for name, shape in hf_tensors(written, routers=source.has_routers).items()
    }
    with new_folder(destination) as folder:
        write_json(folder / CONFIG_FILE, hf)
        source.pattern.to_json(folder / PATTERN_FILE)
        write_model(folder, tensors, lambda names: join_tensors(names, joined, source.read))
        copy_companions(source.folder, folder)
    if notice:
        log.warning("%s: %s", destination, notice)
    return destination
