"""Imports that end before they are done: nothing half-written is left, and the same command then succeeds."""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN, change_json, files_of, hf_of, tensors_of, write_folder

import swa_jax
from swa_jax.base import files
from swa_jax.base.errors import CheckpointError, UnreachableError, sentence
from swa_jax.checkpoint import finite, hf_import
from swa_jax.checkpoint import folder as checkpoint_module
from swa_jax.checkpoint.folder import open_checkpoint
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.safetensors_files import TensorReader

HF, TENSORS = hf_of("qwen2-full"), tensors_of("qwen2-full")


def breaks(monkeypatch, after: int, error: BaseException) -> list[str]:
    """From the so-manieth part of a tensor on, reading raises; returns the tensors that are read."""
    parts, seen = TensorReader.parts, []

    def broken(reader, tensor, *rows) -> Iterator:
        if len(seen) == after:
            raise error
        seen.append(f"{tensor.file}:{tensor.start}")
        return parts(reader, tensor, *rows)

    monkeypatch.setattr(TensorReader, "parts", broken)
    return seen


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (0, FULL),
        (1, OSError(errno.EIO, "I/O error")),
        (7, MemoryError()),
        (7, SystemExit(1)),
        ("fsync", FULL),
        ("replace", FULL),
        ("check", FULL),  # beside the writing
    ],
)
def test_a_failed_import_leaves_nothing(source, destination, monkeypatch, fault, error):
    def refuse(*_):
        raise error

    with monkeypatch.context() as patch:
        if isinstance(fault, int):
            breaks(patch, fault, error)
        else:
            patch.setattr(hf_import.CheckedSource if fault == "check" else os, fault, refuse)
        with pytest.raises(type(error)) as caught:
            import_model(source, destination)
    assert error is not FULL or re.match("the disk (of .* )?is full", str(sentence(caught.value)))
    assert list(destination.parent.iterdir()) == []
    swa_jax.load_model(import_model(source, destination))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UnreachableError("the hub")])
def test_an_interrupted_import_goes_on(source, destination, monkeypatch, error):
    """Shards that were whole are not read again."""
    monkeypatch.setattr(checkpoint_module, "SHARD_BYTES", 20_000)
    with monkeypatch.context() as patch:
        first = breaks(patch, 20, error)
        with pytest.raises(type(error)):
            import_model(source, destination)
    partial = destination.with_name("checkpoint.partial")
    whole = {file.name for file in partial.rglob("*.safetensors")}
    assert whole
    assert not list(partial.rglob("*.safetensors.partial"))
    with monkeypatch.context() as patch:
        again = breaks(patch, -1, error)
        import_model(source, destination)
    assert len(first) == 20
    assert 0 < len(again) < 50
    assert not partial.exists()
    swa_jax.load_model(destination)
    assert files_of(destination) == files_of(import_model(source, destination.with_name("straight")))


def edit_weights(source: Path) -> None:
    write_folder(source, HF, {name: np.ascontiguousarray(array[::-1]) for name, array in TENSORS.items()})
    os.utime(source / "model.safetensors", ns=(1, 1))


