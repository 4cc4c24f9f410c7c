"""A small training run to plan: three windowed layers; and what a search is given for a run."""

from swa_jax.base.settings import from_dict
from swa_jax.plan.cost import Workload
from swa_jax.plan.plan import planned_start
from swa_jax.train.config import TrainConfig
from swa_jax.train.patterns import stage_patterns

MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}


def config_of(*, length=4096, rows=8, **changes) -> TrainConfig:
    settings = {
        "output": "runs/none",
        "tokenizer": "none",
        "model": MODEL,
        "pattern": "window",
        "sliding_window": 512,
        "bfloat16": True,
        "remat": "layer",
        "stages": [{"steps": 1, "sequence_length": length, "batch_size": rows}],
    }
    return from_dict(TrainConfig, settings | changes)


def work_of(config: TrainConfig, devices: int, chip: str = "v5e", stage: int = 0) -> Workload:
    """What `workload` gives, without asking libtpu for devices."""
    start = planned_start(config)
    pattern = stage_patterns(config, start, config.stages[stage])[0]
    return Workload(config, stage, start.config, pattern, chip, devices)
