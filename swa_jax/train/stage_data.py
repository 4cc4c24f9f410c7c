"""The batches of a run's stages: this process's rows of them, for training and for validation."""

from __future__ import annotations

from pathlib import Path

from swa_jax.base.errors import ConfigError
from swa_jax.data.batches import Batches, make_batches
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.model.memory import check_fits
from swa_jax.model.sharding import Partition
from swa_jax.train.config import TrainConfig
from swa_jax.train.run_checkpoints import newest_step


def open_stages(config: TrainConfig, tokenizer: Tokenizer, partition: Partition | None) -> dict[int, Batches]:
    """The batches of every stage that has steps left, by its number, after reading a sample of each source.

    All are opened before the first step: that the last stage's data is damaged, too short or without documents to hold
    out must not be found out after days of training.
    """
    done = newest_step(Path(config.output) / "checkpoints")
    opened = {}
    for number, start in enumerate(config.starts):
        stage = config.stages[number]
        if done >= start + stage.steps:
            continue  # its data may be gone by now
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
