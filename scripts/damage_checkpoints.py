"""Damage the files of a training run's checkpoints at random and check that each damage is found and named.

    python scripts/damage_checkpoints.py --count 200 --seed 0 --json damage.json

A tiny model is trained and leaves three checkpoints. Each time one file of one of them has a random bit flipped, or
is cut at a random length. It is an error if the damage goes unnoticed, if the sentence about it does not name that
file, or if the checkpoint that is offered instead is not, bit for bit, the newest good one.
"""

import argparse
import collections
import json
import logging
import random
import shutil
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from interrupt_training import tiny_run  # beside this file; sets the platform, so it comes before jax
from orbax.checkpoint import v1 as ocp

from swa_jax.errors import CheckpointError
from swa_jax.settings import from_dict
from swa_jax.train.loop import TrainConfig, train
from swa_jax.train.run_checkpoints import RunCheckpoints


class Sentences(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def layout(checkpoint: Path) -> dict[str, jax.ShapeDtypeStruct]:
    stored = ocp.metadata(checkpoint).metadata
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in stored.items()}


def same(left: tuple, right: tuple) -> bool:
    """Equal bit for bit."""
    (a, a_data), (b, b_data) = left, right
    bits = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    return a_data == b_data and all(bits.values())


def damage(file: Path, rng: random.Random) -> str:
    data = bytearray(file.read_bytes())
    if rng.random() < 0.5:
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        kind = "bit flipped"
    else:
        del data[rng.randrange(len(data)) :]
        kind = "cut short"
    file.write_bytes(data)
    return kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    began = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    files_hit = set()
    log = logging.getLogger("swa_jax.train.run_checkpoints")
    log.propagate = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = tiny_run(folder, "run", steps=15) | {"keep_checkpoints": 3}
        train(from_dict(TrainConfig, settings), quiet=True)
        source, copy = folder / "run" / "checkpoints", folder / "copy"
        checkpoints = RunCheckpoints(source, keep=3)
        abstract = layout(source / "15")
        good = {step: checkpoints.restore(abstract, step) for step in (5, 10, 15)}
        names = sorted(f.relative_to(source) for f in source.rglob("*") if f.is_file() and f.stat().st_size > 0)
        for _ in range(options.count):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy)
            name = rng.choice(names)
            step = int(name.parts[0])
            kind = damage(copy / name, rng)
            sentences = Sentences()
            log.addHandler(sentences)
            checkpoints = RunCheckpoints(copy, keep=3)
            log.removeHandler(sentences)
            if step == 15:
                assert checkpoints.newest == 10, f"{name}, {kind}: not noticed"
                (sentence,) = sentences.said
            else:
                assert checkpoints.newest == 15
                try:
                    checkpoints.restore(abstract, step)
                except CheckpointError as error:
                    sentence = str(error)
                else:
                    raise AssertionError(f"{name}, {kind}: not noticed")
            assert str(copy / name) in sentence, f"{name} is not named: {sentence}"
            assert same(checkpoints.restore(abstract), good[checkpoints.newest])
            counts[kind] += 1
            counts["of the newest checkpoint" if step == 15 else "of an older checkpoint"] += 1
            files_hit.add(name)
    figures = {"seed": options.seed, "files": len(names), "files damaged": len(files_hit)}
    figures |= {"damages": options.count, "found and named": sum(counts[k] for k in ("bit flipped", "cut short"))}
    figures |= {**dict(sorted(counts.items())), "seconds": round(time.monotonic() - began)}
    for key, value in figures.items():
        print(f"{key:32} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
