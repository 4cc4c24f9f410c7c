"""The launcher for GKE: the JobSet that it makes, and what it gives kubectl and xpk."""

import json
import os
import shlex

import yaml
from launching import EXAMPLE, HOSTILE, dry, flag, pod_of, settings

from launch import gke
from launch.settings import main

# The fields of a JobSet (jobset.x-k8s.io/v1alpha2), and of the Kubernetes objects in it, that exist.
SPEC = {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator"}
SPEC |= {"managedBy", "ttlSecondsAfterFinished"}
JOB = {"parallelism", "completions", "backoffLimit", "podFailurePolicy", "template"}


def test_the_manifest_is_a_jobset(capsys):
    assert main(gke.VERBS, "", ["render", str(EXAMPLE), "slices=2", f"overrides={json.dumps([HOSTILE])}"]) == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(jobset) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(jobset["spec"]) <= SPEC
    (slices,) = jobset["spec"]["replicatedJobs"]
    assert (slices["replicas"], set(slices)) == (2, {"name", "replicas", "template"})
    job = slices["template"]["spec"]
    assert set(job) == JOB
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (32, 32, 0)
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a pod failure policy demands it
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x8",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    train = ["swa-jax", "train", "configs/bosch/qwen3-8b.yaml", HOSTILE, "mesh.slices=2", "--timeout=300"]
    assert container["command"] == train
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
    assert (mounts, claims) == ({"shared": "/shared"}, {"shared": "shared"})


def test_a_secret_and_a_bucket_reach_the_pods():
    plain, full = pod_of(), pod_of("gke.secret=keys", "gke.gcs_fuse=true", "gke.service_account=trainer")
    assert "metadata" not in plain
    assert full["metadata"] == {"annotations": {"gke-gcsfuse/volumes": "true"}}
    assert full["spec"]["serviceAccountName"] == "trainer"
    assert full["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert "envFrom" not in plain["spec"]["containers"][0]


def test_preemptions_restart_the_jobset_for_ever_and_failures_do_not():
    spec = gke.manifest(settings())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in rules} == {"FailJob"}
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    (container,) = job["template"]["spec"]["containers"]
    assert rules[1]["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [143]}
    assert spec["failurePolicy"] == {
        "maxRestarts": 3,
        "restartStrategy": "BlockingRecreate",
        "rules": [{"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }


def test_apply_gives_kubectl_the_manifest(tmp_path, monkeypatch, capsys):
    assert main(gke.VERBS, "", ["apply", str(EXAMPLE), "gke.namespace=team", "gke.queue=tpus", "--dry-run"]) == 0
    first, *text, end = capsys.readouterr().out.splitlines()
    assert shlex.split(first)[:3] == ["kubectl", "--namespace=team", "create"]  # one that has ended is in the way
    assert (first[-7:], end) == ("<<'END'", "END")
    expected = gke.manifest(settings("gke.namespace=team", "gke.queue=tpus"))
    assert yaml.safe_load("\n".join(text)) == expected
    assert expected["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "tpus"}
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\ncat > {shlex.quote(str(tmp_path / 'applied'))}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(gke.VERBS, "", ["apply", str(EXAMPLE)]) == 0
    assert yaml.safe_load((tmp_path / "applied").read_text()) == gke.manifest(settings())


def test_delete_returns_when_the_pods_have_saved(capsys):
    (command,) = dry(capsys, gke.VERBS, "delete")
    assert command[2:] == ["delete", "jobset/bosch-8b", "--cascade=foreground"]


def test_xpk(capsys):
    where = ["gke.cluster=c", "gke.project=p", "gke.zone=z", f"overrides={json.dumps([HOSTILE])}"]
    (command,) = dry(capsys, gke.VERBS, "xpk", "slices=2", *where)
    assert command[:3] == ["xpk", "workload", "create"]
    assert flag(command, "tpu-type") == "v5p-256"
    assert flag(command, "num-slices") == "2"
    assert shlex.split(flag(command, "command"))[-3:-1] == [HOSTILE, "mesh.slices=2"]


def test_gkes_own_settings(capsys):
    for verb, change, sentence in (
        ("apply", "gke=null", "missing key 'gke': image and volume_claim"),
        ("apply", "gke={image: x}", "missing key 'gke.volume_claim'"),
        ("xpk", "slices=1", "missing key 'gke.cluster': xpk needs it"),
        ("apply", "gke.mount_path=/data", "output is /shared/runs/bosch-8b, which is not in 'gke.mount_path' = /data:"),
        ("render", "overrides=[output=/s, seed=x]", "configs/bosch/qwen3-8b.yaml with 'overrides': 'seed' must be int"),
        ("xpk", "gke={image: a, volume_claim: b, cluster: c, project: d, zone: e, secret: f}", "'gke.secret' is set"),
    ):
        assert main(gke.VERBS, "", [verb, str(EXAMPLE), change]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)
    assert main(gke.VERBS, "", ["aply", str(EXAMPLE)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
