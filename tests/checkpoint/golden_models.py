"""The golden models as the tests of this room take them: what their folders hold, changed and written anew."""

import json
from pathlib import Path

import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.model.decoder import Decoder

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = sorted(file.parent.name for file in GOLDEN.glob("*/config.json"))


def hf_of(model: str) -> dict:
    return json.loads((GOLDEN / model / "config.json").read_text())


def tensors_of(model: str | Path) -> dict[str, np.ndarray]:
    """The tensors of a golden, or of another folder in Hugging Face's format."""
    files = sorted((GOLDEN / model).glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def write_folder(folder: Path, hf: dict, tensors: dict[str, np.ndarray | None]) -> Path:
    """A folder in Hugging Face's format; tensors that are None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def change_json(file: Path, **keys) -> None:
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(held | keys))


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def bits_of(tensors: dict[str, np.ndarray]) -> dict[str, tuple]:
    return {name: (tensor.dtype, tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()}


def contents(checkpoint: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint folder."""
    opened = open_checkpoint(checkpoint)
    return dict(opened.read(list(opened.tensors)))


@nnx.jit
def logits(model: Decoder, tokens: np.ndarray):
    """One program for all models of the same configuration and pattern."""
    return model(tokens)
