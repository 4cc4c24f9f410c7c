"""Headers of safetensors files: what is refused before anything is read, by files written byte by byte."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from swa_jax.base.errors import CheckpointError
from swa_jax.checkpoint.safetensors_files import TensorReader, read_headers

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def write(folder: Path, header: object, payload: int, *, size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = (len(text) if size is None else size).to_bytes(8, "little") + text + bytes(range(payload))
    (folder / "model.safetensors").write_bytes(data)
    return folder


def test_a_whole_file_is_read(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"b": rng.normal(size=(3, 5)).astype(np.float32), "a": rng.normal(size=7).astype(np.float16)}
    arrays |= {"empty": np.zeros((0, 4), np.float32), "one": np.ones(1, np.float32)}
    save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    found = read_headers(tmp_path)
    with TensorReader() as reader:
        for name, array in arrays.items():
            np.testing.assert_array_equal(reader.whole(found[name]), array)
        np.testing.assert_array_equal(reader.rows(found["b"], 1, 3), arrays["b"][1:3])
    assert found.keys() == arrays.keys()


def test_an_index_that_an_earlier_save_left_is_not_read(tmp_path):
    for name in ("model", "model-00001-of-00002", "model-00002-of-00002"):
        save_file({f"{name}.a": np.ones(3, np.float32)}, tmp_path / f"{name}.safetensors")
    shards = {f"{name}.a": f"{name}.safetensors" for name in ("model-00001-of-00002", "model-00002-of-00002")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert read_headers(tmp_path).keys() == shards.keys()
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert read_headers(tmp_path).keys() == {"model.a"}


@pytest.mark.parametrize(
    ("header", "payload", "sentence"),
    [
        ({"a": A, "b": B}, 31, "its header asks for .* bytes, it has .* fetch it again"),
        ({"a": A, "b": B}, 33, "its header asks for"),
        ({"a": A, "b": B | {"data_offsets": [25, 33]}}, 33, "leaves a hole before tensor 'b'"),
        ({"a": A, "b": B | {"data_offsets": [23, 31]}}, 32, "lays others over tensor 'b'"),
        ({"a": A, "b": A}, 24, "lays others over tensor 'b'"),
        ({"b": B}, 32, "leaves a hole before tensor 'b'"),
        ({"a": A | {"shape": [2, 4]}}, 24, r"says of tensor 'a' that it has 24 bytes, but F32 \[2, 4\] takes 32"),
        ({"a": A | {"dtype": "BF16"}}, 24, r"it has 24 bytes, but BF16 \[2, 3\] takes 12"),
        ({"a": A | {"shape": [2**40, 2**40]}}, 24, "it has 24 bytes, but F32"),
        ({"a": A | {"shape": [2**62] * 40}}, 24, "it has 24 bytes, but F32 .* takes more than there is"),
        ({"a": A | {"shape": [-2, -3]}}, 24, "is no dtype, shape and data_offsets"),
        ({"a": A | {"shape": [2.0, 3]}}, 24, "is no dtype, shape and data_offsets"),
        ({"a": A | {"shape": [True, 6]}}, 24, "is no dtype, shape and data_offsets"),
        ({"a": A | {"shape": "23"}}, 24, "is no dtype, shape and data_offsets"),
        ({"a": A | {"data_offsets": [0]}}, 24, "is no dtype, shape and data_offsets"),
        ({"a": A | {"data_offsets": [24, 0]}}, 24, "that it has -24 bytes"),
        ({"a": A | {"dtype": None}}, 24, "is no dtype, shape and data_offsets"),
        ({"a": A | {"dtype": "F7"}}, 24, "tensor 'a' in model.safetensors has dtype F7; supported: F32, F16, BF16"),
        ({"a": 3}, 24, "is no dtype, shape and data_offsets"),
        ({"a\n": A}, 24, r"has a tensor 'a\\n', which is no name of one"),
        ({"a" * 300: A}, 24, "which is no name of one"),
        ([A], 24, "the header of .* must hold a JSON object"),
        (b"{" + b'"a":' + json.dumps(A).encode(), 24, "the header of .* is not valid JSON"),
        (b'{"a": 1, "a": 2}', 0, "the header of .* has the key 'a' twice"),
        (b'{"a": {"shape": [], "shape": [1]}}', 0, "the header of .* has the key 'shape' twice"),
        (b"[" * 100_000, 0, "the header of .* lie too deep"),
        (b"\xff\xfe", 0, "the header of .* is not UTF-8"),
    ],
)
def test_headers_that_cannot_be(tmp_path, header, payload, sentence):
    write(tmp_path, header, payload)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        read_headers(tmp_path)
    assert re.fullmatch(r"[ -~]{10,1000}", str(caught.value))


@pytest.mark.parametrize("size", [0, 1, 33, 10**9, 2**63, 2**64 - 1])
def test_lengths_of_a_header_that_cannot_be(tmp_path, size):
    write(tmp_path, b'{"a": 1}', 24, size=size)
    with pytest.raises(CheckpointError, match="is not a complete safetensors file; it may be cut short or a git-lfs"):
        read_headers(tmp_path)