EDITS = {
    "pattern": lambda source: None,
    "config": lambda source: change_json(source / "config.json", rope_theta=77.0),
    "weights": edit_weights,
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_an_interrupted_import_of_something_else_left_is_not_used(source, destination, monkeypatch, edit):
    monkeypatch.setattr(checkpoint_module, "SHARD_BYTES", 20_000)
    with monkeypatch.context() as patch:
        breaks(patch, 20, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            import_model(source, destination)
    EDITS[edit](source)
    options = {"pattern": "window"} if edit == "pattern" else {}
    import_model(source, destination, **options)
    assert files_of(destination) == files_of(import_model(source, destination.with_name("straight"), **options))


def test_a_killed_import_can_be_run_again(source, destination, monkeypatch, tmp_path):
    """What a kill leaves is what lies there at that moment, without any cleaning up."""
    partial = destination.with_name("checkpoint.partial")
    parts, left = TensorReader.parts, iter(range(2, -1, -1))

    def dying(reader, *arguments) -> Iterator:
        if next(left) == 0:
            shutil.copytree(partial, tmp_path / "left")
            raise OSError("stops this process, too")
        return parts(reader, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TensorReader, "parts", dying)
        with pytest.raises(OSError, match="stops this"):
            import_model(source, destination)
    shutil.move(tmp_path / "left", partial)
    assert any(partial.rglob("*.safetensors.partial"))
    swa_jax.load_model(import_model(source, destination))
    assert not partial.exists()


# ---- interrupted in the folder's own steps ----


@pytest.mark.parametrize("step", ["rmtree", "unlink", "rmdir", "replace", "sync_folder"])
@pytest.mark.parametrize("number", range(4))
def test_an_interruption_of_the_cleaning_up_is_survived(source, destination, monkeypatch, step, number):
    """A second Ctrl-C, or a kill, while the folder of an interrupted import is removed or renamed."""
    owner = {"rmtree": shutil, "replace": os, "sync_folder": files}.get(step, Path)
    original, calls = getattr(owner, step), []

    def interrupted(*arguments, **options):
        calls.append(step)
        if len(calls) > number:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, interrupted)
        if step in ("rmtree", "unlink", "rmdir"):
            breaks(patch, 3, OSError(errno.ENOSPC, "No space left on device"))
        with contextlib.suppress(KeyboardInterrupt, OSError):
            import_model(source, destination)
    swa_jax.load_model(import_model(source, destination))
    assert list(destination.parent.iterdir()) == [destination]


def test_an_import_that_is_done_is_not_done_again(source, destination):
    import_model(source, destination)
    before = {file: file.stat().st_mtime_ns for file in destination.rglob("*")}
    notes: list[str] = []
    assert import_model(source, destination, describe=notes.append) == destination
    assert notes == [f"{destination} holds this import already"]
    assert {file: file.stat().st_mtime_ns for file in destination.rglob("*")} == before
    with pytest.raises(CheckpointError, match="is there already"):
        import_model(source, destination, pattern="window")
    file = destination / "weights" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        import_model(source, destination)


def test_what_others_have_in_the_way_is_left_alone(source, destination):
    partial = destination.with_name("checkpoint.partial")
    partial.mkdir(parents=True)
    (partial / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match=r"checkpoint.partial is in the way"):
        import_model(source, destination)
    assert (partial / "thesis.tex").read_text() == "mine"
    shutil.rmtree(partial)
    with files.new_folder(destination, "the first"):
        (partial / "weights").mkdir()
        with pytest.raises(CheckpointError, match=r"another process is writing .*checkpoint\.partial"):
            import_model(source, destination)
        assert (partial / "weights").is_dir()


# ---- the disk ----


def test_a_disk_without_room_is_found_before_anything_is_written(source, destination, monkeypatch):
    size = sum(array.nbytes for array in TENSORS.values())
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    with pytest.raises(CheckpointError, match=r"has 0\.\d+ MB left, and 0\.\d+ MB are needed: make room"):
        import_model(source, destination)
    assert not destination.parent.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))
    import_model(source, destination)


# ---- values ----


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", np.nan),
        ("float32", -np.inf),
        ("float16", -np.nan),
        ("float16", np.inf),
        ("bfloat16", np.nan),
        ("bfloat16", np.inf),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(monkeypatch, source, destination, dtype, value):
    monkeypatch.setattr(finite, "CHECKED_AT_ONCE", 64)
    name, tensors = "model.layers.2.mlp.up_proj.weight", {key: a.astype(dtype) for key, a in TENSORS.items()}
    largest = np.full((2, 2), np.finfo(np.float32).max if dtype == "float32" else 60000, dtype)
    tensors[name][:2, :2] = largest
    write_folder(source, HF, tensors)
    import_model(source, destination)
    shutil.rmtree(destination)
    tensors[name][-1, -1] = value
    write_folder(source, HF, tensors)
    with pytest.raises(CheckpointError, match=f"'{name}' in model.safetensors holds NaN or infinity") as caught:
        import_model(source, destination)
    assert "\n" not in str(caught.value)
    assert list(destination.parent.iterdir()) == []


# ---- the manifest ----


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    return import_model(GOLDEN / "qwen2-full", tmp_path_factory.mktemp("imported") / "model")


@pytest.fixture
def folder(imported, tmp_path) -> Path:
    """A copy of an import that a test may damage."""
    return shutil.copytree(imported, tmp_path / "copy")


@pytest.mark.parametrize("name", ["weights/model-2.safetensors", "weights/.hidden", "weights/more/x"])
def test_files_that_the_manifest_does_not_list_are_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"is not in manifest.json, .*: remove it"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "weights/../config.json", "weights/a/b", "", "pattern.json"])
def test_a_manifest_that_lists_files_elsewhere_is_refused(folder, name):
    manifest = json.loads((folder / "manifest.json").read_text())
    change_json(folder / "manifest.json", sha256=manifest["sha256"] | {name: "0"})
    with pytest.raises(CheckpointError, match=r"lists '.*', which is no file of weights/"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "pattern.json", "manifest.json", "weights/model.safetensors"])
def test_a_pipe_is_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} is no regular file"):
        open_checkpoint(folder)


def test_an_edited_config_is_read_with_a_warning(folder, caplog):
    open_checkpoint(folder)
    file = folder / "config.json"
    hf = json.loads(file.read_text())
    file.write_text(json.dumps(hf, indent=7))  # says the same
    open_checkpoint(folder)
    assert not caplog.records
    change_json(file, rms_norm_eps=1e-3)
    assert open_checkpoint(folder).config.rms_norm_eps == 1e-3
    assert "config.json was edited after it was written" in caplog.text
