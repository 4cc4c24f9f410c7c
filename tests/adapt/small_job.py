"""The least that `swa-jax adapt` can be asked for: as options of a command, and prepared."""

from swa_jax.adapt.job import Adaptation, AdaptOptions, prepare

SMALL = ["--length", 256, "--examples", 4, "--choose-by", 4, "--window", "16,32"]


def small_job(tmp_path, **changes) -> Adaptation:
    settings = {"length": 256, "window": (16,), "examples": 4, "choose_by": 4} | changes
    return prepare(AdaptOptions("recall", tmp_path / "out", 0.3, **settings))
