"""The model that a run starts from, and the patterns under which its stages train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.pattern_files import load_pattern
from swa_jax.checkpoint.folder import WEIGHTS, open_checkpoint
from swa_jax.checkpoint.named import model_folder, tokenizer_folder
from swa_jax.data.sources import ANSWERED
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_stacks import nope_of_full_layers
from swa_jax.model.layer_types import FULL, SWITCH
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window
from swa_jax.train.config import StageConfig, TrainConfig


class Start(NamedTuple):
    """What is known of a run's model before it is drawn or read."""

    config: ModelConfig  # with the changes that the run asks for
    pattern: AttentionPattern | None  # the checkpoint's own; None: the model is drawn
    teacher: ModelConfig  # with those changes that a teacher has too

    @property
    def window(self) -> int | None:
        """The window that recipes take; None: there is none."""
        return None if self.pattern is None else self.pattern.sliding_window


def with_folders(config: TrainConfig) -> TrainConfig:
    """The run with the folders of what `init_from` and `tokenizer` name, in any of the ways of `checkpoint.named`.

    Several processes need folders from the start: each would import for itself.
    """
    if jax.process_count() > 1:
        return config
    start = None if config.init_from is None else str(model_folder(config.init_from))
    return dataclasses.replace(config, tokenizer=str(tokenizer_folder(config.tokenizer)), init_from=start)


def _folder_of(name: str) -> Path:
    """The checkpoint folder that a model is in, or is imported to: by a process that is alone."""
    if jax.process_count() > 1 and not (Path(name).expanduser() / WEIGHTS).is_dir():
        raise ConfigError(
            f"'init_from' = {name} is no checkpoint folder, and each of the {jax.process_count()} processes would "
            f"import it for itself: set it to one that all of them see, made with: swa-jax import {name} DST"
        )
    return model_folder(name)


def find_start(config: TrainConfig) -> Start:
    """The model that `init_from` or `model` names, where full layers have no rotary embeddings if the pattern says so.

    Raises `ConfigError`: as `open_checkpoint` and `load_pattern`.
    """
    if config.model is not None:
        start = Start(config.model, None, config.model)
    else:
        assert config.init_from is not None
        source = open_checkpoint(_folder_of(config.init_from))
        changed = config.model_changes.apply(source.config)
        start = Start(changed, source.pattern, changed)
    pattern = run_pattern(config, start)
    if not pattern.nope_full_layers:
        return start
    layers = nope_of_full_layers(pattern.layer_types, start.config.rope_layers)
    return start._replace(config=dataclasses.replace(start.config, rope_layers=layers))


def run_pattern(
    config: TrainConfig, start: Start, name: str | None = None, stage: StageConfig | None = None
) -> AttentionPattern:
    """The pattern of a recipe or file, by default the run's own, with the window of a stage if one is given.

    It leaves out the `nope_full_layers` that the model itself says (`find_start`).
    """
    window = Window(None if stage is None else stage.sliding_window).of(config.window, needed=False)
    source: AttentionPattern | str | None = config.attention if name is None else name
    if source is None:
        source = start.pattern or "full"  # a plan may come before the model is there
    pattern = load_pattern(source, start.config, window, default_window=start.window, seed=config.seed)
    said = all(start.config.rope_kinds_by_layer[layer] == "none" for layer in pattern.full_layers)
    return dataclasses.replace(pattern, nope_full_layers=pattern.nope_full_layers and not said)


def teacher_pattern(config: TrainConfig, start: Start) -> AttentionPattern:
    """The pattern of the teacher that runs in the step. Raises `ConfigError` for one that has no weights."""
    assert config.distill is not None
    name, model = config.distill.teacher, start.teacher
    # A plan may come before the model is there.
    pattern = start.pattern or AttentionPattern.everywhere(FULL, model)
    if name is not None:
        pattern = load_pattern(name, model, default_window=start.window, seed=config.seed)
    if SWITCH in pattern.layer_types:
        raise ConfigError(
            "the teacher of 'distill' has routed layers, and its routers would be those that are trained: set "
            "'distill.teacher' to another pattern, such as full"
        )
    return pattern


def stage_patterns(config: TrainConfig, start: Start, stage: StageConfig) -> list[AttentionPattern]:
    """Those that the steps of a stage take in turn."""
    return [run_pattern(config, start, name, stage) for name in stage.patterns or (None,)]


def check_patterns(
    config: TrainConfig, patterns: list[list[AttentionPattern]], routed: bool, teacher: AttentionPattern | None = None
) -> None:
    """Raise `ConfigError` for patterns that the run's model or a stage's data cannot be trained under."""
    for number, (stage, chosen) in enumerate(zip(config.stages, patterns, strict=True)):
        for pattern in chosen:
            if (SWITCH in pattern.layer_types) != routed:
                raise ConfigError(f"'stages.{number}.patterns' and 'pattern' must both be routed, or neither")
        for pattern in chosen if teacher is None else [*chosen, teacher]:
            without = [source.kind for source in stage.data if source.kind not in ANSWERED]
            if pattern.full_attention_decode and without:
                raise ConfigError(
                    f"training data of kind '{without[0]}' ('stages.{number}.data') has no prompts and answers, so "
                    "full-attention decode has no boundary to start at: leave '+fa-decode' out of the pattern, or "
                    "train on kind 'prompts' or 'distilled' alone"
                )
