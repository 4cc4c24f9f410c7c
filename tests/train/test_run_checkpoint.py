"""Checkpoints of training runs: what is saved comes back on any mesh; damage, full disks and old files are handled."""

import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from python_process import EIGHT_DEVICES, python

import swa_jax.train.run_checkpoints
from swa_jax.base.errors import CheckpointError
from swa_jax.train.run_checkpoints import MANIFEST_FILE, RunCheckpoints, has_checkpoint, load_state
from swa_jax.train.step import abstract_state

ROOT = Path(__file__).resolve().parents[2]
DATA_STATE = {"next": 7, "inner": [{"a": [1, 2]}, None]}


def state_of(seed):
    key = jax.random.key(seed)
    return {
        "step": jnp.int32(seed),
        "params": {"w": jax.random.normal(key, (33, 16)), "b": jnp.full((5,), seed, jnp.bfloat16)},
        "optimizer": (jnp.ones((3, 2)) * seed, {}),
    }


def assert_is(state, seed):
    jax.tree.map(np.testing.assert_array_equal, state, state_of(seed))


def saved(folder, *steps, keep=10, **options):
    with RunCheckpoints(folder, keep=keep, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), DATA_STATE)
    return folder


def poll(check):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        check()
        time.sleep(0.01)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(file, bit=0):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_was_saved_comes_back(tmp_path):
    folder = tmp_path / "checkpoints"
    assert not has_checkpoint(folder)
    with RunCheckpoints(folder, keep=2) as checkpoints:
        assert checkpoints.newest is None
        for step in (3, 5, 5):
            checkpoints.save(step, state_of(step), DATA_STATE)
        checkpoints.wait()
        assert checkpoints.newest == 5
        state, data_state = checkpoints.restore(abstract_state(state_of(0)))
        assert_is(state, 5)
        assert data_state == DATA_STATE
    assert has_checkpoint(folder)
    assert RunCheckpoints(folder, keep=2).newest == 5
    assert_is(load_state(folder / "3", abstract_state(state_of(0)))[0], 3)


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    """The next step may overwrite the arrays while they are being written."""
    zero = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    with RunCheckpoints(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            state = {"w": jnp.full((500, 1000), step, jnp.float32)}
            shape = abstract_state(state)
            checkpoints.save(step, state, None)
            jax.block_until_ready(zero(state))
    for step in (1, 2, 3):
        assert (load_state(tmp_path / str(step), shape)[0]["w"] == step).all()


def test_processes_wait_for_each_other_as_long_as_a_slow_disk_takes():
    """Process 0 may be summing up one checkpoint when the others begin with the next."""
    from orbax.checkpoint.experimental.v1._src.synchronization.multihost import coordination_timeout

    options = swa_jax.train.run_checkpoints._orbax_options()
    assert coordination_timeout() == options.asynchronous.timeout_secs == 24 * 3600


def test_the_newest_and_the_periodic_ones_stay(tmp_path):
    saved(tmp_path, *range(1, 9), keep=2, keep_period=3)
    assert names(tmp_path) == ["3", "6", "7", "8"]


def test_an_old_checkpoint_goes_only_after_a_newer_one_is_there(tmp_path, monkeypatch):
    order = []
    real = swa_jax.train.run_checkpoints._write_manifest
    monkeypatch.setattr(
        swa_jax.train.run_checkpoints,
        "_write_manifest",
        lambda folder, step: (order.append(names(tmp_path)), real(folder, step)),
    )
    saved(tmp_path, 1, 2, keep=1)
    assert order == [["1.writing"], ["1", "2.writing"]]
    assert names(tmp_path) == ["2"]


def test_leftovers_of_a_killed_run_are_removed_and_nothing_else(tmp_path):
    saved(tmp_path, 4)
    for name in ("8.writing", "8.writing.orbax-checkpoint-tmp", "2.deleting"):
        (tmp_path / name / "d").mkdir(parents=True)
        (tmp_path / name / "d" / "part").write_text("half")
    (tmp_path / "notes").mkdir()
    (tmp_path / "1.damaged").mkdir()
    assert RunCheckpoints(tmp_path, keep=1).newest == 4
    assert names(tmp_path) == ["1.damaged", "4", "notes"]


def test_any_damage_is_named_and_the_run_goes_on_from_the_good_one(tmp_path, caplog):
    saved(tmp_path, 4, 8)
    randomness = random.Random(0)
    for file in files_of(tmp_path / "8"):
        content = file.read_bytes()
        if not content:
            continue
        for damage in ("flip", "truncate"):
            if damage == "flip":
                flip(file, randomness.randrange(8 * len(content)))
            else:
                file.write_bytes(content[: randomness.randrange(len(content))])
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                checkpoints = RunCheckpoints(tmp_path, keep=2)
            assert checkpoints.newest == 4
            assert_is(checkpoints.restore(abstract_state(state_of(0)))[0], 4)
            (sentence,) = caplog.messages
            assert str(file) in sentence
            assert "is damaged" in sentence
            assert "going on from the checkpoint of step 4" in sentence
            assert names(tmp_path) == ["4", "8.damaged"]
            os.rename(tmp_path / "8.damaged", tmp_path / "8")
            file.write_bytes(content)
    assert RunCheckpoints(tmp_path, keep=2).newest == 8


def test_a_missing_file_or_manifest_is_damage(tmp_path, caplog):
    saved(tmp_path, 2, 4, 6)
    (tmp_path / "6" / MANIFEST_FILE).unlink()
    missing = next(f for f in files_of(tmp_path / "4") if f.parent.name == "d")
    missing.unlink()
    assert RunCheckpoints(tmp_path, keep=3).newest == 2
    assert caplog.messages[0].startswith(f"{tmp_path / '6' / MANIFEST_FILE} is missing")
    assert caplog.messages[1].startswith(f"{missing} is missing")


def test_a_checkpoint_under_another_name_is_damaged(tmp_path):
    os.rename(saved(tmp_path, 4) / "4", tmp_path / "9")
    with pytest.raises(CheckpointError, match="not of step 9"):
        RunCheckpoints(tmp_path, keep=1)


def test_no_good_checkpoint_left_changes_nothing(tmp_path):
    saved(tmp_path, 4, 8)
    (tmp_path / "12.writing").mkdir()
    for step in ("4", "8"):
        flip(tmp_path / step / MANIFEST_FILE, 333)
    before = [(f, f.read_bytes()) for f in files_of(tmp_path)]
    with pytest.raises(CheckpointError, match=r"8/manifest.json is damaged.*no good checkpoint is left.*1 more"):
        RunCheckpoints(tmp_path, keep=1)
    assert [(f, f.read_bytes()) for f in files_of(tmp_path)] == before
    assert (tmp_path / "12.writing").exists()


def test_a_damaged_step_is_saved_again(tmp_path):
    saved(tmp_path, 4, 8)
    flip(tmp_path / "8" / MANIFEST_FILE)
    for name in ("8.damaged", "8.damaged-2"):
        assert saved(tmp_path, 8) is tmp_path
        assert RunCheckpoints(tmp_path, keep=2).newest == 8
        assert (tmp_path / name).is_dir()
        flip(tmp_path / "8" / MANIFEST_FILE)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"params": {"w": jnp.ones((3, 3)), "b": jnp.ones(5, jnp.bfloat16)}},
            r"'params.w' in .*4 is float32 \[33, 16\], this run's is float32 \[3, 3\]",
        ),
        (
            {"params": {"w": jnp.ones((33, 16)), "b": jnp.ones(5)}},
            r"'params.b' in .*4 is bfloat16 \[5\], this run's is float32",
        ),
        ({"extra": jnp.ones(1)}, "'extra' is in this run and not in .*4"),
        ({"step": {}}, "'step' is in .*4 and not in this run"),
    ],
)
def test_a_state_of_another_model_is_refused(tmp_path, change, sentence):
    checkpoints = RunCheckpoints(saved(tmp_path, 4), keep=1)
    with pytest.raises(CheckpointError, match=sentence):
        checkpoints.restore(abstract_state(state_of(0) | change))


