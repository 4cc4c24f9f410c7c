"""Import: a Hugging Face folder or hub id becomes a checkpoint folder (`swa_jax.checkpoint.folder`)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.checkpoint.block_fp8 import SUFFIX, dequantised, split_scales
from swa_jax.checkpoint.folder import COMPANIONS, CONFIG_FILE, PATTERN_FILE, WEIGHTS, write_checkpoint
from swa_jax.checkpoint.mxfp4 import Packed, find_packed, stream_unpacked, with_unpacked
from swa_jax.checkpoint.safetensors_files import DTYPES, StoredTensor, read_headers, stream_tensors
from swa_jax.checkpoint.tensor_names import cut_tensors, hf_tensors, is_left_out, is_router, joined_parts
from swa_jax.errors import CheckpointError
from swa_jax.families import hf_pattern, model_config
from swa_jax.families.pattern_files import is_pattern_file, load_pattern
from swa_jax.families.quantization import (
    KEY,
    MODELOPT_FILE,
    fp8_blocks,
    is_mxfp4,
    unsupported,
    without_quantization,
)
from swa_jax.files import check_destination, read_json
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import EMBEDDING, HEAD
from swa_jax.model.pattern import AttentionPattern
from swa_jax.settings import nearest


def import_model(
    source: str | Path, destination: str | Path, *, pattern: AttentionPattern | str | Path | None = None
) -> Path:
    """Turn a Hugging Face model into a checkpoint folder that `swa_jax.load_model` reads.

    Everything is checked from the headers before the first byte is written, and the folder appears whole or not at
    all. Weights keep their dtype and pass through memory a tensor at a time; those in blocks of FP8 are multiplied by
    their scales and become what the others are, those in MXFP4 (gpt-oss) become bf16, which holds the same values.

    Args:
      source: a folder with `config.json` and safetensors (one file or shards with an index), or a hub id.
      destination: a folder that does not exist yet, or is empty.
      pattern: an AttentionPattern, the path of a pattern JSON or a recipe. None: the source's `pattern.json` (which
        our export writes), or else what `config.json` says.

    Returns:
      The destination.

    Raises:
      ConfigError: an unsupported model or a pattern that does not fit it.
      CheckpointError: unknown, missing or misshapen tensors, unsupported dtypes, pickled weights, damaged files, a
        source that cannot be reached, a destination in use.
    """
    destination = check_destination(destination)
    folder = _local_folder(source)
    hf = _read_config(folder)
    config = model_config(hf)
    chosen = _choose_pattern(folder, hf, config, pattern)
    found, blocks = read_headers(folder), None
    packed: dict[str, Packed] = {}
    scales: dict[str, StoredTensor] = {}
    if is_mxfp4(hf):
        packed = find_packed(found)
        found = with_unpacked(found, packed)
    elif (blocks := fp8_blocks(hf)) is not None:
        found, scales = split_scales(found, blocks)
    tensors = _check_tensors(found, config, quantised=scales)
    stream = stream_tensors({name: tensor for name, tensor in tensors.items() if name not in packed})
    if blocks is not None:
        stream = dequantised(stream, _read_scales(scales), blocks, _plain_dtype(hf))
    stream = itertools.chain(cut_tensors(stream, joined_parts(config)), stream_unpacked(packed))
    write_checkpoint(destination, without_quantization(hf), chosen, stream, companions=folder)
    return destination


def _read_scales(scales: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    """All scales at once: they may lie in another shard than their tensor, and are small."""
    stored = {name + SUFFIX: scale for name, scale in scales.items()}
    return {name.removesuffix(SUFFIX): array for name, array in stream_tensors(stored)}


def _plain_dtype(hf: Mapping[str, Any]) -> np.dtype:
    """What quantised weights become: the dtype that config.json gives the others, or bfloat16."""
    name = hf.get("dtype") or hf.get("torch_dtype")
    return {dtype.name: dtype for dtype in DTYPES.values()}.get(str(name), DTYPES["BF16"])


def _local_folder(source: str | Path) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    text = str(source)
    if (
        isinstance(source, Path)
        or folder.exists()
        or text.startswith((".", "~", "/"))
        or text.count("/") != 1
    ):
        raise CheckpointError(
            f"{source} is no folder; give a folder with config.json, or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    return _download(text)


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        # Only the names read here: some repositories hold the same weights again under other names.
        wanted = ["*.json", "model*.safetensors", *COMPANIONS]
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except GatedRepoError:
        raise CheckpointError(
            f"'{repository}' is gated: accept its terms on the hub and log in (`hf auth login`), or give a folder"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise CheckpointError(
            f"'{repository}' is neither a folder here nor a model on the Hugging Face hub"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"'{repository}' is no folder here, and the Hugging Face hub cannot be reached ({reason}); "
            "give a folder with the downloaded model"
        ) from None


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if (folder / WEIGHTS).is_dir():
        raise CheckpointError(
            f"{folder} is already a checkpoint folder of this library: load it with load_model"
        )
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG_FILE}: it is not a Hugging Face model")
    hf = read_json(file)
    if not hf.get(KEY) and (folder / MODELOPT_FILE).is_file():
        raise unsupported(f"{MODELOPT_FILE}: quant_method 'modelopt'")
    return hf


def _choose_pattern(
    folder: Path, hf: Mapping[str, Any], config: ModelConfig, pattern: AttentionPattern | str | Path | None
) -> AttentionPattern:
    if pattern is None and (folder / PATTERN_FILE).is_file():
        pattern = folder / PATTERN_FILE
    if isinstance(pattern, AttentionPattern) or (pattern is not None and is_pattern_file(pattern)):
        return load_pattern(pattern, config)
    own = hf_pattern(hf)
    return load_pattern(own if pattern is None else pattern, config, default_window=own.sliding_window)


def _check_tensors(
    found: dict[str, StoredTensor], config: ModelConfig, quantised: Collection[str] = ()
) -> dict[str, StoredTensor]:
    """The tensors to read, after comparing what was found with what the configuration asks for."""
    expected = hf_tensors(config, routers=any(map(is_router, found)))
    tensors = {name: tensor for name, tensor in found.items() if not is_left_out(name)}
    if config.tie_word_embeddings and HEAD in tensors:
        _check_tied(tensors)
        del tensors[HEAD]
    for name, tensor in tensors.items():
        if name not in expected:
            raise CheckpointError(
                f"{tensor.file.name} holds tensor '{name}', which a {config.model_type} model with this config.json "
                f"does not have{_nearest_tensor(name, list(expected))}"
            )
    missing = [name for name in expected if name not in tensors]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"the weights lack tensor '{missing[0]}'{others}; config.json asks for {len(expected)} tensors in "
            f"{config.num_hidden_layers} layers"
        )
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES and name not in quantised:
            raise CheckpointError(
                f"tensor '{name}' in {tensor.file.name} has dtype {tensor.dtype}; supported: {', '.join(DTYPES)}"
            )
        if tensor.shape != expected[name]:
            raise CheckpointError(
                f"tensor '{name}' in {tensor.file.name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(expected[name])}"
            )
    return tensors


def _nearest_tensor(name: str, expected: list[str]) -> str:
    clause = nearest(name, expected)
    return clause if clause.startswith("; did you mean") else ""  # a list of all tensors would help nobody


def _check_tied(tensors: Mapping[str, StoredTensor]) -> None:
    """A tied model may store its head again; another matrix there means that config.json is wrong."""
    if EMBEDDING not in tensors or tensors[EMBEDDING].dtype not in DTYPES:
        return  # reported as missing, or for its dtype
    one, other = tensors[EMBEDDING], tensors[HEAD]
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    if not (alike and _same_bits(*(_read_one(tensors, name) for name in (EMBEDDING, HEAD)))):
        raise CheckpointError(
            f"config.json ties the embeddings (tie_word_embeddings), but '{HEAD}' differs from '{EMBEDDING}': "
            "set tie_word_embeddings to false to use both"
        )


def _read_one(tensors: Mapping[str, StoredTensor], name: str) -> np.ndarray:
    return dict(stream_tensors({name: tensors[name]}))[name]


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
