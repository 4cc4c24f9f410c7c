"""The batches of a run's stages: this process's rows of them, for training and for validation."""

from __future__ import annotations

from pathlib import Path

import jax

from swa_jax.base.errors import ConfigError
from swa_jax.data.batches import Batches, check_source, make_batches
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.model.memory import check_fits
from swa_jax.model.sharding import Partition
from swa_jax.train.config import TrainConfig
from swa_jax.train.run_checkpoints import from_first_process, newest_step


def open_stages(config: TrainConfig, tokenizer: Tokenizer, partition: Partition | None) -> dict[int, Batches]:
    """The batches of every stage that has steps left, by its number, after reading a sample of each source.

    All are opened before the first step: that the last stage's data is damaged, too short or without documents to hold
    out must not be found out after days of training.
    """
    done = newest_step(Path(config.output) / "checkpoints")
    # The data of stages that are done may be gone by now.
    coming = [number for number, start in enumerate(config.starts) if done < start + config.stages[number].steps]
    for source in (source for number in coming for source in config.stages[number].data):
        check_source(source, tokenizer)  # all of them, before the texts of the first are tokenised
    opened = {}
    for number in coming:
        stage = config.stages[number]
        here = local_rows(partition, stage.batch_size)
        check_fits(
            (here.stop - here.start) * stage.sequence_length * 8,  # tokens and segment ids
            f"'stages.{number}': {stage.batch_size} rows of {stage.sequence_length} tokens",
            "lower 'batch_size'",
        )
        try:
            opened[number] = stage_batches(config, number, tokenizer, partition)
            opened[number].check()
            if config.validate_every is not None:
                stage_batches(config, number, tokenizer, partition, held_out=True).check()
        except ConfigError as error:
            raise ConfigError(f"'stages.{number}.data': {error}") from None
    return opened


def check_same_data(opened: dict[int, Batches]) -> None:
    """Raise `ConfigError` where this process would read other data than process 0; all processes call it.

    Rows of one batch out of two orders of the documents would repeat some and miss others.
    """
    ours = {}
    for number, batches in opened.items():
        for key, value in batches.get_state()["data"].items():
            if key == "tokenizer":
                ours[key] = value
            elif key.endswith(".files"):  # all else is in the configuration, which is the same
                ours[f"stages.{number}.{key}"] = value
    theirs = from_first_process(lambda: ours)
    if different := [key for key in ours if key in theirs and ours[key] != theirs[key]]:
        raise ConfigError(
            f"'{different[0]}' has other contents in process {jax.process_index()} than in process 0, under the same "
            "name: give every machine the same files"
        )


def stage_batches(
    config: TrainConfig, number: int, tokenizer: Tokenizer, partition: Partition | None, *, held_out: bool = False
) -> Batches:
    """What a stage trains on, without end; or the documents that it holds out, once, in batches of one piece's rows."""
    stage = config.stages[number]
    rows = stage.batch_size // (stage.pieces if held_out else 1)
    return make_batches(
        stage.data,
        tokenizer,
        length=stage.sequence_length,
        batch_size=rows,
        seed=config.seed + 1000 * number,
        rows=local_rows(partition, rows),
        held_out=held_out,
        top_logprobs=config.top_k or 0,
    )


def local_rows(partition: Partition | None, batch_size: int) -> slice:
    """The rows of a global batch that this process's devices hold some of."""
    if partition is None:
        return slice(0, batch_size)
    indices = partition.sharding("batch").addressable_devices_indices_map((batch_size,)).values()
    spans = [index[0].indices(batch_size) for index in indices if index is not None]
    return slice(min(first for first, _, _ in spans), max(last for _, last, _ in spans))
