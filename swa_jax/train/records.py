"""What says which run a folder holds, and that a run which goes on there is the same one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import alone, sum_of_file, write_text
from swa_jax.base.settings import from_dict, parse_yaml, to_dict, to_yaml
from swa_jax.checkpoint.folder import MANIFEST_FILE
from swa_jax.model.pattern import AttentionPattern
from swa_jax.train.config import TrainConfig
from swa_jax.train.run_checkpoints import has_checkpoint, recorded

CONFIG_FILE = "config.yaml"
BASE_FILE = "base.sha256"  # of the model that adapters are trained on, or that teaches: checkpoints do not hold it
PATTERNS_FILE = "patterns.json"
# When a run goes on: where it computes and what it tells and keeps, not what it learns. The output may have been moved.
_KEPT = ("checkpoint_every", "keep_checkpoints", "keep_checkpoint_period", "validate_every", "validation_batches")
_MAY_CHANGE = ("mesh", "sharding", "log", "output", *_KEPT)


def records_of(config: TrainConfig, patterns: Sequence[AttentionPattern]) -> dict[str, str]:
    """What says which run this is, by file: in the run's folder, and in every checkpoint.

    Args:
      patterns: all that the run computes under; the configuration may name them by a file.
    """
    base = _base_digest(config)
    texts = [dataclasses.replace(pattern, provenance={}).to_json() for pattern in patterns]
    first = {PATTERNS_FILE: f"[{', '.join(texts)}]\n"} | ({} if base is None else {BASE_FILE: base + "\n"})
    return first | {CONFIG_FILE: to_yaml(config)}  # last: then all else is there


@contextlib.contextmanager
def claimed(run: Path, config: TrainConfig, records: Mapping[str, str]) -> Iterator[None]:
    """The run's folder for this process alone, with the records in it; if it holds a checkpoint or a model, check first
    that its run is the same one."""
    check_folder(run, config, records)
    run.mkdir(parents=True, exist_ok=True)
    with alone(run, "training in"):
        for name, text in records.items():
            write_text(run / name, text)
        yield


def check_folder(run: Path, config: TrainConfig, records: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a folder that holds another run than that of `records_of`."""
    started = has_checkpoint(run / "checkpoints")
    finished = next((run / name for name in ("model", "adapter") if (run / name).exists()), None)
    if started or finished is not None:
        _check_same_settings(run, config)
    else:
        _check_free(run)
    if started:
        _check_same_content(run, config, records)
    if finished is not None and not started and config.total_steps:
        raise ConfigError(
            f"{finished} is there, but no checkpoint of the run that made it is: training anew would not replace it; "
            "set 'output' to a new folder, or move it away"
        )


def _check_free(run: Path) -> None:
    """A run that begins neither replaces a file of the user's nor lies in a model's folder."""
    if model := next((run / name for name in (MANIFEST_FILE, "config.json") if (run / name).exists()), None):
        raise ConfigError(f"{run} holds a model ({model}): set 'output' to a new folder")
    file = run / CONFIG_FILE
    if file.exists() and not _is_record(file):
        raise ConfigError(
            f"the run would write all its settings to {file}, which holds something else: give that file another name, "
            "or set 'output' to a new folder"
        )


def _is_record(file: Path) -> bool:
    """Whether a run wrote this configuration: with every key, and nothing else."""
    try:
        text = file.read_text()
        return to_yaml(from_dict(TrainConfig, parse_yaml(text, str(file)))) == text
    except ValueError:
        return False


def _check_same_settings(run: Path, config: TrainConfig) -> None:
    """Compare the settings that the run in a folder has recorded with those with which it is to go on."""
    file = recorded(run, CONFIG_FILE)
    if file is None:
        raise ConfigError(
            f"{run} holds a run whose settings are unknown, because {run / CONFIG_FILE} is missing: bring that file "
            "back, or set 'output' to a new folder"
        )
    text = file.read_text()
    if (run / CONFIG_FILE).is_file() and (run / CONFIG_FILE).read_text() == text:
        file = run / CONFIG_FILE  # the copy that is easier to find
    resolved, before = to_dict(config), to_dict(from_dict(TrainConfig, parse_yaml(text, str(file))))
    changed = sorted(key for key in resolved if before.get(key) != resolved[key] and key not in _MAY_CHANGE)
    if changed:
        raise ConfigError(
            f"{run} holds a run whose '{changed[0]}' differs: set 'output' to a new folder, or resume with "
            f"{file} as it is"
        )


def _check_same_content(run: Path, config: TrainConfig, records: Mapping[str, str]) -> None:
    """The same for what the settings only name: files may have been edited."""
    before = recorded(run, PATTERNS_FILE)
    if before is not None and before.read_text() != records[PATTERNS_FILE]:
        raise ConfigError(
            f"the attention patterns are not those that the run in {run} began with, which {before} holds: a pattern "
            "file, or that of 'init_from', was changed; bring it back, or set 'output' to a new folder"
        )
    base = records.get(BASE_FILE)
    if base is not None and ((old := recorded(run, BASE_FILE)) is None or old.read_text() != base):
        raise ConfigError(
            f"'init_from' = {config.init_from} is not the model that the run in {run} began with: bring that "
            "one back, or set 'output' to a new folder"
        )


def _base_digest(config: TrainConfig) -> str | None:
    """The sum of the manifest of the weights that stay as they are, under LoRA and of a teacher; it holds the sums of
    their files."""
    if config.lora is None and not config.teaches:
        return None
    assert config.init_from is not None
    return sum_of_file(Path(config.init_from) / MANIFEST_FILE)
