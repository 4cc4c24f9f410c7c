"""The configuration of a training run, as its YAML file has it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import check_local
from swa_jax.base.settings import MissingKeyError
from swa_jax.data.sources import SourceConfig
from swa_jax.model.config import ModelConfig, RopeScaling
from swa_jax.model.lora import LoraConfig
from swa_jax.model.remat import Remat, TrainingPass
from swa_jax.model.sequence_order import SequenceOrder
from swa_jax.model.sharding import AUTO, Auto, MeshConfig, ShardingRules
from swa_jax.model.window import Window
from swa_jax.train.compiler import XlaOptions
from swa_jax.train.objectives import Distill, SwitchLoss
from swa_jax.train.optimizer import OptimizerConfig

# SwiAttn's comparison from one file: what each method trains. "swa-zero-shot" is the windowed model as it is.
METHODS = {
    "swiattn": "switch",
    "full": "full",
    "static-hybrid": "interleave-1-in-4",
    "swa-cpt": "window",
    "swa-zero-shot": "window",
}


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """Consecutive steps with one shape of batch."""

    steps: int
    sequence_length: int  # tokens a row
    batch_size: int  # rows a step, over all devices and accumulated pieces
    accumulate: int | Auto = AUTO  # pieces that a step's batch is taken in, one after the other
    data: tuple[SourceConfig, ...] = (SourceConfig(),)
    patterns: tuple[str, ...] = ()  # recipes taken in turn, a step each, in place of the run's pattern
    sliding_window: int | None = None  # in place of the run's
    learning_rate_factor: float = 1.0  # times the optimizer's rates

    @property
    def pieces(self) -> int:
        """`accumulate`; 1 as long as nothing else is chosen."""
        return 1 if self.accumulate == AUTO else self.accumulate


@dataclasses.dataclass(frozen=True)
class ModelChanges:
    """Changes to the configuration of the model that a run starts from, such as YaRN for a longer context."""

    max_position_embeddings: int | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    router_bias_init: float | None = None

    def apply(self, config: ModelConfig) -> ModelConfig:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Beside `metrics.jsonl`, which is always written. Process 0 writes."""

    tensorboard: bool = False  # to the run's folder `tensorboard/`
    wandb_project: str | None = None
    every: int = 1  # steps between lines
    profile_from: int | None = None  # first step of a profiler trace, in the run's folder `profile/`
    profile_steps: int = 3  # how many it has


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. Exactly one of `model` (random start) and `init_from` (a checkpoint folder) is given."""

    output: str  # the run folder
    stages: tuple[StageConfig, ...]
    tokenizer: str = ""  # tokenizer.json, or a folder that has one; left out: `init_from`'s
    model: ModelConfig | None = None
    init_from: str | None = None  # by any name of `checkpoint.named`
    plan_model: str | None = None  # a file with the sizes of `init_from`'s model: for a plan before that is there
    init_optimizer: bool = False  # go on with the optimizer state of the run that made `init_from`
    model_changes: ModelChanges = dataclasses.field(default_factory=ModelChanges)  # to `init_from`'s model
    pattern: str | None = None  # a recipe, or a pattern JSON; left out: `init_from`'s own, or "full"
    method: Literal["swiattn", "full", "static-hybrid", "swa-cpt", "swa-zero-shot"] | None = None  # in place of pattern
    sliding_window: int | None = None
    num_sink_tokens: int | None = None
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sharding: ShardingRules = dataclasses.field(default_factory=ShardingRules)
    sequence_order: SequenceOrder = "auto"  # of a row's tokens over 'mesh.context': see sequence_order.py
    lora: LoraConfig | None = None  # train adapters of `init_from`'s projections, and routers, in place of all weights
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    switch_loss: SwitchLoss = dataclasses.field(default_factory=SwitchLoss)
    distill: Distill | None = None  # learn from the model that the run starts from, beside the data
    z_loss: float = 0.0  # weight of the mean squared log of the softmax's denominator
    router_aux_loss_coef: float = 0.0  # weight of the loss that spreads tokens over a model's experts
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient that is no number
    spike_factor: float | None = None  # skip updates whose gradient norm is this many times the running mean
    bfloat16: bool = False  # compute in bf16; what is trained and its optimiser stay f32
    save_dtype: Literal["float32", "bfloat16"] = "float32"  # of the finished model's weights
    remat: Remat | Auto = AUTO  # what the backward pass computes again in place of keeping it
    scan_layers: bool | Auto = AUTO  # one loop over the layers; False compiles each for itself
    xla_options: XlaOptions = dataclasses.field(default_factory=dict)  # beside `TPU_OPTIONS`
    seed: int = 0  # of weights, data order and dropout
    checkpoint_every: int = 500  # steps
    keep_checkpoints: int = 2  # the newest ones
    keep_checkpoint_period: int | None = None  # steps: multiples of it are kept for good
    validate_every: int | None = None  # steps between losses of the held-out documents (`data[].held_out`)
    validation_batches: int = 8  # at most, each time
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for name in ("output", "tokenizer", "init_from", "pattern"):
            check_local(getattr(self, name) or "", f"'{name}' =")
        if (self.model is None) == (self.init_from is None):
            raise ConfigError("give exactly one of 'model' (start at random) and 'init_from' (a checkpoint folder)")
        if not self.tokenizer:
            if self.init_from is None:
                raise MissingKeyError("missing key 'tokenizer' (a tokenizer.json, or a folder that has one)")
            object.__setattr__(self, "tokenizer", self.init_from)
        if self.model is not None and self.model_changes != ModelChanges():
            raise ConfigError("'model_changes' is for a run with 'init_from'; write its keys into 'model'")
        if self.init_optimizer and (self.init_from is None or self.lora is not None):
            raise ConfigError(
                "'init_optimizer' goes on with the optimizer of the run that made 'init_from': "
                + ("set 'init_from' to that run's model" if self.lora is None else "new LoRA adapters have none")
            )
        if self.method is not None and self.pattern is not None:
            raise ConfigError(f"'method' = {self.method} stands for a pattern, but 'pattern' is set too: drop one")
        if not self.stages:
            raise ConfigError("'stages' is empty: name at least one, with steps, sequence_length and batch_size")
        for i, stage in enumerate(self.stages):
            for name in ("steps", "sequence_length", "batch_size", "accumulate"):
                if (value := getattr(stage, name)) != AUTO and value < 1:
                    raise ConfigError(f"'stages.{i}.{name}' must be at least 1, got {value}")
            if not stage.learning_rate_factor > 0:
                raise ConfigError(
                    f"'stages.{i}.learning_rate_factor' must be above 0, got {stage.learning_rate_factor:g}"
                )
            if stage.batch_size % stage.pieces:
                raise ConfigError(
                    f"'stages.{i}.batch_size' = {stage.batch_size} must be a multiple of 'accumulate' = "
                    f"{stage.accumulate}"
                )
        others = [source.kind for stage in self.stages for source in stage.data if source.kind != "distilled"]
        if self.top_k is not None and others:
            raise ConfigError(
                f"'distill.top_k' needs the log-probabilities of distilled data, which a source of kind '{others[0]}' "
                "has not: train on kind 'distilled' alone"
            )
        if self.teaches and self.init_from is None:
            raise ConfigError(
                "'distill' learns from the model that the run starts from, and one drawn at random knows nothing: set "
                "'init_from' in place of 'model'"
            )
        for name in ("checkpoint_every", "keep_checkpoints", "validation_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"'{name}' must be at least 1, got {getattr(self, name)}")
        optional = {
            name: getattr(self, name) for name in ("keep_checkpoint_period", "validate_every", "sliding_window")
        } | {f"stages.{i}.sliding_window": stage.sliding_window for i, stage in enumerate(self.stages)}
        for name, value in optional.items():
            if value is not None and value < 1:
                raise ConfigError(f"'{name}' must be at least 1, or left out, got {value}")
        if self.seed < 0:
            raise ConfigError(f"'seed' must be 0 or more, got {self.seed}")
        if self.log.every < 1:
            raise ConfigError(f"'log.every' must be at least 1, got {self.log.every}")
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise ConfigError(f"'spike_factor' must be greater than 1, got {self.spike_factor}")

    @property
    def top_k(self) -> int | None:
        """How many log-probabilities of distilled data are learned."""
        return None if self.distill is None else self.distill.top_k

    @property
    def teaches(self) -> bool:
        """Whether a teacher runs in the step."""
        return self.distill is not None and self.distill.top_k is None

    @property
    def window(self) -> Window:
        return Window(self.sliding_window, self.num_sink_tokens)

    @property
    def attention(self) -> str | None:
        """The recipe or pattern file that the run trains under; None: the pattern of the model that it starts from."""
        if self.method is not None:
            return METHODS[self.method]
        return "full" if self.init_from is None and self.pattern is None else self.pattern

    @property
    def training(self) -> TrainingPass:
        """What is kept for the backward pass, and how layers are compiled; "auto" is what costs least time."""
        return TrainingPass("none" if self.remat == AUTO else self.remat, unroll=self.scan_layers is False)

    def without_auto(self) -> TrainConfig:
        """The same run, where nothing is left to be chosen."""
        stages = tuple(dataclasses.replace(stage, accumulate=stage.pieces) for stage in self.stages)
        mesh = dataclasses.replace(self.mesh, **self.mesh.sizes)
        remat, unroll, _ = self.training
        return dataclasses.replace(self, stages=stages, mesh=mesh, remat=remat, scan_layers=not unroll)

    @property
    def start_dtype(self) -> str:
        """The dtype of the weights that the run starts from: f32, or of the compute if they are frozen."""
        return "bfloat16" if self.lora is not None and self.bfloat16 else "float32"

    @property
    def total_steps(self) -> int:
        return 0 if self.method == "swa-zero-shot" else sum(stage.steps for stage in self.stages)

    @property
    def starts(self) -> list[int]:
        """The first step of each stage that is trained."""
        steps = [stage.steps for stage in self.stages] if self.total_steps else []
        return [sum(steps[:number]) for number in range(len(steps))]

    @property
    def rate_factors(self) -> list[tuple[int, float]]:
        """The first step of each stage, and what the learning rates are multiplied by from there on."""
        return [(start, stage.learning_rate_factor) for start, stage in zip(self.starts, self.stages, strict=False)]
