"""Scripts that start training: on this machine, on TPU VMs, on GKE. docs/pods.md is their manual."""
