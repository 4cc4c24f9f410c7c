"""Interrupt imports of a large model at random moments and check that the same command then succeeds.

    python scripts/interrupt_import.py --times 20 --megabytes 1000 --seed 0 --json interruptions.json

A random checkpoint of 1 GB in shards is imported by `swa-jax import` in a process of its own, which is sent SIGINT
(Ctrl-C, sometimes twice), SIGTERM or SIGKILL at a random moment between its start and its end. It is an error if

- the same command, started again, fails, or what it writes differs in any bit from an import that nobody interrupted,
- the destination is there before it is whole, or anything else is left beside it in the end.

Also prints the time of an import as a multiple of that of `cp -r` of the same files: the median of some pairs, one of
each in turn. The command's start (Python and JAX) is measured apart, since it does not grow with the model.
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


def times_beside_cp(source: Path, folder: Path, pairs: int) -> tuple[float, list[float]]:
    """Seconds of `cp -r`, and the ratios of import to it, in this process, which has started already."""
    seconds, ratios = [], []
    for number in range(pairs + 1):
        began = time.monotonic()
        subprocess.run(["cp", "-r", source, folder / "copy"], check=True)
        copied = time.monotonic()
        import_model(source, folder / "imported")
        ratio = (time.monotonic() - copied) / (copied - began)
        shutil.rmtree(folder / "copy")
        shutil.rmtree(folder / "imported")
        if number:  # the first fills the system's cache of files
            seconds.append(copied - began)
            ratios.append(ratio)
    return statistics.median(seconds), ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the checkpoint")
    parser.add_argument(
        "--pairs", type=int, default=5, help="of an import and a cp, for the ratio of their times"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to try; default: the system's temporary folder"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        source, errors = random_model(folder / "source", 1e6 * options.megabytes), folder / "errors"
        cp, ratios = times_beside_cp(source, folder, options.pairs)
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
    figures = {
        "megabytes": options.megabytes,
        "seconds of cp": round(cp, 2),
        "import / cp, median": round(statistics.median(ratios), 2),
        "import / cp, each": [round(ratio, 2) for ratio in ratios], "seconds of the command": round(whole, 1), **counts,
    }  # fmt: skip
    for key, value in figures.items():
        print(f"{key:32} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
