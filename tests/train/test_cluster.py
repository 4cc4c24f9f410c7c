"""Which of several processes this one is."""

import json

import pytest

import swa_jax.train.cluster
from swa_jax.base.errors import ConfigError
from swa_jax.train.cluster import Member, find_member
from swa_jax.train.processes import _difference


def test_the_arguments_say_which_process_this_is():
    assert find_member(None, None, None, detect=False, timeout=1) is None
    assert find_member(1, 0, "here:1", detect=False, timeout=1) is None  # alone
    place = find_member(2, 1, "[::1]:8476", detect=False, timeout=1)
    assert (str(place), place.address) == ("process 1 of 2", ("::1", 8476))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((2, None, None), "--processes without --process-id and --coordinator: give all three"),
        ((None, 1, "here:1"), "--process-id, --coordinator without --processes"),
        ((2, 2, "here:1"), "--process-id 2 is not one of 2 processes: it must be from 0 to 1"),
        ((2, 0, "here"), "--coordinator is 'here': it must be HOST:PORT"),
    ],
)
def test_wrong_arguments(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        find_member(*arguments, detect=False, timeout=1)


def test_slurm_is_detected_when_asked_for(monkeypatch):
    with pytest.raises(ConfigError, match="--distributed found no cluster"):
        find_member(None, None, None, detect=True, timeout=1)
    values = {"JOB_ID": "4096", "STEP_NODELIST": "node[7-9]", "NTASKS": "3", "PROCID": "2", "LOCALID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")  # so that it is put back
    assert find_member(None, None, None, detect=False, timeout=1) is None
    assert find_member(None, None, None, detect=True, timeout=1) == Member(2, 3, "node7:61440")


def test_a_tpu_vm_that_is_one_of_several_workers_is_detected_without_being_asked(monkeypatch, tmp_path):
    def found():
        return find_member(None, None, None, detect=False, timeout=1)

    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,other")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    for name in ("COORDINATOR_ADDRESS", "NUM_SLICES", "SLICE_ID"):  # else the metadata server is asked
        monkeypatch.setenv(f"MEGASCALE_{name}", "")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(swa_jax.train.cluster, "_TPUS", (str(tmp_path / "accel*"),))
    assert found() is None
    (tmp_path / "accel0").touch()
    assert found() == Member(1, 2, "localhost:8482")
    with monkeypatch.context() as missing:
        missing.setenv("TPU_WORKER_HOSTNAMES", "nowhere.invalid,other")
        missing.setattr("time.sleep", lambda seconds: None)
        with pytest.raises(ConfigError, match=r"process 1 of 2 of a TPU pod, but process 0 was not found within 1 s"):
            found()  # it would train alone
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert found() is None
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert found() is None


def test_the_first_key_that_differs():
    first = {"a": {"b": 1, "c": [{"d": 2}, 3]}, "e": None}
    assert _difference(first, json.loads(json.dumps(first))) is None
    assert _difference(first, first | {"a": {"b": 1, "c": [{"d": 4}, 3]}}) == ("a.c.0.d", 2, 4)
    assert _difference(first, first | {"f": 5}) == ("f", None, 5)
    assert _difference({"c": [1]}, {"c": [1, 2]}) == ("c", [1], [1, 2])
