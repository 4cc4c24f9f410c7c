"""Interrupt a training run at random moments and check that nothing is lost.

    python scripts/interrupt_training.py --kills 50 --terms 10 --seed 0 --json interruptions.json

A tiny model trains in a process of its own, saving in the background every few steps. That process is sent SIGKILL or
SIGTERM while it starts, between steps or during a save, and started again, until it has been interrupted as often as
asked and has finished; where it finishes sooner, another run begins. It is an error if

- the loss of any step differs in any bit from that of a run that nobody interrupted,
- the newest checkpoint after an interruption does not verify and load, or is older than one seen before,
- a terminated process does not exit with status 143 after saving the step that it stopped at.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import yaml
from orbax.checkpoint import v1 as ocp

from swa_jax.train.preemption import EXIT_STATUS
from swa_jax.train.run_checkpoints import RunCheckpoints

TOKENIZER = Path(__file__).resolve().parents[1] / "swa_jax" / "recall" / "tokenizer.json"


def tiny_run(folder: Path, name: str, *, steps: int, every: int = 5) -> dict:
    """The settings of a run of a model with a few thousand parameters, on text that is written to `folder`."""
    text = folder / "text.txt"
    if not text.exists():
        words = random.Random(0).choices(["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"], k=3000)
        text.write_text(" ".join(words))
    return {
        "output": str(folder / name),
        "tokenizer": str(TOKENIZER),
        "model": {
            "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "qk_norm": True, "tie_word_embeddings": True,
        },
        "pattern": "window",
        "sliding_window": 4,
        "checkpoint_every": every,
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "warmup_steps": 4},
        "stages": [{"steps": steps, "sequence_length": 16, "batch_size": 2, "data": [{"files": [str(text)]}]}],
    }  # fmt: skip


class Run:
    """A run folder and the process that trains in it."""

    def __init__(self, folder: Path, name: str, steps: int):
        settings = tiny_run(folder, name, steps=steps)
        self.output = Path(settings["output"])
        self.config = folder / f"{name}.yaml"
        self.config.write_text(yaml.safe_dump(settings))
        self.errors = folder / f"{name}.err"
        self.environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "swa_jax.cli", "train", str(self.config)]
        with self.errors.open("w") as errors:
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=self.environment)

    def lines(self) -> list[dict]:
        file = self.output / "metrics.jsonl"
        whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in whole]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines()]

    def size(self) -> int:
        file = self.output / "metrics.jsonl"
        return file.stat().st_size if file.exists() else 0

    def writing(self) -> set[str]:
        return {path.name for path in (self.output / "checkpoints").glob("*.writing*")}


def wait_for_moment(run: Run, process: subprocess.Popen, moment: str, startup: float, rng: random.Random) -> bool:
    """Return at a random moment of a kind; False if the process ended before."""
    if moment == "start":
        wait = rng.uniform(0, startup)
    else:
        size, lines = run.size(), rng.randint(1, 60)
        while run.size() < size + 150 * lines:  # about that many lines
            if process.poll() is not None:
                return False
            time.sleep(0.002)
        if moment == "save":
            before = run.writing()
            while run.writing() <= before:
                if process.poll() is not None:
                    return False
        wait = rng.uniform(0, 0.04)
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        return True
    return False


def check_newest(run: Run, scratch: Path) -> int:
    """Load the newest checkpoint of an interrupted run, from a copy: the run is to find its folder as it was left."""
    source = run.output / "checkpoints"
    if not source.exists():
        return 0
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    steps = [int(path.name) for path in scratch.iterdir() if path.name.isdecimal()]
    checkpoints = RunCheckpoints(scratch, keep=100)
    assert checkpoints.newest == max(steps, default=None), "the newest checkpoint does not verify"
    if checkpoints.newest is None:
        return 0
    stored = ocp.metadata(scratch / str(checkpoints.newest)).metadata
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in stored.items()}
    state, _ = checkpoints.restore(abstract)
    assert int(state["step"]) == checkpoints.newest
    return checkpoints.newest


def interrupt(run: Run, moment: str, kind: signal.Signals, startup: float, rng: random.Random) -> bool:
    """Start the run and interrupt it; False if it finished before."""
    process = run.start()
    if not wait_for_moment(run, process, moment, startup, rng):
        assert process.wait() == 0, f"the run failed: {run.errors.read_text()[-2000:]}"
        return False
    process.send_signal(kind)
    if kind == signal.SIGTERM and rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(kind)  # a second one must not spoil the save
    status = process.wait(120)
    if kind == signal.SIGTERM and status == 0:
        return False  # it was at its last step
    if kind == signal.SIGTERM and moment != "start":
        assert status == EXIT_STATUS, f"status {status}: {run.errors.read_text()[-2000:]}"
        last = run.lines()[-1]["step"]
        assert (run.output / "checkpoints" / str(last)).is_dir(), f"step {last} was not saved"
    else:
        assert status in (-kind, EXIT_STATUS), f"status {status}: {run.errors.read_text()[-2000:]}"
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="SIGKILLs")
    parser.add_argument("--terms", type=int, default=10, help="SIGTERMs")
    parser.add_argument("--steps", type=int, default=400, help="of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    began = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        straight = Run(folder, "straight", options.steps)
        for _attempt in range(2):  # the second finds the compiled programs, as every later one does
            shutil.rmtree(straight.output, ignore_errors=True)
            clock = time.monotonic()
            process = straight.start()
            while straight.size() == 0 and process.poll() is None:
                time.sleep(0.01)
            startup = time.monotonic() - clock
            assert process.wait() == 0, straight.errors.read_text()[-2000:]
        expected = straight.losses()
        assert len(expected) == options.steps

        kinds = [signal.SIGKILL] * options.kills + [signal.SIGTERM] * options.terms
        rng.shuffle(kinds)
        number, newest, run = 0, 0, Run(folder, "run-0", options.steps)

        def finished() -> None:
            assert run.losses() == expected, "losses differ from those of the uninterrupted run"
            assert not list((run.output / "checkpoints").glob("*.damaged")), "a checkpoint was found damaged"
            counts["runs finished"] += 1
            counts["losses compared"] += options.steps
            shutil.rmtree(run.output)

        while kinds:
            moment = rng.choice(("start", "step", "step", "save", "save"))
            if interrupt(run, moment, kinds[-1], startup, rng):
                kind = kinds.pop()
                counts[f"{kind.name} at a {moment}"] += 1
                counts["saves cut short"] += bool(run.writing())
                found = check_newest(run, folder / "copy")
                assert found >= newest, f"the newest checkpoint was of step {newest}, and is now of step {found}"
                newest = found
                counts["checkpoints verified and loaded"] += found > 0
            else:
                finished()
                number, newest = number + 1, 0
                run = Run(folder, f"run-{number}", options.steps)
        assert run.start().wait() == 0, run.errors.read_text()[-2000:]
        finished()
    figures = {"seed": options.seed, "steps a run": options.steps, **dict(sorted(counts.items()))}
    figures["seconds"] = round(time.monotonic() - began)
    for key, value in figures.items():
        print(f"{key:32} {value}")
    print("every loss was bit-identical, and every newest checkpoint loaded")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
