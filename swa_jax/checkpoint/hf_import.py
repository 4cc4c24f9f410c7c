"""Import: a Hugging Face model becomes a checkpoint folder (`swa_jax.checkpoint.folder`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swa_jax.base.errors import CheckpointError
from swa_jax.base.files import check_destination, check_room, parse_json, partial_folder
from swa_jax.base.settings import nearest
from swa_jax.checkpoint.block_fp8 import dequantised, split_scales
from swa_jax.checkpoint.checked_source import CheckedSource, import_identity
from swa_jax.checkpoint.companions import check_companions
from swa_jax.checkpoint.families import hf_pattern, model_config
from swa_jax.checkpoint.families.pattern_files import is_pattern_file, load_pattern
from swa_jax.checkpoint.families.quantization import (
    KEY,
    MODELOPT_FILE,
    fp8_blocks,
    is_mxfp4,
    unsupported,
    without_quantization,
)
from swa_jax.checkpoint.families.text_part import text_config
from swa_jax.checkpoint.families.vllm_plugin import without_pattern
from swa_jax.checkpoint.folder import (
    CONFIG_FILE,
    PATTERN_FILE,
    WEIGHTS,
    open_checkpoint,
    read_companions,
    write_checkpoint,
    written_from,
)
from swa_jax.checkpoint.mxfp4 import PackedTensor, find_packed, unpacked, with_unpacked
from swa_jax.checkpoint.safetensors_files import DTYPES, Parts, StoredTensor, TensorReader, read_headers
from swa_jax.checkpoint.sources import GGUF, ModelFolder, companion, gguf_file, open_source
from swa_jax.checkpoint.tensor_names import constants_of, hf_tensors, is_left_out, is_router, joined_parts
from swa_jax.checkpoint.text_part import text_tensors
from swa_jax.model.config import ModelConfig
from swa_jax.model.parameters import EMBEDDING, HEAD
from swa_jax.model.pattern import AttentionPattern

_CODE = "auto_map"  # of config.json: names .py files beside it, which are not copied


def import_model(
    source: str | Path,
    destination: str | Path,
    *,
    pattern: AttentionPattern | str | Path | None = None,
    describe: Callable[[str], Any] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Turn a Hugging Face model into a checkpoint folder that `swa_jax.load_model` reads.

    Everything but the values of the weights is checked before the first byte is written, and the folder appears whole
    or not at all. An import that was interrupted goes on when it is called again, and one that is done already is
    not done again. Weights keep their dtype and pass through memory a part at a time; those in blocks of FP8 are
    multiplied by their scales and become what the others are, those in MXFP4 (gpt-oss) become bf16, which holds the
    same values.

    Args:
      source: a folder with `config.json` and safetensors (one file or shards with an index), a GGUF file (any part of
        a split one), a hub id, or the address of a folder in a bucket (`sources.open_source`). The last two are read
        where they are, and may be followed by the name of a GGUF file.
      destination: a folder that does not exist yet, or is empty.
      pattern: an AttentionPattern, the path of a pattern JSON or a recipe. None: the source's `pattern.json` (which
        our export writes), or else what `config.json` says.
      describe: called with what a user should know of the model, before anything is written.
      progress: called with the MiB of weights that are written, and all of them.

    Returns:
      The destination.

    Raises:
      ConfigError: an unsupported model, a pattern that does not fit it, or a tokenizer that cannot be read.
      CheckpointError: unknown, missing or misshapen tensors, unsupported dtypes, pickled weights, damaged files,
        weights that are no numbers, a source that cannot be reached, a destination in use, a disk without room.
    """
    done = written_from(destination)
    if done is None:
        check_destination(destination)  # before the source is read, which may take a while
    checked = check_source(source, pattern)
    if done == checked.identity:
        folder = open_checkpoint(destination).folder
        describe(f"{destination} holds this import already")
        return folder
    destination = check_destination(destination)
    size = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in checked.tensors.values())
    there = sum(path.stat().st_size for path in partial_folder(destination).rglob("*") if path.is_file())
    check_room(destination, size - there)
    describe(f"importing {source} into {destination}")
    for note in checked.notes:
        describe(note)
    write_checkpoint(
        destination,
        checked.hf_config,
        checked.pattern,
        checked.tensors,
        checked.read,
        companions=checked.companions,
        check=_counted(checked.check, size, progress),
        identity=checked.identity,
    )
    return destination


