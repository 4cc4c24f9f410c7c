"""Remake the model of chains: `python -m scripts.train_chains [--seed 0] [--output runs/chains-0] [--minutes 60]`.

The curriculum is `configs/chains.yaml`; --config names another, and arguments such as `sliding_window=64` change it. A
stage ends when the model answers 90 % of the questions of every number of hops that the stage teaches, on prompts that
training does not see, or when its steps are over. Started again, the run goes on from its last checkpoint. The output
folder has `log.jsonl`, `checkpoints/`, and models in bfloat16, which every verb of `swa-jax` reads: `stage-N/` after
each stage, and `model/` when a call ends.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from swa_jax.base.errors import ConfigError, UserError
from swa_jax.base.settings import load_config
from swa_jax.checkpoint.folder import save_model
from swa_jax.data.batches import Batches, make_batches
from swa_jax.data.chains import chain_tokenizer
from swa_jax.data.lessons import write_tokenizer
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.evaluate.chains import ChainCell, chain_examples, chain_scores
from swa_jax.model.attention import cast_parameters
from swa_jax.model.decoder import Decoder
from swa_jax.train.config import StageConfig, TrainConfig
from swa_jax.train.optimizer import make_optimizer
from swa_jax.train.patterns import find_start, run_pattern
from swa_jax.train.run_checkpoints import RunCheckpoints
from swa_jax.train.step import TrainState, abstract_state, init_state, make_step

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "chains.yaml"
PASSED = 0.9
CHECK_TOKENS = 24_576  # of a check, so that it costs as much at every length
CHECK_SEED = 1_000_000  # prompts that no training seed draws


@dataclasses.dataclass
class Place:
    """Where a run is in its curriculum."""

    stage: int = 0
    inside: int = 0  # steps of the stage done
    steps: int = 0  # of the run
    tokens: int = 0
    seconds: float = 0.0  # of the processor, in training alone


class CurriculumRun:
    """A curriculum, trained from its last checkpoint on.

    `gap`: tokens between the statements of the prompts that end a stage; at most half of a row.
    """

    def __init__(self, config: TrainConfig, gap: int = 0):
        self.config, self.folder, self.gap = config, Path(config.output), gap
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (Path(config.tokenizer) / "tokenizer.json").is_file():
            write_tokenizer(chain_tokenizer(), Path(config.tokenizer))
        self.tokenizer: Tokenizer = load_tokenizer(config.tokenizer)
        start = find_start(config)
        self.model = Decoder(start.config, run_pattern(config, start), rngs=nnx.Rngs(config.seed))
        self.place = Place()
        self.state: TrainState = init_state(nnx.state(self.model), self._optimizer())
        self.data_state: dict[str, Any] | None = None
        self.checkpoints = RunCheckpoints(self.folder / "checkpoints", keep=1)
        if self.checkpoints.newest is not None:
            self.state, saved = self.checkpoints.restore(abstract_state(self.state))
            self.place, self.data_state = Place(**saved["place"]), saved["data"]

    def _optimizer(self) -> optax.GradientTransformation:
        """Its rates are those of the last stage from that stage's beginning on, however early the others ended."""
        config, place = self.config, self.place
        last = place.stage == len(config.stages) - 1
        early = config.starts[-1] - (place.steps - place.inside) if last else 0
        rates = dataclasses.replace(config.optimizer, first_step=early)
        factor = config.stages[min(place.stage, len(config.stages) - 1)].learning_rate_factor
        return make_optimizer(rates, config.total_steps - early, self.model.config, [(0, factor)])

    def batches(self) -> Batches:
        stage = self.config.stages[self.place.stage]
        seed = self.config.seed + 100 * (self.place.stage + 1)
        made = make_batches(
            stage.data, self.tokenizer, length=stage.sequence_length, batch_size=stage.batch_size, seed=seed
        )
        if self.data_state is not None:
            made.set_state(self.data_state)
        return made

    def train(self, minutes: float = float("inf"), steps: int | None = None) -> bool:
        """Train until the curriculum is over (True), or the minutes are, or the steps."""
        stop = time.monotonic() + 60 * minutes
        last = None if steps is None else self.place.steps + steps
        stopped = False
        while self.place.stage < len(self.config.stages) and not stopped:
            stage, batches = self.config.stages[self.place.stage], self.batches()
            self.step = make_step(self.model, self._optimizer(), self.config, None)
            over = False
            while not (over or stopped):
                self._train_one(next(batches), stage)
                over = self.place.inside >= stage.steps
                checked = over or self.place.inside % self.config.checkpoint_every == 0
                over |= checked and self._check(stage)
                stopped = time.monotonic() > stop or self.place.steps == last
                if over:
                    self.place.stage, self.place.inside, self.data_state = self.place.stage + 1, 0, None
                    self.keep(f"stage-{self.place.stage}")
                else:
                    self.data_state = batches.get_state()
                if over or checked or stopped:
                    saved = {"place": dataclasses.asdict(self.place), "data": self.data_state}
                    self.checkpoints.save(self.place.steps, self.state, saved)
        self.checkpoints.wait()
        return self.place.stage == len(self.config.stages)

    def _train_one(self, batch: dict[str, np.ndarray], stage: StageConfig) -> None:
        start = time.process_time()
        self.state, metrics = self.step(self.state, {k: jnp.asarray(v) for k, v in batch.items()}, 1)
        self.loss = float(metrics["loss"])
        if not np.isfinite(self.loss):
            raise ConfigError(f"the loss is not a number at step {self.place.steps}: lower optimizer.learning_rate")
        place = self.place
        place.seconds += time.process_time() - start
        place.inside, place.steps = place.inside + 1, place.steps + 1
        place.tokens += stage.batch_size * stage.sequence_length

    def _check(self, stage: StageConfig) -> bool:
        """Whether every kind of chain of the stage is answered; the figures go to the log."""
        nnx.update(self.model, self.state.params)
        kinds = [source for source in stage.data if source.kind == "chains" and source.noise == "words"]
        kinds = kinds or [source for source in stage.data if source.kind == "chains"]
        hardest = max(kinds, key=lambda source: source.weight)
        count = max(16, CHECK_TOKENS // stage.sequence_length // hardest.hops)
        drawn = {"num_examples": count, "gap": min(self.gap, stage.sequence_length // 2)}
        drawn["seed"] = CHECK_SEED + self.config.seed
        cells = [ChainCell(hops + 1, hardest.num_chains - 1, stage.sequence_length) for hops in range(hardest.hops)]
        asked = {cell: chain_examples(self.tokenizer, cell, **drawn) for cell in cells}
        scores = chain_scores(self.model, asked, batch_size=2048 // stage.sequence_length)
        accuracy = {one.cell.hops: round(one.score, 3) for one in scores}
        place = dataclasses.asdict(self.place) | {"seconds": round(self.place.seconds)}
        self._log(place | {"loss": round(self.loss, 3), "accuracy": accuracy, "n": count})
        return min(accuracy.values()) >= PASSED

    def _log(self, line: dict[str, Any]) -> None:
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def keep(self, name: str) -> None:
        """Write the model as it is now; what has that name already was made of an earlier state."""
        model = Decoder(self.model.config, self.model.pattern, rngs=nnx.Rngs(0))
        nnx.update(model, cast_parameters(self.state.params, "bfloat16"))
        if (self.folder / name).exists():
            shutil.rmtree(self.folder / name)
        save_model(model, self.folder / name, tokenizer_from=self.config.tokenizer)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.train_chains", description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="default: runs/chains-SEED")
    parser.add_argument("--steps", type=int, help="stop after so many of this call; default: at the end")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many; default: at the end")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the configuration")
    given = parser.parse_args(arguments)
    output = given.output or Path(f"runs/chains-{given.seed}")
    run = CurriculumRun(
        load_config(TrainConfig, given.config, [f"seed={given.seed}", f"output={output}", *given.overrides])
    )
    done = run.train(given.minutes, given.steps)
    run.keep("model")
    print(f"{output}: " + ("done" if done else "stopped; the same command goes on"))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
