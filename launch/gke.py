"""Training on GKE, one slice or several: a JobSet, or a workload of xpk.

    python -m launch.gke apply SETTINGS.yaml [a.b=c ...] [--dry-run]

The cluster has a TPU node pool of the slice's shape for every slice, and the JobSet controller (0.7 or newer, for its
failure policies). The JobSet starts the run again by itself.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

import yaml

from launch.settings import SAVED, Gke, Runner, Settings, check_run, main
from swa_jax.base.errors import ConfigError

GRACE = 120  # seconds between SIGTERM and SIGKILL: a step and a checkpoint


def place(settings: Settings) -> Gke:
    if settings.gke is None:
        raise ConfigError("missing key 'gke': image and volume_claim of a run on GKE")
    return settings.gke


def manifest(settings: Settings) -> dict[str, Any]:
    """The JobSet: one job a slice, one pod a machine; GKE tells each pod its place.

    Raises `ConfigError` where the run would write to a pod's own disk, which goes with the pod.
    """
    gke = place(settings)
    output = settings.override("output") or "the configuration's own"
    if not output.startswith(f"{gke.mount_path.rstrip('/')}/"):
        raise ConfigError(
            f"output is {output}, which is not in 'gke.mount_path' = {gke.mount_path}: what a pod writes elsewhere "
            "goes with it"
        )
    selector = {
        "cloud.google.com/gke-tpu-accelerator": settings.chip.gke,
        "cloud.google.com/gke-tpu-topology": settings.shape,
    }
    if gke.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    container = {
        "name": "train",
        "image": gke.image,
        "command": ["swa-jax", *settings.arguments],  # no shell between: it would not pass SIGTERM on
        "ports": [{"containerPort": 8471}, {"containerPort": 8482}],  # libtpu's and JAX's
        "securityContext": {"privileged": True},
        "resources": {"limits": {"google.com/tpu": settings.chips_per_machine}},
        "volumeMounts": [{"name": "shared", "mountPath": gke.mount_path}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": selector,
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": gke.volume_claim}}],
    }
    if gke.service_account:
        pod["serviceAccountName"] = gke.service_account
    if gke.secret:
        container["envFrom"] = [{"secretRef": {"name": gke.secret}}]
    template: dict[str, Any] = {"spec": pod}
    if gke.gcs_fuse:
        template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
    job = {
        "parallelism": settings.machines,
        "completions": settings.machines,
        "backoffLimit": 0,
        # Taken away, with a checkpoint or without: the rules below start all jobs again and do not count that.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [SAVED]}},
            ]
        },
        "template": template,
    }
    metadata = {
        "name": settings.name,
        "namespace": gke.namespace,
        # One slice a node pool, so that two slices never share one.
        "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
    }
    if gke.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": gke.queue}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": gke.max_restarts,
                "restartStrategy": "BlockingRecreate",  # a new pod is not to meet one that still saves
                "rules": [{"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "slice", "replicas": settings.slices, "template": {"spec": job}}],
        },
    }


def check(settings: Settings) -> None:
    """Read the configuration of the run, before anything is started."""
    check_run(settings, f"the image {place(settings).image}: build and push it again after a change")


def kubectl(settings: Settings, *words: str) -> list[str]:
    return ["kubectl", f"--namespace={place(settings).namespace}", *words]


def render(settings: Settings, run: Runner) -> None:
    """Print the manifest."""
    check(settings)
    print(yaml.safe_dump(manifest(settings), sort_keys=False), end="")


def apply(settings: Settings, run: Runner) -> None:
    """Create the JobSet. Where there is one of that name, also of a run that has ended, `delete` it first."""
    check(settings)
    text = yaml.safe_dump(manifest(settings), sort_keys=False)
    run(kubectl(settings, "create", "--filename=-"), input=text)  # `apply` on one that has ended starts nothing


def watch(settings: Settings, run: Runner) -> None:
    """How often it was started, which pods there are, and the first machine's log, until Ctrl-C."""
    run(kubectl(settings, "get", f"jobset/{settings.name}"))
    chosen = f"--selector=jobset.sigs.k8s.io/jobset-name={settings.name}"
    run(kubectl(settings, "get", "pods", chosen, "--output=wide"))
    first = "jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    run(kubectl(settings, "logs", f"{chosen},{first}", "--container=train", "--follow", "--tail=50"))


def delete(settings: Settings, run: Runner) -> None:
    """End the run: its pods are told to save first, and have ended when this returns."""
    run(kubectl(settings, "delete", f"jobset/{settings.name}", "--cascade=foreground"))


def xpk(settings: Settings, run: Runner) -> None:
    """Hand the run to xpk in place of a JobSet of ours; the shared folder is then `xpk storage`'s to mount."""
    gke = place(settings)
    for key in ("cluster", "project", "zone"):
        if getattr(gke, key) is None:
            raise ConfigError(f"missing key 'gke.{key}': xpk needs it")
    for key in ("secret", "service_account"):
        if getattr(gke, key) is not None:
            raise ConfigError(f"'gke.{key}' is set, which xpk does not hand on: use `apply`, or drop it")
    check(settings)
    command = ["xpk", "workload", "create", f"--workload={settings.name}", f"--cluster={gke.cluster}"]
    command += [f"--project={gke.project}", f"--zone={gke.zone}", f"--tpu-type={settings.accelerator_type}"]
    command += [f"--num-slices={settings.slices}", f"--docker-image={gke.image}"]
    # Statuses from 127 on, so that of a run that has saved, are restarted by default.
    command.append(f"--max-restarts={gke.max_restarts}")
    run([*command, f"--command=exec swa-jax {shlex.join(settings.arguments)}"])


VERBS = {verb.__name__: verb for verb in (apply, render, watch, delete, xpk)}

if __name__ == "__main__":
    sys.exit(main(VERBS, __doc__))