def _counted(
    check: Callable[[str, np.ndarray], None], size: int, progress: Callable[[int, int], None]
) -> Callable[[str, np.ndarray], None]:
    """The check of each part of the weights, which are `size` bytes in all, and then a word on how far they are."""
    done = 0

    def run(name: str, part: np.ndarray) -> None:
        nonlocal done
        check(name, part)
        done += part.nbytes
        progress(done >> 20, size >> 20)

    return run


class SourceRows(NamedTuple):
    """Where a tensor of ours is in the source: rows `first` to below `last` of one of the source's."""

    name: str  # of the source's
    tensor: StoredTensor
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.last - self.first, *self.tensor.shape[1:])


def check_source(source: str | Path, pattern: AttentionPattern | str | Path | None = None) -> CheckedSource:
    """Read and check everything of a source but its weights' values. Raises as `import_model`."""
    if (file := gguf_file(source)) is not None:
        from swa_jax.checkpoint.gguf.source import check_gguf  # here: it takes a while to import

        return check_gguf(file, pattern)
    folder = open_source(source)
    whole, said = without_pattern(_read_config(folder))
    text = text_config(whole)
    hf = whole if text is None else text
    config = model_config(hf)
    chosen = _choose_pattern(folder, said or hf_pattern(hf), config, pattern)
    companions = read_companions(folder)
    notes = check_companions(folder, {**companions, CONFIG_FILE: json.dumps(hf).encode()}, config.vocab_size)
    headers = read_headers(folder)
    found, tied, left_out = text_tensors(headers, config, whole=None if text is None else whole["model_type"])
    notes += left_out
    if tied != config.tie_word_embeddings:
        hf = {**hf, "tie_word_embeddings": tied}
        config = model_config(hf)
    packed: dict[str, PackedTensor] = {}
    scales: dict[str, StoredTensor] = {}
    blocks = None
    if is_mxfp4(hf):
        packed = find_packed(found)
        found = with_unpacked(found, packed)
    elif (blocks := fp8_blocks(hf)) is not None:
        found, scales = split_scales(found, blocks)
    rows = _locate(_check_tensors(found, config, quantised=scales), config)
    plain = _plain_dtype(hf)

    def read(names: list[str]) -> Parts:
        with TensorReader() as reader:
            for name in names:
                row = rows[name]
                if row.name in packed:
                    yield from ((name, expert) for expert in unpacked(reader, row.name, packed[row.name]))
                    continue
                scale = reader.whole(scales[row.name]) if row.name in scales else None
                for first, part in reader.parts(row.tensor, row.first, row.last):
                    if scale is not None and blocks is not None:
                        part = dequantised(part, first, scale, blocks, plain)
                    yield name, part

    return CheckedSource(
        {key: value for key, value in without_quantization(hf).items() if key != _CODE},
        chosen,
        companions,
        notes,
        {name: (plain if row.name in scales else DTYPES[row.tensor.dtype], row.shape) for name, row in rows.items()},
        {name: (row.name, row.tensor.file.name) for name, row in rows.items()},
        read,
        import_identity(hf, chosen, companions, headers),
    )


def _locate(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, SourceRows]:
    """Our tensors in the order in which they lie in the source, which is how they are read and written."""
    joined = joined_parts(config)
    found: dict[str, SourceRows] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].file.name, item[1].start)):
        row = 0
        for part in joined.get(name, ()):  # those of experts lie in one more axis, as rows below each other
            matrix = tensor._replace(shape=(int(np.prod(tensor.shape[:-1])), tensor.shape[-1]))
            found[part.name] = SourceRows(name, matrix, row, row + part.shape[0])
            row += part.shape[0]
        if name not in joined:
            found[name] = SourceRows(name, tensor, 0, tensor.shape[0])
    return found


def _plain_dtype(hf: Mapping[str, Any]) -> np.dtype:
    """What quantised weights become: the dtype that config.json gives the others, or bfloat16."""
    name = hf.get("dtype") or hf.get("torch_dtype")
    return {dtype.name: dtype for dtype in DTYPES.values()}.get(str(name), DTYPES["BF16"])


