"""Interrupt imports of a large model at random moments and check that the same command then succeeds.

    python scripts/interrupt_import.py --times 20 --megabytes 1000 --json interruptions.json

A random checkpoint of 1 GB in shards is imported by `swa-jax import` in a process of its own, which is sent SIGINT
(Ctrl-C, sometimes twice), SIGTERM or SIGKILL at a random moment between its start and its end. It is an error if

- the same command, started again, fails, or what it writes differs in any bit from an import that nobody interrupted,
- the destination is there before it is whole, or anything else is left beside it in the end.

Also prints the time of an import as a multiple of that of `cp -r` of the same files, which returns before the copy is
on the disk, and of `cp -r` and `sync`, which returns when it is, as an import does. They are timed in turn, import in a
process that has started already: the command's start (Python and JAX) does not grow with the model.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from swa_jax.checkpoint.hf_import import import_model
from swa_jax.checkpoint.tensor_names import expected_tensors
from swa_jax.families import model_config


def random_model(folder: Path, size: float, shards: int = 4) -> Path:
    """A Qwen3 of about so many bytes in bf16, drawn at random."""
    layer = 2 * (3 * 1024 * 3072 + 4 * 1024 * 2048 * 3 // 4)
    config = {
        "model_type": "qwen3", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": max(1, round((size - 2 * 32000 * 1024) / layer)), "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes, rng, places = expected_tensors(model_config(config)), np.random.default_rng(0), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = list(shapes)[number::shards]
        tensors = {n: rng.standard_normal(shapes[n], np.float32).astype(ml_dtypes.bfloat16) for n in names}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def start(source: Path, destination: Path, errors: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "swa_jax.cli", "import", str(source), str(destination)]
    with errors.open("w") as stderr:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)


def interrupt(process: subprocess.Popen, kind: signal.Signals, wait: float, rng: random.Random) -> bool:
    """False if the import was done before."""
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        process.send_signal(kind)
        if kind == signal.SIGINT and rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(kind)
        process.wait(120)
        return process.returncode != 0
    return False


def times_beside_cp(source: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of `cp -r`, of `cp -r` until the copy is on the disk, and of an import in this process, in turn."""
    seconds: dict[str, list[float]] = {"cp": [], "cp and sync": [], "import": []}
    for number in range(rounds + 1):
        for name in seconds:
            copy = folder / "copy"
            began = time.monotonic()
            if name == "import":
                import_model(source, copy)
            else:
                subprocess.run(["cp", "-r", source, copy], check=True)
            if name == "cp and sync":
                subprocess.run(["sync", *copy.iterdir()], check=True)
            if number:  # the first round fills the system's cache of files
                seconds[name].append(time.monotonic() - began)
            subprocess.run(["sync", *copy.rglob("*")], check=True)  # the next one is not to wait for this one's
            shutil.rmtree(copy)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="of an import and two kinds of cp, to time them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on the disk to try; default: the system's temporary folder")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        source, errors = random_model(folder / "source", 1e6 * options.megabytes), folder / "errors"
        seconds = times_beside_cp(source, folder, options.rounds)
        began = time.monotonic()
        assert start(source, folder / "straight", errors).wait() == 0, errors.read_text()
        whole = time.monotonic() - began
        expected = (folder / "straight" / "manifest.json").read_bytes()
        for number in range(options.times):
            destination = folder / "runs" / str(number)
            for _attempt in range(rng.choice([1, 1, 2])):
                kind = rng.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
                process = start(source, destination, errors)
                cut = interrupt(process, kind, rng.uniform(0, whole), rng)
                counts[kind.name if cut else "done before the signal"] += 1
                partial = destination.with_name(f"{number}.partial")
                counts["left something to go on with"] += any(partial.rglob("*.safetensors"))
                if destination.exists():  # then it is whole
                    assert (destination / "manifest.json").read_bytes() == expected
            process = start(source, destination, errors)
            assert process.wait() == 0, f"the same command failed: {errors.read_text()[-2000:]}"
            assert (destination / "manifest.json").read_bytes() == expected, "another result"
            assert [path.name for path in destination.parent.iterdir()] == [str(number)], "something is left"
            subprocess.run(["diff", "-r", folder / "straight", destination], check=True)
            counts["then succeeded, bit for bit"] += 1
            shutil.rmtree(destination)
    figures: dict[str, object] = {"megabytes": options.megabytes, "seconds of the command": round(whole, 1), **counts}
    for name, values in seconds.items():
        figures[f"seconds of {name}, median"] = round(statistics.median(values), 2)
    for name in ("cp", "cp and sync"):
        ratios = [a / b for a, b in zip(seconds["import"], seconds[name], strict=True)]
        figures[f"import / {name}, median of ratios"] = round(statistics.median(ratios), 2)
    for key, value in figures.items():
        print(f"{key:32} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
