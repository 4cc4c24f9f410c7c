"""Damage the files of a training run's checkpoints at random and check that each damage is found and named.

A tiny model is trained and leaves three checkpoints. Each time one file of one of them has a random bit flipped, or is
cut at a random length. It is an error if the damage goes unnoticed, if the sentence about it does not name that file,
or if the checkpoint that is offered instead is not, bit for bit, the newest good one.
"""

import collections
import logging
import logging.handlers
import random
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from scripts.torture.interrupt import ROOT
from swa_jax.base.errors import CheckpointError
from swa_jax.base.settings import from_dict
from swa_jax.train.loop import TrainConfig, train
from swa_jax.train.run_checkpoints import RunCheckpoints

STEPS = (5, 10, 15)  # of the checkpoints


def tiny_run(folder: Path, *, steps: int) -> dict:
    """The settings of a run of a model with a few thousand parameters, on text that is written to `folder`."""
    text = folder / "text.txt"
    words = random.Random(0).choices(["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"], k=3000)
    text.write_text(" ".join(words))
    model = {"model_type": "qwen3", "vocab_size": 1024, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    model |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "qk_norm": True}
    return {
        "output": str(folder / "run"),
        "tokenizer": str(ROOT / "swa_jax" / "chains" / "tokenizer.json"),
        "model": model | {"tie_word_embeddings": True},
        "pattern": "window",
        "sliding_window": 4,
        "checkpoint_every": 5,
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "warmup_steps": 4},
        "stages": [{"steps": steps, "sequence_length": 16, "batch_size": 2, "data": [{"files": [str(text)]}]}],
    }


def layout(checkpoint: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """What a checkpoint holds."""
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
    kind = "bit flipped" if rng.random() < 0.5 else "cut short"
    if kind == "bit flipped":
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
    else:
        del data[rng.randrange(len(data)) :]
    file.write_bytes(data)
    return kind


def damage_checkpoints(count: int, rng: random.Random) -> tuple[dict[str, int], list[str]]:
    """What was damaged, by kind, and which damages were not noticed as they should be."""
    counts: collections.Counter[str] = collections.Counter()
    bad: list[str] = []
    log = logging.getLogger("swa_jax.train.run_checkpoints")
    log.propagate = False
    heard = logging.handlers.BufferingHandler(count)
    log.addHandler(heard)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(from_dict(TrainConfig, tiny_run(folder, steps=STEPS[-1]) | {"keep_checkpoints": 3}), quiet=True)
        source, copy = folder / "run" / "checkpoints", folder / "copy"
        checkpoints, wanted = RunCheckpoints(source, keep=3), layout(source / str(STEPS[-1]))
        good = {step: checkpoints.restore(wanted, step) for step in STEPS}
        files = sorted(f.relative_to(source) for f in source.rglob("*") if f.is_file() and f.stat().st_size > 0)
        for _ in range(count):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy)
            file = rng.choice(files)
            step, kind = int(file.parts[0]), damage(copy / file, rng)
            heard.buffer.clear()
            checkpoints = RunCheckpoints(copy, keep=3)
            said = [record.getMessage() for record in heard.buffer]
            if step != STEPS[-1]:
                try:
                    checkpoints.restore(wanted, step)
                except CheckpointError as error:
                    said = [str(error)]
            expected = max(one for one in STEPS if one != step)
            named = len(said) == 1 and str(copy / file) in said[0]
            if named and checkpoints.newest == expected and same(checkpoints.restore(wanted), good[expected]):
                counts["found and named"] += 1
                counts[kind] += 1
                counts["of the newest checkpoint" if step == STEPS[-1] else "of an older checkpoint"] += 1
            else:
                bad.append(f"{file}, {kind}: newest {checkpoints.newest}, said {said}")
    return {"files": len(files), **dict(sorted(counts.items()))}, bad