def _read_config(folder: ModelFolder) -> dict[str, Any]:
    if isinstance(folder, Path) and (folder / WEIGHTS).is_dir():
        raise CheckpointError(f"{folder} is already a checkpoint folder of this library: load it with load_model")
    file = companion(folder, CONFIG_FILE)
    if file is None:
        files = sorted(path.name for path in folder.iterdir() if path.name.endswith(GGUF))
        inside = isinstance(folder, Path) and (folder / "model" / CONFIG_FILE).is_file()  # as of a training run
        hint = f"; give the model in it: {folder}/model" if inside else ""
        hint = f"; give the GGUF file itself: {folder}/{files[0]}" if files else hint
        raise CheckpointError(f"{folder} holds no {CONFIG_FILE}: it is not a Hugging Face model{hint}")
    hf = parse_json(file.read_bytes(), file, finite=True)
    if not hf.get(KEY) and (folder / MODELOPT_FILE).is_file():
        raise unsupported(f"{MODELOPT_FILE}: quant_method 'modelopt'")
    return hf


def _choose_pattern(
    folder: ModelFolder, own: AttentionPattern, config: ModelConfig, pattern: AttentionPattern | str | Path | None
) -> AttentionPattern:
    if pattern is None and (own_file := companion(folder, PATTERN_FILE)) is not None:
        data = parse_json(own_file.read_bytes(), own_file, finite=True)
        return load_pattern(AttentionPattern.from_object(str(own_file), data), config)
    if isinstance(pattern, AttentionPattern) or (pattern is not None and is_pattern_file(pattern)):
        return load_pattern(pattern, config)
    return load_pattern(own if pattern is None else pattern, config, default_window=own.sliding_window)


def _check_tensors(
    found: dict[str, StoredTensor], config: ModelConfig, quantised: Collection[str] = ()
) -> dict[str, StoredTensor]:
    """The tensors to read, after comparing what was found with what the configuration asks for."""
    expected = hf_tensors(config, routers=any(map(is_router, found))) | dict.fromkeys(constants_of(config), ())
    tensors = {name: tensor for name, tensor in found.items() if not is_left_out(name, config)}
    if config.tie_word_embeddings and HEAD in tensors:
        _check_tied(tensors)
        del tensors[HEAD]
    for name, tensor in tensors.items():
        if name not in expected:
            raise CheckpointError(
                f"{tensor.file.name} holds tensor '{name}', which a {config.model_type} model with this config.json "
                f"does not have{nearest(name, list(expected), listed=False)}"
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
    return _without_constants(tensors, config)


def _without_constants(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors less the numbers that the decoder knows, which must be those that are stored."""
    known = constants_of(config)
    with TensorReader() as reader:
        for name, value in known.items():
            stored, tensor = reader.whole(tensors[name]), tensors[name]
            if stored != np.asarray(value, DTYPES[tensor.dtype]):
                raise CheckpointError(
                    f"tensor '{name}' in {tensor.file.name} is {float(stored):g}; supported: {value:g}, as in all "
                    f"{config.model_type} models"
                )
    return {name: tensor for name, tensor in tensors.items() if name not in known}


def _check_tied(tensors: Mapping[str, StoredTensor]) -> None:
    """A tied model may store its head again; another matrix there means that config.json is wrong."""
    if EMBEDDING not in tensors or tensors[EMBEDDING].dtype not in DTYPES:
        return  # reported as missing, or for its dtype
    one, other = tensors[EMBEDDING], tensors[HEAD]
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    if not (alike and _same_bits(one, other)):
        raise CheckpointError(
            f"config.json ties the embeddings (tie_word_embeddings), but '{HEAD}' differs from '{EMBEDDING}': "
            "set tie_word_embeddings to false to use both"
        )


def _same_bits(one: StoredTensor, other: StoredTensor) -> bool:
    with TensorReader() as left, TensorReader() as right:
        pairs = zip(left.parts(one), right.parts(other), strict=True)
        return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for (_, a), (_, b) in pairs)