def test_a_failed_save_names_the_step_and_leaves_the_one_before(tmp_path, monkeypatch):
    def no_space(folder, step):
        raise OSError(28, "No space left on device", str(folder))

    saved(tmp_path, 4)
    checkpoints = RunCheckpoints(tmp_path, keep=1)
    monkeypatch.setattr(swa_jax.train.run_checkpoints, "_write_manifest", no_space)
    sentence = r"step 8 could not be written: the disk is full.*step 4, is untouched"
    for ask in (lambda: checkpoints.save(12, state_of(12), DATA_STATE), lambda: poll(checkpoints.check)):
        checkpoints.save(8, state_of(8), DATA_STATE)  # fails in the background
        with pytest.raises(CheckpointError, match=sentence):
            ask()
        checkpoints.check()  # it is said once
    assert names(tmp_path) == ["4"]
    monkeypatch.undo()
    checkpoints.save(12, state_of(12), DATA_STATE)  # there is room again
    checkpoints.wait()
    assert names(tmp_path) == ["12"]


_FILL = """
import sys, jax.numpy as jnp
from pathlib import Path
from swa_jax.train.run_checkpoints import RunCheckpoints
from swa_jax.base.errors import CheckpointError
folder = Path(sys.argv[1])
try:
    with RunCheckpoints(folder, keep=2) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones((300, 1000))}, None)
        checkpoints.save(2, {"w": jnp.ones((3000, 1000))}, None)
except CheckpointError as error:
    print(error)
    assert RunCheckpoints(folder, keep=2).newest == 1
    print(sorted(path.name for path in folder.iterdir()))
"""


