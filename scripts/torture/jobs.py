"""What is interrupted: training runs, imports of a large model, evaluations and selections."""

import argparse
import collections
import filecmp
import json
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from scripts.random_model import write_random_model
from scripts.torture.damage import layout, tiny_run
from scripts.torture.interrupt import ROOT, SIGNALS, Ended, Job, interrupt, some_time
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.train.preemption import EXIT_STATUS
from swa_jax.train.run_checkpoints import RunCheckpoints

CLI = (sys.executable, "-m", "swa_jax.cli")
SIZES = {"model_type": "qwen3", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
SIZES |= {"dtype": "bfloat16"}
PROMPTS = ("--chains", "hops=1-2,rivals=2,gap=16", "--length", 128, "--window", 16, "--dtype", "float32")
COMMANDS = {  # MODEL stands for the bundled model's checkpoint; beside each: the files of its results
    "evaluate chains": (
        "swa-jax evaluate chains MODEL --hops 1,2 --rivals 1,3 --lengths 128 --examples 24 --batch-size 4 "
        "--pattern full --pattern window --window 16 --gap 16 --out OUT",
        ("*.json", "*.jsonl"),
    ),
    "evaluate text": (
        "swa-jax evaluate text MODEL LICENSE --pattern window --window 16 --lengths 128,256 "
        "--eval-windows 16,32,full --batch-size 4 --out OUT",
        ("*.json",),
    ),
    "select nll": (
        "swa-jax select nll MODEL PROMPTS --one-in 2 --examples 24 --batch-size 4 --resume-file OUT/scores.jsonl "
        "--out OUT/nll.json --force",
        ("nll.json",),
    ),
    "select bosch": (
        "swa-jax select bosch MODEL PROMPTS --ratio 0.5 --examples 12 --iterations 4 --out OUT/bosch.json --force",
        ("bosch.json",),
    ),
    "compare": (
        "swa-jax compare MODEL PROMPTS --method nll --method bosch --method interleave --ratio 0.5 --seeds 2 "
        "--iterations 2 --examples 8 --held-out 24 --out OUT --force",
        ("results.json", "patterns/*.json"),
    ),
    "compare plants": (
        "scripts.compare plants --out OUT --only nll bosch --placement 'whole layers' --seeds 0 1 --examples 8",
        ("cells.jsonl",),
    ),
    "compare card": (
        "scripts.compare card MODEL --out OUT --hops 1 --rivals 2 --length 128 --window 16 --examples 8",
        ("cells.jsonl", "table.md"),
    ),
}


def interrupt_jobs(given: argparse.Namespace) -> tuple[dict[str, int], list[str]]:
    """What happened, and what should not have."""
    rng, bad = random.Random(given.seed), []
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        make = {"training": training, "import": importing, "commands": commands}[given.kind]
        jobs = make(folder, given)
        shares = [given.count // len(jobs) + (i < given.count % len(jobs)) for i in range(len(jobs))]
        for place, (times, (job, what)) in enumerate(zip(shares, jobs.items(), strict=True)):
            try:
                counts += interrupt(job, what, times, folder / str(place), rng)
            except AssertionError as error:
                bad.append(str(error))
            print(f"{job}: {times} interruptions, {bad or 'nothing lost'}", flush=True)
    return dict(sorted(counts.items())), bad


# ---- commands ----


def commands(folder: Path, given: argparse.Namespace) -> dict[str, Job]:
    model = import_model(ROOT / "swa_jax" / "chains", folder / "model")
    return {name: command(name, model) for name in given.only or COMMANDS}


def command(name: str, model: Path) -> Job:
    line, files = COMMANDS[name]
    program, *words = shlex.split(line)
    head = CLI if program == "swa-jax" else (sys.executable, "-m", program)
    fill = {"MODEL": [model], "PROMPTS": PROMPTS, "LICENSE": [ROOT / "LICENSE"]}
    words = [one for word in words for one in fill.get(word, [word])]
    return Job((*head, *words), lambda out: numbers_in(out, files))


def numbers_in(out: Path, files: tuple[str, ...]) -> dict[str, Any]:
    """What a command has written, by file, without times."""
    read = {".json": json.loads, ".jsonl": lambda text: [json.loads(line) for line in text.splitlines()]}
    paths = sorted(path for pattern in files for path in out.glob(pattern))
    return {str(p.relative_to(out)): timeless(read.get(p.suffix, str)(p.read_text())) for p in paths}


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(one) for key, one in value.items() if "second" not in key and key != "sum"}
    return [timeless(one) for one in value] if isinstance(value, list) else value


# ---- training ----


def training(folder: Path, given: argparse.Namespace) -> dict[str, Job]:
    """A tiny model that is saved in the background every few steps; `OUT` is its folder."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tiny_run(folder, steps=given.steps)))
    words = (*CLI, "train", config, "output=OUT")
    kinds = (*[signal.SIGKILL] * 5, signal.SIGTERM)
    return {"training": Job(words, losses, step_or_save, newest_checkpoint, kinds)}


def metrics(out: Path) -> list[dict]:
    file = out / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(out: Path) -> dict[str, Any]:
    assert not list((out / "checkpoints").glob("*.damaged")), "a checkpoint was found damaged"
    return {"losses": [line["loss"] for line in metrics(out)]}


def step_or_save(out: Path, process: subprocess.Popen, seconds: float, rng: random.Random) -> str:
    """Any moment, or a few steps on, or while a checkpoint is written."""
    kind = rng.choice(("any moment", "step", "step", "save", "save"))
    if kind == "any moment":
        return some_time(out, process, seconds, rng)

    def wait_until(there) -> None:
        while not there() and process.poll() is None:
            time.sleep(0.002)

    steps = len(metrics(out)) + rng.randint(1, 60)
    wait_until(lambda: len(metrics(out)) >= steps)
    if kind == "save":
        wait_until(lambda: any((out / "checkpoints").glob("*.writing*")))
    some_time(out, process, 0.04, rng)
    return kind


def newest_checkpoint(out: Path, ended: Ended, last: int | None) -> int:
    """Load the newest checkpoint of an interrupted run, from a copy: the run is to find its folder as it was left."""
    assert ended.status in (-signal.SIGKILL, -signal.SIGTERM, EXIT_STATUS), ended.output[-2000:]
    source, scratch = out / "checkpoints", out.parent / "copy"
    if ended.status == EXIT_STATUS and metrics(out):
        step = metrics(out)[-1]["step"]
        assert (source / str(step)).is_dir(), f"step {step} was not saved"
    if not source.exists():
        return 0
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch)
    steps = [int(path.name) for path in scratch.iterdir() if path.name.isdecimal()]
    checkpoints = RunCheckpoints(scratch, keep=100)
    assert checkpoints.newest == max(steps, default=None), "the newest checkpoint does not verify"
    newest = checkpoints.newest or 0
    assert newest >= (last or 0), f"the newest checkpoint was of step {last}, and is now of step {newest}"
    if newest:
        state, _ = checkpoints.restore(layout(scratch / str(newest)))
        assert int(state["step"]) == newest
    return newest


# ---- imports ----


def importing(folder: Path, given: argparse.Namespace) -> dict[str, Job]:
    """A random Qwen3 in shards, of about as many megabytes as are asked for."""
    layer = 2 * (3 * 1024 * 3072 + 4 * 1024 * 2048 * 3 // 4)  # bytes
    layers = max(1, round((1e6 * given.megabytes - 2 * 32000 * 1024) / layer))
    source = write_random_model(folder / "source", SIZES | {"num_hidden_layers": layers}, shards=4)
    words = (*CLI, "import", source, "OUT")
    kinds = (SIGNALS[2], *SIGNALS)
    return {"import": Job(words, whole_folder, check=whole_or_not_there, signals=kinds)}


def whole_folder(out: Path) -> dict[str, Any]:
    """The manifest has the sums of all weights; each file is compared with the first import's as well."""
    first = out.parent / "first"
    if not first.exists():
        shutil.copytree(out, first)
    files = [str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()]
    _, other, missing = filecmp.cmpfiles(first, out, files, shallow=False)
    left = [path.name for path in out.parent.iterdir() if path.name not in (out.name, "first", "whole", "compiled")]
    assert not left, f"left beside the checkpoint: {left}"
    return {"manifest": (out / "manifest.json").read_bytes(), "files": len(files), "differing": [*other, *missing]}


def whole_or_not_there(out: Path, ended: Ended, last: Any) -> None:
    if out.exists():
        assert not whole_folder(out)["differing"], "the destination is there before it is whole"