def test_a_full_disk(tmp_path):
    """A real file system of 4 MB where the kernel lets us mount one, else a limit on the size of a file."""
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=4m none {small} && exec {sys.executable} -c '{_FILL}' {small}"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount]
    probe = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", str(small)]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        limit = f"ulimit -f 2048 && exec {sys.executable} -c '{_FILL}' {small}"
        command = ["bash", "-c", limit]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{small}: the checkpoint of step 2 could not be written" in done.stdout
    assert "step 1, is untouched" in done.stdout
    assert "['1']" in done.stdout


_MESHES = """
import sys, jax, numpy as np
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
from swa_jax.train.run_checkpoints import RunCheckpoints
values = {"w": np.random.default_rng(0).standard_normal((16, 24), np.float32), "step": np.int32(3)}
def state(shape, names, spec):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, names)
    shardings = {"w": NamedSharding(mesh, spec), "step": NamedSharding(mesh, P())}
    return jax.device_put(values, shardings)
layouts = [((8,), ("fsdp",), P("fsdp")), ((2, 4), ("fsdp", "tensor"), P("fsdp", "tensor")), ((1,), ("fsdp",), P())]
folder = Path(sys.argv[1])
with RunCheckpoints(folder, keep=9) as checkpoints:
    for step, layout in enumerate(layouts):
        here = state(*layout)
        if step:
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), here)
            here, data = checkpoints.restore(abstract)
            assert data == {"rows": step - 1}
            assert here["w"].sharding == abstract["w"].sharding
            np.testing.assert_array_equal(here["w"], values["w"])
            assert here["step"] == 3
        checkpoints.save(step, here, {"rows": step})
        checkpoints.wait()
print("equal")
"""


def test_restoring_onto_other_meshes_is_bit_equal(tmp_path):
    assert python("-c", _MESHES, tmp_path, timeout=120, **EIGHT_DEVICES) == "equal\n"
